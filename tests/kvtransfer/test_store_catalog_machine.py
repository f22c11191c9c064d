"""The catalog over real bytes and any order of events, against naive dicts: the right bytes or a miss.

It is over 400 lines because the machine's rules and its naive model are read together.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise

import pytest
from catalog_harness import (
    GRANULE_BYTES,
    LEFT,
    ONE_GRANULE,
    RIGHT,
    WHOLE,
    CatalogHarness,
    payload_of,
    record_id,
)
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from slow_cases import examples

from kvtransfer.blocks.checksum import checksum
from kvtransfer.common.group_shares import GroupShares
from kvtransfer.messages import Shard
from kvtransfer.store.messages.engine_session import HELD, REFUSED
from kvtransfer.store.messages.records import PurgeOrder, RecordInfo
from kvtransfer.store.nvme.segment import NvmeRef
from kvtransfer.store.record import Writer

pytestmark = pytest.mark.slow

Name = tuple[str, Shard]
GROUPS = ("t", "u")
NAMES: list[Name] = [
    (f"{group}{number}", shard) for group in GROUPS for number in range(5) for shard in (WHOLE, LEFT, RIGHT)
]
SIZES = (1, 5000, ONE_GRANULE, 3 * GRANULE_BYTES, 8 * GRANULE_BYTES)
SESSIONS = (b"session-a", b"session-b")
EVENTS = ("engine_core", "engine_core", "rank", "owner", "hello")

names = st.sampled_from(NAMES)
sessions = st.sampled_from(SESSIONS)


@dataclass
class Grant:
    """A slot that a rank may be writing, for all that it knows."""

    name: Name
    offset: int
    num_bytes: int
    rank: int
    is_purged: bool = False


@dataclass
class Session:
    """An engine core's connection and its one rank, a process."""

    rank: int
    is_open: bool = True
    is_rank_connected: bool = True
    grants: list[Grant] = field(default_factory=list)


@dataclass
class Read:
    """What the owner reads from NVMe into the arena."""

    name: Name
    offset: int
    payload: bytes
    is_purged: bool = False


def parent_of(name: Name) -> str:
    number = int(name[0][1:])
    return f"{name[0][0]}{number - 1}" if number else ""


