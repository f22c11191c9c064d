"""`store.kv_dtype`: what it is refused beside, and the size of records that follows from it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from doctor_harness import FakeMachine, config_of, context_of

from benchmarks.random_checkpoint import write_random_checkpoint
from cluster.config import ClusterConfig
from cluster.doctor.redis import index_bytes
from cluster.errors import ConfigError
from cluster.serve.resource_needs import needs_of
from cluster.serve.rollout import check_update
from cluster.stores import smallest_record_bytes
from kvtransfer.store.record import HEADER_BYTES


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    sizes: dict[str, Any] = {
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 128,
    }
    write_random_checkpoint(tmp_path / "model", "llama", seed=1, **sizes)
    return tmp_path / "model"


def config_with(folder: Path, in_store: str, **engine: Any) -> ClusterConfig:
    settings = {"kv_tokens": 4096, "block_tokens": 32, **engine}
    pools = [{"name": "one", "role": "both", "dtype": "bf16", "engine": settings}]
    return config_of(folder, pools, store={"dram_gb": 1, "kv_dtype": in_store})


def test_kv_is_not_rounded_twice(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"store\.kv_dtype: fp8 does not fit pool one, .*kv_dtype int8"):
        config_with(folder, "fp8", kv_dtype="int8")
    with pytest.raises(ConfigError, match=r"store\.kv_dtype: .*'auto', 'int8' or 'fp8'"):
        config_with(folder, "int4")


def test_deterministic_pools_keep_kv_as_it_is(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"store\.kv_dtype: int8 does not fit pool one, .*deterministic"):
        config_with(folder, "int8", deterministic=True)
    config_with(folder, "auto", deterministic=True)
    config_with(folder, "int8", deterministic=True, kv_dtype="int8")  # it is what the device has


def test_an_update_cannot_change_it(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"^store\.kv_dtype: an update does not restart stores"):
        check_update(config_with(folder, "auto"), config_with(folder, "int8"))


@pytest.mark.parametrize("kv_dtype", ["int8", "fp8"])
def test_records_get_smaller_and_blocks_do_not(tmp_path: Path, folder: Path, kv_dtype: str) -> None:
    small, whole = config_with(folder, kv_dtype), config_with(folder, "auto")
    sizes = [smallest_record_bytes(it.pools, folder, it.store.kv_dtype) for it in (small, whole)]
    assert sizes[0] == HEADER_BYTES + 32 * 2 * 3 * 2 * (128 + 4)
    assert (sizes[0] - HEADER_BYTES) / (sizes[1] - HEADER_BYTES) == pytest.approx(0.516, abs=1e-3)
    on_device = [needs_of(it).pools[0].ranks[0].block_bytes.block_bytes for it in (small, whole)]
    assert on_device[0] == on_device[1]
    # More records fit, so the index of a full node is larger.
    machine = FakeMachine(tmp_path / "machine").view()
    of_index = [index_bytes(context_of(machine, it)) for it in (small, whole)]
    assert of_index[0] / of_index[1] == pytest.approx(sizes[1] / sizes[0], rel=1e-2)


def test_a_device_in_the_same_dtype_needs_no_other_records(folder: Path) -> None:
    made = config_with(folder, "int8", kv_dtype="int8")
    alone = config_with(folder, "auto", kv_dtype="int8")
    assert smallest_record_bytes(made.pools, folder, "int8") == smallest_record_bytes(alone.pools, folder)
