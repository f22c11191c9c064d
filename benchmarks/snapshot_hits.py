"""Time to the first token of prompts that begin behind a snapshot: `python -m benchmarks.snapshot_hits`.

One replica of a small model in the style of Qwen3-Next (two layers attend, six keep a state of 1.1 MB each)
has computed prompts, and evicted them to the host tier of the node. Then, prompt by prompt, it gets each with
another end: first from the host tier (*loaded*), then from its own memory (*resident*), and then the end
alone, without a prefix (*end*). Limit of *loaded*: a plain copy of its bytes, and the time of *resident*;
limit of *resident*: the time of *end*, and of attention to the prefix, which is not counted. JSON lines:
TTFT, and the processor time of engine core and rank, which other load on the machine changes less.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from benchmarks.drawn_trust import draw_trust
from benchmarks.linked import CLOCK, LinkedReplicas
from benchmarks.owner_process import owner_settings, running_owner
from benchmarks.random_checkpoint import write_random_checkpoint
from workers.config import EngineConfig, Parallel
from workers.model.kv_groups import kv_groups
from workers.model.model_config import read_model_config

BLOCK_TOKENS = 16
SHAPE: dict[str, Any] = {
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "num_hidden_layers": 8,
    "vocab_size": 4096,
    "max_position_embeddings": 16384,
    "linear_num_key_heads": 8,
    "linear_num_value_heads": 16,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "layer_types": [*["linear_attention"] * 3, "full_attention"] * 2,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 256,
    "shared_expert_intermediate_size": 256,
}
TARGET = 1.2


class Asked(NamedTuple):
    """One request: its TTFT, the processor time from its submission to its end, its cached tokens, and those
    of the store."""

    ttft_s: float
    processor_s: float
    num_cached: int
    num_loaded: int


class Bench:
    """A replica that has evicted all but the newest of its prompts."""

    def __init__(
        self,
        replicas: LinkedReplicas,
        process_ids: Sequence[int],
        num_prefix: int,
        num_end: int,
        num_prompts: int,
    ) -> None:
        """`process_ids` are those of the ranks."""
        self._replicas = replicas
        self._process_ids = process_ids
        self._num_end = num_end
        self._random = np.random.default_rng(1)
        self._prefixes = [self._drawn(num_prefix) for _ in range(num_prompts)]
        self._num_asked = 0

    def _drawn(self, num_tokens: int) -> bytes:
        return self._random.integers(3, 4096, num_tokens).astype("<u4").tobytes()

    async def ask(self, prefix: bytes) -> Asked:
        """Request a prompt with a new end."""
        self._num_asked += 1
        name = f"r{self._num_asked}"
        began_s = self._processor_s()
        heard = await self._replicas.run("r", name, prefix + self._drawn(self._num_end), max_tokens=1)
        used_s = self._processor_s() - began_s
        assert heard.prefill is not None
        num_loaded = sum(heard.prefill.num_loaded_tokens.values())
        return Asked(heard.ttft_s, used_s, heard.prefill.num_cached_tokens, num_loaded)

    def _processor_s(self) -> float:
        """Return the processor time of this process, which runs the engine core, and of the ranks."""
        of_ranks = (time.clock_gettime((~process_id << 3) | 2) for process_id in self._process_ids)
        return time.process_time() + sum(of_ranks)

    async def fill(self) -> None:
        """Compute every prefix twice: where its ends diverge a snapshot is kept."""
        for prefix in self._prefixes:
            for _ in range(2):
                await self.ask(prefix)

    async def round(self) -> list[tuple[Asked, Asked, Asked]]:
        """Ask for every prefix in turn. Return what *loaded*, *resident* and *end* took."""
        found = []
        for prefix in self._prefixes:
            loaded, resident = await self.ask(prefix), await self.ask(prefix)
            assert resident.num_cached >= len(prefix) // 4 - BLOCK_TOKENS, resident
            found.append((loaded, resident, await self.ask(b"")))
        return found


def copy_s(num_bytes: int) -> float:
    """Return the seconds of a plain copy of so many bytes."""
    source, target = np.ones(num_bytes, np.uint8), np.zeros(num_bytes, np.uint8)
    began_at = CLOCK.now()
    target[:] = source
    return CLOCK.now() - began_at


def loaded_bytes(model_dir: Path, num_tokens: int) -> tuple[int, int]:
    """Return the bytes of the KV of so many tokens in bf16, and those of a state."""
    config = read_model_config(model_dir)
    full, states = kv_groups(config)
    kv = len(full.layers) * 2 * config.num_kv_heads * config.kv_cells.width * 2 * num_tokens
    return kv, len(states.layers) * config.num_kv_heads * states.state_size * 4


async def measure(arguments: argparse.Namespace, folder: Path) -> None:
    """Run the rounds and print what the best of them took."""
    model_dir = folder / "model"
    write_random_checkpoint(model_dir, "qwen3_next", seed=1, dtype="bfloat16", **SHAPE)
    settings, trust = owner_settings(granule_bytes=64 << 10), draw_trust()
    with running_owner(settings, trust):
        replicas = LinkedReplicas(model_dir, "bf16", trust)
        engine = EngineConfig(
            block_tokens=BLOCK_TOKENS,
            kv_tokens=2 * arguments.tokens,
            chunk_tokens=512,
            max_batch_tokens=512,
            max_sequences=2,
            state_snapshots=4,
            num_threads=1,
        )
        core = await replicas.add("r", "both", Parallel(), engine, store=settings.name)
        tiers = core.connector
        assert tiers is not None
        while not tiers.is_open:
            await CLOCK.sleep(0.01)
        ranks = core.rank_process_ids
        bench = Bench(replicas, ranks, arguments.tokens, arguments.end, arguments.prompts)
        await bench.fill()
        rounds: list[tuple[Asked, Asked, Asked]] = []
        for _ in range(arguments.rounds):
            while not tiers.saver.is_idle:
                await CLOCK.sleep(0.01)
            rounds += await bench.round()
        await replicas.stop()
    hits = [it for it in rounds if it[0].num_loaded >= arguments.tokens - BLOCK_TOKENS]
    assert hits, f"nothing was loaded: {rounds}"
    report(arguments, hits, *loaded_bytes(model_dir, arguments.tokens))


def report(
    arguments: argparse.Namespace, hits: list[tuple[Asked, Asked, Asked]], kv_bytes: int, state_bytes: int
) -> None:
    """Print the best and the median of what was measured."""
    copied_s = statistics.median(copy_s(kv_bytes + state_bytes) for _ in range(10))
    sizes = {"kv_mb": round(kv_bytes / 1e6, 2), "state_mb": round(state_bytes / 1e6, 2)}
    shape = {"prefix_tokens": arguments.tokens, "end_tokens": arguments.end, "num_hits": len(hits)}
    for clock in ("ttft_s", "processor_s"):
        for what, pick in (("best", min), ("median", statistics.median)):
            loaded_s, resident_s, end_s = (pick([getattr(it[at], clock) for it in hits]) for at in range(3))
            ratios = {
                "resident_of_end": round(resident_s / end_s, 3),
                "loaded_of_limit": round(loaded_s / (copied_s + resident_s), 3),
                "target": TARGET,
            }
            times = {"copy": copied_s, "end": end_s, "resident": resident_s, "loaded": loaded_s}
            shown = {f"{name}_ms": round(1e3 * its, 2) for name, its in times.items()}
            line = {"clock": clock, "what": what, **shape, **sizes, **shown, **ratios}
            print(json.dumps(line), flush=True)


def main() -> None:
    """Measure in a temporary folder."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=2048, help="of a prefix")
    parser.add_argument("--end", type=int, default=256, help="tokens behind it")
    parser.add_argument("--prompts", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=4)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="tandem-snapshots-") as folder:
        asyncio.run(measure(arguments, Path(folder)))


if __name__ == "__main__":
    main()
