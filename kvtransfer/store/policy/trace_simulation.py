"""Replays a trace through the store's policies, without bytes or time: hit rates, and their cost in writes.

    request --> device (LRU) --> host tier (ChainLru) --> NVMe (segments, admission)
                   a chain is walked until its first block that is nowhere; the rest is computed and put

One node with one replica. Blocks are those of the trace (512 tokens in the Mooncake format).
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Sequence
from typing import Literal, NamedTuple

from kvtransfer.messages import Shard
from kvtransfer.store.dram.chain_lru import ChainKey, ChainLru
from kvtransfer.store.messages.records import RecordId, RecordInfo
from kvtransfer.store.policy.nvme_admission import Admission

# Files of the simulated NVMe tier.
NUM_SEGMENTS = 64

# How NVMe is used. "lru": everything is written, and the least recently used leaves for nothing, as a log of
# segments cannot do; the others are the store's own.
Policy = Literal["lru", "all", "seen_twice", "adaptive"]
POLICIES: tuple[Policy, ...] = ("lru", "all", "seen_twice", "adaptive")

_SPACE = b""
_SHARD = Shard(0, 1, 0, 1)
_TENANT = "trace"


class TierSizes(NamedTuple):
    """Blocks that each tier holds."""

    device: int
    dram: int
    nvme: int


class Outcome(NamedTuple):
    """What became of all blocks of a trace; `num_moved` are those that compaction wrote again."""

    policy: Policy
    sizes: TierSizes
    num_blocks: int
    num_ideal_hits: int
    num_device_hits: int
    num_dram_hits: int
    num_nvme_hits: int
    num_written: int
    num_moved: int

    @property
    def hit_rate(self) -> float:
        num_hits = self.num_device_hits + self.num_dram_hits + self.num_nvme_hits
        return num_hits / max(self.num_blocks, 1)

    @property
    def ideal_hit_rate(self) -> float:
        return self.num_ideal_hits / max(self.num_blocks, 1)

    @property
    def written_per_hit(self) -> float | None:
        """Bytes written to NVMe for each byte hit there; None without a hit."""
        return (self.num_written + self.num_moved) / self.num_nvme_hits if self.num_nvme_hits else None


# The blocks of each request, in order. A block's number names all of the prompt up to its end.
Trace = Sequence[Sequence[int]]


def simulate(trace: Trace, sizes: TierSizes, policy: Policy) -> Outcome:
    """Run every request of the trace through all tiers; `sizes.nvme` 0: there is no such tier."""
    node = _Node(sizes, policy)
    for blocks in trace:
        node.serve(blocks)
    num_blocks = sum(map(len, trace))
    return Outcome(
        policy=policy,
        sizes=sizes,
        num_blocks=num_blocks,
        num_ideal_hits=num_blocks - len({block for blocks in trace for block in blocks}),
        num_device_hits=node.num_device_hits,
        num_dram_hits=node.num_dram_hits,
        num_nvme_hits=node.num_nvme_hits,
        num_written=node.num_written,
        num_moved=node.nvme.num_moved,
    )


class SegmentLog:
    """As `NvmeTier`: the oldest segment leaves; of its records, those used since they were written there
    (read, or hit in the host tier) are written again at the end."""

    def __init__(self, num_blocks: int) -> None:
        self._capacity = num_blocks
        self._segment_blocks = max(1, num_blocks // NUM_SEGMENTS)
        self._segments: deque[list[RecordId]] = deque()
        self._was_used: dict[RecordId, bool] = {}
        self.num_moved = 0

    def __contains__(self, record_id: RecordId) -> bool:
        return record_id in self._was_used

    @property
    def is_full(self) -> bool:
        return len(self._was_used) + self._segment_blocks > self._capacity

    def write(self, record_id: RecordId) -> list[RecordId]:
        """Take one more record; return the records that leave for it."""
        self._append(record_id)
        dropped = []
        while len(self._was_used) > self._capacity:
            for each in self._segments.popleft():
                if self._was_used[each]:
                    self._append(each)
                    self.num_moved += 1
                else:
                    del self._was_used[each]
                    dropped.append(each)
        return dropped

    def use(self, record_id: RecordId) -> None:
        """Note that a record was read from here, or hit in the host tier."""
        self._was_used[record_id] = True

    def _append(self, record_id: RecordId) -> None:
        if not self._segments or len(self._segments[-1]) >= self._segment_blocks:
            self._segments.append([])
        self._segments[-1].append(record_id)
        self._was_used[record_id] = False


class PlainLru:
    """The least recently written or used leaves."""

    def __init__(self, num_blocks: int) -> None:
        self._capacity = num_blocks
        self._records: OrderedDict[RecordId, None] = OrderedDict()
        self.num_moved = 0

    def __contains__(self, record_id: RecordId) -> bool:
        return record_id in self._records

    @property
    def is_full(self) -> bool:
        return len(self._records) >= self._capacity

    def write(self, record_id: RecordId) -> list[RecordId]:
        """Take one more record; return the records that leave for it."""
        self._records[record_id] = None
        return [self._records.popitem(last=False)[0] for _ in range(len(self._records) - self._capacity)]

    def use(self, record_id: RecordId) -> None:
        """Note that a record was read from here, or hit in the host tier."""
        self._records.move_to_end(record_id)


class _Node:
    """All tiers of one node, and what was counted."""

    def __init__(self, sizes: TierSizes, policy: Policy) -> None:
        self._sizes = sizes
        self._device: OrderedDict[int, None] = OrderedDict()
        self._dram = ChainLru()
        self.nvme: PlainLru | SegmentLog = PlainLru(sizes.nvme) if policy == "lru" else SegmentLog(sizes.nvme)
        self._admission = Admission("all" if policy == "lru" else policy, sizes.nvme)
        self._infos: dict[int, RecordInfo] = {}
        self.num_device_hits = 0
        self.num_dram_hits = 0
        self.num_nvme_hits = 0
        self.num_written = 0

    def serve(self, blocks: Sequence[int]) -> None:
        parent = b""
        is_prefix = True
        for block in blocks:
            info = self._info(block, parent)
            is_prefix = is_prefix and self._find(block, info)
            if not is_prefix:
                self._put(info)
            parent = info.id.key
        for block in reversed(blocks):  # so that a chain leaves the device from its end
            self._device[block] = None
            self._device.move_to_end(block)
        while len(self._device) > self._sizes.device:
            self._device.popitem(last=False)

    def _find(self, block: int, info: RecordInfo) -> bool:
        """Whether the block need not be computed."""
        if block in self._device:
            self.num_device_hits += 1
        elif _chain_key(info) in self._dram:
            self.num_dram_hits += 1
            self._use(info)
        elif info.id in self.nvme:
            self.num_nvme_hits += 1
            self.nvme.use(info.id)
            self._admission.nvme_hit(info.id)
            self._add_to_dram(info)
        else:
            return False
        return True

    def _put(self, info: RecordInfo) -> None:
        """Put a block that was computed; it may still lie in a tier, behind one that is missing."""
        if _chain_key(info) in self._dram:
            self._use(info)
            return
        self._add_to_dram(info)
        if info.id not in self.nvme and self._admission.put(info, self.nvme.is_full):
            self._write(info)

    def _use(self, info: RecordInfo) -> None:
        self._dram.touch(_chain_key(info))
        if info.id in self.nvme:
            self.nvme.use(info.id)
        if self._admission.hit(info, self.nvme.is_full):
            self._write(info)

    def _add_to_dram(self, info: RecordInfo) -> None:
        self._dram.add(_chain_key(info), info.parent, _TENANT)
        while self._dram.num_resident > self._sizes.dram:
            oldest = self._dram.oldest()
            assert oldest is not None, "nothing is held here, so a leaf may always leave"
            self._dram.remove(oldest)

    def _write(self, info: RecordInfo) -> None:
        if not self._sizes.nvme:
            return
        self.num_written += 1
        dropped = self.nvme.write(info.id)
        self._admission.written(info)
        for record_id in dropped:
            self._admission.dropped(record_id)

    def _info(self, block: int, parent: bytes) -> RecordInfo:
        info = self._infos.get(block)
        if info is None:
            record_id = RecordId(_SPACE, block.to_bytes(16, "big"), _SHARD)
            info = self._infos[block] = RecordInfo(record_id, parent, b"", _TENANT, b"", 1, 0)
        return info


def _chain_key(info: RecordInfo) -> ChainKey:
    return ChainKey(_SPACE, info.id.key)
