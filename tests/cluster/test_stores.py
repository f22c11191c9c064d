"""With which settings each node's store starts, and what is refused before anything does."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from serving import TINY
from trust_files import TRUST

from cluster.config import ClusterConfig, parse_config
from cluster.errors import ConfigError
from cluster.identity.config import AuthConfig
from cluster.stores import (
    NodeAddress,
    NvmeFolder,
    check_redis_url,
    check_store,
    draw_life,
    granule_bytes,
    has_password,
    smallest_record_bytes,
    store_name,
    store_settings,
)
from kvtransfer.common.clock import SystemClock
from kvtransfer.common.faults import Faults
from kvtransfer.common.group_shares import GroupShares
from kvtransfer.config import StoreConfig
from kvtransfer.store.messages.records import HEADER_BYTES
from kvtransfer.store.nvme.log import NvmeTier
from workers.model.model_config import read_model_config

NODE = NodeAddress("0123456789abcdef" * 3, "127.0.0.1")


def config(store: dict[str, Any] | None = None, **pool: Any) -> ClusterConfig:
    both = {"name": "b", "role": "both", "dtype": "bf16", "engine": {"block_tokens": 64}, **pool}
    return parse_config({"model": str(TINY), "pools": [both], "store": store or {}}, "test")


@pytest.mark.parametrize(
    ("record", "granule"),
    [
        (1, 4 << 10),
        (8 * (4 << 10), 4 << 10),
        (8 * (64 << 10) - 1, 32 << 10),
        (8 * (64 << 10), 64 << 10),
        (8 * (64 << 10) + 1, 64 << 10),
        (1 << 40, 1 << 20),
    ],
)
def test_a_granule_is_the_largest_power_of_two_within_an_eighth_of_a_record(
    record: int, granule: int
) -> None:
    assert granule_bytes(record) == granule


@pytest.mark.parametrize(
    ("pool", "num_layers", "num_heads"),
    [
        ({}, 6, 4),
        ({"tp": 2}, 6, 2),
        ({"tp": 3}, 6, 1),
        ({"tp": 8}, 6, 1),
        ({"pp": 2}, 3, 4),
        ({"pp": 2, "layers": [5, 1]}, 1, 4),
        ({"pp": 4}, 1, 4),
    ],
)
def test_the_smallest_rank_of_a_pool_has_the_smallest_records(
    pool: dict[str, Any], num_layers: int, num_heads: int
) -> None:
    model = read_model_config(TINY)
    assert (model.num_layers, model.num_kv_heads) == (6, 4)
    values = 2 * num_layers * num_heads * 64 * model.head_dim
    made = config(**pool)
    assert smallest_record_bytes(made.pools, made.model_path) == HEADER_BYTES + 2 * values


def test_the_smallest_pool_counts() -> None:
    engine = {"block_tokens": 16}
    pools = [
        {"name": "p", "role": "prefill", "engine": engine},
        {"name": "d", "role": "decode", "tp": 4, "engine": engine},
    ]
    made = parse_config({"model": str(TINY), "pools": pools}, "test")
    alone = parse_config({"model": str(TINY), "pools": pools[1:]}, "test")
    assert smallest_record_bytes(made.pools, TINY) == smallest_record_bytes(alone.pools, TINY)


def test_settings_are_what_the_file_says_in_bytes_and_seconds(tmp_path: Path) -> None:
    store = {
        "dram_gb": 2.5,
        "nvme_path": str(tmp_path),
        "nvme_gb": 4,
        "segment_mb": 64,
        "redis_url": "redis://r",
        "lookup_budget_ms": 5,
        "admission": "all",
    }
    tenants = {"*": {"dram_share": 0.5}, "a": {"nvme_share": 0.25, "sharing_group": "g"}}
    auth = AuthConfig.model_validate({"tenants": tenants})
    made = config(store).model_copy(update={"app": "a", "auth": auth})
    settings = store_settings(made, TRUST, NODE, "life", 7, tmp_path / "own")
    assert (settings.node_id, settings.epoch) == (NODE.node_id[:12], 7)
    assert settings.name == store_name("a", "life", NODE.node_id) == "tandem-store-a-life-0123456789ab"
    assert settings.dram_bytes % (2 << 20) == 0
    assert 0 <= 2_500_000_000 - settings.dram_bytes < 2 << 20
    assert settings.nvme_bytes == 4_000_000_000
    assert (settings.nvme_path, settings.segment_bytes) == (str(tmp_path / "own"), 64 << 20)
    assert settings.admission == "all"
    assert settings.dram_shares == GroupShares(0.5, {"g": 1.0})
    assert settings.nvme_shares == GroupShares(1.0, {"g": 0.25})
    assert settings.lookup_budget_s == pytest.approx(0.005)
    assert (settings.redis_url, settings.host) == ("redis://r", "127.0.0.1")
    assert "cuda_ipc" not in settings.transports
    assert {"shm", "tcp"} <= set(settings.transports)


def test_without_a_folder_or_an_index_there_is_none() -> None:
    settings = store_settings(config({"redis_url": "redis://r", "index": False}), TRUST, NODE, "l", 1, None)
    assert (settings.nvme_path, settings.nvme_bytes, settings.redis_url) == ("", 0, "")


def test_the_lives_of_an_application_have_names_of_their_own() -> None:
    assert draw_life() != draw_life()


@pytest.mark.parametrize(
    ("store", "message"),
    [
        ({"dram_gb": 3}, "store.dram_gb: 3 is more than the memory of this host, 2.0; use less, or 0 for"),
        (
            {"nvme_path": "/dev/null/kv", "nvme_gb": 1},
            "store.nvme_path: .*/dev/null.*name a folder on a local",
        ),
    ],
)
def test_what_this_host_cannot_do_is_refused_with_a_remedy(store: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_store(StoreConfig.model_validate(store), memory_bytes=2 * 10**9)


def test_the_folder_is_made(tmp_path: Path) -> None:
    wanted = tmp_path / "a" / "b"
    check_store(StoreConfig(nvme_path=wanted, nvme_gb=1), memory_bytes=2 * 10**9)
    assert wanted.is_dir()


def test_a_url_that_no_client_knows_is_refused_without_showing_it() -> None:
    with pytest.raises(ConfigError, match=re.escape("store.redis_url")) as refused:
        check_redis_url(StoreConfig(redis_url="http://user:secret@host"))
    assert "secret" not in str(refused.value)
    for url in ("", "redis://h:1/0", "rediss://u:p@h", "unix:///run/redis"):
        check_redis_url(StoreConfig(redis_url=url))


def test_an_authority_is_for_a_server_with_tls_and_a_password_for_a_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"store\.redis_ca_file: is for a server with TLS"):
        check_redis_url(StoreConfig(redis_url="redis://h", redis_ca_file=tmp_path / "ca"))
    check_redis_url(StoreConfig(redis_url="rediss://h", redis_ca_file=tmp_path / "ca"))
    urls = (
        "redis://h",
        "redis://user@h",
        "redis://:p@h",
        "rediss://h?password=p",
        "rediss://h?ssl_password=p",
    )
    assert [has_password(url) for url in urls] == [False, False, True, True, True]


def test_stores_of_one_host_have_folders_of_their_own_and_find_them_again(tmp_path: Path) -> None:
    first, second = NvmeFolder(tmp_path, "h", "a"), NvmeFolder(tmp_path, "h", "a")
    other = NvmeFolder(tmp_path, "h", "b")
    assert len({first.path, second.path, other.path}) == 3
    first.close()
    again, third = NvmeFolder(tmp_path, "h", "a"), NvmeFolder(tmp_path, "h", "a")
    assert again.path == first.path
    assert third.path not in (first.path, second.path)
    for folder in (second, other, again, third):
        folder.close()


def test_a_store_and_its_nvme_tier_lock_different_files(tmp_path: Path) -> None:
    folder = NvmeFolder(tmp_path, "h", "a")
    made = config({"nvme_path": str(tmp_path), "nvme_gb": 1})
    settings = store_settings(made, TRUST, NODE, "l", 1, folder.path)
    tier = NvmeTier(settings, SystemClock(), Faults())
    assert tier.open() == []
    tier.close()
    folder.close()


def test_where_nothing_can_be_locked_the_first_folder_is_named(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.touch()
    folder = NvmeFolder(blocked, "h", "a")
    assert folder.path == blocked / "h-a-0"
    folder.close()
