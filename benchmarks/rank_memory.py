"""Resident memory of a rank over many steps that differ: `python -m benchmarks.rank_memory`.

What counts is the resident memory beyond that of a process that has imported torch, beside weights and
configured KV, which a rank cannot do without. Prompts, batches and ways of sampling are random, so that every
step has another shape. JSON lines; `ratio` is the rank's memory over weights and KV, `growth_mib` what the
second half of the steps adds.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import psutil

from benchmarks.random_checkpoint import QWEN3_06B, write_random_checkpoint
from benchmarks.rank_process import RankProcess
from workers.messages.rank_channel import BatchEntry, SlotSample, SlotStart, StepPlan, TableChange
from workers.messages.sampling import SamplingParams
from workers.model.model_config import read_model_config, weight_files

_MOST_OUTPUT = 100
_WAYS_TO_SAMPLE = (
    SamplingParams(),
    SamplingParams(temperature=1.0),
    SamplingParams(temperature=0.7, top_k=20),
    SamplingParams(temperature=0.7, top_p=0.9),
    SamplingParams(temperature=1.0, min_p=0.05, repetition_penalty=1.1),
    SamplingParams(presence_penalty=0.5, frequency_penalty=0.2, num_logprobs=3),
)


class Resident(NamedTuple):
    """Resident memory in bytes: of the process itself, of mapped files, and of shared memory such as KV."""

    own: int
    of_files: int
    shared: int

    @classmethod
    def of(cls, process_id: int) -> Resident:
        """Read that of a process."""
        status = Path(f"/proc/{process_id}/status").read_text(encoding="ascii")
        kib = dict(line.split(":") for line in status.splitlines() if line.startswith("Rss"))
        own, of_files, shared = (
            int(kib[name].split()[0]) << 10 for name in ("RssAnon", "RssFile", "RssShmem")
        )
        return cls(own, of_files, shared)

    @property
    def total(self) -> int:
        return self.own + self.of_files + self.shared


def resident_of_torch() -> int:
    """Return the resident bytes of a process that has imported torch."""
    code = "import os, torch; print(os.getpid(), flush=True); input()"
    command = [sys.executable, "-c", code]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        num_bytes = psutil.Process(process.pid).memory_info().rss
        process.kill()
    return int(num_bytes)


@dataclass
class _Sequence:
    slot: int
    prompt: bytes
    num_total: int
    num_computed: int = 0

    @property
    def num_left(self) -> int:
        """Prompt tokens that are not computed yet."""
        return max(0, len(self.prompt) // 4 - self.num_computed)


class VariedSteps:
    """Makes random plans. Prompts are computed in chunks of random lengths together with decodes of
    others."""

    def __init__(
        self,
        seed: int,
        *,
        num_slots: int,
        num_blocks: int,
        block_tokens: int,
        step_tokens: int,
        vocab_size: int,
    ) -> None:
        self._random = np.random.default_rng(seed)
        self._free_slots = list(range(num_slots))
        self._free_blocks = list(range(num_blocks))
        self._block_tokens = block_tokens
        self._step_tokens = step_tokens
        self._vocab_size = vocab_size
        self._slot_to_blocks: dict[int, list[int]] = {}
        self._running: list[_Sequence] = []
        self._step = 0

    def next(self) -> StepPlan:
        """Make the next plan. It computes something."""
        self._step += 1
        ended = [it for it in self._running if it.num_computed >= it.num_total]
        for sequence in ended:
            self._running.remove(sequence)
            self._free_slots.append(sequence.slot)
            self._free_blocks += self._slot_to_blocks.pop(sequence.slot)
        starts: list[SlotStart] = []
        tables: list[TableChange] = []
        while self._free_slots and (not self._running or self._random.random() < 0.3):
            sequence = self._draw()
            if not self._give_blocks(sequence, tables):
                break
            params = _WAYS_TO_SAMPLE[self._random.integers(len(_WAYS_TO_SAMPLE))]
            last_token = int.from_bytes(sequence.prompt[-4:], "little")
            prompt = sequence.prompt if params.penalizes_prompt else b""
            starts.append(SlotStart(params, (SlotSample(sequence.slot, self._step, last_token),), prompt))
            self._running.append(sequence)
        decodes = self._decodes()
        entries = self._entries(self._step_tokens - len(decodes))
        return StepPlan(
            self._step,
            free_slots=tuple(it.slot for it in ended),
            starts=tuple(starts),
            tables=tuple(tables),
            entries=tuple(entries),
            decodes=np.array(decodes, dtype="<u4").tobytes(),
        )

    def _draw(self) -> _Sequence:
        """Draw a sequence: as many prompts are of tens of tokens as of hundreds or thousands."""
        most = len(self._free_blocks) * self._block_tokens + self._block_tokens
        num_prompt = int(np.exp(self._random.uniform(0, np.log(max(2, min(most // 2, 4000))))))
        tokens = self._random.integers(0, self._vocab_size, num_prompt).astype("<u4").tobytes()
        return _Sequence(
            self._free_slots[-1], tokens, num_prompt + int(self._random.integers(1, _MOST_OUTPUT))
        )

    def _give_blocks(self, sequence: _Sequence, tables: list[TableChange]) -> bool:
        num_blocks = -(-sequence.num_total // self._block_tokens)
        if num_blocks > len(self._free_blocks):
            return False
        self._free_slots.pop()
        self._random.shuffle(self._free_blocks)
        blocks = [self._free_blocks.pop() for _ in range(num_blocks)]
        self._slot_to_blocks[sequence.slot] = blocks
        tables.append(TableChange(sequence.slot, 0, np.array(blocks, dtype="<u4").tobytes()))
        return True

    def _decodes(self) -> list[int]:
        slots = []
        for sequence in self._running:
            if sequence.num_computed and not sequence.num_left and self._random.random() < 0.9:
                sequence.num_computed += 1
                slots.append(sequence.slot)
        return slots

    def _entries(self, budget: int) -> list[BatchEntry]:
        entries = []
        for sequence in self._running:
            if budget > 0 and sequence.num_left:
                num_tokens = min(sequence.num_left, int(self._random.integers(1, budget + 1)))
                start = sequence.num_computed
                tokens = sequence.prompt[4 * start : 4 * (start + num_tokens)]
                sequence.num_computed += num_tokens
                samples = () if sequence.num_left else (sequence.slot,)
                entries.append(BatchEntry(sequence.slot, start, num_tokens, tokens, samples))
                budget -= num_tokens
        return entries


@dataclass(frozen=True)
class MemoryCourse:
    """The resident memory of a rank: of torch alone, when it was ready, halfway, and at the end."""

    of_torch: int
    ready: Resident
    middle: Resident
    end: Resident
    weights_bytes: int
    kv_bytes: int

    @property
    def ratio(self) -> float:
        """The rank's memory beyond torch, over weights and KV. All KV counts as resident."""
        shared = max(self.end.shared, self.kv_bytes)
        own = self.end.own + self.end.of_files - self.of_torch
        return (own + shared) / (self.weights_bytes + self.kv_bytes)

    @property
    def growth(self) -> int:
        """The memory that the second half of the steps adds to the process's own."""
        return self.end.own - self.middle.own


