"""A replica that does not fit into its container is refused, with the fields that would help."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from doctor_harness import FakeMachine, config_of

from cluster.config import ClusterConfig
from cluster.errors import ConfigError
from cluster.serve.container_memory import check_container_memory
from cluster.serve.machine import Machine
from cluster.serve.resource_needs import ENGINE_CORE_BYTES, needs_of

GIB = 1 << 30


def container(folder: Path, limit_bytes: int | None, **memory: str) -> Machine:
    """A machine with such a control group, and such a /proc/meminfo."""
    files: dict[str, str | None] = (
        {} if limit_bytes is None else {"sys/fs/cgroup/memory.max": f"{limit_bytes}\n"}
    )
    if memory:
        files["proc/meminfo"] = "".join(f"{name}: {value}\n" for name, value in memory.items())
    return FakeMachine(folder, files).view()


def pool(**fields: Any) -> dict[str, Any]:
    return {"name": "decode", "role": "both", **fields}


def test_a_store_beyond_the_pods_memory_is_refused_with_the_field_and_the_remedy(tmp_path: Path) -> None:
    config = config_of(pools=[pool()], store={"dram_gb": 200})
    with pytest.raises(ConfigError) as caught:
        check_container_memory(config, "decode", container(tmp_path, 16 * GIB))
    message = str(caught.value)
    assert message.startswith("pools.decode: a replica takes 200.")
    assert "store.dram_gb 200.0 GB" in message
    assert "the memory limit of its container is 17.2 GB: lower store.dram_gb to 16." in message
    assert message.endswith("raise the limit, which is pools.decode.resources.memory in the chart")


def test_what_fits_exactly_is_taken_and_a_byte_less_is_not(tmp_path: Path) -> None:
    config = config_of(pools=[pool(tp=2, engine={"offload_tokens": 640})], store={"dram_gb": 1})
    (need,) = needs_of(config).pools
    needed = 1_000_000_000 + need.replica_bytes
    check_container_memory(config, "decode", container(tmp_path / "a", needed))
    check_container_memory(config, "decode", container(tmp_path / "b", None))
    with pytest.raises(ConfigError, match=r"engine\.offload_tokens"):
        check_container_memory(config, "decode", container(tmp_path / "c", needed - 1))


def test_stages_may_be_on_other_nodes_and_gpus_have_memory_of_their_own(tmp_path: Path) -> None:
    def least(config: ClusterConfig) -> int:
        """The smallest limit of those that are tried which suffices."""
        for number in range(1, 60):
            machine = container(tmp_path / f"{id(config)}-{number}", number * 100_000_000)
            try:
                check_container_memory(config, "decode", machine)
            except ConfigError:
                continue
            return number * 100_000_000
        raise AssertionError("no limit suffices")

    store = {"dram_gb": 0}
    large = {"kv_tokens": 65_536}
    whole, staged = (least(config_of(pools=[pool(pp=pp, engine=large)], store=store)) for pp in (1, 2))
    (need,) = needs_of(config_of(pools=[pool(pp=2, engine=large)], store=store)).pools
    assert staged >= ENGINE_CORE_BYTES + min(rank.host_bytes for rank in need.ranks)
    assert staged < whole
    assert least(config_of(pools=[pool(device="cuda", engine=large)], store=store)) < whole


def test_huge_pages_are_none_of_the_containers_memory(tmp_path: Path) -> None:
    config = config_of(pools=[pool()], store={"dram_gb": 8})
    with pytest.raises(ConfigError):
        check_container_memory(config, "decode", container(tmp_path / "a", 4 * GIB))
    pages = {"MemTotal": "99 kB", "HugePages_Free": "4096", "Hugepagesize": "2048 kB"}
    check_container_memory(config, "decode", container(tmp_path / "b", 4 * GIB, **pages))
