"""Layers with a recurrent state in one call of the CPU kernels beside their parts, as JSON lines.

One model of random weights, of the shape of Qwen3.5 0.8B, decodes and prefills both ways in turns, of which
`parts_ratio` is the median over the rounds of how many times as long its parts take. `share` is the median of
the part of the machine's bandwidth that a step reaches with the bytes that it must read and write; a plain
sum over other memory measures that bandwidth in each round. Times are those of the processor, or of the
clock with `--wall`.

    python -m benchmarks.state_layers [--threads 1] [--batches 1,8,16] [--context 256] [--rounds 9] [--wall]
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple
from unittest import mock

import torch

from benchmarks.random_checkpoint import QWEN3_5_08B, write_random_checkpoint
from kvtransfer.common.clock import SystemClock
from kvtransfer.common.host import cpu_name
from workers.engine_bench.driver import EngineDriver
from workers.model import native
from workers.model.native_layers import NativeLayers
from workers.model.sizes import ModelWork
from workers.rank.model_runner import ModelRunner
from workers.rank.runner_settings import CheckpointFolder, ComputeSettings, RankCapacity

BLOCK_TOKENS = 64
NUM_STEPS = 4
PROMPT_TOKENS = 512
# Far more than the caches hold.
_SUM_BYTES = 1 << 29


class _ProcessorClock(SystemClock):
    """A clock of the time that the process has computed."""

    def now(self) -> float:
        return time.process_time()


class _Round(NamedTuple):
    """The seconds of one round: in one call for each layer, by parts, and a sum over memory."""

    in_one_call: float
    by_parts: float
    memory: float


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--batches", default="1,8,16")
    parser.add_argument("--context", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--wall", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    clock = SystemClock() if args.wall else _ProcessorClock()
    batches = list(map(int, args.batches.split(",")))
    num_tokens = max(*batches, 2) * (args.context + NUM_STEPS + 1 + BLOCK_TOKENS) + PROMPT_TOKENS
    with tempfile.TemporaryDirectory() as folder:
        write_random_checkpoint(Path(folder), "qwen3_5_text", seed=1, dtype="bfloat16", **QWEN3_5_08B)
        runner = ModelRunner(
            CheckpointFolder(Path(folder)),
            ComputeSettings(torch.bfloat16, torch.device("cpu"), args.threads),
            RankCapacity(BLOCK_TOKENS, num_tokens, max(batches)),
            clock,
        )
    with contextlib.closing(runner):
        runner.warm_up()
        driver = EngineDriver(runner, clock, BLOCK_TOKENS)
        driver.fill_kv()
        measure(args, driver, clock, batches)


def measure(args: argparse.Namespace, driver: EngineDriver, clock: SystemClock, batches: list[int]) -> None:
    """Print a line for each batch, and one for a prompt."""
    work = ModelWork(driver.runner.config, torch.bfloat16.itemsize)
    memory = torch.zeros(_SUM_BYTES // 4)
    kernels = native.load()
    assert kernels is not None, "a compiler is needed"
    fixed = {"benchmark": "state_layers", "cpu": cpu_name(), "isa": kernels.isa.value}
    fixed |= {"threads": args.threads, "clock": "wall" if args.wall else "processor"}
    for batch in batches:
        step_bytes = work.of([(args.context, 1)] * batch, batch).read_bytes

        def decode(batch: int = batch) -> float:
            return driver.decode_s(batch, args.context, NUM_STEPS) / NUM_STEPS

        rounds = _rounds(args.rounds, decode, memory, clock)
        shares = [step_bytes / it.in_one_call * it.memory / _SUM_BYTES for it in rounds]
        of_parts = [step_bytes / it.by_parts * it.memory / _SUM_BYTES for it in rounds]
        line = fixed | {"batch": batch, "context": args.context, "step_gb": round(step_bytes / 1e9, 3)}
        line |= _times(rounds) | {"share": _median(shares), "parts_share": _median(of_parts)}
        print(json.dumps(line), flush=True)
    rounds = _rounds(max(args.rounds // 3, 1), lambda: driver.prefill_s(PROMPT_TOKENS), memory, clock)
    print(json.dumps(fixed | {"prompt": PROMPT_TOKENS} | _times(rounds)), flush=True)


def _rounds(
    num_rounds: int, run: Callable[[], float], memory: torch.Tensor, clock: SystemClock
) -> list[_Round]:
    found = []
    for number in range(num_rounds + 1):  # the first touches the memory
        in_one_call = run()
        with mock.patch.object(NativeLayers, "begin", return_value=None):
            by_parts = run()
        started_at = clock.now()
        memory.sum()
        if number:
            found.append(_Round(in_one_call, by_parts, clock.now() - started_at))
    return found


def _times(rounds: list[_Round]) -> dict[str, float]:
    return {
        "ms": _median([it.in_one_call * 1e3 for it in rounds]),
        "parts_ms": _median([it.by_parts * 1e3 for it in rounds]),
        "parts_ratio": _median([it.by_parts / it.in_one_call for it in rounds]),
    }


def _median(values: list[float]) -> float:
    return round(statistics.median(values), 3)


if __name__ == "__main__":
    main()
