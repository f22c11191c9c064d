"""The engine beside other engines, as JSON lines: `python -m benchmarks.engine [--model DIR] [options]`.

The same as `tandem bench engine --json`, which describes the options, but for the defaults: a checkpoint of
Qwen3-0.6B's shape with random weights, beside every peer that is installed. With `--experts` it is the shape
of Qwen3-30B-A3B, scaled to 2 billion weights; with `--states`, one of Qwen3.5 of 0.8 billion weights, whose
layers keep a state but for every fourth. `--weights int8,int4,fp8 --peer llama.cpp:q8_0,llama.cpp:q4_k_m`
measures forms of weights beside, and llama.cpp with the same weights in its own; of a `--model` that is a
GGUF file, `--weights gguf --peer llama.cpp` measures both from that file.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.random_checkpoint import (
    QWEN3_06B,
    QWEN3_5_08B,
    QWEN3_MOE_SCALED,
    write_random_checkpoint,
)
from cluster.bench.bench_command import cli
from workers.engine_bench.peer_process import INSTALL

MEASURES = ("--prefill", "512,2048", "--decode-batch", "1,4,8,16,16x2048")
# The family and the keys of config.json of the model that an option asks for.
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "": ("qwen3", QWEN3_06B),
    "--experts": ("qwen3_moe", QWEN3_MOE_SCALED),
    "--states": ("qwen3_5_text", QWEN3_5_08B),
}


def main() -> None:
    arguments = sys.argv[1:]
    if "--model" in arguments:
        cli(["engine", "--json", *arguments])
        return
    with tempfile.TemporaryDirectory() as folder:
        given = next((it for it in arguments if it in MODELS), "")
        family, shape = MODELS[given]
        write_random_checkpoint(Path(folder), family, seed=1, dtype="bfloat16", **shape)
        arguments = [it for it in arguments if it != given]
        peers = ("--peer", ",".join(INSTALL))
        cli(["engine", "--json", "--model", folder, *MEASURES, *peers, *arguments])


if __name__ == "__main__":
    main()
