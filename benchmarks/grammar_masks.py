"""What masks of grammars cost beside decoding steps on this machine's CPU, as JSON lines.

Steps of `batch` sequences, which all follow a grammar, or none. The outputs are drawn at random among the
tokens that the grammars allow; when one ends, all begin again. `mask_ms` is the mean time of all of a step's
masks, with the tokens that matchers take and the digests; `share` is that of the median decoding step without
grammars. `first_mask_ms` is a step in which every lexer is new. `compile_ms` does not include the check in a
child process. Grammars are one for all, or one for each sequence.

    python -m benchmarks.grammar_masks [--model DIR] [--batch 16] [--threads 2] [--steps 100]
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from llguidance import LLMatcher
from numpy.typing import NDArray

from benchmarks.random_checkpoint import QWEN3_06B, write_random_checkpoint
from kvtransfer.common.clock import SystemClock
from workers.messages.rank_channel import (
    BatchEntry,
    FailedEntry,
    SlotSample,
    SlotStart,
    StepPlan,
    TableChange,
)
from workers.messages.sampling import Grammar, SamplingParams
from workers.model.model_config import read_model_config
from workers.rank.compiled_grammars import CompiledGrammars
from workers.rank.input_batch import PlannedRows
from workers.rank.model_runner import ModelRunner
from workers.rank.runner_settings import CheckpointFolder, ComputeSettings, RankCapacity
from workers.rank.slot_matchers import SlotMatchers, StepMasks

CLOCK = SystemClock()
BLOCK_TOKENS = 16
NUM_PROMPT_TOKENS = 32
SAMPLING = SamplingParams(temperature=1.0)
TINY = Path(__file__).resolve().parent.parent / "models" / "tiny"


def schema(number: int) -> Grammar:
    """Return the grammar of objects as tools take them; `number` makes it another one."""
    value = {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 40},
            f"field{number}": {"type": "number"},
            "when": {"type": "string", "format": "date-time"},
            "tags": {"type": "array", "items": {"type": "string"}, "maxItems": 5},
            "where": {
                "type": "object",
                "properties": {
                    "street": {"type": "string"},
                    "code": {"type": "string", "pattern": "^[0-9]{5}$"},
                },
                "required": ["street", "code"],
                "additionalProperties": False,
            },
        },
        "required": ["name", f"field{number}", "when", "tags", "where"],
        "additionalProperties": False,
    }
    return Grammar.of(LLMatcher.grammar_from_json_schema(json.dumps(value)))


class TimedMatchers(SlotMatchers):
    """Adds up the time that a step's masks and tokens take."""

    step_s: float = 0.0

    def masks(self, rows: PlannedRows) -> StepMasks | None:
        begun = CLOCK.now()
        masks = super().masks(rows)
        self.step_s += CLOCK.now() - begun
        return masks

    def advance(self, rows: PlannedRows, tokens: NDArray[np.integer]) -> tuple[FailedEntry, ...]:
        begun = CLOCK.now()
        failed = super().advance(rows, tokens)
        self.step_s += CLOCK.now() - begun
        return failed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", type=Path, help="default: Qwen3-0.6B's shape with random weights")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--steps", type=int, default=100)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        model = args.model or Path(folder)
        if args.model is None:
            shape = {**QWEN3_06B, "tokenizer_from": TINY}
            write_random_checkpoint(model, "qwen3", seed=1, dtype="bfloat16", **shape)
        bench = MaskBench(model, args.batch, args.threads)
        with contextlib.closing(bench.runner):
            bench.measure(args.steps)


