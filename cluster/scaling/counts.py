"""Which counts a deploy begins with: those that were ordered since the last one, not those of the file.

Serve stops what exceeds the deployed counts within a second, long before anybody could restore them.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Protocol

from cluster.config import ClusterConfig
from cluster.roster.messages import RosterView
from cluster.scaling.serve_client import AppTargets
from kvtransfer.codec import Codec, Part
from kvtransfer.common.clock import Clock
from kvtransfer.errors import WireError
from kvtransfer.store.index.redis_client import IndexAwayError, RedisLink, Script


class KnownCounts(Part, frozen=True):
    """What was ordered of the pools of an application, as far as it is known."""

    # By pool; absent where nobody ordered anything.
    desired: dict[str, int] = {}
    # Pools whose count an operator chose.
    pinned: tuple[str, ...] = ()
    # By pool: the count in the configuration that was followed then.
    declared: dict[str, int] = {}


COUNTS_CODEC: Codec[KnownCounts] = Codec(KnownCounts)


def counts_of(view: RosterView) -> KnownCounts:
    """What the roster knows of it."""
    return KnownCounts(dict(view.desired), view.pinned, dict(view.declared))


def kept_counts(config: ClusterConfig, known: KnownCounts) -> KnownCounts:
    """What of it holds under `config`. A pool that nobody pinned and that is not autoscaled follows the file
    where that says another count than before; pools that are gone are dropped."""
    autoscaled = config.scaling.autoscaled
    desired = {}
    for pool in config.pools:
        is_chosen = pool.name in known.pinned or pool.name in autoscaled
        is_as_before = known.declared.get(pool.name, pool.replicas) == pool.replicas
        if pool.name in known.desired and (is_chosen or is_as_before):
            desired[pool.name] = known.desired[pool.name]
    return KnownCounts(
        desired=desired,
        pinned=tuple(name for name in known.pinned if name in desired),
        declared={pool.name: pool.replicas for pool in config.pools},
    )


def counts_to_deploy(config: ClusterConfig, known: KnownCounts) -> Mapping[str, int]:
    """The count that each pool of `config` is deployed with."""
    desired = kept_counts(config, known).desired
    return {pool.name: desired.get(pool.name, pool.replicas) for pool in config.pools}


# ----------------------------------------------------------------------------------------------
# Keeps what the roster knows of the counts where the next Ray cluster finds it, and takes over what the last
# one left.

# How often what has not changed is written again: its server may have lost it.
WRITE_AGAIN_S = 60.0
_log = logging.getLogger(__name__)


class CountMemory(Protocol):
    """`RedisCounts`; raises `IndexAwayError` while its server is away."""

    async def read(self) -> KnownCounts | None: ...

    async def write(self, counts: KnownCounts, since_ms: int) -> bool: ...


class KeptCounts:
    """One scaler's. `since_ms` orders the Ray clusters: an older one never overwrites what a newer one keeps.

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
        """What an earlier Ray cluster left and the roster lacks, for pools that Serve has deployed with just
        that count; empty from the second time on."""
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
        """Write what the roster knows, when it has changed and now and then."""
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


# ----------------------------------------------------------------------------------------------
# The ordered counts of a declared application in its Redis, where they outlive the Ray cluster.
#
# KubeRay upgrades pods by a second RayCluster with a roster of its own. Both clusters have the same Redis and
# the same secret, and nothing else in common that a pod may read without rights in Kubernetes.

_ANSWER_S = 5.0
# What nobody writes again, because the application is gone, is dropped after so long.
_KEEP_S = 30 * 24 * 3600
_READ = Script("return redis.call('HGET', KEYS[1], 'counts')")
_WRITE = Script(
    """
local since = redis.call('HGET', KEYS[1], 'since')
if since and tonumber(since) > tonumber(ARGV[1]) then return 0 end
redis.call('HSET', KEYS[1], 'since', ARGV[1], 'counts', ARGV[2])
redis.call('EXPIRE', KEYS[1], ARGV[3])
return 1
"""
)


def counts_key(namespace: str, life: str) -> str:
    """Under which the counts of the application with this life (`cluster.serve.entrypoint`) are kept."""
    return f"{namespace}:counts:{life}"


class RedisCounts:
    """The counts under one key. Each call opens a connection of its own and raises `IndexAwayError`."""

    def __init__(self, url: str, key: str, ca_file: str = "") -> None:
        self._url = url
        self._ca_file = ca_file
        self._key = key.encode()

    async def read(self) -> KnownCounts | None:
        """What was written last; None where nothing was. Raises `WireError` for what is none of ours."""
        frame = await self._run(_READ)
        return COUNTS_CODEC.decode(frame) if isinstance(frame, bytes) else None

    async def write(self, counts: KnownCounts, since_ms: int) -> bool:
        """Replace what is there, unless a Ray cluster that began later than `since_ms` (Unix time) wrote it:
        the one that replaces this cluster. Returns whether it was replaced."""
        return bool(await self._run(_WRITE, since_ms, COUNTS_CODEC.encode(counts), _KEEP_S))

    async def _run(self, script: Script, *arguments: int | bytes) -> object:
        link = RedisLink(self._url, _ANSWER_S, self._ca_file)
        await link.connect()
        try:
            return await link.run(script, [self._key], arguments)
        finally:
            await link.close()
