"""A catalog over a small real arena with real bytes, and a listener that writes down what it hears.

Run as a program, an owner that dies: it adopts the arena whose descriptor it inherits, and works until a
fault kills it.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from kvtransfer.blocks.checksum import checksum
from kvtransfer.common.clock import ManualClock
from kvtransfer.common.faults import FaultRule, Faults
from kvtransfer.common.group_shares import GroupShares, GroupUsage
from kvtransfer.messages import Shard
from kvtransfer.store.dram.arena import Arena
from kvtransfer.store.dram.catalog import Catalog
from kvtransfer.store.messages.engine_session import NewRecord
from kvtransfer.store.messages.records import PurgeOrder, RecordId, RecordInfo
from kvtransfer.store.record import HEADER_BYTES, Writer

GRANULE_BYTES = 64 << 10
ARENA_BYTES = 2 << 20
# Records of one granule that the arena takes.
NUM_SLOTS = ARENA_BYTES // GRANULE_BYTES - 1
SPACE = b"space-01"
WHOLE = Shard(0, 2, 0, 2)
LEFT, RIGHT = Shard(0, 2, 0, 1), Shard(0, 2, 1, 2)
SESSION, OTHER = b"session-a", b"session-b"
# The payload that fills a granule.
ONE_GRANULE = GRANULE_BYTES - HEADER_BYTES


class Listener:
    """`heard` are (event, key) in order; `in_dram` is what it takes to be in the host tier."""

    def __init__(self) -> None:
        self.heard: list[tuple[str, str]] = []
        self.in_dram: dict[RecordId, RecordInfo] = {}
        # The last reasons for which records are gone.
        self.reasons: dict[RecordId, str] = {}

    def committed(self, info: RecordInfo) -> None:
        self.in_dram[info.id] = info
        self.heard.append(("committed", info.id.key.decode()))

    def touched(self, info: RecordInfo) -> None:
        assert self.in_dram[info.id] == info
        self.heard.append(("touched", info.id.key.decode()))

    def evicted(self, info: RecordInfo) -> None:
        assert self.in_dram.pop(info.id) == info
        self.heard.append(("evicted", info.id.key.decode()))

    def gone(self, record_id: RecordId, reason: str) -> None:
        self.reasons[record_id] = reason
        self.in_dram.pop(record_id, None)
        self.heard.append(("gone", record_id.key.decode()))

    def take(self) -> list[tuple[str, str]]:
        heard, self.heard = self.heard, []
        return heard


NO_LIMITS = GroupShares()


def record_id(name: str, shard: Shard = WHOLE) -> RecordId:
    return RecordId(SPACE, name.encode(), shard)


def payload_of(name: str, shard: Shard = WHOLE, num_bytes: int = ONE_GRANULE, salt: int = 0) -> bytes:
    """Return the bytes of that record, unlike any other's."""
    pattern = f"{name}|{shard.head_start}|{shard.head_end}|{salt}|".encode()
    return (pattern * (num_bytes // len(pattern) + 1))[:num_bytes]


class CatalogHarness:
    """`catalog` with the sessions `SESSION` and `OTHER` open. `close` in the end."""

    def __init__(
        self,
        *,
        shares: GroupShares = NO_LIMITS,
        nvme_shares: GroupShares = NO_LIMITS,
        nvme_bytes: int = 0,
        with_arena: bool = True,
        rules: Sequence[FaultRule] = (),
    ) -> None:
        self.clock = ManualClock()
        self.listener = Listener()
        self.faults = Faults(rules)
        self.shares = shares
        self.nvme_shares, self.nvme_bytes = nvme_shares, nvme_bytes
        self.arena = Arena.create(ARENA_BYTES, GRANULE_BYTES, huge_pages=False)
        self.catalog = self.make(self.arena if with_arena else None)
        for session in (SESSION, OTHER):
            self.catalog.session_opened(session)

    def make(self, arena: Arena | None) -> Catalog:
        nvme_usage = GroupUsage(self.nvme_shares, self.nvme_bytes)
        return Catalog(arena, self.clock, self.faults, self.listener, self.shares, nvme_usage)

    def allocate(
        self,
        name: str,
        parent: str = "",
        *,
        session: bytes = SESSION,
        shard: Shard = WHOLE,
        group: str = "t",
        num_bytes: int = ONE_GRANULE,
        model: bytes = b"model",
        writer: Writer | None = None,
    ) -> int:
        record = NewRecord(name.encode(), parent.encode(), shard, num_bytes)
        writer = writer or Writer(os.getpid(), 1)
        offset = self.catalog.allocate(session, group, b"chain", SPACE, model, record, writer)
        self.catalog.check()
        return offset

    def write(self, offset: int, payload: bytes) -> int:
        """As a rank does; returns the checksum."""
        self.arena.payload(offset, len(payload))[:] = payload
        return checksum(payload)

    def put(
        self,
        name: str,
        parent: str = "",
        *,
        session: bytes = SESSION,
        shard: Shard = WHOLE,
        group: str = "t",
        num_bytes: int = ONE_GRANULE,
        model: bytes = b"model",
    ) -> int:
        """Go through all phases of a put; return the offset."""
        offset = self.allocate(
            name, parent, session=session, shard=shard, group=group, num_bytes=num_bytes, model=model
        )
        assert offset >= 0, f"{name}: {offset}"
        total = self.write(offset, payload_of(name, shard, num_bytes))
        assert self.catalog.commit(session, offset, total) is not None
        self.catalog.check()
        return offset

    def put_chain(self, *names: str, group: str = "t") -> None:
        parent = ""
        for name in names:
            self.put(name, parent, group=group)
            parent = name

    def read(self, name: str, shard: Shard = WHOLE) -> bytes | None:
        """Return the bytes under a lease, checked against the sum in the books; None: a miss."""
        offset = self.catalog.lease(record_id(name, shard))
        if offset is None:
            return None
        held = self.catalog.find(record_id(name, shard))
        assert held is not None
        payload = bytes(self.arena.payload(offset, held.info.num_bytes))
        assert checksum(payload) == held.info.checksum
        self.catalog.release(offset)
        self.catalog.check()
        return payload

    def names(self) -> set[str]:
        """Return the names of the findable records in the host tier."""
        return {held.info.id.key.decode() for held in self.catalog.records() if held.offset is not None}

    def restart(self) -> None:
        """Restart the owner: the next one adopts the arena by its descriptor. No session has said hello
        yet."""
        self.adopt(os.dup(self.arena.fd))

    def adopt(self, fd: int) -> None:
        """Adopt the arena of this descriptor with a new catalog."""
        arena = Arena.adopt(fd, GRANULE_BYTES)
        self.arena.close()
        self.arena = arena
        self.listener.in_dram.clear()
        self.catalog = self.make(arena)
        self.catalog.check()

    def close(self) -> None:
        self.arena.close()


def main(fd: int, point: str, marker: str) -> None:
    harness = CatalogHarness(rules=[FaultRule(point, "kill", marker)])
    harness.adopt(fd)
    harness.catalog.session_opened(SESSION)
    harness.put("x")
    harness.read("x")
    harness.put("y", "x")
    harness.catalog.purge(PurgeOrder("purged", None))


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], sys.argv[3])
