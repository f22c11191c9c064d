"""The space of an arena: which granules belong to which record. Its memory is that of a subclass."""

from __future__ import annotations

from collections.abc import Iterator

from kvtransfer.store.dram.extents import Extents
from kvtransfer.store.messages.records import RecordInfo
from kvtransfer.store.record import Header, State, Writer, image_bytes


class ArenaSpace:
    """`num_bytes`, divided into granules, the first of which takes no record. A record's offset is a multiple
    of `granule_bytes`, never 0."""

    def __init__(self, arena_id: bytes, num_bytes: int, granule_bytes: int) -> None:
        """Nothing is free until `give_all`."""
        self.id = arena_id
        self.num_bytes = num_bytes
        self.granule_bytes = granule_bytes
        # The end of the highest record that there ever was.
        self.num_used_bytes = 0
        self._counts: dict[int, int] = {}  # offset of each record -> its granules
        self._extents = Extents(num_bytes // granule_bytes)

    def give_all(self) -> None:
        """Let all of a new arena be free, but for its first granule."""
        self._extents.give(1, self.num_bytes // self.granule_bytes - 1)

    def allocate(self, num_payload: int) -> int | None:
        """Allocate space for a record with that payload; None when there is no free range of that size."""
        count = self._num_granules(num_payload)
        start = self._extents.take(count)
        if start is None:
            return None
        offset = start * self.granule_bytes
        self._counts[offset] = count
        self.num_used_bytes = max(self.num_used_bytes, offset + count * self.granule_bytes)
        return offset

    def free(self, offset: int) -> None:
        """Free a record's space. Its header's mark is erased at once, so that no scan finds it again."""
        self._erase(offset)
        self._extents.give(offset // self.granule_bytes, self._counts.pop(offset))

    def record_bytes(self, num_payload: int) -> int:
        """Return the space that a record of that payload takes: whole granules."""
        return self._num_granules(num_payload) * self.granule_bytes

    @property
    def capacity_bytes(self) -> int:
        """The space for records: all but the first granule."""
        return self.num_bytes - self.granule_bytes

    @property
    def num_free_bytes(self) -> int:
        return self._extents.num_free * self.granule_bytes

    def erase_header(self, offset: int) -> None:
        """Erase a record's header, so that no scan finds it; its space stays allocated."""
        assert offset in self._counts
        self._erase(offset)

    def check(self) -> None:
        """Assert that records and free ranges divide the arena."""
        ranges = [(offset // self.granule_bytes, count) for offset, count in self._counts.items()]
        position = 1
        for start, count in sorted(ranges + self._extents.ranges()):
            assert start == position, f"granule {position} belongs to nobody, or to two"
            position += count
        assert position == self._extents.num_total
        free = [start for start, _ in self._extents.ranges()]
        ends = {start + count for start, count in self._extents.ranges()}
        assert not ends & set(free), "two free ranges are neighbours"
        assert self._extents.num_free == sum(count for _, count in self._extents.ranges())

    def _num_granules(self, num_payload: int) -> int:
        return -(-image_bytes(num_payload) // self.granule_bytes)

    # ------------------------------------------------------------------------------------------ memory

    def write_header(
        self, offset: int, info: RecordInfo, state: State, sequence: int, writer: Writer | None = None
    ) -> None:
        """Write the header of the record at `offset`. `StoreError` when its fields are too long."""
        raise NotImplementedError

    def info_at(self, offset: int) -> RecordInfo | None:
        """Return what the header at `offset` describes, for whatever place it was written; None: there is no
        intact one."""
        raise NotImplementedError

    def space(self, offset: int) -> memoryview:
        """Return all memory of the record at `offset`."""
        raise NotImplementedError

    def payload(self, offset: int, num_bytes: int) -> memoryview:
        """Return the payload of the record at `offset`."""
        raise NotImplementedError

    def image(self, offset: int, num_payload: int) -> memoryview:
        """Return the whole record with that payload at `offset`, as on NVMe: in whole, aligned pages."""
        raise NotImplementedError

    def scan(self) -> Iterator[tuple[int, Header]]:
        """Return (offset, header) of each record found by adoption, whose space is allocated: free the
        unwanted."""
        raise NotImplementedError

    def close(self) -> None:
        """Close the arena; its memory is given back when the last view of it is dropped."""
        raise NotImplementedError

    def _erase(self, offset: int) -> None:
        raise NotImplementedError
