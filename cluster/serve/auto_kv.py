"""Decide the KV of each replica where `kv_tokens` is `auto`: the memory that this machine has left for it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from cluster.config import ClusterConfig
from cluster.errors import ConfigError
from cluster.serve.capacity import ENGINE_CORE_CPUS, bundles
from cluster.serve.container_memory import check_container_memory, host_parts, huge_pages_suffice
from cluster.serve.machine import Machine
from cluster.serve.resource_needs import (
    ENGINE_CORE_BYTES,
    RAY_BYTES,
    ClusterNeed,
    PoolNeed,
    gb,
    needs_of,
    step_sizes,
)
from cluster.served_model import described_model
from kvtransfer.blocks.host_memory import ALIGNMENT_BYTES, mapping_bytes
from workers.config import EngineConfig
from workers.model.kv_division import KvDemand, divide_kv
from workers.model.model_config import ModelConfig, read_model_config
from workers.model.rank_memory import least_kv_tokens, most_useful_kv_tokens

# Tokens where `kv_tokens` is `auto` and the machine does not report its memory.
_UNKNOWN_KV_TOKENS = 16384


class NodeResources(NamedTuple):
    """Represents a Ray node: all that it has by resource, and the CPUs per rank of each pool."""

    total: Mapping[str, float]
    cpus: Mapping[str, float]


class HostMemory(NamedTuple):
    """Represents the memory of this process's control group, or of the machine where that has less."""

    total_bytes: int
    free_bytes: int
    source: str


def planned_needs(
    config: ClusterConfig,
    machine: Machine,
    node: NodeResources | None = None,
    *,
    is_running: bool = False,
) -> ClusterNeed:
    """Return the needs of the configuration on this machine, as `needs_of` does, with the KV that the machine
    has for each replica.

    `node` is the machine as a Ray node; None: all replicas may be here. While the cluster `is_running`, what
    is free now is ignored.
    """
    needs, model = needs_of(config), read_model_config(described_model(config))
    return needs._replace(pools=_with_auto_kv(needs, config, model, machine, node, is_running))


def engine_config(
    config: ClusterConfig, pool_name: str, machine: Machine, node: NodeResources | None = None
) -> EngineConfig:
    """Return the engine's settings for a replica of the pool on this machine, all sizes decided.

    Raises `ConfigError`, with the field and the remedy, where the memory does not suffice. Where the pool is
    on GPUs and its `kv_tokens` is `auto`, the result has the most that is of use: its ranks find out what
    their devices have left.
    """
    pool = next(pool for pool in config.pools if pool.name == pool_name)
    engine, model = pool.engine, read_model_config(described_model(config))
    sizes = step_sizes(pool, config, model)
    if engine.kv_tokens != "auto":
        check_container_memory(config, pool_name, machine)
        return engine.decided(engine.kv_tokens, sizes)
    if "cpu" not in pool.stage_devices:
        check_container_memory(config, pool_name, machine)
        return engine.decided(most_useful_kv_tokens(model, sizes.max_sequences), sizes)
    needs = planned_needs(config, machine, node)
    need = needs.of(pool_name)
    least = least_kv_tokens(model, engine.block_tokens)
    if need.kv_tokens < least:
        store = 0 if huge_pages_suffice(config, needs, machine) else needs.store_bytes
        parts = host_parts(need.ranks, store)
        parts.pop("engine.kv_tokens")
        listed = ", ".join(f"{name} {gb(size)}" for name, size in parts.items() if size)
        raise ConfigError(
            f"pools.{pool_name}.engine.kv_tokens: auto leaves space for {need.kv_tokens} tokens, "
            f"and a replica needs {least} at least ({need.kv_reason}; beside KV a replica takes: {listed}). "
            "Lower store.dram_gb, replicas or max_sequences, set surge: false, raise the memory limit "
            f"(pools.{pool_name}.resources.memory in the chart), or name kv_tokens"
        )
    return engine.decided(need.kv_tokens, sizes)


def host_memory(machine: Machine) -> HostMemory | None:
    """Return the memory that processes here can have; None where the machine does not report it."""
    total, free = machine.memory("MemTotal"), machine.memory("MemAvailable")
    of_machine = None if total is None or free is None else HostMemory(total, free, "memory")
    group = machine.memory_limit()
    if group is None:
        return of_machine
    limit, used = group
    source = f"the control group's limit of {gb(limit)}"
    if of_machine is None:
        return HostMemory(limit, max(limit - used, 0), source)
    free_bytes = min(max(limit - used, 0), of_machine.free_bytes)
    if limit < of_machine.total_bytes:
        return HostMemory(limit, free_bytes, source)
    return of_machine._replace(free_bytes=free_bytes)