class CatalogMachine(RuleBasedStateMachine):
    """`kept` has the bytes last committed of every record that was not dropped since: the catalog may have
    evicted some, and never has others. `on_nvme` is exactly what the catalog must know to be there."""

    def __init__(self) -> None:
        super().__init__()
        self.harness = CatalogHarness(shares=GroupShares(0.6))
        self.sessions = {session: Session(rank) for rank, session in enumerate(SESSIONS, 1)}
        self.num_processes = len(SESSIONS)
        self.dead: set[int] = set()
        self.kept: dict[Name, bytes] = {}
        self.leases: list[tuple[Name, int, bytes]] = []
        self.reads: list[Read] = []
        self.on_nvme: dict[Name, tuple[RecordInfo, NvmeRef, bytes]] = {}
        self.num_written = 0

    # ------------------------------------------------------------------------------------------- puts

    @rule(name=names, session=sessions, num_bytes=st.sampled_from(SIZES))
    def allocate(self, name: Name, session: bytes, num_bytes: int) -> None:
        self.grant(name, session, num_bytes)

    def grant(self, name: Name, session: bytes, num_bytes: int) -> Grant | None:
        state = self.sessions[session]
        if not (state.is_open and state.is_rank_connected):
            self.engine_core_says_hello(session)
        under_way = {
            grant.name
            for other in self.sessions.values()
            for grant in other.grants
            if other.is_open and not grant.is_purged
        }
        is_held = self.is_in_dram(name) or name in under_way
        is_empty = self.harness.catalog.stat().num_bytes == 0
        offset = self.harness.allocate(
            name[0],
            parent_of(name),
            session=session,
            shard=name[1],
            group=name[0][0],
            num_bytes=num_bytes,
            writer=Writer(state.rank, 1),
        )
        assert (offset == HELD) == is_held
        assert not (is_empty and offset == REFUSED)
        if offset < 0:
            return None
        state.grants.append(Grant(name, offset, num_bytes, state.rank))
        return state.grants[-1]

    @rule(session=sessions, data=st.data())
    def commit(self, session: bytes, data: st.DataObject) -> None:
        state = self.sessions[session]
        grants = [grant for grant in state.grants if grant.rank not in self.dead]
        if not (state.is_open and grants):
            return
        grant = data.draw(st.sampled_from(grants))
        state.grants.remove(grant)
        payload = self.payload(grant)
        total = self.harness.write(grant.offset, payload)
        is_late = self.is_in_dram(grant.name)
        info = self.harness.catalog.commit(session, grant.offset, total)
        assert (info is None) == (grant.is_purged or is_late)
        if info is not None:
            assert info.id == record_id(*grant.name)
            assert (info.checksum, info.num_bytes) == (total, len(payload))
            self.kept[grant.name] = payload

    @rule(some=st.lists(names, min_size=2, max_size=6), session=sessions, num_bytes=st.sampled_from(SIZES))
    def put(self, some: list[Name], session: bytes, num_bytes: int) -> None:
        """All at once, so that the arena fills."""
        for name in some:
            grant = self.grant(name, session, num_bytes)
            if grant is not None:
                self.sessions[session].grants.remove(grant)
                self.kept[name] = self.payload(grant)
                total = self.harness.write(grant.offset, self.kept[name])
                assert self.harness.catalog.commit(session, grant.offset, total) is not None

    @rule(session=sessions, data=st.data())
    def abandon(self, session: bytes, data: st.DataObject) -> None:
        state = self.sessions[session]
        if state.is_open and state.grants:
            grant = data.draw(st.sampled_from(state.grants))
            state.grants.remove(grant)
            self.harness.catalog.abandon(session, grant.offset)

    @rule(data=st.data())
    def write_late(self, data: st.DataObject) -> None:
        """A rank writes what it was once told to, whatever has become of its engine core and of the owner."""
        grants = [
            grant for state in self.sessions.values() for grant in state.grants if grant.rank not in self.dead
        ]
        if grants:
            grant = data.draw(st.sampled_from(grants))
            self.harness.arena.payload(grant.offset, grant.num_bytes)[:] = b"\xee" * grant.num_bytes

    # ----------------------------------------------------------------------------------------- sessions

    @rule(session=sessions, event=st.sampled_from(EVENTS))
    def life(self, session: bytes, event: str) -> None:
        """Ends are rare, so that there is something to end."""
        if event == "engine_core":
            self.engine_core_ends(session)
        elif event == "rank":
            self.rank_ends(session)
        elif event == "owner":
            self.owner_dies()
        else:
            self.engine_core_says_hello(session)

    def engine_core_ends(self, session: bytes) -> None:
        state = self.sessions[session]
        if state.is_open:
            state.is_open = False
            self.harness.catalog.session_lost(session)
            if not state.is_rank_connected:
                self.harness.catalog.writers_gone(session)

    def rank_ends(self, session: bytes) -> None:
        state = self.sessions[session]
        self.dead.add(state.rank)
        if state.is_rank_connected:
            state.is_rank_connected = False
            self.harness.catalog.writers_gone(session)

    def engine_core_says_hello(self, session: bytes) -> None:
        """Of a session that is open it would be a second connection: that happens, but seldom."""
        state = self.sessions[session]
        state.grants.clear()
        state.is_open = state.is_rank_connected = True
        if state.rank in self.dead:
            self.num_processes += 1
            state.rank = self.num_processes
        self.harness.catalog.session_opened(session)

    @rule()
    def look_for_dead_writers(self) -> None:
        self.harness.catalog.free_orphans(lambda writer: writer.process_id not in self.dead)

    def owner_dies(self) -> None:
        self.harness.restart()
        self.leases.clear()
        self.reads.clear()
        for info, ref, _ in self.on_nvme.values():
            assert self.harness.catalog.added_nvme(info, ref) is None
        for state in self.sessions.values():
            state.is_open = state.is_rank_connected = False

    # ------------------------------------------------------------------------------------------ readers

    @rule(name=names)
    def lease(self, name: Name) -> None:
        is_there = self.is_in_dram(name)
        offset = self.harness.catalog.lease(record_id(*name))
        assert (offset is not None) == is_there
        if offset is not None:
            self.leases.append((name, offset, self.kept[name]))

    @precondition(lambda self: self.leases)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        index = data.draw(st.integers(0, len(self.leases) - 1))
        _, offset, _ = self.leases.pop(index)
        self.harness.catalog.release(offset)

    @precondition(lambda self: self.leases)
    @rule(data=st.data())
    def bad(self, data: st.DataObject) -> None:
        name, offset, _ = data.draw(st.sampled_from(self.leases))
        is_findable = self.harness.catalog.is_findable(offset)
        dropped = self.harness.catalog.bad(offset)
        assert (dropped is not None) == is_findable
        if dropped is not None:
            del self.kept[name]
            _, ref, _ = self.on_nvme.pop(name, (None, None, None))
            assert dropped.nvme == ref

    @rule(name=names, duration_s=st.sampled_from((1.0, 10.0)))
    def pin(self, name: Name, duration_s: float) -> None:
        is_pinned = self.harness.catalog.pin(record_id(*name), self.harness.clock.now() + duration_s)
        assert not is_pinned or self.is_in_dram(name)

    @rule()
    def time_passes(self) -> None:
        self.harness.clock.advance(5.0)

    # --------------------------------------------------------------------------------------------- NVMe

    @rule(name=names)
    def write_to_nvme(self, name: Name) -> None:
        offset = self.harness.catalog.lease(record_id(*name), is_hit=False)
        if offset is None:
            return
        held = self.harness.catalog.find(record_id(*name))
        assert held is not None
        self.num_written += 1
        ref = NvmeRef(self.num_written, 0, 0)
        _, before, _ = self.on_nvme.get(name, (None, None, None))
        assert self.harness.catalog.added_nvme(held.info, ref) == before
        self.on_nvme[name] = held.info, ref, self.kept[name]
        self.harness.catalog.release(offset)

    @rule(name=names)
    def drop_from_nvme(self, name: Name) -> None:
        _, ref, _ = self.on_nvme.pop(name, (None, NvmeRef(0, 0, 0), None))
        assert self.harness.catalog.removed_nvme(record_id(*name), ref, "corrupt") == (ref.segment > 0)

    @rule(name=names)
    def begin_read(self, name: Name) -> None:
        if name not in self.on_nvme:
            return
        info, _, payload = self.on_nvme[name]
        under_way = any(read.name == name and not read.is_purged for read in self.reads)
        is_held = self.is_in_dram(name) or under_way
        offset = self.harness.catalog.begin_read(info)
        assert (offset == HELD) == is_held
        if offset >= 0:
            self.reads.append(Read(name, offset, payload))

    @precondition(lambda self: self.reads)
    @rule(is_done=st.booleans())
    def end_read(self, is_done: bool) -> None:
        read = self.reads.pop(0)
        if not is_done:
            self.harness.catalog.abandon_read(read.offset)
            return
        is_late = self.is_in_dram(read.name)
        total = self.harness.write(read.offset, read.payload)
        info = self.harness.catalog.commit_read(read.offset, total)
        assert (info is None) == (read.is_purged and not is_late)
        if info is not None and not is_late:
            self.kept[read.name] = read.payload

    # -------------------------------------------------------------------------------------------- purge

    @rule(group=st.sampled_from(GROUPS))
    def purge(self, group: str) -> None:
        meant = {name for name in NAMES if name[0][0] == group}
        purged = self.harness.catalog.purge(PurgeOrder(group, None))
        assert sorted(purged.erase) == sorted(
            ref for name, (_, ref, _) in self.on_nvme.items() if name in meant
        )
        self.kept = {name: payload for name, payload in self.kept.items() if name not in meant}
        self.on_nvme = {name: value for name, value in self.on_nvme.items() if name not in meant}
        for state in self.sessions.values():
            for grant in state.grants:
                grant.is_purged |= grant.name in meant
        for read in self.reads:
            read.is_purged |= read.name in meant

    # -------------------------------------------------------------------------------------------- checks

    @invariant()
    def everything_is_right(self) -> None:
        self.harness.catalog.check()
        on_nvme = {}
        for held in self.harness.catalog.records():
            name = held.info.id.key.decode(), held.info.id.shard
            if held.offset is not None:
                payload = bytes(self.harness.arena.payload(held.offset, held.info.num_bytes))
                assert payload == self.kept[name]
                assert checksum(payload) == held.info.checksum
            if held.nvme is not None:
                on_nvme[name] = held.nvme_info, held.nvme
        assert on_nvme == {name: (info, ref) for name, (info, ref, _) in self.on_nvme.items()}
        for _, offset, payload in self.leases:
            assert self.harness.arena.payload(offset, len(payload)) == payload, (
                "a leased record was overwritten"
            )
        self.nothing_that_may_be_written_is_given_away()
        in_dram = {
            held.info.id: held.info for held in self.harness.catalog.records() if held.offset is not None
        }
        assert self.harness.listener.in_dram == in_dram, "who only listens knows something else"

    def nothing_that_may_be_written_is_given_away(self) -> None:
        writable: list[tuple[int, int]] = []
        for state in self.sessions.values():
            for grant in state.grants:
                if grant.rank not in self.dead:
                    writable.append((grant.offset, self.harness.arena.record_bytes(grant.num_bytes)))
        for read in self.reads:
            writable.append((read.offset, self.harness.arena.record_bytes(len(read.payload))))
        for held in self.harness.catalog.records():
            if held.offset is not None:
                writable.append((held.offset, self.harness.arena.record_bytes(held.info.num_bytes)))
        writable.sort()
        for (offset, num_bytes), (following, _) in pairwise(writable):
            assert offset + num_bytes <= following, "two have the same bytes"

    def teardown(self) -> None:
        """When all have ended, everything is free."""
        for session in SESSIONS:
            self.rank_ends(session)
            self.engine_core_ends(session)
        for _, offset, _ in self.leases:
            self.harness.catalog.release(offset)
        for read in self.reads:
            self.harness.catalog.abandon_read(read.offset)
        self.look_for_dead_writers()
        self.harness.catalog.purge(PurgeOrder(None, None))
        self.harness.catalog.check()
        assert self.harness.catalog.stat().num_bytes == 0
        self.harness.close()

    # -------------------------------------------------------------------------------------------- inside

    def is_in_dram(self, name: Name) -> bool:
        held = self.harness.catalog.find(record_id(*name))
        return held is not None and held.offset is not None

    def payload(self, grant: Grant) -> bytes:
        """New bytes for every writing: no two are equal."""
        self.num_written += 1
        return payload_of(*grant.name, grant.num_bytes, self.num_written)


TestCatalog = CatalogMachine.TestCase
TestCatalog.settings = settings(max_examples=examples(60), stateful_step_count=60, deadline=None)
