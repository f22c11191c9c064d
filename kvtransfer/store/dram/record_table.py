"""What a node holds, by name: which record is where, and what the catalog tells of it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple, Protocol

from kvtransfer.messages import Shard
from kvtransfer.store.dram.eviction import ChainKey
from kvtransfer.store.messages import RecordId, RecordInfo, Tier
from kvtransfer.store.nvme.segments import NvmeRef
from kvtransfer.store.record import image_bytes


class Held:
    """A record that this node holds, live: read it, never write it, ask again after anything else ran.

    `info` is the record as it lies in the cheapest of its tiers: its checksum is that of the bytes at
    `offset` when it has one, else of those at `nvme`. (Two writings of a block need not be equal to the bit.)
    """

    __slots__ = ("info", "num_hits", "nvme", "nvme_info", "offset", "used_at")

    def __init__(self, info: RecordInfo) -> None:
        self.info = info
        # Where it lies in the arena; None: not in the host tier.
        self.offset: int | None = None
        self.nvme: NvmeRef | None = None
        # As it lies on NVMe; given exactly when `nvme` is.
        self.nvme_info: RecordInfo | None = None
        self.num_hits = 0
        # Grows with every use of any record: who has more was used later.
        self.used_at = 0

    @property
    def tiers(self) -> tuple[Tier, ...]:
        """Where it is, the cheapest first."""
        dram: tuple[Tier, ...] = ("dram",) if self.offset is not None else ()
        return (*dram, "nvme") if self.nvme is not None else dram


class Dropped(NamedTuple):
    """A record that left all tiers of the node; `nvme` is what the caller must drop there."""

    info: RecordInfo
    nvme: NvmeRef | None


class Purged(NamedTuple):
    """What a purge took out of the books. `erase` is what the caller must erase from NVMe, durably. Counts
    and bytes are by tier; `num_pending` slots of the arena still have a user and are free after the last."""

    num_records: dict[str, int]
    num_bytes: dict[str, int]
    num_pending: int
    erase: tuple[NvmeRef, ...]


class CatalogEvents(Protocol):
    """Who must know of changes: called at once, in the middle of the change; must not change the catalog."""

    def committed(self, info: RecordInfo) -> None:
        """The record is in the host tier now: put by a session, read from another tier, or adopted."""

    def touched(self, info: RecordInfo) -> None:
        """A reader asked for it and it was in the host tier."""

    def evicted(self, info: RecordInfo) -> None:
        """It leaves the host tier for want of room; if it is nowhere else, `gone` follows."""

    def gone(self, record_id: RecordId) -> None:
        """It is in no tier of this node any more."""


def is_meant(info: RecordInfo, tenant: str | None, model: str | None) -> bool:
    """Whether a record is of this tenant and of a model whose fingerprint in hex begins so; None: of any."""
    return tenant in (None, info.tenant) and (model is None or info.model.hex().startswith(model))


class RecordTable:
    """The records of a node by block and shard. Who enters a record puts it in a tier at once."""

    def __init__(self) -> None:
        # Whole records on NVMe, by tenant.
        self.nvme_bytes: dict[str, int] = {}
        self._blocks: dict[ChainKey, dict[Shard, Held]] = {}
        self._nothing: Mapping[Shard, Held] = {}

    def __iter__(self) -> Iterator[Held]:
        return (held for block in self._blocks.values() for held in block.values())

    def block(self, key: ChainKey) -> Mapping[Shard, Held]:
        return self._blocks.get(key, self._nothing)

    def enter(self, info: RecordInfo) -> Held:
        """The record of that name; a new one is in no tier yet."""
        block = self._blocks.setdefault(ChainKey(info.id.space, info.id.key), {})
        held = block.get(info.id.shard)
        if held is None:
            held = block[info.id.shard] = Held(info)
        return held

    def remove(self, held: Held) -> None:
        """It is in no tier any more."""
        key = ChainKey(held.info.id.space, held.info.id.key)
        del self._blocks[key][held.info.id.shard]
        if not self._blocks[key]:
            del self._blocks[key]

    def put_on_nvme(self, held: Held, info: RecordInfo, nvme: NvmeRef) -> None:
        self.clear_nvme(held)
        held.nvme, held.nvme_info = nvme, info
        if held.offset is None:
            held.info = info
        self._count_nvme(info, 1)

    def clear_nvme(self, held: Held) -> None:
        if held.nvme_info is not None:
            self._count_nvme(held.nvme_info, -1)
        held.nvme = held.nvme_info = None

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
                    tenant, num_bytes = held.nvme_info.tenant, image_bytes(held.nvme_info.num_bytes)
                    nvme_bytes[tenant] = nvme_bytes.get(tenant, 0) + num_bytes
        assert nvme_bytes == self.nvme_bytes

    def _count_nvme(self, info: RecordInfo, sign: int) -> None:
        total = self.nvme_bytes.get(info.tenant, 0) + sign * image_bytes(info.num_bytes)
        if total:
            self.nvme_bytes[info.tenant] = total
        else:
            del self.nvme_bytes[info.tenant]
