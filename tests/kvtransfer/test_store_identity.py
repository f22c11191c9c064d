"""A store serves the KV of one identity only: weights, their dtype, and the way in which both are named."""

from __future__ import annotations

import hashlib
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest
from nvme_harness import NvmeHarness, settings_for
from store_harness import COMPATIBILITY, LEFT, Chain, Replica, StoreHarness, block_bytes

from kvtransfer.messages import CompatibilityRecord
from kvtransfer.store.record import space_id

pytestmark = pytest.mark.slow


@pytest.fixture
async def harness(tmp_path: Path) -> AsyncIterator[StoreHarness]:
    harness = StoreHarness(
        tmp_path, nvme_path=str(tmp_path / "nvme"), nvme_bytes=64 << 20, segment_bytes=4 << 20
    )
    yield harness
    await harness.close()


def _space_of_protocol_5(compatibility: CompatibilityRecord) -> bytes:
    """As stores were named when a model's identity was a sample of its weights, without their dtype."""
    fields = msgspec.structs.asdict(compatibility)
    del fields["protocol"], fields["weight_dtype"]
    return hashlib.sha256(msgspec.msgpack.encode(fields)).digest()[:8]


@pytest.mark.parametrize("is_old", [True, False])
async def test_records_of_the_old_identity_are_not_taken_for_those_of_the_new(
    harness: StoreHarness, tmp_path: Path, is_old: bool
) -> None:
    space = _space_of_protocol_5(COMPATIBILITY) if is_old else space_id(COMPATIBILITY)
    earlier = NvmeHarness(settings_for(tmp_path / "nvme", segment_bytes=4 << 20))
    infos = [earlier.put(key, block_bytes(LEFT), "alice", space) for key in range(1, 5)]
    earlier.tier.close()
    await harness.start()
    await harness.until("nvme", lambda stat: stat.num_records == 4, "the records on NVMe are known")
    reader = await Replica(harness, LEFT).start()
    chain = Chain("alice", tuple(info.id.key for info in infos))
    assert await reader.find(chain) == (() if is_old else ("nvme",) * 4)
    await reader.close()
    await harness.stop()


async def test_kv_of_other_weights_is_other_kv(harness: StoreHarness) -> None:
    await harness.start()
    writer = await Replica(harness).start()
    chain = Chain.of("prompt", 4)
    await writer.put(chain)
    rounded = msgspec.structs.replace(COMPATIBILITY, weight_dtype="bfloat16")
    reader = await Replica(harness, compatibility=rounded).start()
    assert await writer.find(chain) == ("dram",) * 4
    assert await reader.find(chain) == ()
    await writer.close()
    await reader.close()
    await harness.stop()
