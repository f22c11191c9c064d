"""What sampling costs beside a plain read of the logits (`limit`: torch's amax), as JSON lines.

Milliseconds of one thread's CPU time for a step of `rows` sequences, host work included: the median of
several rounds in which all kinds take turns, and of a round's ratios to the limit. `kernels` names the
instruction set of the compiled code, "none" is a machine without a compiler.

    python -m benchmarks.sampling [--rows 16,256] [--vocabulary 32000,151936] [--kernels
    avx512_bf16,avx2,none]
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from functools import partial
from unittest import mock

import numpy as np
import torch

from workers.messages.rank_channel import SlotSample, SlotStart
from workers.messages.sampling import SamplingParams
from workers.model import native
from workers.model.native.isa import Isa, available_isas
from workers.rank.sampler import Sampler

KINDS = {
    "greedy": SamplingParams(),
    "temperature": SamplingParams(temperature=1.0),
    "top_k": SamplingParams(temperature=1.0, top_k=50),
    "top_k and top_p": SamplingParams(temperature=1.0, top_k=50, top_p=0.9),
    "top_p": SamplingParams(temperature=1.0, top_p=0.9),
    "min_p": SamplingParams(temperature=1.0, min_p=0.05),
    "repetition": SamplingParams(temperature=1.0, repetition_penalty=1.1),
}
NUM_PROMPT_TOKENS, NUM_OUTPUT_TOKENS = 2000, 200


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    isas = [isa.value for isa in available_isas()] if native.load() is not None else []
    parser.add_argument("--rows", default="16,256", help="sequences in a step")
    parser.add_argument("--vocabulary", default="32000,151936", help="its sizes")
    parser.add_argument("--kinds", default=",".join(KINDS))
    parser.add_argument("--kernels", default=",".join([*isas[:1], "none"]), help="instruction sets, or none")
    parser.add_argument("--rounds", type=int, default=7)
    args = parser.parse_args()
    torch.set_num_threads(1)
    for kernels in args.kernels.split(","):
        for vocab_size in map(int, args.vocabulary.split(",")):
            for num_rows in map(int, args.rows.split(",")):
                measure(num_rows, vocab_size, args.rounds, kernels, args.kinds.split(","))


@torch.inference_mode()
def measure(num_rows: int, vocab_size: int, num_rounds: int, kernels: str, kinds: list[str]) -> None:
    """Print a line for each kind."""
    loaded = native.compiled(Isa(kernels)) if kernels != "none" else None
    generator = torch.Generator().manual_seed(0)
    # Values as a head in bfloat16 gives them, many of them equal.
    logits = (torch.randn(num_rows, vocab_size, generator=generator) * 3).bfloat16().float()
    fresh = torch.empty_like(logits)
    works: dict[str, Callable[[], object]] = {"limit": lambda: fresh.amax(-1)}
    for kind in kinds:
        sampler = _sampler(num_rows, vocab_size, KINDS[kind])
        works[kind] = partial(sampler.sample, fresh, np.arange(num_rows, dtype=np.int32))
    kind_to_ms: dict[str, list[float]] = {kind: [] for kind in works}

    def load() -> native.Kernels | None:  # a mock object would be slow
        return loaded

    def serves(*_: object) -> bool:
        return loaded is not None

    with mock.patch.object(native, "load", load), mock.patch.object(native, "serves", serves):
        for _ in range(num_rounds):
            for kind, work in works.items():
                fresh.copy_(logits)
                started_at = time.thread_time()
                work()
                kind_to_ms[kind].append((time.thread_time() - started_at) * 1e3)
    limits_ms = kind_to_ms.pop("limit")
    for kind, took_ms in kind_to_ms.items():
        ratios = [took / limit for took, limit in zip(took_ms, limits_ms, strict=True)]
        line = {
            "benchmark": "sampling",
            "kind": kind,
            "rows": num_rows,
            "vocabulary": vocab_size,
            "kernels": kernels,
            "ms": round(statistics.median(took_ms), 3),
            "limit_ms": round(statistics.median(limits_ms), 3),
            "ratio": round(statistics.median(ratios), 2),
        }
        print(json.dumps(line), flush=True)


def _sampler(num_rows: int, vocab_size: int, sampling: SamplingParams) -> Sampler:
    """Return a sampler with slots in the middle of an answer."""
    sampler = Sampler(vocab_size, (0,), torch.device("cpu"), num_rows)
    tokens = torch.randint(0, vocab_size, (NUM_PROMPT_TOKENS + NUM_OUTPUT_TOKENS,), dtype=torch.int32)
    packed = tokens.numpy().tobytes()
    prompt, output = packed[: 4 * NUM_PROMPT_TOKENS], packed[4 * NUM_PROMPT_TOKENS :]
    samples = tuple(
        SlotSample(row, row, 0, NUM_OUTPUT_TOKENS, output if sampling.penalizes_output else b"")
        for row in range(num_rows)
    )
    sampler.start(SlotStart(sampling, samples, prompt if sampling.penalizes_prompt else b""))
    return sampler


if __name__ == "__main__":
    main()
