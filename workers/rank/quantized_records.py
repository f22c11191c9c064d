"""A rank's KV as the store has it where `store.kv_dtype` has fewer bits than the device: blocks are quantized
on their way to records, and widened on their way back.

    store:  block --quantize--> staging block --copy and sum--> record
    load:   record --copy and sum--> staging block --widen--> block

Sums are those of the records' own bytes. What is widened is the copy of which the sum was taken."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kvtransfer.blocks.device_pool import DevicePool
from kvtransfer.blocks.host_memory import KvMemory
from kvtransfer.blocks.layout import BlockLayout
from kvtransfer.blocks.pool import HostPool, KvPool, RecordPool
from kvtransfer.blocks.runs import ByteRegion
from kvtransfer.messages import Shard
from workers.model.attention.quantized_kv import kv_dtype
from workers.model.kv_form import ScaledParts
from workers.model.kv_layout import record_layout
from workers.model.scaled_heads import ScaledHeads

# Bytes of records that are converted at a time, where one block has not more: they stay in a core's cache,
# and what a device waits for between two parts is little beside them.
_STAGING_BYTES = 1 << 20
_DEVICE_STAGING_BYTES = 16 << 20
# Bytes of a device that quantizing takes for each byte of a record: several copies of a block in float32.
_TEMPORARY_BYTES = 24


def conversion_bytes(layout: BlockLayout, form: ScaledParts) -> int:
    """Return how much memory of a device conversion takes in addition to a pool of this layout."""
    block_bytes = record_layout(layout, form).block_bytes
    return max(_DEVICE_STAGING_BYTES, block_bytes) + _TEMPORARY_BYTES * block_bytes


class QuantizedRecords(RecordPool):
    """The records of `form` of the blocks of a pool. Used by one thread at a time."""

    def __init__(self, layout: BlockLayout, kv: Tensor, form: ScaledParts) -> None:
        """`kv` [num_blocks, num_layers, num_kinds, ..., width] are the blocks of this layout, of elements of
        activations; they stay the caller's."""
        super().__init__(record_layout(layout, form), len(kv), str(kv.device))
        # As blocks are addressed: of latents parts of the tokens are in the place of heads.
        self._kv = kv.view(*kv.shape[:3], layout.shard.num_heads, layout.block_tokens, kv.shape[-1])
        element_dtype = kv_dtype(form.kv_dtype, kv.dtype)
        self._heads = ScaledHeads(form.parts, element_dtype, kv.dtype, layout.block_tokens)
        self._staging, data = _staging_pool(self.layout, kv.device)
        width = self.layout.head_dim * self.layout.item_bytes + self.layout.scale_bytes
        shape = (self._staging.num_blocks, *self._kv.shape[1:-1], width)
        # The blocks of the staging pool, like those of `kv`.
        self._staged = data.view(self._heads.element_dtype).view(shape)

    def store(
        self,
        block_ids: Sequence[int],
        region: ByteRegion,
        offsets: Sequence[int],
        layers: tuple[int, ...] | None = None,
    ) -> list[int]:
        self.check_blocks(block_ids)
        sums: list[int] = []
        for start in range(0, len(block_ids), self._staging.num_blocks):
            ids = block_ids[start : start + self._staging.num_blocks]
            with torch.inference_mode(), self._staging.computing():
                for place, block_id in enumerate(ids):
                    self._heads.quantize(self._kv[block_id], self._staged[place])
            sums += self._staging.store(range(len(ids)), region, offsets[start : start + len(ids)], layers)
        return sums

    def load(
        self,
        block_ids: Sequence[int],
        piece: Shard,
        region: ByteRegion,
        offsets: Sequence[int],
        shard: Shard,
        layers: tuple[int, ...] | None = None,
    ) -> list[int]:
        self.check_blocks(block_ids)
        part_layers, part_heads = self.layout.part(piece)
        part = part_layers, slice(None), part_heads
        sums: list[int] = []
        for start in range(0, len(block_ids), self._staging.num_blocks):
            ids = block_ids[start : start + self._staging.num_blocks]
            places = range(len(ids))
            sums += self._staging.load(
                places, piece, region, offsets[start : start + len(ids)], shard, layers
            )
            with torch.inference_mode(), self._staging.computing():
                for place, block_id in enumerate(ids):
                    self._heads.widen(self._staged[place][part], self._kv[block_id][part])
        return sums

    def attach(self, region: ByteRegion) -> None:
        self._staging.attach(region)

    def detach(self, region: ByteRegion) -> None:
        self._staging.detach(region)

    def close(self) -> None:
        """Release the staging memory."""
        self._kv = self._staged = torch.empty(0)
        self._staging.close()


def _staging_pool(layout: BlockLayout, device: torch.device) -> tuple[KvPool, Tensor]:
    """Allocate blocks of records on the device, at least one: the pool, and its bytes, uint8."""
    staging_bytes = _STAGING_BYTES if device.type == "cpu" else _DEVICE_STAGING_BYTES
    # A rank may have no layer of the blocks, which are empty then.
    num_blocks = max(1, staging_bytes // layout.block_bytes) if layout.block_bytes else 0
    if device.type == "cpu":
        memory = KvMemory.allocate(num_blocks * layout.block_bytes)
        data = (
            torch.frombuffer(memory.buffer, dtype=torch.uint8)
            if num_blocks
            else torch.empty(0, dtype=torch.uint8)
        )
        return HostPool(layout, memory), data
    data = torch.zeros((num_blocks, layout.block_bytes), dtype=torch.uint8, device=device)
    return DevicePool(layout, data), data
