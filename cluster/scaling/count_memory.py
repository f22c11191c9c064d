"""Keep the ordered counts where the next Ray cluster finds them, and take over those of the last one."""

from __future__ import annotations

import logging
from typing import Protocol

from cluster.config import ClusterConfig
from cluster.roster.messages import RosterView
from cluster.scaling.counts import KnownCounts, counts_of, kept_counts
from cluster.scaling.serve_client import AppTargets
from kvtransfer.common.clock import Clock
from kvtransfer.errors import WireError
from kvtransfer.store.index.redis_client import IndexAwayError

# How often unchanged counts are written again: their server may have lost them.
WRITE_AGAIN_S = 60.0
_log = logging.getLogger(__name__)


class CountMemory(Protocol):
    """`RedisCounts`; raises `IndexAwayError` while its server is away."""

    async def read(self) -> KnownCounts | None: ...

    async def write(self, counts: KnownCounts, since_ms: int) -> bool: ...


class KeptCounts:
    """The kept counts of one scaler. `since_ms` orders the Ray clusters: an older one never overwrites the
    counts of a newer one.

    Nothing waits for the server: while it is away, counts are kept by the roster alone.
    """

    def __init__(self, memory: CountMemory, since_ms: int, clock: Clock) -> None:
        self._memory = memory
        self._since_ms = since_ms
        self._clock = clock
        self._is_read = False
        self._written: KnownCounts | None = None
        self._written_at = 0.0
        self._is_away = False

    async def left(self, config: ClusterConfig, seen: AppTargets, view: RosterView) -> KnownCounts:
        """Return the counts that an earlier Ray cluster left and the roster lacks, for pools that Serve has
        deployed with just that count; empty from the second time on."""
        if self._is_read or not seen.pools:
            return KnownCounts()
        try:
            found = await self._memory.read()
        except WireError as error:
            _log.warning("the counts that an earlier Ray cluster left are not understood: %s", error)
            found = None
        except IndexAwayError as error:
            self._note(str(error))
            return KnownCounts()
        self._is_read = True
        kept = kept_counts(config, found or KnownCounts())
        desired = {
            pool: count
            for pool, count in kept.desired.items()
            if pool not in view.desired and pool in seen.pools and seen.pools[pool].target == count
        }
        return KnownCounts(desired, tuple(pool for pool in kept.pinned if pool in desired))

    async def keep(self, view: RosterView) -> None:
        """Write the roster's counts, when they have changed and now and then."""
        counts, now = counts_of(view), self._clock.now()
        if not self._is_read or (counts == self._written and now < self._written_at + WRITE_AGAIN_S):
            return
        try:
            await self._memory.write(counts, self._since_ms)
        except IndexAwayError as error:
            self._note(str(error))
            return
        self._written, self._written_at, self._is_away = counts, now, False

    def _note(self, problem: str) -> None:
        if not self._is_away:
            _log.warning("a new Ray cluster would not know the ordered counts: %s", problem)
        self._is_away = True
