"""The gateway's side of a purge on devices: every replica forgets what it caches, or is named with the reason
why that is not known.
"""

from __future__ import annotations

import asyncio

from cluster.gateway.replica_connections import ReplicaLinks
from cluster.gateway.replica_view import ReplicaView
from cluster.proto import tandem_pb2 as pb
from kvtransfer.errors import PeerGoneError

# A replica answers between two steps.
ANSWER_S = 10.0


class CachePurges:
    """Over the Links of one gateway."""

    def __init__(self, links: ReplicaLinks) -> None:
        self._links = links

    async def purge(
        self, tenant: str | None, model: str | None, remaining_s: float | None
    ) -> list[pb.ReplicaPurged]:
        """Of this tenant, at replicas of models whose fingerprint begins so; None: of all."""
        limit_s = ANSWER_S if remaining_s is None else min(ANSWER_S, remaining_s / 2)
        views = [view for view in self._links.views() if _serves(view, model)]
        return list(await asyncio.gather(*(self._purge(view, tenant, limit_s) for view in views)))

    async def _purge(self, view: ReplicaView, tenant: str | None, limit_s: float) -> pb.ReplicaPurged:
        reply = pb.ReplicaPurged(replica_id=view.record.identity.replica_id)
        try:
            async with asyncio.timeout(limit_s):
                purged = await self._links.purge(view, tenant)
        except PeerGoneError as error:
            reply.error = f"not purged for certain: {error}"
        except TimeoutError:
            reply.error = f"no answer within {limit_s:.1f} s; it may still do what was asked"
        else:
            reply.num_blocks, reply.num_held = purged.num_blocks, purged.num_held
            reply.num_requests = purged.num_requests
        return reply


def _serves(view: ReplicaView, model: str | None) -> bool:
    """A replica that never was connected may serve the model."""
    if model is None or view.hello is None:
        return True
    return view.hello.compatibility.model_fingerprint.hex().startswith(model)
