"""The engine beside other engines, as JSON lines: `python -m benchmarks.engine [--model DIR] [options]`.

The same as `tandem bench engine --json`, which describes the options, but for the defaults: a checkpoint of
Qwen3-0.6B's shape with random weights, beside every peer that is installed. With `--experts` it is the shape
of Qwen3-30B-A3B, scaled to 2 billion weights.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from benchmarks.random_checkpoint import QWEN3_06B, QWEN3_MOE_SCALED, write_random_checkpoint
from cluster.bench.bench_command import cli
from workers.engine_bench.peer_process import INSTALL

MEASURES = ("--prefill", "512,2048", "--decode-batch", "1,4,8,16,16x2048")


def main() -> None:
    arguments = sys.argv[1:]
    if "--model" in arguments:
        cli(["engine", "--json", *arguments])
        return
    with tempfile.TemporaryDirectory() as folder:
        family, shape = ("qwen3_moe", QWEN3_MOE_SCALED) if "--experts" in arguments else ("qwen3", QWEN3_06B)
        write_random_checkpoint(Path(folder), family, seed=1, dtype="bfloat16", **shape)
        arguments = [it for it in arguments if it != "--experts"]
        peers = ("--peer", ",".join(INSTALL))
        cli(["engine", "--json", "--model", folder, *MEASURES, *peers, *arguments])


if __name__ == "__main__":
    main()
