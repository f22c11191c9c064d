"""How much of a hand-over hides behind the prefill when the link is slow: `python -m benchmarks.overlap`.

Two replicas, one rank each. The prefill replica's hand-over rate is limited so that moving the prompt takes a
given share of computing it. What counts is how long after the last chunk the landing is complete, against the
time that the last chunk's own transfer takes at that rate: 1.0 is all that could be hidden; moved after the
prefill, it would be the number of chunks. One JSON line a shape of the writer.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from benchmarks.drawn_trust import draw_trust
from benchmarks.linked import Heard, LinkedReplicas
from benchmarks.random_checkpoint import write_random_checkpoint
from kvtransfer.config import TransferConfig
from workers.config import EngineConfig, Parallel
from workers.messages.link import HandOverReport, PrefillReport

BLOCK_TOKENS = 32
MODEL: dict[str, Any] = {
    "hidden_size": 512,
    "intermediate_size": 1536,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "max_position_embeddings": 8192,
}


class Pair:
    """A prefill and a decode replica."""

    def __init__(self, model_dir: Path, num_tokens: int, chunk_tokens: int) -> None:
        self._replicas = LinkedReplicas(model_dir, "float32", draw_trust())
        self._engine = EngineConfig(
            block_tokens=BLOCK_TOKENS,
            kv_tokens=2 * num_tokens + 512,
            chunk_tokens=chunk_tokens,
            max_batch_tokens=chunk_tokens,
        )
        self._draw = np.random.default_rng(0)

    async def start(self, writer: Parallel, limit_gb_s: float) -> None:
        transfer = TransferConfig(hand_over_gb_s=limit_gb_s)
        await self._replicas.add("prefill", "prefill", writer, self._engine, transfer)
        await self._replicas.add("decode", "decode", Parallel(), self._engine)

    async def run(self, name: str, num_tokens: int) -> Heard:
        """Run one prompt of random tokens, handed over."""
        prompt = self._draw.integers(3, 250, num_tokens).astype("<u4").tobytes()
        return await self._replicas.run("prefill", name, prompt, decode="decode")

    async def stop(self) -> None:
        await self._replicas.stop()


async def measure(model_dir: Path, writer: Parallel, arguments: argparse.Namespace) -> dict[str, object]:
    num_tokens, chunk_tokens = arguments.tokens, arguments.chunk
    free = Pair(model_dir, num_tokens, chunk_tokens)
    await free.start(writer, 0.0)
    await free.run("warm-up", num_tokens)
    unlimited = [await free.run(f"free-{number}", num_tokens) for number in range(arguments.repeat)]
    await free.stop()
    prefill_s = median(_prefill_s(outcome) for outcome in unlimited)
    num_bytes = _hand_over(unlimited[0]).num_moved_bytes
    # The limit is a rank's; together the ranks of the writer move the prompt in the share of its prefill.
    total_gb_s = num_bytes / (arguments.share * prefill_s) / 1e9
    slow = Pair(model_dir, num_tokens, chunk_tokens)
    await slow.start(writer, total_gb_s / (writer.tp * writer.pp))
    await slow.run("warm-up", num_tokens)
    limited = [await slow.run(f"slow-{number}", num_tokens) for number in range(arguments.repeat)]
    await slow.stop()
    last_chunk_s = num_bytes / num_tokens * chunk_tokens / total_gb_s / 1e9
    rests = [_hand_over(heard).times.transfer_end - _prefill(heard).times.prefilled for heard in limited]
    return {
        "what": "overlap",
        "writer": f"{writer.tp}x{writer.pp}",
        "prompt_tokens": num_tokens,
        "chunk_tokens": chunk_tokens,
        "moved_mib": round(num_bytes / 2**20, 1),
        "limit_gb_s": round(total_gb_s, 4),
        "prefill_s": round(prefill_s, 3),
        "limited_prefill_s": round(median(_prefill_s(outcome) for outcome in limited), 3),
        "last_chunk_s": round(last_chunk_s, 4),
        "rest_s": round(median(rests), 4),
        "ratio": round(median(rests) / last_chunk_s, 3),
        "ratio_without_overlap": round(num_tokens / chunk_tokens, 1),
    }


def _prefill(heard: Heard) -> PrefillReport:
    assert heard.prefill is not None
    return heard.prefill


def _hand_over(heard: Heard) -> HandOverReport:
    assert heard.hand_over is not None
    return heard.hand_over


def _prefill_s(heard: Heard) -> float:
    times = _prefill(heard).times
    return times.prefilled - times.scheduled


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--chunk", type=int, default=256)
    parser.add_argument(
        "--share", type=float, default=0.8, help="of the prefill time that the transfer takes"
    )
    parser.add_argument("--repeat", type=int, default=3)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        write_random_checkpoint(Path(folder) / "m", "llama", seed=1, **MODEL)
        for writer in (Parallel(), Parallel(tp=2)):
            result = asyncio.run(measure(Path(folder) / "m", writer, arguments))
            print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
