"""Check when a replica starts that it fits into the memory of its container."""

from __future__ import annotations

from collections.abc import Sequence

from cluster.config import ClusterConfig
from cluster.errors import ConfigError
from cluster.serve.machine import Machine
from cluster.serve.resource_needs import ENGINE_CORE_BYTES, ClusterNeed, RankNeed, gb, needs_of
from kvtransfer.store.dram.arena import HUGE_PAGE_BYTES
from workers.model.rank_memory import PROCESS_BYTES


def check_container_memory(config: ClusterConfig, pool_name: str, machine: Machine) -> None:
    """Raise `ConfigError` where the control group of this process has less memory than one replica of the
    pool, or its smallest stage, takes in addition to the node's store. Without a limit nothing is checked.

    Only what is certainly taken is counted; where it exceeds the limit, the kernel would end a process later,
    when the store or the KV pool fills.
    """
    limit = machine.memory_limit()
    if limit is None:
        return
    needs = needs_of(config)
    ranks = needs.of(pool_name).stages[0]  # others may be on other nodes; which one is here is not known yet
    parts = host_parts(ranks, 0 if huge_pages_suffice(config, needs, machine) else needs.store_bytes)
    needed = sum(parts.values())
    if needed <= limit[0]:
        return
    largest = max(parts, key=lambda name: parts[name])
    lower = largest if largest in ("store.dram_gb", "engine.kv_tokens", "engine.offload_tokens") else ""
    if largest == "store.dram_gb":
        lower += f" to {max(limit[0] - needed + parts[largest], 0) / 1e9:.1f} at most"
    listed = ", ".join(f"{name} {gb(size)}" for name, size in parts.items() if size)
    raise ConfigError(
        f"pools.{pool_name}: a replica takes {gb(needed)} ({listed}), and the memory limit of its container "
        f"is {gb(limit[0])}: {f'lower {lower}, or ' if lower else ''}raise the limit, which is "
        f"pools.{pool_name}.resources.memory in the chart"
    )


def host_parts(ranks: Sequence[RankNeed], store_bytes: int) -> dict[str, int]:
    """Return by field, or by name, the host memory of a replica of these ranks and of its node's store."""
    on_cpu = [rank for rank in ranks if rank.device == "cpu"]
    return {
        "store.dram_gb": store_bytes,
        "weights": sum(rank.weight_bytes for rank in on_cpu),
        "engine.kv_tokens": sum(rank.kv_bytes for rank in on_cpu),
        "engine.expert_offload": sum(rank.expert_bytes for rank in ranks),
        "engine.offload_tokens": sum(rank.offload_bytes for rank in ranks),
        "activations": sum(rank.activation_bytes for rank in on_cpu),
        "processes": ENGINE_CORE_BYTES + len(ranks) * PROCESS_BYTES,
    }


def huge_pages_suffice(config: ClusterConfig, needs: ClusterNeed, machine: Machine) -> bool:
    """Whether the store takes huge pages alone: these are neither free memory nor part of a control group."""
    has_huge = config.store.huge_pages and machine.memory("Hugepagesize") == HUGE_PAGE_BYTES
    return has_huge and (machine.memory("HugePages_Free") or 0) * HUGE_PAGE_BYTES >= needs.store_bytes
