"""The records of a node by name: in which tiers each one is."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from kvtransfer.common.group_shares import GroupUsage
from kvtransfer.common.sliced_map import SlicedMap
from kvtransfer.messages import Shard
from kvtransfer.store.dram.chain_lru import ChainKey, ChainLru
from kvtransfer.store.messages.records import RecordId, RecordInfo, Tier
from kvtransfer.store.nvme.segment import NvmeRef
from kvtransfer.store.record import image_bytes

# The slices in which blocks can be read: of a million blocks each has some 250. A prime (`SlicedMap`).
NUM_SLICES = 4093


class Held:
    """A record that this node holds: a live entry, to be read at once and never written.

    `info` describes the copy in the cheapest tier: its checksum is that of the bytes at `offset` if there are
    any, otherwise of those at `nvme`. (Two copies of a block need not be equal to the bit.)
    """

    __slots__ = ("info", "num_hits", "nvme", "nvme_info", "offset", "used_at")

    def __init__(self, info: RecordInfo) -> None:
        self.info = info
        # Its offset in the arena; None: not in the host tier.
        self.offset: int | None = None
        self.nvme: NvmeRef | None = None
        # The copy on NVMe; given exactly when `nvme` is.
        self.nvme_info: RecordInfo | None = None
        self.num_hits = 0
        # Grows with every use of any record: a larger number is a later use.
        self.used_at = 0

    @property
    def tiers(self) -> tuple[Tier, ...]:
        """The tiers that hold the record, the cheapest first."""
        dram: tuple[Tier, ...] = ("dram",) if self.offset is not None else ()
        return (*dram, "nvme") if self.nvme is not None else dram


class RecordTable:
    """The records of a node by block and shard. A record that is entered must be put in a tier at once."""

    def __init__(self, nvme_usage: GroupUsage) -> None:
        # The usage by whole records.
        self.nvme_usage = nvme_usage
        # Blocks on NVMe of groups that have a limit.
        self._nvme_chain = ChainLru()
        self._blocks: SlicedMap[ChainKey, dict[Shard, Held]] = SlicedMap(NUM_SLICES)
        self._nothing: Mapping[Shard, Held] = {}

    def __iter__(self) -> Iterator[Held]:
        return (held for block in self._blocks.values() for held in block.values())

    def slice(self, index: int) -> Iterable[ChainKey]:
        """Return the blocks of one of the `NUM_SLICES` slices. A block that stays is always in the same."""
        return self._blocks.slice(index)

    def block(self, key: ChainKey) -> Mapping[Shard, Held]:
        return self._blocks.get(key) or self._nothing

    def enter(self, info: RecordInfo) -> Held:
        """Return the entry of a record; a new one is in no tier yet."""
        key = _chain_key(info)
        block = self._blocks.get(key)
        if block is None:
            block = self._blocks[key] = {}
        held = block.get(info.id.shard)
        if held is None:
            held = block[info.id.shard] = Held(info)
        return held

    def remove(self, held: Held) -> None:
        """Remove a record that is in no tier any more."""
        key = _chain_key(held.info)
        block = self._blocks[key]
        del block[held.info.id.shard]
        if not block:
            self._blocks.pop(key)

    def put_on_nvme(self, held: Held, info: RecordInfo, nvme: NvmeRef) -> None:
        self.clear_nvme(held)
        held.nvme, held.nvme_info = nvme, info
        if held.offset is None:
            held.info = info
        self.nvme_usage.take(info.sharing_group, image_bytes(info.num_bytes))
        if self.nvme_usage.has_limit(info.sharing_group):
            self._nvme_chain.add(_chain_key(info), info.parent, info.sharing_group)

    def clear_nvme(self, held: Held) -> None:
        info = held.nvme_info
        if info is not None:
            self.nvme_usage.take(info.sharing_group, -image_bytes(info.num_bytes))
            if self.nvme_usage.has_limit(info.sharing_group):
                self._nvme_chain.remove(_chain_key(info))
        held.nvme = held.nvme_info = None

    def touch_nvme(self, held: Held) -> None:
        """Note that the record, if it is on NVMe, is used just now."""
        info = held.nvme_info
        if info is not None and self.nvme_usage.has_limit(info.sharing_group):
            self._nvme_chain.touch(_chain_key(info))

    def nvme_victim(self, group: str, num_bytes: int) -> ChainKey | None:
        """Return the block to drop from NVMe for `num_bytes` bytes of this group: its own when it has its
        share, else one of the group that exceeds its share most. None: no group does."""
        if self.nvme_usage.has_limit(group) and self.nvme_usage.would_exceed(group, num_bytes):
            return self._nvme_chain.oldest(group)
        found = (self._nvme_chain.oldest(other) for other in self.nvme_usage.greediest())
        return next((key for key in found if key is not None), None)

    def check(self) -> None:
        """Assert every invariant."""
        nvme_bytes: dict[str, int] = {}
        for key, block in self._blocks.items():
            assert block, "a block without records is still known"
            for shard, held in block.items():
                assert held.info.id == RecordId(key.space, key.key, shard)
                assert held.tiers, "a record is in no tier"
                assert (held.nvme is None) == (held.nvme_info is None)
                assert held.offset is not None or held.info is held.nvme_info
                if held.nvme_info is not None:
                    group, num_bytes = held.nvme_info.sharing_group, image_bytes(held.nvme_info.num_bytes)
                    nvme_bytes[group] = nvme_bytes.get(group, 0) + num_bytes
        assert nvme_bytes == self.nvme_usage.taken
        self._nvme_chain.check()


def _chain_key(info: RecordInfo) -> ChainKey:
    return ChainKey(info.id.space, info.id.key)
