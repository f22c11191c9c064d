"""Memory of a real local cluster under short requests of sessions, as JSON lines: what grows is a leak.

A cluster of one prefill and one decode replica with a store is started: `tandem serve` with the bundled
model. Some sessions at once send one turn after the other, each with all turns before it; after a few turns
another session begins.

What is bounded is not a leak, and is full before growth is measured: after the first quarter of the time, and
after 40,000 requests. Caches are small; a gateway's history of prompts has 32,768 keys, one for a request,
and its curves are of 330 seconds; the two heaps that `tandem serve` leaves to the C library soon have their
size.

    python -m benchmarks.soak [--minutes 30] [--sessions 24]

A line for each process has the slope of its own memory (`RssAnon`) in megabytes a minute from then on (least
squares), and its size after each eighth of the whole time; memory that it shares with others is told apart.
The last line is the verdict: every process grows by less than 0.05 MB a minute; otherwise the exit status is
1. Give it 30 minutes: in less, noise of some hundred kilobytes is more than that.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import tempfile
from bisect import bisect_left
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import yaml

from benchmarks.served import ROOT, Service, serving
from cluster.api.admin_client import AdminClient
from cluster.api.client import Client
from cluster.api.generate_options import GenerateOptions
from cluster.proto.enums import name_of
from cluster.proto.tandem.v1 import admin_pb2 as pb
from kvtransfer.common.clock import Clock, SystemClock

LIMIT_MB_PER_MINUTE = 0.05
# Before growth is measured.
NUM_WARM_REQUESTS = 40_000
PERIOD_S = 2.0
NUM_TURNS, FIRST_TOKENS, TURN_TOKENS, OUTPUT_TOKENS = 4, 24, 12, 4
VOCABULARY = (3, 190)
KIB_PER_MIB = 1024
ENGINE = {"block_tokens": 16, "kv_tokens": 4096, "max_sequences": 32}
CLUSTER = {
    "model": str(ROOT / "models" / "tiny"),
    "pools": [
        {"name": role, "role": role, "dtype": "fp32", "cpus_per_rank": 0.25, "engine": ENGINE}
        for role in ("prefill", "decode")
    ],
    "store": {"dram_gb": 0.03},
}


class Samples(NamedTuple):
    """The memory of one process, of its own and shared, and when it was read."""

    kind: str
    process_id: int
    times_s: list[float]
    own_mb: list[float]
    shared_mb: list[float]

    def read(self, now: float) -> None:
        """Read the present figures of the process."""
        lines = Path(f"/proc/{self.process_id}/status").read_text().splitlines()
        kb = {line.split(":")[0]: int(line.split()[1]) for line in lines if line.startswith("Rss")}
        self.times_s.append(now)
        self.own_mb.append(kb["RssAnon"] / KIB_PER_MIB)
        self.shared_mb.append((kb["RssFile"] + kb["RssShmem"]) / KIB_PER_MIB)


async def processes(service: Service) -> list[Samples]:
    """Return the processes of the cluster: gateway, engine cores, ranks and stores."""
    async with AdminClient(service.admin_address) as client:
        status = await client.status()
    found = [("gateway", it.process_id) for it in status.gateways]
    for replica in status.replicas:
        role = name_of(pb.ReplicaRole, replica.role)
        found.append((f"engine core ({role})", replica.process_id))
        found += [(f"rank ({role})", process_id) for process_id in replica.rank_process_ids]
    found += [("store", it.process_id) for it in status.stores]
    return [Samples(kind, process_id, [], [], []) for kind, process_id in found]


class Load:
    """Sessions that send their turns until a time is over."""

    def __init__(self, client: Client, clock: Clock, until_s: float) -> None:
        self.num_requests = 0
        self._client = client
        self._clock = clock
        self._until_s = until_s

    async def run(self, seed: int) -> None:
        """Run one session after the other."""
        draw = random.Random(seed)
        options = GenerateOptions(max_tokens=OUTPUT_TOKENS, ignore_eos=True, seed=0)
        while self._clock.now() < self._until_s:
            prompt = _drawn(draw, FIRST_TOKENS)
            for _ in range(NUM_TURNS):
                completion = await self._client.complete(prompt, options)
                self.num_requests += 1
                prompt = [*prompt, *completion.token_ids[0], *_drawn(draw, TURN_TOKENS)]


def _drawn(draw: random.Random, num_tokens: int) -> list[int]:
    return [draw.randrange(*VOCABULARY) for _ in range(num_tokens)]


async def watch(found: Sequence[Samples], load: Load, clock: Clock, until_s: float) -> list[int]:
    """Read the memory of all processes until the time is over; return how many requests were done each
    time."""
    nums_done: list[int] = []
    while (now := clock.now()) < until_s:
        for samples in found:
            samples.read(now)
        nums_done.append(load.num_requests)
        await clock.sleep(PERIOD_S)
    return nums_done


def first_warm(nums_done: Sequence[int]) -> int:
    """Return from which sample on growth is measured; end the program where there are too few of them."""
    first = max(len(nums_done) // 4, bisect_left(nums_done, NUM_WARM_REQUESTS))
    if first > len(nums_done) // 4 * 3:
        sys.exit(
            f"of {nums_done[-1]} requests too few came after the first {NUM_WARM_REQUESTS}: "
            "give it more --minutes"
        )
    return first


def record_of(samples: Samples, first: int) -> dict[str, Any]:
    """Describe the growth of one process from this sample on."""
    minutes = np.asarray(samples.times_s[first:]) / 60.0
    slope, _ = np.polyfit(minutes - minutes[0], np.asarray(samples.own_mb[first:]), 1)
    last = len(samples.times_s) - 1
    return {
        "what": "process",
        "kind": samples.kind,
        "mb_per_minute": round(float(slope), 3),
        "own_mb": [round(samples.own_mb[last * part // 8], 2) for part in range(9)],
        "shared_mb": [round(samples.shared_mb[last * part // 8], 2) for part in range(9)],
    }


async def measure(service: Service, minutes: float, num_sessions: int) -> bool:
    """Print the records; returns whether every process kept the limit."""
    clock = SystemClock()
    found = await processes(service)
    until_s = clock.now() + 60.0 * minutes
    async with Client([service.address]) as client:
        load = Load(client, clock, until_s)
        async with asyncio.TaskGroup() as group:
            for seed in range(num_sessions):
                group.create_task(load.run(seed))
            nums_done = await watch(found, load, clock, until_s)
    first = first_warm(nums_done)
    records = [record_of(samples, first) for samples in found]
    for record in records:
        print(json.dumps(record), flush=True)
    worst = max(record["mb_per_minute"] for record in records)
    verdict = {
        "what": "verdict",
        "minutes": minutes,
        "num_requests": load.num_requests,
        "measured_minutes": round(PERIOD_S * (len(nums_done) - first) / 60.0, 1),
        "requests_per_s": round(load.num_requests / (60.0 * minutes), 1),
        "worst_mb_per_minute": worst,
        "limit_mb_per_minute": LIMIT_MB_PER_MINUTE,
        "is_kept": worst < LIMIT_MB_PER_MINUTE,
    }
    print(json.dumps(verdict), flush=True)
    return bool(verdict["is_kept"])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--sessions", type=int, default=24)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "cluster.yaml"
        file.write_text(yaml.safe_dump(CLUSTER))
        with serving("--file", str(file)) as service:
            is_kept = asyncio.run(measure(service, arguments.minutes, arguments.sessions))
    sys.exit(0 if is_kept else 1)


if __name__ == "__main__":
    main()
