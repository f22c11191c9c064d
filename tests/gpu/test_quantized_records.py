"""KV of a device that the store keeps in 8 bits: its records are those of the same KV on a CPU."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kvtransfer.blocks.layout import BlockLayout
from kvtransfer.blocks.runs import ByteRegion
from kvtransfer.messages import Shard
from workers.model.kv_form import ScaledParts
from workers.rank.quantized_records import QuantizedRecords

SHARD = Shard(0, 3, 0, 4)
NUM_BLOCKS = 5


@pytest.mark.parametrize("kv_dtype", ["int8", "fp8"])
@pytest.mark.parametrize("parts", [(128,), (48, 16)], ids=["one scale", "two scales"])
def test_records_and_blocks_are_those_of_a_cpu(
    device: torch.device, parts: tuple[int, ...], kv_dtype: str
) -> None:
    """A block that came back is widened from the record of another, too."""
    layout = BlockLayout(SHARD, sum(parts), 16, 2)
    generator = torch.Generator().manual_seed(3)
    drawn = torch.randn((NUM_BLOCKS, 3, 2, 4, 16, sum(parts)), generator=generator).to(torch.bfloat16)
    every, found = list(range(NUM_BLOCKS)), []
    for place in (device, torch.device("cpu")):
        kv = drawn.clone().to(place)
        pool = QuantizedRecords(layout, kv, ScaledParts(kv_dtype, parts))
        memory = np.zeros(NUM_BLOCKS * pool.layout.block_bytes, dtype=np.uint8)
        region, offsets = ByteRegion(memory.data), range(0, len(memory), pool.layout.block_bytes)
        pool.attach(region)
        sums = pool.store(every, region, list(offsets))
        assert pool.load(every[::-1], Shard(1, 3, 1, 4), region, list(offsets), SHARD) == sums
        pool.detach(region)
        found.append((memory.tobytes(), sums, kv.cpu()))
        pool.close()
    assert found[0][:2] == found[1][:2]
    assert torch.equal(found[0][2], found[1][2])
