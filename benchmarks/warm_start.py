"""The first request after everything was restarted, on a warm NVMe tier: `python -m benchmarks.warm_start`.

A prompt is computed cold by a replica of one rank and written to NVMe; then store and replica end. New ones,
of the same and of another shape, get the same prompt with another last block first thing. Limit: the bytes at
the read rate of NVMe in this run, and the one chunk that is computed. JSON lines; `ratio` is TTFT over that
limit, `of_cold` over the cold TTFT.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import mmap
import os
import shutil
import tempfile
from pathlib import Path

import numpy as np

from benchmarks.drawn_trust import draw_trust
from benchmarks.linked import CLOCK, Heard, LinkedReplicas
from benchmarks.owner_process import owner_settings, running_owner
from benchmarks.random_checkpoint import QWEN3_06B, write_random_checkpoint
from kvtransfer.config import StoreSettings
from workers.config import EngineConfig, Parallel
from workers.replica.engine_core import EngineCore

BLOCK_TOKENS = 64
CHUNK_TOKENS = 256
_ALIGNED_BYTES = 4 << 20


class Bench:
    """Runs replicas of one model one after another on one NVMe folder."""

    def __init__(self, model_dir: Path, folder: Path, num_tokens: int, num_threads: int) -> None:
        self._model_dir = model_dir
        self._folder = folder
        self._num_tokens = num_tokens
        self._num_threads = num_threads
        self._trust = draw_trust()
        tokens = np.random.default_rng(1).integers(3, 150_000, num_tokens + 2 * BLOCK_TOKENS)
        self._known = tokens[:num_tokens].astype("<u4").tobytes()
        self._last = tokens[num_tokens:].astype("<u4").tobytes()

    async def run(self, parallel: Parallel, *, is_cold: bool) -> tuple[Heard, EngineCore]:
        """Run a new store and a new replica; when cold, after a first request that warms the rest up, and
        until the prompt is in the tiers."""
        settings = self._settings()
        with running_owner(settings, self._trust):
            replicas = LinkedReplicas(self._model_dir, "bf16", self._trust)
            engine = EngineConfig(
                block_tokens=BLOCK_TOKENS,
                kv_tokens=self._num_tokens + 1024,
                chunk_tokens=CHUNK_TOKENS,
                max_batch_tokens=CHUNK_TOKENS,
                num_threads=max(1, self._num_threads // parallel.num_ranks),
            )
            core = await replicas.add("r", "both", parallel, engine, store=settings.name)
            tiers = core.connector
            assert tiers is not None
            while not tiers.is_open:
                await CLOCK.sleep(0.01)
            part = BLOCK_TOKENS * 4
            prompt = self._known + (
                self._last[: part // 2] if is_cold else self._last[part // 2 :][: part // 2]
            )
            heard = await replicas.run("r", "first", prompt)
            while is_cold and not tiers.saver.is_idle:
                await CLOCK.sleep(0.01)
            await replicas.stop()
        return heard, core

    def _settings(self) -> StoreSettings:
        return owner_settings(
            nvme_path=str(self._folder),
            nvme_bytes=4 << 30,
            flush_s=60.0,
            granule_bytes=1 << 20,
        )


def read_gb_s(folder: Path) -> float:
    """Return the rate of a plain loop over the segments with O_DIRECT, one thread."""
    buffer = mmap.mmap(-1, _ALIGNED_BYTES)
    num_bytes = 0
    began_at = CLOCK.now()
    for path in sorted(folder.rglob("*.seg")):
        fd = os.open(path, os.O_RDONLY | os.O_DIRECT)
        try:
            offset = 0
            while num_bytes < 1 << 28 and (count := os.preadv(fd, [buffer], offset)):
                num_bytes += count
                offset += count
        finally:
            os.close(fd)
    return num_bytes / (CLOCK.now() - began_at) / 1e9


async def measure(arguments: argparse.Namespace, folder: Path) -> None:
    model_dir = folder / "model"
    write_random_checkpoint(model_dir, "qwen3", seed=1, **QWEN3_06B)
    nvme = folder / "nvme"
    nvme.mkdir()
    bench = Bench(model_dir, nvme, arguments.tokens, arguments.threads)
    cold, core = await bench.run(Parallel(), is_cold=True)
    assert cold.prefill is not None
    num_bytes = arguments.tokens * 2 * 28 * 8 * 128 * 2
    prefill_tok_s = core.steps.rates.prefill_tok_s
    for parallel in (Parallel(), Parallel(tp=2)):
        warm, core = await bench.run(parallel, is_cold=False)
        assert warm.prefill is not None
        rate = read_gb_s(nvme)
        chunk_s = warm.prefill.times.prefilled - warm.prefill.times.scheduled
        limit_s = num_bytes / rate / 1e9 + chunk_s
        print(
            json.dumps(
                {
                    "what": "warm_start",
                    "written_by": "1x1",
                    "read_by": f"{parallel.tp}x{parallel.pp}",
                    "prompt_tokens": arguments.tokens,
                    "loaded_tokens": warm.prefill.num_loaded_tokens,
                    "kv_mib": round(num_bytes / 2**20, 1),
                    "nvme_read_gb_s": round(rate, 2),
                    "cold_ttft_s": round(cold.ttft_s, 3),
                    "cold_prefill_tok_s": round(prefill_tok_s, 1),
                    "chunk_s": round(chunk_s, 3),
                    "limit_s": round(limit_s, 3),
                    "ttft_s": round(warm.ttft_s, 3),
                    "ratio": round(warm.ttft_s / limit_s, 3),
                    "of_cold": round(warm.ttft_s / cold.ttft_s, 4),
                }
            ),
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument(
        "--folder", type=Path, default=None, help="on the disk to measure; default: temporary"
    )
    arguments = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="tandem-warm-", dir=arguments.folder))
    try:
        asyncio.run(measure(arguments, folder))
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
