"""The connection of a rank's worker to an owner: attached, lost, attached again; ranks in other processes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from arena_harness import (
    MODEL,
    SESSION,
    SLOT_BYTES,
    RankProcess,
    SharedArena,
    StandInOwner,
    WorkerRank,
    get,
    layout,
    put,
    read,
)
from patience import WAIT_S
from service_harness import Hooks

from kvtransfer.common.faults import FaultRule
from kvtransfer.rpc.trust import Trust
from kvtransfer.store import owner_connection
from kvtransfer.store.messages.store_orders import (
    AttachStore,
    StoreAttached,
    StoreCopy,
    StoreGet,
    StorePut,
    StorePutDone,
)

SIZE = layout(MODEL).block_bytes


@pytest.fixture
def arena() -> SharedArena:
    return SharedArena()


@pytest.fixture
def owner(arena: SharedArena) -> Iterator[StandInOwner]:
    with StandInOwner(arena) as owner:
        yield owner


def test_the_owner_hears_of_the_end(owner: StandInOwner) -> None:
    with WorkerRank() as rank:
        rank.attach(owner)
        assert [(hello.session, hello.rank, hello.arena) for hello in owner.hellos] == [(SESSION, 0, b"")]
        assert not owner.ended.acquire(blocking=False)
    assert owner.ended.acquire(timeout=WAIT_S)


def test_refusals_and_wrong_secrets_are_reported(arena: SharedArena) -> None:
    with WorkerRank() as rank:
        with StandInOwner(arena, refusal="not today") as refusing:
            attached = rank.attach(refusing)
            assert attached.arena == b""
            assert "not today" in attached.error
        with StandInOwner(arena, trust=Trust.of(bytes(32))) as strange:
            assert "secret" in rank.attach(strange).error
        rank.worker.handle(AttachStore("tandem-test-nobody", SESSION))
        assert "tandem-test-nobody" in rank.reports.take(StoreAttached).error
        with StandInOwner(arena) as owner:
            assert rank.attach(owner) == StoreAttached(arena.id)


def test_the_pages_of_a_record_are_mapped_once(
    arena: SharedArena, owner: StandInOwner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To ask the kernel again costs more than the copy where pages are small."""
    mapped: list[int] = []

    def populate(_: object, offset: int, num_bytes: int) -> None:
        mapped.append(offset)

    monkeypatch.setattr(owner_connection, "populate_read", populate)
    with WorkerRank() as rank:
        rank.attach(owner)
        totals = put(rank, arena, 1, [(0, 0), (1, 2)]).sums
        reads = [read(block, slot, MODEL, MODEL, totals[block]) for block, slot in ((0, 0), (1, 2))]
        for number in range(2, 5):
            assert get(rank, arena, number, reads).bad == ()
        assert mapped == [0, 2 * SLOT_BYTES]


def test_an_arena_that_could_shrink_is_refused(arena: SharedArena, tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(arena.memory.num_bytes))
    with path.open("r+b") as file, StandInOwner(arena) as owner, WorkerRank() as rank:
        kept, arena.memory.fd = arena.memory.fd, file.fileno()
        assert rank.attach(owner).error
        arena.memory.fd = kept


@pytest.mark.parametrize("has_own", [False, True], ids=["the same arena", "a new arena"])
def test_a_lost_owner_is_reported_and_the_next_is_attached(arena: SharedArena, has_own: bool) -> None:
    with WorkerRank(seed=1) as rank:
        with StandInOwner(arena) as owner:
            rank.attach(owner)
            (total,) = put(rank, arena, 1, [(0, 1)]).sums
        lost = rank.reports.take(StoreAttached)
        assert lost.arena == b""
        assert lost.error
        assert put(rank, arena, 2, [(0, 2)]).error  # until it is attached again
        other = SharedArena() if has_own else None
        with StandInOwner(other) as successor:
            attached = rank.attach(successor)
            assert [hello.arena for hello in successor.hellos] == [arena.id]
            if other is None:
                assert attached == StoreAttached(arena.id)
                assert successor.adopted == arena.id
                assert get(rank, arena, 3, [read(5, 1, MODEL, MODEL, total)]).bad == ()
                assert rank.blocks[5].tobytes() == rank.blocks[0].tobytes()
            else:
                assert attached == StoreAttached(other.id)
                assert put(rank, arena, 3, [(0, 2)]).error  # for the arena of before
                assert put(rank, other, 4, [(0, 2)]).error == ""
                lying = other.payload(2 * SLOT_BYTES, rank.layout.block_bytes)
                assert lying.tobytes() == rank.blocks[0].tobytes()


