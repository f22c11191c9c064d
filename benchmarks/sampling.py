"""What sampling costs beside greedy decoding, as JSON lines; `limit` is torch's argmax of the same logits.

Milliseconds of one thread's CPU time for a step of `rows` sequences, the least of several rounds in which all
kinds take turns. `kernels` false: as on a machine without a compiler.

    python -m benchmarks.sampling [--rows 16] [--vocabulary 32000,128256]
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from functools import partial
from unittest import mock

import numpy as np
import torch

from workers.messages import SamplingParams, SlotSample, SlotStart
from workers.model import native
from workers.rank.sampler import Sampler

KINDS = {
    "greedy": SamplingParams(),
    "temperature": SamplingParams(temperature=1.0),
    "top_k": SamplingParams(temperature=0.7, top_k=50),
    "top_k and top_p": SamplingParams(temperature=0.7, top_k=50, top_p=0.9),
    "top_p": SamplingParams(temperature=0.7, top_p=0.9),
    "min_p": SamplingParams(temperature=0.7, min_p=0.05),
    "repetition": SamplingParams(temperature=0.7, repetition_penalty=1.1),
}
NUM_PROMPT_TOKENS, NUM_OUTPUT_TOKENS = 2000, 200


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rows", type=int, default=16, help="sequences in a step")
    parser.add_argument("--vocabulary", default="32000,128256", help="its sizes")
    parser.add_argument("--rounds", type=int, default=10)
    args = parser.parse_args()
    torch.set_num_threads(1)
    for vocab_size in map(int, args.vocabulary.split(",")):
        for has_kernels in (True, False):
            if has_kernels and not native.serves(torch.device("cpu"), torch.float32):
                continue
            measure(args.rows, vocab_size, args.rounds, has_kernels)


def measure(num_rows: int, vocab_size: int, num_rounds: int, has_kernels: bool) -> None:
    """Print a line for each kind."""
    generator = torch.Generator().manual_seed(0)
    # Values as a head in bfloat16 gives them, many of them equal.
    logits = (torch.randn(num_rows, vocab_size, generator=generator) * 3).bfloat16().float()
    fresh = torch.empty_like(logits)
    works: dict[str, Callable[[], object]] = {"limit": lambda: fresh.argmax(-1)}
    for kind, sampling in KINDS.items():
        sampler = _sampler(num_rows, vocab_size, sampling)
        works[kind] = partial(sampler.sample, fresh, np.arange(num_rows, dtype=np.int32))
    kind_to_ms: dict[str, float] = {}
    with mock.patch.object(native, "serves", native.serves if has_kernels else lambda device, dtype: False):
        for _ in range(num_rounds):
            for kind, work in works.items():
                fresh.copy_(logits)
                started_at = time.thread_time()
                work()
                took_ms = (time.thread_time() - started_at) * 1e3
                kind_to_ms[kind] = min(took_ms, kind_to_ms.get(kind, took_ms))
    limit_ms = kind_to_ms.pop("limit")
    for kind, took_ms in kind_to_ms.items():
        line = {
            "benchmark": "sampling",
            "kind": kind,
            "rows": num_rows,
            "vocabulary": vocab_size,
            "kernels": has_kernels,
            "ms": round(took_ms, 3),
            "limit_ms": round(limit_ms, 3),
            "ratio": round(took_ms / limit_ms, 2),
        }
        print(json.dumps(line), flush=True)


def _sampler(num_rows: int, vocab_size: int, sampling: SamplingParams) -> Sampler:
    """With slots in the middle of an answer."""
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
