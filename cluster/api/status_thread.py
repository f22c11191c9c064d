"""Build the replicas' part of a status, and the paths between them, in a thread apart from the event loop.

The loop passes its data by reference. Messages are built from that, and only those that changed.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple, TypeVar

from cluster.admission.queued_load import QueuedLoad
from cluster.gateway.replica_connections import ReplicaView
from cluster.metrics.replica_stats import load_of
from cluster.proto.enums import value_of
from cluster.proto.tandem.v1 import admin_pb2 as admin_pb
from cluster.roster.messages import ReplicaRecord
from kvtransfer.common.clock import let_others_run
from kvtransfer.messages import ReplicaIdentity
from workers.stats_record import PathMeasure, ReplicaStats

T = TypeVar("T")


# Paths built before the event loop may run again.
_NUM_PATHS = 64


class ReplicaLook(NamedTuple):
    """The parts of a replica's message; none of them is changed later."""

    record: ReplicaRecord
    state: str
    note: str
    role: str
    role_epoch: int
    load: ReplicaStats | None

    @staticmethod
    def of(view: ReplicaView) -> ReplicaLook:
        """Take the facts that are known of the replica now."""
        hello, record = view.hello, view.record
        role_epoch = hello.role_epoch if hello else record.role_epoch
        note = "; ".join(filter(None, (view.note, view.avoided)))
        return ReplicaLook(record, str(view.state), note, view.role, role_epoch, view.load)

    def is_same(self, other: ReplicaLook) -> bool:
        """Compare by identity where that is enough: reports and records are never changed."""
        return self.record is other.record and self.load is other.load and self[1:5] == other[1:5]


class StatusThread:
    """Builds messages for one gateway, one at a time, from the calling event loop."""

    def __init__(self) -> None:
        self._executor = ThreadPoolExecutor(1, "status")
        # Messages by replica; for the thread alone.
        self._built: dict[str, tuple[ReplicaLook, admin_pb.Replica]] = {}
        # Messages of replicas built since the start.
        self.num_built = 0

    async def add_replicas(
        self,
        status: admin_pb.StatusResponse,
        views: Sequence[ReplicaView],
        now: float,
        held: Mapping[str, QueuedLoad],
    ) -> admin_pb.StatusResponse:
        """Add the replicas as they are now to the message. Nobody else may use the message at the same
        time."""
        looks = [(ReplicaLook.of(view), now - view.load_at) for view in views]
        return await self._run(lambda: self._add(status, looks, held))

    async def paths(
        self, views: Sequence[ReplicaView], known: Collection[ReplicaIdentity]
    ) -> AsyncIterator[admin_pb.ReplicaPaths]:
        """Yield the paths of each replica, in this order, to the replicas of `known`."""
        looks = [(view.record.identity, view.paths) for view in views]
        for identity, paths in looks:
            yield await self._run(functools.partial(_replica_paths, identity, paths, known))

    def close(self) -> None:
        """End the thread, after its present work."""
        self._executor.shutdown(cancel_futures=True)

    async def _run(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._executor, work)

    def _add(
        self,
        status: admin_pb.StatusResponse,
        looks: Sequence[tuple[ReplicaLook, float]],
        held: Mapping[str, QueuedLoad],
    ) -> admin_pb.StatusResponse:
        before, self._built = self._built, {}
        for look, age_s in looks:
            replica_id = look.record.identity.replica_id
            known = before.get(replica_id)
            if known is None or not known[0].is_same(look):
                known = look, replica_message(look)
                self.num_built += 1
                let_others_run()  # the event loop may have been waiting
            self._built[replica_id] = known
            if look.load is not None:
                known[1].load.age_s = age_s
            status.replicas.append(known[1])
            if (waiting := held.get(replica_id)) is not None:
                status.replicas[-1].held.CopyFrom(held_message(waiting))
        return status


def held_message(load: QueuedLoad) -> admin_pb.Held:
    """Return the load that waits in a gateway as the public message."""
    return admin_pb.Held(
        num_prompts=load.num_prompts, num_tokens=load.num_tokens, num_sequences=load.num_sequences
    )


def replica_message(look: ReplicaLook) -> admin_pb.Replica:
    """Return a replica as the public message."""
    record = look.record
    return admin_pb.Replica(
        replica_id=record.identity.replica_id,
        epoch=record.identity.epoch,
        pool=record.pool,
        role=value_of(admin_pb.ReplicaRole, look.role),
        address=record.address,
        state=value_of(admin_pb.ReplicaState, look.state),
        note=look.note,
        process_id=record.process_id,
        rank_process_ids=record.rank_process_ids,
        load=load_of(look.load) if look.load else None,
        tp=record.tp,
        stage_layers=[end - start for start, end in record.stages],
        home_role=value_of(admin_pb.ReplicaRole, record.home_role or record.role),
        role_epoch=look.role_epoch,
        ep=record.ep,
    )


def _replica_paths(
    identity: ReplicaIdentity, paths: Sequence[PathMeasure], known: Collection[ReplicaIdentity]
) -> admin_pb.ReplicaPaths:
    reply = admin_pb.ReplicaPaths(replica_id=identity.replica_id, epoch=identity.epoch)
    for number, path in enumerate(paths):
        if path.peer in known:
            reply.paths.append(_path(path))
        if number % _NUM_PATHS == 0:
            let_others_run()
    return reply


def _path(path: PathMeasure) -> admin_pb.Path:
    return admin_pb.Path(
        peer_replica_id=path.peer.replica_id,
        rank=path.rank,
        peer_rank=path.peer_rank,
        transport=path.transport,
        gb_s=path.gb_s,
        latency_us=path.latency_us,
        device=path.device,
        instead_of=path.instead_of,
    )
