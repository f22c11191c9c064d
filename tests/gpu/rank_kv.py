"""A rank of an 8B shape that starts on a card and prints how many blocks of KV it got; see `test_two_ranks`.

    python rank_kv.py SHARE GO

It loads nothing before the file GO exists, so that several start at once.
"""

from __future__ import annotations

import sys
import tempfile
import threading
from pathlib import Path
from unittest import mock

import torch
from safetensors.torch import save_file

from benchmarks.gpu import MODEL_TO_SIZES, RandomFiles
from benchmarks.random_checkpoint import write_config
from kvtransfer.common.clock import SystemClock
from workers.rank.model_runner import ModelRunner
from workers.rank.runner_settings import AutoKv, CheckpointFolder, ComputeSettings, RankCapacity

BLOCK_TOKENS = 64


def main(share: float, go: Path) -> None:
    device = torch.device("cuda:0")
    torch.zeros(1, device=device)  # the context is there before the start, as in a rank
    print("ready", flush=True)
    pause = threading.Event()
    while not go.exists():
        pause.wait(0.01)
    with tempfile.TemporaryDirectory() as folder:
        write_config(Path(folder), "llama", "bfloat16", **MODEL_TO_SIZES["8b"].shape)
        save_file({"unread": torch.zeros(1)}, str(Path(folder) / "model.safetensors"))
        with mock.patch("workers.model.weights.TensorFiles", RandomFiles):
            runner = ModelRunner(
                CheckpointFolder(Path(folder)),
                ComputeSettings(torch.bfloat16, device, num_threads=1),
                RankCapacity(BLOCK_TOKENS, 1 << 40, 256, auto_kv=AutoKv(share, 4096)),
                SystemClock(),
            )
        print(len(runner.kv), flush=True)
        runner.close()


if __name__ == "__main__":
    main(float(sys.argv[1]), Path(sys.argv[2]))