def most_replicas_here(config: ClusterConfig, node: NodeResources | None) -> dict[str, int]:
    """Return how many replicas of each pool this node may have to hold at a time: all, one more where an
    update starts it before another leaves, and those that the autoscaler may add; but no more than the node
    has resources for."""
    counts = {}
    for pool in config.pools:
        limits = config.scaling.pools.get(pool.name) if config.scaling.autoscale else None
        most = max(pool.replicas, limits.max if limits else 1) + pool.surge
        if node is not None:
            asked: dict[str, float] = {}
            for bundle in bundles(pool, node.cpus[pool.name]):
                for name, amount in bundle.items():
                    asked[name] = asked.get(name, 0.0) + amount
            fitting = (node.total.get(name, 0.0) / amount for name, amount in asked.items() if amount)
            most = min(most, int(min(fitting, default=most) + 1e-6))
        counts[pool.name] = most
    return counts


def _with_auto_kv(
    needs: ClusterNeed,
    config: ClusterConfig,
    model: ModelConfig,
    machine: Machine,
    node: NodeResources | None,
    is_running: bool,
) -> tuple[PoolNeed, ...]:
    """Return the pools with their KV where it is `auto` and in host memory."""
    memory = host_memory(machine)
    huge_pages = huge_pages_suffice(config, needs, machine)
    of_node = RAY_BYTES + needs.num_gateways * ENGINE_CORE_BYTES + (0 if huge_pages else needs.store_bytes)
    shares = _kv_bytes(needs, config, model, memory, of_node, node) if memory else {}
    planned = []
    for pool, need in zip(config.pools, needs.pools, strict=True):
        engine = pool.engine
        most = most_useful_kv_tokens(model, need.max_sequences)
        if engine.kv_tokens != "auto":
            planned.append(need)
        elif not need.has_host_kv:
            planned.append(need._replace(kv_reason="what each GPU has left"))
        elif memory is None:
            planned.append(need.with_kv(min(most, _UNKNOWN_KV_TOKENS), "the memory here is unknown"))
        else:
            bounds = [(shares[pool.name], _divided(config, node, memory, engine.memory_share))]
            if not is_running:
                left = round(engine.memory_share * memory.free_bytes) - _fixed_bytes(need)
                bounds.append((left, f"{gb(memory.free_bytes)} are free here now"))
            num_bytes, reason = min(bounds)
            if num_bytes >= (most_bytes := need.host_kv_bytes(most)):
                num_bytes, reason = most_bytes, "all that max_sequences contexts can use"
            planned.append(need.with_kv(need.fitting_kv_tokens(num_bytes), reason))
    return tuple(planned)


def _kv_bytes(
    needs: ClusterNeed,
    config: ClusterConfig,
    model: ModelConfig,
    memory: HostMemory,
    of_node: int,
    node: NodeResources | None,
) -> dict[str, int]:
    """Return the memory for KV in each replica of the pools where it is `auto`.

    Where all replicas that there may be fit on this node by their CPUs, all are counted, and what is left is
    divided among them. Otherwise each has a share of the memory equal to its share of the node's CPUs, which
    is safe whichever of them are placed here.
    """
    counts = most_replicas_here(config, node)
    cpu_shares = None if node is None else _cpu_shares(config, node)
    if cpu_shares is not None and sum(counts[name] * share for name, share in cpu_shares.items()) > 1 + 1e-6:
        return {
            pool.name: round(
                (pool.engine.memory_share * memory.total_bytes - of_node) * min(cpu_shares[pool.name], 1.0)
            )
            - _fixed_bytes(need)
            for pool, need in zip(config.pools, needs.pools, strict=True)
        }
    share = min(pool.engine.memory_share for pool in config.pools)
    left = round(share * memory.total_bytes) - of_node
    name_to_wish: dict[str, KvDemand] = {}
    for pool, need in zip(config.pools, needs.pools, strict=True):
        is_auto = pool.engine.kv_tokens == "auto" and need.has_host_kv
        left -= counts[pool.name] * (_fixed_bytes(need) if is_auto else need.replica_bytes)
        if is_auto:
            most = most_useful_kv_tokens(model, need.max_sequences)
            name_to_wish[pool.name] = KvDemand(counts[pool.name], need.host_kv_bytes(most))
    return dict(zip(name_to_wish, divide_kv(left, list(name_to_wish.values())), strict=True))


def _cpu_shares(config: ClusterConfig, node: NodeResources) -> dict[str, float]:
    """Return the share of the node's CPUs that a replica of each pool requests."""
    num_cpus = max(node.total.get("CPU", 0.0), 1e-9)
    return {
        pool.name: (ENGINE_CORE_CPUS + pool.num_ranks * node.cpus[pool.name]) / num_cpus
        for pool in config.pools
    }


def _fixed_bytes(need: PoolNeed) -> int:
    """Return the host memory of a replica without its KV, the rounding of the pools' mappings included."""
    on_cpu = [rank for rank in need.ranks if rank.device == "cpu"]
    kv = sum(rank.kv_bytes for rank in on_cpu)
    return need.replica_bytes - kv + len(on_cpu) * (mapping_bytes(0) + ALIGNMENT_BYTES)


def _divided(
    config: ClusterConfig, node: NodeResources | None, memory: HostMemory, memory_share: float
) -> str:
    counts = most_replicas_here(config, node)
    listed = ", ".join(f"{count} of {name}" for name, count in counts.items() if count)
    return f"{memory_share:.0%} of {gb(memory.total_bytes)} of {memory.source}, for up to {listed}"
