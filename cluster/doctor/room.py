"""Whether a replica fits into the memory of its container: the doctor's arithmetic, applied at its start."""

from __future__ import annotations

from cluster.config import ClusterConfig
from cluster.doctor.findings import gb
from cluster.doctor.machine import Machine
from cluster.doctor.needs import BRAIN_BYTES, RANK_BYTES, needs_of
from cluster.errors import ConfigError
from kvtransfer.store.dram.arena import HUGE_PAGE_BYTES


def check_container_memory(config: ClusterConfig, pool_name: str, machine: Machine) -> None:
    """`ConfigError` where the control group of this process has less memory than one replica of the pool, or
    the stage of it that is here, takes beside the node's store. Without a limit nothing is checked.

    What is counted is taken for certain; where it exceeds the limit, the kernel would end a process later,
    when the store or the KV pool fills.
    """
    limit = machine.memory_limit()
    if limit is None:
        return
    needs = needs_of(config)
    need = next(pool for pool in needs.pools if pool.name == pool_name)
    stages = [need.ranks[first : first + need.tp] for first in range(0, len(need.ranks), need.tp)]
    # Stages may be on other nodes, and which one is here is not known yet.
    ranks = (
        need.ranks if len(stages) == 1 else min(stages, key=lambda stage: sum(it.host_bytes for it in stage))
    )
    on_cpu = [rank for rank in ranks if rank.device == "cpu"]
    parts = {
        "store.dram_gb": _store_bytes(config, needs.store_bytes, machine),
        "weights": sum(rank.weight_bytes for rank in on_cpu),
        "engine.kv_tokens": sum(rank.kv_bytes for rank in on_cpu),
        "engine.offload_tokens": sum(rank.offload_bytes for rank in ranks),
        "processes": BRAIN_BYTES + len(ranks) * RANK_BYTES,
    }
    needed = sum(parts.values())
    if needed <= limit[0]:
        return
    largest = max(parts, key=lambda name: parts[name])
    lower = largest if largest in ("store.dram_gb", "engine.kv_tokens", "engine.offload_tokens") else ""
    if largest == "store.dram_gb":
        lower += f" to {max(limit[0] - needed + parts[largest], 0) / 1e9:.1f} at most"
    told = ", ".join(f"{name} {gb(size)}" for name, size in parts.items() if size)
    raise ConfigError(
        f"pools.{pool_name}: a replica takes {gb(needed)} ({told}), and the memory limit of its container is "
        f"{gb(limit[0])}: {f'lower {lower}, or ' if lower else ''}raise the limit, which is "
        f"pools.{pool_name}.resources.memory in the chart"
    )


def _store_bytes(config: ClusterConfig, store_bytes: int, machine: Machine) -> int:
    """Huge pages are no memory of the control group."""
    has_huge = config.store.huge_pages and machine.memory("Hugepagesize") == HUGE_PAGE_BYTES
    num_free = machine.memory("HugePages_Free") or 0
    return 0 if has_huge and num_free * HUGE_PAGE_BYTES >= store_bytes else store_bytes
