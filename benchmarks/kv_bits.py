"""Decoding after long contexts with KV in 8 bits beside KV of activations, as JSON lines.

Engines over one checkpoint of random weights, in whose steps KV is most of what is read, decode in turns. A
figure is the median of the rounds, and `ratio` the median of its ratios to KV of activations in the same
round.

    python -m benchmarks.kv_bits [--dtype bf16] [--threads 2] [--batch 16] [--context 2048] [--rounds 5]
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import tempfile
from pathlib import Path
from typing import Any

import torch

from benchmarks.random_checkpoint import write_random_checkpoint
from kvtransfer.common.clock import Clock, SystemClock
from kvtransfer.common.host import cpu_name
from workers.engine_bench.driver import EngineDriver
from workers.model import native
from workers.rank.model_runner import ModelRunner
from workers.rank.runner_settings import CheckpointFolder, ComputeSettings, RankCapacity, read_dtype

FORMS = ("auto", "int8", "fp8")
# The least ratio of the target: decoding 16 sequences of 2,048 tokens on a CPU.
TARGET = 1.3
NUM_STEPS = 8
# Attention of a model of some billion parameters, with few other weights.
SHAPE: dict[str, Any] = {
    "hidden_size": 1024,
    "intermediate_size": 2048,
    "num_hidden_layers": 4,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 32768,
    "vocab_size": 4096,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--dtype", default="bf16")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--context", type=int, default=2048)
    parser.add_argument("--block-tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        write_random_checkpoint(Path(folder), "llama", seed=1, **SHAPE)
        clock = SystemClock()
        drivers = {form: _driver(args, Path(folder), form, clock, stack) for form in FORMS}
        measure(args, drivers)


def _driver(
    args: argparse.Namespace, folder: Path, form: str, clock: Clock, stack: contextlib.ExitStack
) -> EngineDriver:
    num_tokens = args.batch * (args.context + NUM_STEPS + 1 + args.block_tokens)
    runner = ModelRunner(
        CheckpointFolder(folder),
        ComputeSettings(read_dtype(args.dtype), torch.device("cpu"), args.threads),
        RankCapacity(args.block_tokens, num_tokens, args.batch, kv_dtype=form),
        clock,
    )
    stack.enter_context(contextlib.closing(runner))
    runner.warm_up()
    driver = EngineDriver(runner, clock, args.block_tokens)
    driver.fill_kv()
    return driver


def measure(args: argparse.Namespace, drivers: dict[str, EngineDriver]) -> None:
    """Print a line for each form of KV."""
    rates: dict[str, list[float]] = {form: [] for form in drivers}
    for number in range(args.rounds + 1):  # the first touches the memory
        for form, driver in drivers.items():
            rate = args.batch * NUM_STEPS / driver.decode_s(args.batch, args.context, NUM_STEPS)
            if number:
                rates[form].append(rate)
    kernels = native.load()
    for form, found in rates.items():
        layout = drivers[form].runner.layouts[0]
        line = {
            "benchmark": "kv_bits",
            "cpu": cpu_name(),
            "isa": None if kernels is None else kernels.isa.value,
            "dtype": args.dtype,
            "threads": args.threads,
            "kv_dtype": form,
            "batch": args.batch,
            "context": args.context,
            "token_kb": round(layout.block_bytes / layout.block_tokens / 1e3, 2),
            "tok_s": round(statistics.median(found), 1),
            "limit": 1.0 if form == "auto" else TARGET,
            "ratio": round(statistics.median(map(_ratio, found, rates["auto"])), 3),
        }
        print(json.dumps(line), flush=True)


def _ratio(rate: float, limit: float) -> float:
    return rate / limit


if __name__ == "__main__":
    main()