def test_copies_of_before_are_dropped_when_it_is_attached_again(
    owner: StandInOwner, arena: SharedArena
) -> None:
    hooks = Hooks()
    with WorkerRank(faults=hooks) as rank:
        rank.attach(owner)

        def attach_again(passage: int) -> None:
            if passage == 2:
                rank.worker.handle(StorePut(2, arena.id, (StoreCopy(1, 4 * SLOT_BYTES),)))
                rank.worker.handle(AttachStore(owner.address, SESSION))

        hooks.hooks["store.copy.put"] = attach_again
        copies = tuple(StoreCopy(0, slot * SLOT_BYTES) for slot in (1, 2, 3))
        rank.worker.handle(StorePut(1, arena.id, copies))
        assert rank.reports.take(StoreAttached) == StoreAttached(arena.id)
        first, second = rank.reports.take(StorePutDone), rank.reports.take(StorePutDone)
        assert (first.number, second.number) == (1, 2)
        assert first.error
        assert second.error
        assert isinstance(rank.reports.all[-1], StoreAttached)  # after the answers to what was dropped
        assert arena.payload(SLOT_BYTES, SIZE).any()
        assert not arena.payload(3 * SLOT_BYTES, SIZE).any()
        assert not arena.payload(4 * SLOT_BYTES, SIZE).any()
        assert owner.ended.acquire(timeout=WAIT_S)  # the connection before


# ------------------------------------------------------------------------------------- two processes


def test_two_processes_share_the_arena(owner: StandInOwner, arena: SharedArena) -> None:
    with RankProcess(MODEL, seed=1) as writer, WorkerRank(MODEL, seed=2) as reader:
        writer.handle(AttachStore(owner.address, SESSION))
        assert writer.reports.take(StoreAttached) == StoreAttached(arena.id)
        reader.attach(owner)
        writer.handle(StorePut(1, arena.id, (StoreCopy(3, SLOT_BYTES),)))
        (total,) = writer.reports.take(StorePutDone).sums
        assert get(reader, arena, 1, [read(0, 1, MODEL, MODEL, total)]).bad == ()
        with WorkerRank(MODEL, seed=1) as same:
            assert reader.blocks[0].tobytes() == same.blocks[3].tobytes()


@pytest.mark.parametrize("point", ["store.copy.put", "store.copy.get"])
def test_the_end_of_a_killed_rank_is_seen_by_the_owner(
    owner: StandInOwner, arena: SharedArena, tmp_path: Path, point: str
) -> None:
    rules = [FaultRule(point, "kill", str(tmp_path / "marker"), after=2)]
    with RankProcess(MODEL, 1, rules) as rank:
        rank.handle(AttachStore(owner.address, SESSION))
        rank.reports.take(StoreAttached)
        if point == "store.copy.put":
            rank.handle(StorePut(1, arena.id, (StoreCopy(0, SLOT_BYTES), StoreCopy(1, 2 * SLOT_BYTES))))
        else:
            reads = [read(block, 1, MODEL, MODEL, 0) for block in (0, 1)]
            rank.handle(StoreGet(1, arena.id, tuple(reads)))
        assert rank.wait_killed() == -9
        assert owner.ended.acquire(timeout=WAIT_S)
        assert np.count_nonzero(arena.payload(2 * SLOT_BYTES, SIZE)) == 0