def watch(
    model_dir: Path,
    num_steps: int,
    *,
    kv_tokens: int,
    step_tokens: int,
    num_slots: int,
    num_threads: int,
    dtype: str = "bf16",
) -> MemoryCourse:
    """Run random steps on a rank of its own process."""
    config = read_model_config(model_dir)
    rank = RankProcess(
        model_dir,
        dtype,
        num_threads=num_threads,
        num_kv_tokens=kv_tokens,
        max_batch_tokens=step_tokens,
        max_sequences=num_slots,
    )
    with rank:
        process_id = rank.process.pid
        ready = Resident.of(process_id)
        steps = VariedSteps(
            0,
            num_slots=num_slots,
            num_blocks=rank.ready.num_blocks,
            block_tokens=64,
            step_tokens=step_tokens,
            vocab_size=config.vocab_size,
        )
        for _ in range(num_steps // 2):
            _run(rank, steps.next())
        middle = Resident.of(process_id)
        for _ in range(num_steps - num_steps // 2):
            _run(rank, steps.next())
        end = Resident.of(process_id)
    cells = config.kv_cells
    token_bytes = cells.num_layers * cells.num_cells * cells.width * cells.num_kinds * 2
    weights_bytes = sum(file.stat().st_size for file in weight_files(model_dir))
    return MemoryCourse(resident_of_torch(), ready, middle, end, weights_bytes, kv_tokens * token_bytes)


def _run(rank: RankProcess, plan: StepPlan) -> None:
    report = rank.run(plan)
    assert not report.failed, report.failed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, help="default: random weights in the shape of Qwen3-0.6B")
    parser.add_argument("--steps", type=int, default=1500)
    parser.add_argument("--kv-tokens", type=int, default=16384)
    parser.add_argument("--step-tokens", type=int, default=512)
    parser.add_argument("--slots", type=int, default=16)
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="tandem-memory-"))
    try:
        model_dir = arguments.model
        if model_dir is None:
            model_dir = folder / "model"
            write_random_checkpoint(model_dir, "qwen3", seed=1, dtype="bfloat16", **QWEN3_06B)
        course = watch(
            model_dir,
            arguments.steps,
            kv_tokens=arguments.kv_tokens,
            step_tokens=arguments.step_tokens,
            num_slots=arguments.slots,
            num_threads=arguments.threads,
        )
    finally:
        shutil.rmtree(folder)
    mib = {name: round(getattr(course, name).total / 2**20, 1) for name in ("ready", "middle", "end")}
    line = {
        "what": "rank_memory",
        "steps": arguments.steps,
        "torch_mib": round(course.of_torch / 2**20, 1),
        "weights_mib": round(course.weights_bytes / 2**20, 1),
        "kv_mib": round(course.kv_bytes / 2**20, 1),
        "resident_mib": mib,
        "growth_mib": round(course.growth / 2**20, 1),
        "ratio": round(course.ratio, 3),
    }
    print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
