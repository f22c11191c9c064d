"""Announces to the index what this node holds: queued, coalesced, batched, and repeated when Redis lost it.

Callers that announce never wait. What does not fit in the queue is dropped and counted, and a rebuild
announces everything later; what could not be written returns to the queue, unless a newer state of the record
is there.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from itertools import islice
from typing import NamedTuple

from kvtransfer.common.clock import Clock
from kvtransfer.common.tasks import wait_first
from kvtransfer.messages import ReplicaIdentity
from kvtransfer.store.index.redis_client import IndexAwayError, RedisLink, Script
from kvtransfer.store.index.values import (
    STALE_STAMPS,
    STAMP_S,
    UPDATE_SCRIPT,
    encode_change,
    encode_epoch,
    key_prefix,
    node_number,
)
from kvtransfer.store.messages.records import RecordId, RecordInfo, Tier

_UPDATE = Script(UPDATE_SCRIPT)


class AnnounceLimits(NamedTuple):
    """Limits and periods of announcements."""

    max_queued: int = 1 << 16
    # Records in one round trip, so that packing them does not hold up the loop.
    batch: int = 128
    # A change that is announced within this time after another goes with it.
    linger_s: float = 0.002
    # Between two batches of a rebuild: many nodes may rebuild at once.
    rebuild_pause_s: float = 0.05
    entry_ttl_s: float = 3600.0
    # How often everything is announced again, so that valid entries stay and stale ones expire.
    refresh_s: float = 1200.0
    retry_s: float = 1.0


class Announcer:
    """The records of this node on their way to Redis: `drain` and `reannounce` run all the time, in
    parallel."""

    def __init__(
        self,
        link: RedisLink,
        namespace: str,
        identity: ReplicaIdentity,
        clock: Clock,
        limits: AnnounceLimits,
        records: Callable[[], Iterable[tuple[RecordInfo, Tier]]],
        wrote: Callable[[IndexAwayError | None], None],
    ) -> None:
        """`records` returns all that is held now; `wrote` receives the outcome of each batch."""
        self._link = link
        self._namespace = namespace
        self._number = node_number(identity.replica_id)
        self._epoch = encode_epoch(identity.epoch)
        self._clock = clock
        self._limits = limits
        self._records = records
        self._wrote = wrote
        self._queue: dict[RecordId, tuple[bytes, Tier | None]] = {}  # with the chain
        # The records left to announce again. One that is announced by itself leaves them, so that they are
        # never more than were held when they were taken.
        self._walk: dict[RecordId, tuple[bytes, Tier | None]] = {}
        self._has_work = asyncio.Event()
        self._rebuild_is_wanted = asyncio.Event()
        self._writing = asyncio.Lock()
        self._is_over = False
        self.num_announced = 0
        self.num_dropped = 0
        self.num_rebuilds = 0

    def announce(self, info: RecordInfo, tier: Tier | None) -> None:
        """Announce that the record is in this tier now; None: in none."""
        self._walk.pop(info.id, None)
        if info.id not in self._queue and len(self._queue) >= self._limits.max_queued:
            self.num_dropped += 1
            self.rebuild()
            return
        self._queue[info.id] = info.chain, tier
        self._has_work.set()

    def rebuild(self) -> None:
        """Announce everything again, soon."""
        self._rebuild_is_wanted.set()

    def stop(self) -> None:
        """Stop writing to the index."""
        self._is_over = True
        self._queue.clear()

    async def drain(self) -> None:
        """Write the announced changes, until cancelled."""
        while True:
            await self._has_work.wait()
            if self._limits.linger_s:
                await self._clock.sleep(self._limits.linger_s)
            async with self._writing:
                batch = dict(islice(self._queue.items(), self._limits.batch))
                for record in batch:
                    del self._queue[record]
                if not self._queue:
                    self._has_work.clear()
                unwritten = await self._write(batch)
            for record, state in unwritten.items():
                if record not in self._queue:
                    self._queue[record] = state
                self._has_work.set()
            if unwritten:
                await self._clock.sleep(self._limits.retry_s)

    async def reannounce(self) -> None:
        """Tell everything at the start and when that is wanted, at once but not fast, and every `refresh_s`,
        slowly, until cancelled."""
        is_first = True
        while True:
            is_rebuild = await self._is_wanted_within(0.0 if is_first else self._limits.refresh_s)
            self._rebuild_is_wanted.clear()
            self._walk = {info.id: (info.chain, tier) for info, tier in self._records()}
            num_batches = max(1, len(self._walk) // self._limits.batch)
            slow_s = self._limits.refresh_s / 2 / num_batches
            if await self._announce_all(self._limits.rebuild_pause_s if is_rebuild or is_first else slow_s):
                self.num_rebuilds += is_rebuild
                is_first = False

    async def _announce_all(self, pause_s: float) -> bool:
        """Announce the entries of the walk; False: it must be begun again."""
        while self._walk:
            async with self._writing:
                batch = dict(islice(self._walk.items(), self._limits.batch))
                for record in batch:
                    del self._walk[record]
                unwritten = await self._write(batch)
                # Nothing leaves the queue during this, so that its entries are newer.
                for record, state in unwritten.items():
                    if record not in self._queue:
                        self._walk[record] = state
            if await self._is_wanted_within(self._limits.retry_s if unwritten else pause_s):
                return False
        return True

    async def _is_wanted_within(self, delay_s: float) -> bool:
        """Wait for at most `delay_s` until a rebuild is wanted; return whether it is."""
        if not delay_s:
            return self._rebuild_is_wanted.is_set()
        await wait_first(self._rebuild_is_wanted.wait(), self._clock.sleep(delay_s))
        return self._rebuild_is_wanted.is_set()

    async def _write(
        self, batch: dict[RecordId, tuple[bytes, Tier | None]]
    ) -> dict[RecordId, tuple[bytes, Tier | None]]:
        """Write these states; return those that could not be written."""
        groups: dict[bytes, dict[bytes, list[RecordId]]] = {}  # by the part of the key that says the slot
        for record, (chain, _) in batch.items():
            prefix = key_prefix(self._namespace, chain, record.space)
            groups.setdefault(prefix, {}).setdefault(prefix + record.key, []).append(record)
        if not groups or self._is_over:
            return {}
        stamp = int(self._clock.wall()) // STAMP_S
        ttl_ms = int(self._limits.entry_ttl_s * 1000)
        fixed: tuple[bytes | int, ...] = (self._number, self._epoch, stamp, STALE_STAMPS, ttl_ms)
        calls: list[tuple[Sequence[bytes], Sequence[bytes | int]]] = []
        for keys in groups.values():
            changes = [
                b"".join(encode_change(r.shard, batch[r][1]) for r in records) for records in keys.values()
            ]
            calls.append((tuple(keys), (*fixed, *changes)))
        outcomes = await self._link.run_many(_UPDATE, calls)
        unwritten: dict[RecordId, tuple[bytes, Tier | None]] = {}
        for keys, outcome in zip(groups.values(), outcomes, strict=True):
            records = [record for some in keys.values() for record in some]
            if outcome is None:
                self.num_announced += len(records)
            else:
                unwritten.update((record, batch[record]) for record in records)
        self._wrote(next(filter(None, outcomes), None))
        return unwritten
