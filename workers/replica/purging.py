"""What a replica forgets when an administrator purges a tenant: its cached blocks, and what is on its way to
the store or from it. Requests under way keep their blocks until they end, and leave nothing behind.
"""

from __future__ import annotations

from workers.disagg.kv_receiver import KvReceiver
from workers.disagg.kv_sender import KvSender
from workers.messages import CachePurged, PurgeCache
from workers.scheduler.block_pool import BlockPool
from workers.scheduler.scheduler import Scheduler
from workers.store_connector.connector import StoreConnector


class Purging:
    """Of one engine core; `tiers` is None without a store."""

    def __init__(
        self,
        pool: BlockPool,
        scheduler: Scheduler,
        outbound: KvSender,
        inbound: KvReceiver,
        tiers: StoreConnector | None,
    ) -> None:
        self._pool = pool
        self._scheduler = scheduler
        self._outbound = outbound
        self._inbound = inbound
        self._tiers = tiers

    def purge(self, order: PurgeCache) -> CachePurged:
        """All of it at once; the answer tells what requests under way still hold."""
        if self._tiers is not None:
            self._tiers.purge(order.tenant)
        num_requests = self._scheduler.keep_private(order.tenant)
        self._outbound.keep_private(order.tenant)
        num_blocks, num_held = self._pool.purge(order.tenant)
        num_landings = self._inbound.book.num_of(order.tenant)
        return CachePurged(order.number, num_blocks, num_held, num_requests + num_landings)
