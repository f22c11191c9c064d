"""How much of the time both stages of a pipeline work: `python -m benchmarks.pipeline`.

A replica of two stages of equal cost, one process a rank, decodes a fixed number of sequences while long
prompts are computed one after the other. The ranks' own reports say when each was busy with which step
(waiting for the other stage is not busy), which gives a timeline; `--timeline FILE` writes it. The figure is
the time in which both are busy over the time in which either is, from a long prompt's first chunk to its
last, and for decoding alone; with chunks that shrink as the prefix grows, and with equal ones. The ranks and
the engine core need cores of their own.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import tempfile
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.random_checkpoint import write_random_checkpoint
from benchmarks.replica import CLOCK, BareReplica, Span, bare_replica
from workers.config import EngineConfig, Parallel

BLOCK_TOKENS = 16
TARGET = 0.8
MODEL: dict[str, Any] = {
    "hidden_size": 512,
    "intermediate_size": 1536,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "max_position_embeddings": 16384,
}


class Timeline:
    """The busy spans of a window of time."""

    def __init__(self, spans: Iterable[Span], start: float, end: float) -> None:
        self._start, self._end = start, end
        self.spans = [span for span in spans if span.finished_at > start and span.started_at < end]

    def busy(self, min_ranks: int) -> float:
        """Return the seconds of the window in which at least `min_ranks` ranks are busy."""
        edges = [(max(span.started_at, self._start), 1) for span in self.spans]
        edges += [(min(span.finished_at, self._end), -1) for span in self.spans]
        total, num_busy, before = 0.0, 0, 0.0
        for at, change in sorted(edges):
            total += at - before if num_busy >= min_ranks else 0.0
            num_busy, before = num_busy + change, at
        return total

    def stats(self) -> dict[str, float]:
        either, both = self.busy(1), self.busy(2)
        wall_s = self._end - self._start
        return {"ratio": both / either, "both_busy": both / wall_s, "either_busy": either / wall_s}


async def record(
    name: str, replica: BareReplica, args: argparse.Namespace, keep: Callable[[str, Timeline], None]
) -> list[dict[str, float]]:
    """Measure each long prompt, and decoding alone before it, in turn."""
    lines = []
    decoding = [replica.submit(8, 10**6) for _ in range(args.sequences)]
    await replica.until(lambda: all(replica.token_times[each] for each in decoding))
    for _ in range(args.rounds + 1):
        window = await _decode_alone(replica, decoding, args.tokens)
        alone = Timeline(replica.spans, *window)
        long = replica.submit(args.prompt, 1)
        await replica.until(lambda name=long: name in replica.finished)  # type: ignore[misc]
        chunks = chunk_spans(replica)
        beside = Timeline(
            replica.spans, min(it.started_at for it in chunks), max(it.finished_at for it in chunks)
        )
        keep(name, beside)
        lines.append(_line(replica, chunks, alone, beside, decoding))
        replica.plans.clear()
        replica.spans.clear()
    replica.cancel_all()
    return lines[1:]  # the first one warms up


async def _decode_alone(replica: BareReplica, decoding: list[str], num_tokens: int) -> tuple[float, float]:
    """Wait from now until every sequence has `num_tokens` tokens more."""
    start = CLOCK.now()
    goals = {name: len(replica.token_times[name]) + num_tokens for name in decoding}
    await replica.until(lambda: all(len(replica.token_times[name]) >= goal for name, goal in goals.items()))
    return start, CLOCK.now()


def chunk_spans(replica: BareReplica) -> list[Span]:
    """Return the spans of the steps that have a prefill chunk."""
    steps = {
        step for step, plan in replica.plans.items() if any(entry.num_tokens > 1 for entry in plan.entries)
    }
    return [span for span in replica.spans if span.step in steps]


def _line(
    replica: BareReplica, chunks: list[Span], alone: Timeline, beside: Timeline, decoding: list[str]
) -> dict[str, float]:
    start, end = min(it.started_at for it in chunks), max(it.finished_at for it in chunks)
    gaps = []
    for name in decoding:
        times = [at for at in replica.token_times[name] if start < at < end]
        gaps += [after - before for before, after in pairwise(times)]
    seconds = [span.finished_at - span.started_at for span in chunks]
    whole = sorted(seconds)[: -max(1, len(seconds) // 20)]  # without those that other work has delayed
    return {
        **beside.stats(),
        "ratio_decode_alone": alone.stats()["ratio"],
        "prefill_s": end - start,
        "num_chunks": len(chunks) / 2,
        "step_p50_ms": 1e3 * median(seconds),
        "step_p95_ms": 1e3 * whole[-1],
        "itl_p50_ms": 1e3 * median(gaps),
    }


async def measure(model_dir: Path, args: argparse.Namespace, keep: Callable[[str, Timeline], None]) -> None:
    engine = EngineConfig(
        block_tokens=BLOCK_TOKENS,
        kv_tokens=2 * args.prompt + 1024 * args.sequences,
        chunk_tokens=args.chunk,
        max_batch_tokens=args.chunk + args.sequences,
    )
    half = args.layers // 2
    parallel = Parallel(pp=2, devices=("cpu", "cpu"), layers=(half, half))
    for name, ratio in (("shrinking chunks", args.attention_ratio), ("equal chunks", 0.0)):
        async with bare_replica(model_dir, args.dtype, parallel, engine, ratio) as replica:
            rounds = await record(name, replica, args, keep)
            report(name, rounds, replica.attention_ratio, args)


def report(what: str, rounds: Sequence[dict[str, float]], ratio: float, args: argparse.Namespace) -> None:
    stats = {key: median(each[key] for each in rounds) for key in rounds[0]}
    line: dict[str, Any] = {"benchmark": "pipeline", "what": what}
    line |= {"figure": round(stats.pop("ratio"), 3), "limit": 1.0}
    line |= {"ratio": line["figure"], "target": TARGET}
    line |= {"worst": round(min(each["ratio"] for each in rounds), 3)}
    line |= {key: round(value, 3) for key, value in stats.items()}
    line |= {"attention_ratio": float(f"{ratio:.2g}"), "prompt": args.prompt, "chunk": args.chunk}
    line |= {"sequences": args.sequences, "layers": args.layers, "dtype": args.dtype, "rounds": len(rounds)}
    print(json.dumps(line), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--layers", type=int, default=8, help="of both stages together")
    parser.add_argument("--dtype", default="fp32", help="bf16, fp16 or fp32")
    parser.add_argument("--sequences", type=int, default=8, help="that decode all the time")
    parser.add_argument("--prompt", type=int, default=4096, help="tokens of a long prompt")
    parser.add_argument("--chunk", type=int, default=256, help="the longest prefill chunk")
    parser.add_argument("--attention-ratio", type=float, help="instead of the measured one")
    parser.add_argument("--tokens", type=int, default=32, help="of each sequence, decoding alone")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--timeline", type=Path, help="write the busy spans here, as JSON lines")
    args = parser.parse_args()
    lines: list[str] = []

    def keep(what: str, timeline: Timeline) -> None:
        lines.extend(json.dumps({"what": what, **span._asdict()}) for span in timeline.spans)

    with tempfile.TemporaryDirectory() as folder:
        model_dir = Path(folder)
        write_random_checkpoint(model_dir, "llama", seed=0, num_hidden_layers=args.layers, **MODEL)
        asyncio.run(measure(model_dir, args, keep))
    if args.timeline:
        args.timeline.write_text("".join(line + "\n" for line in lines), encoding="utf-8")


if __name__ == "__main__":
    main()
