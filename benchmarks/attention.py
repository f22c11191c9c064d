"""What attention costs on a CPU, as JSON lines: decoding in bytes a second beside a loop that only reads, and
chunks of a prompt in operations a second beside products.

`limit` is that loop, or a product of as many rows, timed in the same round as both backends; a figure is the
median of the rounds, and `ratio` the median of its ratio to the limit of its round. A decoding step reads the
keys and values of several layers, so that none of them is in a cache when its turn comes.

    python -m benchmarks.attention [--dtype bf16] [--threads 2] [--heads 16 --kv-heads 8 --head-dim 128]
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable

import torch

from workers.model import native
from workers.model.attention.choice import candidate_backends
from workers.model.attention.interface import (
    AttentionBackend,
    AttentionShape,
    LayerAttention,
    Rotation,
    SequenceSpan,
    StepInput,
)
from workers.model.make_linear import make_linear
from workers.rank.runner_settings import read_dtype

DECODES = [(batch, context) for context in (128, 2048, 8192) for batch in (1, 16)]
CHUNKS = [(0, 512), (0, 2048), (1536, 512)]
LEAST_READ_BYTES, MOST_LAYERS = 256 << 20, 32
PRODUCT_SIZE = 2048


class LayerTimer:
    """A step over the last tokens of sequences, layer by layer, by every backend of this machine."""

    def __init__(self, args: argparse.Namespace, spans: list[SequenceSpan], num_layers: int) -> None:
        dtype = read_dtype(args.dtype)
        num_blocks = max(max(span.block_ids) for span in spans) + 1
        kv = torch.empty(num_blocks, num_layers, 2, args.kv_heads, args.block_tokens, args.head_dim)
        kv = kv.to(dtype).normal_()
        rotations = (Rotation(torch.zeros(args.head_dim // 2)),)
        shape = AttentionShape(args.heads, (0,) * num_layers, rotations, softcap=args.softcap)
        self.name_to_backend = {it.name: it for it in candidate_backends(shape, kv)}
        self._layers = [LayerAttention(layer, 0) for layer in range(num_layers)]
        self._step = StepInput.of(spans, args.block_tokens)
        num_rows = sum(span.num_tokens for span in spans)
        self._qkv = torch.randn(num_rows, (args.heads + 2 * args.kv_heads) * args.head_dim).to(dtype)

    def layer_s(self, backend: AttentionBackend) -> float:
        """Return the seconds of a layer, without planning."""
        plan = backend.plan(self._step)
        started_at = time.perf_counter()
        for layer in self._layers:
            plan.run(layer, self._qkv)
        return (time.perf_counter() - started_at) / len(self._layers)


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--dtype", default="bf16")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--kv-heads", type=int, default=8)
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--block-tokens", type=int, default=64)
    parser.add_argument("--softcap", type=float, default=0.0, help="caps scores, as Gemma 2 does; 0: none")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", default="", help="decode or prefill")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    if args.only != "prefill":
        for batch, context in DECODES:
            measure_decode(args, batch, context)
    if args.only != "decode":
        for start, num_tokens in CHUNKS:
            measure_chunk(args, start, num_tokens)


def measure_decode(args: argparse.Namespace, batch: int, context: int) -> None:
    """Print the lines of one decoding step."""
    num_blocks = -(-context // args.block_tokens)
    spans = [
        SequenceSpan(context - 1, 1, range(it * num_blocks, (it + 1) * num_blocks)) for it in range(batch)
    ]
    item_bytes = read_dtype(args.dtype).itemsize
    layer_bytes = 2 * batch * context * args.kv_heads * args.head_dim * item_bytes
    num_layers = min(MOST_LAYERS, -(-LEAST_READ_BYTES // layer_bytes))
    memory = torch.ones(LEAST_READ_BYTES // 4)
    report(
        args,
        {"kind": "decode", "batch": batch, "context": context, "unit": "GB/s"},
        LayerTimer(args, spans, num_layers),
        layer_bytes / 1e9,
        lambda: LEAST_READ_BYTES / 1e9 / seconds(memory.sum),
    )


def measure_chunk(args: argparse.Namespace, start: int, num_tokens: int) -> None:
    """Print the lines of one chunk of a prompt."""
    end = start + num_tokens
    spans = [SequenceSpan(start, num_tokens, range(-(-end // args.block_tokens)))]
    num_pairs = num_tokens * start + num_tokens * (num_tokens + 1) // 2
    linear = make_linear(torch.randn(PRODUCT_SIZE, PRODUCT_SIZE).to(read_dtype(args.dtype)))
    rows = torch.randn(num_tokens, PRODUCT_SIZE).to(read_dtype(args.dtype))
    product = 2 * num_tokens * PRODUCT_SIZE**2 / 1e9
    report(
        args,
        {"kind": "prefill", "tokens": num_tokens, "after": start, "unit": "GFLOP/s"},
        LayerTimer(args, spans, 4),
        4 * num_pairs * args.heads * args.head_dim / 1e9,
        lambda: product / seconds(lambda: linear(rows)),
    )


def report(
    args: argparse.Namespace,
    what: dict[str, object],
    timer: LayerTimer,
    work: float,
    limit: Callable[[], float],
) -> None:
    """Measure in rounds, the backends and the limit in turns, and print a line for each backend."""
    name_to_rates: dict[str, list[float]] = {name: [] for name in timer.name_to_backend}
    limits: list[float] = []
    for number in range(args.rounds + 1):  # the first touches the memory
        rates = {name: work / timer.layer_s(backend) for name, backend in timer.name_to_backend.items()}
        reached = limit()
        if number:
            limits.append(reached)
            for name, rate in rates.items():
                name_to_rates[name].append(rate)
    kernels = native.load()
    for name, found in name_to_rates.items():
        line = {
            "benchmark": "attention",
            "backend": name,
            "isa": None if kernels is None else kernels.isa.value,
            "dtype": args.dtype,
            "threads": args.threads,
            **what,
            "rate": round(statistics.median(found), 1),
            "limit": round(statistics.median(limits), 1),
            "ratio": round(statistics.median(map(_ratio, found, limits)), 3),
        }
        print(json.dumps(line), flush=True)


def seconds(work: Callable[[], object]) -> float:
    """Return the seconds that the work takes."""
    started_at = time.perf_counter()
    work()
    return time.perf_counter() - started_at


def _ratio(rate: float, limit: float) -> float:
    return rate / limit


if __name__ == "__main__":
    main()
