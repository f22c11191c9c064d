"""Keep the ordered counts of a declared application in its Redis, where they outlive the Ray cluster.

KubeRay upgrades pods by a second RayCluster with a roster of its own. Both clusters have the same Redis and
the same secret, and nothing else in common that a pod may read without rights in Kubernetes.
"""

from __future__ import annotations

from cluster.scaling.counts import KnownCounts
from kvtransfer.codec import Codec
from kvtransfer.store.index.redis_client import RedisLink, Script

COUNTS_CODEC: Codec[KnownCounts] = Codec(KnownCounts)

_ANSWER_S = 5.0
# Counts that nobody writes again, because the application is gone, are dropped after this time.
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
    """Return the key of the counts of the application with this life (`cluster.serve.entrypoint`)."""
    return f"{namespace}:counts:{life}"


class RedisCounts:
    """The counts under one key. Each call opens a connection of its own and raises `IndexAwayError`."""

    def __init__(self, url: str, key: str, ca_file: str = "") -> None:
        self._url = url
        self._ca_file = ca_file
        self._key = key.encode()

    async def read(self) -> KnownCounts | None:
        """Return the counts that were written last; None where there are none. Raise `WireError` for contents
        that are not ours."""
        frame = await self._run(_READ)
        return COUNTS_CODEC.decode(frame) if isinstance(frame, bytes) else None

    async def write(self, counts: KnownCounts, since_ms: int) -> bool:
        """Replace the kept counts, unless a Ray cluster that began later than `since_ms` (Unix time) wrote
        them: the one that replaces this cluster. Return whether they were replaced."""
        return bool(await self._run(_WRITE, since_ms, COUNTS_CODEC.encode(counts), _KEEP_S))

    async def _run(self, script: Script, *arguments: int | bytes) -> object:
        link = RedisLink(self._url, _ANSWER_S, self._ca_file)
        await link.connect()
        try:
            return await link.run(script, [self._key], arguments)
        finally:
            await link.close()
