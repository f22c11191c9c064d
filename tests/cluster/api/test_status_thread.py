"""The status of a gateway: built beside the event loop, once for all who ask, and only what has changed."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from gateway_harness import FINGERPRINT, Pair

from cluster.admission.queued_load import QueuedLoad
from cluster.api.replies import STATUS_S, Fresh
from cluster.api.status_thread import StatusThread
from cluster.gateway.replica_connections import ReplicaState, ReplicaView
from cluster.proto.enums import name_of
from cluster.proto.tandem.v1 import admin_pb2 as admin_pb
from cluster.roster.messages import ReplicaRecord
from kvtransfer.common.clock import ManualClock
from kvtransfer.messages import PROTOCOL_VERSION, CompatibilityRecord, ReplicaIdentity
from workers.messages.link import LoadReport
from workers.stats_record import PathMeasure


class Stages(tuple[tuple[int, int], ...]):
    """Notes who looks at it."""

    seen: set[str]

    def __iter__(self) -> Iterator[tuple[int, int]]:
        self.seen.add(threading.current_thread().name)
        return super().__iter__()


def load_of(identity: ReplicaIdentity, sequence: int, **fields: Any) -> LoadReport:
    return LoadReport(identity=identity, sequence=sequence, **fields)


def view(name: str, stages: tuple[tuple[int, int], ...] = ((0, 2),)) -> ReplicaView:
    identity = ReplicaIdentity(name, 1)
    record = ReplicaRecord(
        identity=identity,
        pool="decode",
        role="decode",
        address="127.0.0.1:1",
        model="m",
        compatibility=CompatibilityRecord(PROTOCOL_VERSION, FINGERPRINT, "float32", "float32", 16, 2, 2, 8),
        process_id=1,
        rank_process_ids=(2,),
        stages=stages,
        tp=4,
        ep=2,
    )
    return ReplicaView(record, ReplicaState.READY, load=load_of(identity, 1), load_at=10.0)


@pytest.fixture
def thread() -> Iterator[StatusThread]:
    started = StatusThread()
    yield started
    started.close()


async def test_only_replicas_that_changed_are_built_anew(thread: StatusThread) -> None:
    views = [view(f"d{number}") for number in range(4)]
    held = {"d1": QueuedLoad(3, 300, 1)}

    async def looked(now: float) -> admin_pb.StatusResponse:
        return await thread.add_replicas(admin_pb.StatusResponse(), views, now, held)

    first = await looked(11.0)
    assert [it.load.age_s for it in first.replicas] == [1.0] * 4
    assert [it.HasField("held") for it in first.replicas] == [False, True, False, False]
    assert first.replicas[1].held == admin_pb.Held(num_prompts=3, num_tokens=300, num_sequences=1)
    held.clear()
    again = await looked(12.5)
    assert thread.num_built == 4
    assert [it.load.age_s for it in again.replicas] == [2.5] * 4
    assert not any(it.HasField("held") for it in again.replicas)
    assert [it.load.age_s for it in first.replicas] == [1.0] * 4, "what was told stays as it was"
    views[1].load = load_of(views[1].record.identity, 2, num_running=7)
    views[2].state = ReplicaState.LEAVING
    del views[3]
    views.append(view("d4"))
    third = await looked(13.0)
    assert thread.num_built == 7
    assert [
        (it.replica_id, name_of(admin_pb.ReplicaState, it.state), it.load.num_running)
        for it in third.replicas
    ] == [
        ("d0", "ready", 0),
        ("d1", "ready", 7),
        ("d2", "leaving", 0),
        ("d4", "ready", 0),
    ]


async def test_messages_are_built_beside_the_event_loop(thread: StatusThread) -> None:
    stages = Stages(((0, 1), (1, 3)))
    stages.seen = set()
    status = await thread.add_replicas(admin_pb.StatusResponse(), [view("d0", stages)], 11.0, {})
    assert list(status.replicas[0].stage_layers) == [1, 2]
    assert (status.replicas[0].tp, status.replicas[0].ep) == (4, 2)
    assert stages.seen == {"status_0"}


async def test_paths_are_a_call_of_their_own_to_replicas_that_there_are(
    thread: StatusThread,
) -> None:
    assert "paths" not in admin_pb.Replica.DESCRIPTOR.fields_by_name
    views = [view(f"d{number}") for number in range(3)]
    peers = [it.record.identity for it in views] + [ReplicaIdentity("gone", 1)]
    for each in views:
        own = each.record.identity
        each.paths = tuple(
            PathMeasure(peer, 0, 0, "shm", 5.0, 3.0, "memory") for peer in peers if peer != own
        )
    told = [it async for it in thread.paths(views, set(peers[:3]))]
    assert [(it.replica_id, [path.peer_replica_id for path in it.paths]) for it in told] == [
        ("d0", ["d1", "d2"]),
        ("d1", ["d0", "d2"]),
        ("d2", ["d0", "d1"]),
    ]


async def test_all_who_ask_within_a_period_get_the_same(pair: Pair) -> None:
    """Asked again and again, for as long as the first answer holds."""
    gateway, num_answers = pair.gateway, 0
    first = await gateway.status()
    while await gateway.status() is first:
        num_answers += 1
        await asyncio.sleep(0)
    assert num_answers > 1
    at_once = await asyncio.gather(*(gateway.status() for _ in range(8)))
    assert len({id(status) for status in at_once}) == 1
    assert STATUS_S <= 0.5


# ------------------------------------------------------------------------------------------------ Fresh


async def test_a_value_is_made_once_for_all_and_again_when_it_is_old() -> None:
    clock, going, made = ManualClock(), asyncio.Event(), list[int]()

    async def make() -> int:
        made.append(len(made))
        await going.wait()
        return made[-1]

    fresh = Fresh(make, 1.0, clock)
    asking = [asyncio.create_task(fresh.get()) for _ in range(3)]
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    asking[0].cancel()  # who asked first goes; the others still get it, and it is made once
    await asyncio.wait([asking[0]])
    going.set()
    assert [await task for task in asking[1:]] == [0, 0]
    clock.advance(0.9)
    assert await fresh.get() == 0
    clock.advance(0.1)
    assert await fresh.get() == 1
    assert made == [0, 1]


async def test_a_failure_is_told_and_not_kept() -> None:
    outcomes = iter([ValueError("no"), None])

    async def make() -> str:
        if (error := next(outcomes)) is not None:
            raise error
        return "yes"

    fresh = Fresh(make, 1.0, ManualClock())
    with pytest.raises(ValueError, match="no"):
        await fresh.get()
    assert await fresh.get() == "yes"