class MaskBench:
    """A model runner whose slots follow grammars, with fixed block tables."""

    def __init__(self, model: Path, batch: int, num_threads: int) -> None:
        config = read_model_config(model)
        self.batch = batch
        self.grammars = CompiledGrammars(model, config.vocab_size, config.eos_token_ids)
        begun = CLOCK.now()
        self.num_tokens = self.grammars.tokenizer.vocab_size
        self.tokenizer_s = CLOCK.now() - begun
        self.num_blocks = 16
        self.runner = ModelRunner(
            CheckpointFolder(model),
            ComputeSettings(torch.bfloat16, torch.device("cpu"), num_threads),
            RankCapacity(BLOCK_TOKENS, batch * self.num_blocks * BLOCK_TOKENS, batch),
            CLOCK,
            grammars=self.grammars,
        )
        self.runner.warm_up()
        steps: Any = self.runner.steps
        max_slots = self.runner.steps.batch.max_slots
        lift = steps.steps.sampler.lift_minimum
        self.matchers = TimedMatchers(self.grammars, max_slots, num_threads, lift)
        steps._matchers = steps._slots._matchers = self.matchers
        steps.steps._context = steps.steps._context._replace(matchers=self.matchers)

    def measure(self, num_steps: int) -> None:
        """Print a line for each kind."""
        free_ms = self._run("none", [None] * self.batch, num_steps, 0.0)
        kinds: dict[str, list[Grammar | None]] = {
            "one for all": [schema(0)] * self.batch,
            "one for each": [schema(1 + index) for index in range(self.batch)],
        }
        for kind, grammars in kinds.items():
            self._run(kind, grammars, num_steps, free_ms)

    def _run(self, kind: str, grammars: list[Grammar | None], num_steps: int, free_ms: float) -> float:
        begun = CLOCK.now()
        for grammar in grammars:
            if grammar is not None:
                self.grammars.compile(grammar)
        compile_s = CLOCK.now() - begun
        step_ms: list[float] = []
        mask_ms: list[float] = []
        most = self.num_blocks * BLOCK_TOKENS - NUM_PROMPT_TOKENS
        num_outputs = 0
        plan = self._begin(grammars)
        for number in range(num_steps):
            self.matchers.step_s = 0.0
            begun = CLOCK.now()
            report = self.runner.steps.run(plan)
            if plan.decodes:
                step_ms.append(1e3 * (CLOCK.now() - begun))
            mask_ms.append(1e3 * self.matchers.step_s)
            assert not report.failed, report.failed
            ended = set(np.frombuffer(report.tokens, "<u4").tolist()) & set(self.grammars.end_ids)
            num_outputs += 1
            if ended or num_outputs == most:
                num_outputs = 0
                self.runner.steps.run(StepPlan(0, free_slots=tuple(range(self.batch))))
                plan = self._begin(grammars)
            else:
                plan = StepPlan(number + 2, decodes=np.arange(self.batch, dtype="<u4").tobytes())
        self.runner.steps.run(StepPlan(0, free_slots=tuple(range(self.batch))))
        steps = sorted(step_ms)
        line = {
            "grammars": kind,
            "batch": self.batch,
            "vocabulary": self.num_tokens,
            "step_ms": round(statistics.median(steps), 2),
            "mask_ms": round(statistics.fmean(mask_ms), 3),
            "mask_p99_ms": round(sorted(mask_ms)[int(0.99 * (len(mask_ms) - 1))], 3),
            "first_mask_ms": round(mask_ms[0], 3),
            "compile_ms": round(1e3 * compile_s, 2),
            "tokenizer_s": round(self.tokenizer_s, 2),
        }
        if free_ms:
            line["share"] = round(statistics.fmean(mask_ms) / free_ms, 4)
        print(json.dumps(line), flush=True)
        return statistics.median(steps)

    def _begin(self, grammars: list[Grammar | None]) -> StepPlan:
        """Return a plan that computes all prompts."""
        prompt = np.arange(100, 100 + NUM_PROMPT_TOKENS, dtype="<u4").tobytes()
        return StepPlan(
            1,
            starts=tuple(
                SlotStart(
                    SAMPLING,
                    (SlotSample(slot, slot, 99 + NUM_PROMPT_TOKENS),),
                    b"",
                    grammar.digest if grammar else b"",
                )
                for slot, grammar in enumerate(grammars)
            ),
            tables=tuple(
                TableChange(
                    slot,
                    0,
                    np.arange(slot * self.num_blocks, (slot + 1) * self.num_blocks, dtype="<u4").tobytes(),
                )
                for slot in range(self.batch)
            ),
            entries=tuple(
                BatchEntry(slot, 0, NUM_PROMPT_TOKENS, prompt, (slot,)) for slot in range(self.batch)
            ),
        )


if __name__ == "__main__":
    main()
