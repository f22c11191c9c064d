"""What a step costs when most of its context lies in host memory: `python -m benchmarks.offload`.

One runner of Qwen3-0.6B's shape with random weights computes the same step, a token of each sequence or a
chunk of a prompt, with all blocks on the device (*compute*) and with three quarters of them in host memory,
read in both ways. The limit is the longer of *compute* and the offloaded bytes at the bandwidth with which
they are copied when nothing else runs. All take turns in each round, and the best of each counts: other load
on the machine spoils the others. On a CPU the thread that streams needs a core beside those that compute:
hence the results with fewer threads.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.random_checkpoint import QWEN3_06B, write_random_checkpoint
from kvtransfer.common.clock import Clock, SystemClock
from workers.messages.rank_channel import BatchEntry, SlotSample, SlotStart, StepPlan, TableChange
from workers.messages.sampling import SamplingParams
from workers.model.attention.interface import LayerRead
from workers.model.host_kv import MODES, HostKv
from workers.rank.model_runner import ModelRunner
from workers.rank.runner_settings import CheckpointFolder, ComputeSettings, RankCapacity, read_dtype

TARGET = 1.3


class Bench:
    """A model runner with random numbers in its pools, and steps over sequences of `context_tokens`."""

    def __init__(self, runner: ModelRunner, host: HostKv, clock: Clock, block_tokens: int) -> None:
        self._runner = runner
        self._host = host
        self._clock = clock
        self._block_tokens = block_tokens
        runner.kv.normal_()
        host.kv.normal_()

    def tables(self, batch: int, context_tokens: int, num_in_host: int) -> list[tuple[int, ...]]:
        """Return block tables in which the first `num_in_host` blocks of each sequence are in host memory."""
        num_blocks = context_tokens // self._block_tokens
        num_host = num_in_host * batch
        in_host = range(self._host.first_id, self._host.first_id + num_host)
        return [
            (
                *in_host[number * num_in_host : (number + 1) * num_in_host],
                *range(number * num_blocks + num_in_host, (number + 1) * num_blocks),
            )
            for number in range(batch)
        ]

    def step_s(self, tables: list[tuple[int, ...]], num_tokens: int) -> float:
        """Return the seconds of one step of the last `num_tokens` tokens of each sequence, without
        sampling."""
        context_tokens = len(tables[0]) * self._block_tokens
        tokens, slots = b"\0\0\0\0" * num_tokens, range(len(tables))
        start = context_tokens - num_tokens
        starts = [SlotStart(SamplingParams(), (SlotSample(slot, 0, 0),)) for slot in slots]
        changes = [TableChange(slot, 0, np.array(tables[slot], "<u4").tobytes()) for slot in slots]
        self._runner.steps.run(StepPlan(1, starts=tuple(starts), tables=tuple(changes)))
        entries = tuple(BatchEntry(slot, start, num_tokens, tokens, ()) for slot in slots)
        started_at = self._clock.now()
        self._runner.steps.run(StepPlan(1, entries=entries))
        elapsed_s = self._clock.now() - started_at
        self._runner.steps.run(StepPlan(1, free_slots=tuple(slots)))
        return elapsed_s

    @torch.inference_mode()
    def copy_s(self, tables: list[tuple[int, ...]]) -> float:
        """Return the seconds in which all host memory that the step sees is copied, layer by layer, and
        nothing else."""
        self._host.use("stream")
        reader, num_layers = self._host.reader, self._host.kv.shape[1]
        in_host = sorted({block for table in tables for block in table if block >= self._host.first_id})
        started_at = self._clock.now()
        reader.begin([LayerRead(layer, in_host) for layer in range(num_layers)])
        for layer in range(num_layers):
            reader.layer(layer)
            reader.done(layer)
        return self._clock.now() - started_at

    def measure(
        self, what: str, batch: int, context_tokens: int, num_tokens: int, rounds: int
    ) -> list[dict[str, Any]]:
        num_in_host = context_tokens // self._block_tokens * 3 // 4
        on_device = self.tables(batch, context_tokens, 0)
        in_host = self.tables(batch, context_tokens, num_in_host)

        def step_in(mode: Any) -> Callable[[], float]:
            def step_s() -> float:
                self._host.use(mode)
                self.step_s(in_host, num_tokens)
                return self.step_s(in_host, num_tokens)

            return step_s

        measures: dict[str, Callable[[], float]] = {
            "compute": lambda: self.step_s(on_device, num_tokens),
            "copy": lambda: self.copy_s(in_host),
            **{mode: step_in(mode) for mode in MODES},
        }
        best = dict.fromkeys(measures, float("inf"))
        for number in range(rounds + 1):  # the first touches the memory
            for name, measure in measures.items():
                time_s = measure()
                best[name] = min(best[name], time_s) if number else best[name]
        host_bytes = batch * num_in_host * self._host.kv[0].nbytes
        limit_s = max(best["compute"], best["copy"])
        return [
            {
                "what": what,
                "mode": mode,
                "batch": batch,
                "context": context_tokens,
                "offloaded_mb": round(host_bytes / 1e6),
                "copy_gb_s": round(host_bytes / best["copy"] / 1e9, 2),
                "step_ms": round(best[mode] * 1e3, 1),
                "compute_ms": round(best["compute"] * 1e3, 1),
                "limit_ms": round(limit_s * 1e3, 1),
                "ratio": round(best[mode] / limit_s, 3),
                "target": TARGET,
            }
            for mode in MODES
        ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dtype", default="bf16", help="bf16, fp16 or fp32")
    parser.add_argument("--threads", type=_numbers, default="2,1", help="CPU threads that compute")
    parser.add_argument("--context", type=int, default=8192, help="tokens of all sequences together")
    parser.add_argument("--chunk", type=int, default=256, help="tokens of the prompt's chunk")
    parser.add_argument("--block-tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--device", default="cpu")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        dtype = read_dtype(args.dtype)
        write_random_checkpoint(
            Path(folder), "qwen3", seed=0, dtype=str(dtype).removeprefix("torch."), **QWEN3_06B
        )
        clock = SystemClock()
        runner = ModelRunner(
            CheckpointFolder(Path(folder)),
            ComputeSettings(dtype, torch.device(args.device), args.threads[0]),
            RankCapacity(
                args.block_tokens,
                args.context,
                num_offload_tokens=args.context * 3 // 4,
                offload_mode="in_place",
            ),
            clock,
        )
    with contextlib.closing(runner):
        assert runner.host is not None
        bench = Bench(runner, runner.host, clock, args.block_tokens)
        for threads in args.threads:
            torch.set_num_threads(threads)
            for what, batch, num_tokens in (("decode", 1, 1), ("decode", 4, 1), ("chunk", 1, args.chunk)):
                for line in bench.measure(what, batch, args.context // batch, num_tokens, args.rounds):
                    print(json.dumps({"threads": threads, **line}), flush=True)


def _numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


if __name__ == "__main__":
    main()
