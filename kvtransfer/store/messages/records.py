"""What names and describes a record of the store on every connection."""

from __future__ import annotations

from typing import Literal

from kvtransfer.codec import Part
from kvtransfer.messages import Shard

HEADER_BYTES = 4096

# Where a block is held, the cheapest tier first. "remote": in a tier of another node.
Tier = Literal["dram", "nvme", "remote"]


class RecordId(Part, frozen=True):
    """Names a record: its space (model, dtype and block layout; `kvtransfer.store.record.space_id`), the
    block's chained key, and the part of the model whose KV the record holds."""

    space: bytes
    key: bytes
    shard: Shard


class RecordInfo(Part, frozen=True):
    """Describes a record in any tier. `parent` is the key of the preceding block (b"" at the root), `chain`
    the first key of its chain; `num_bytes` and `checksum` (`kvtransfer.blocks.checksum`) are the
    payload's."""

    id: RecordId
    parent: bytes
    chain: bytes
    sharing_group: str
    # The model's fingerprint: what `tandem store purge --model` compares.
    model: bytes
    num_bytes: int
    checksum: int


class PurgeOrder(Part, frozen=True):
    """Names the records to delete: of this group (None: of all), and of a model whose fingerprint in hex has
    this prefix (None: of any)."""

    sharing_group: str | None
    model: str | None

    def includes(self, info: RecordInfo) -> bool:
        """Whether the record is to be deleted."""
        is_of_group = self.sharing_group in (None, info.sharing_group)
        return is_of_group and (self.model is None or info.model.hex().startswith(self.model))
