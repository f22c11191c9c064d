"""What the configured pools take of a machine: memory of each rank, open files, and whether a container has
it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from cluster.config import ClusterConfig, PoolConfig
from cluster.dtypes import resolve_dtype
from cluster.errors import ConfigError
from cluster.serve.machine import Machine
from kvtransfer.blocks.layout import BlockLayout
from kvtransfer.blocks.pool import mapping_bytes
from kvtransfer.messages import ITEM_BYTES, Shard
from kvtransfer.store.dram.arena import HUGE_PAGE_BYTES
from kvtransfer.store.nvme.segments import MAX_IDLE_FILES
from workers.model.model_config import ModelConfig, read_header, read_model_config, weight_files
from workers.model.sizes import kv_heads, part

# Of a rank's process beside weights and KV: torch, its kernels, and the activations of one step.
RANK_BYTES = 350_000_000
# Of a replica's engine core, or of a gateway.
ENGINE_CORE_BYTES = 150_000_000
# Of a Ray node with Serve, and of what it starts in advance.
RAY_BYTES = 1_000_000_000
# That any process of ours has open: libraries, logs, Ray's connections.
FILES_OF_A_PROCESS = 256


class RankNeed(NamedTuple):
    """Represents the memory of one rank. `offload_bytes` are in host memory whatever the device."""

    device: str
    weight_bytes: int
    kv_bytes: int
    offload_bytes: int

    @property
    def device_bytes(self) -> int:
        return self.weight_bytes + self.kv_bytes

    @property
    def host_bytes(self) -> int:
        on_host = self.device_bytes if self.device == "cpu" else 0
        return RANK_BYTES + on_host + self.offload_bytes


class PoolNeed(NamedTuple):
    """Represents what one pool takes. `ranks` are those of each replica, stage by stage."""

    name: str
    num_replicas: int
    ranks: tuple[RankNeed, ...]
    num_threads: int
    tp: int

    @property
    def replica_bytes(self) -> int:
        """Host memory of one replica."""
        return ENGINE_CORE_BYTES + _host_bytes(self.ranks)

    @property
    def stages(self) -> list[tuple[RankNeed, ...]]:
        """The ranks of each stage, which share a node, the smallest stage first."""
        stages = [self.ranks[first : first + self.tp] for first in range(0, len(self.ranks), self.tp)]
        return sorted(stages, key=_host_bytes)

    @property
    def stage_bytes(self) -> int:
        """Host memory of the largest stage."""
        return _host_bytes(self.stages[-1])


class Needs(NamedTuple):
    """Represents what the whole configuration takes."""

    pools: tuple[PoolNeed, ...]
    # Of one node.
    store_bytes: int
    num_gateways: int
    # Of the process that opens most.
    open_files: int

    @property
    def host_bytes(self) -> int:
        """Host memory if all of it ran on one machine."""
        replicas = sum(pool.num_replicas * pool.replica_bytes for pool in self.pools)
        return RAY_BYTES + self.store_bytes + self.num_gateways * ENGINE_CORE_BYTES + replicas

    @property
    def num_threads(self) -> int:
        """Threads of all ranks on CPUs, which compute at once."""
        return sum(
            pool.num_replicas * pool.num_threads
            for pool in self.pools
            for rank in pool.ranks
            if rank.device == "cpu"
        )


def needs_of(config: ClusterConfig) -> Needs:
    """Return what the configuration takes; `CheckpointError` where the model folder cannot be read."""
    model = read_model_config(config.model)
    num_weights = count_weights(config.model)
    return Needs(
        pools=tuple(_pool_need(pool, config, model, num_weights) for pool in config.pools),
        store_bytes=round(config.store.dram_gb * 1e9),
        num_gateways=config.gateway.replicas,
        open_files=_open_files(config),
    )


def count_weights(model_dir: Path) -> int:
    """Return the number of parameters of the checkpoint, from the headers of its files."""
    num_weights = 0
    for file in weight_files(model_dir):
        _, header = read_header(file)
        shapes = (entry["shape"] for name, entry in header.items() if name != "__metadata__")
        num_weights += sum(math.prod(shape) for shape in shapes)
    return num_weights


def stage_layers(pool: PoolConfig, num_layers: int) -> Sequence[int]:
    """Return the layers of each stage; equal shares where none are configured (the real ones are
    measured)."""
    return pool.layers or [len(part(num_layers, stage, pool.pp)) for stage in range(pool.pp)]


def _host_bytes(ranks: Sequence[RankNeed]) -> int:
    return sum(rank.host_bytes for rank in ranks)


def _pool_need(pool: PoolConfig, config: ClusterConfig, model: ModelConfig, num_weights: int) -> PoolNeed:
    item_bytes = ITEM_BYTES[resolve_dtype(config.pools, config.model)]
    ranks: list[RankNeed] = []
    for stage, num_layers in enumerate(stage_layers(pool, model.num_layers)):
        share = num_layers / model.num_layers / pool.tp
        for tp_rank in range(pool.tp):
            shard = Shard(0, num_layers, 0, len(kv_heads(model.num_kv_heads, tp_rank, pool.tp)))
            layout = BlockLayout(shard, model.head_dim, pool.engine.block_tokens, item_bytes)
            num_blocks = pool.engine.kv_tokens // pool.engine.block_tokens
            num_offloaded = pool.engine.offload_tokens // pool.engine.block_tokens
            ranks.append(
                RankNeed(
                    device=pool.stage_devices[stage],
                    weight_bytes=round(num_weights * item_bytes * share),
                    kv_bytes=mapping_bytes(num_blocks * layout.block_bytes),
                    offload_bytes=num_offloaded * layout.block_bytes,
                )
            )
    return PoolNeed(pool.name, pool.replicas, tuple(ranks), pool.engine.num_threads, pool.tp)


def _open_files(config: ClusterConfig) -> int:
    num_replicas = sum(pool.replicas for pool in config.pools)
    num_ranks = sum(pool.replicas * pool.num_ranks for pool in config.pools)
    of_gateway = config.gateway.max_requests + 2 * num_replicas
    of_rank = 2 * config.transfer.tcp_streams * num_ranks + 2 * num_replicas
    of_store = MAX_IDLE_FILES + 2 * num_ranks if config.store.dram_gb else 0
    return FILES_OF_A_PROCESS + max(of_gateway, of_rank, of_store)


# ----------------------------------------------------------------------------------------------
# Whether a replica fits into the memory of its container, checked when it starts.


def check_container_memory(config: ClusterConfig, pool_name: str, machine: Machine) -> None:
    """Raise `ConfigError` where the control group of this process has less memory than one replica of the
    pool, or its smallest stage, takes beside the node's store. Without a limit nothing is checked.

    Only what is certainly taken is counted; where it exceeds the limit, the kernel would end a process later,
    when the store or the KV pool fills.
    """
    limit = machine.memory_limit()
    if limit is None:
        return
    needs = needs_of(config)
    need = next(pool for pool in needs.pools if pool.name == pool_name)
    ranks = need.stages[0]  # others may be on other nodes, and which one is here is not known yet
    on_cpu = [rank for rank in ranks if rank.device == "cpu"]
    parts = {
        "store.dram_gb": 0 if huge_pages_suffice(config, needs, machine) else needs.store_bytes,
        "weights": sum(rank.weight_bytes for rank in on_cpu),
        "engine.kv_tokens": sum(rank.kv_bytes for rank in on_cpu),
        "engine.offload_tokens": sum(rank.offload_bytes for rank in ranks),
        "processes": ENGINE_CORE_BYTES + len(ranks) * RANK_BYTES,
    }
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


def huge_pages_suffice(config: ClusterConfig, needs: Needs, machine: Machine) -> bool:
    """Whether the store takes huge pages alone: these are neither free memory nor part of a control group."""
    has_huge = config.store.huge_pages and machine.memory("Hugepagesize") == HUGE_PAGE_BYTES
    return has_huge and (machine.memory("HugePages_Free") or 0) * HUGE_PAGE_BYTES >= needs.store_bytes


def gb(num_bytes: float) -> str:
    """Return `1.5 GB` (1e9 bytes); small amounts in MB."""
    return f"{num_bytes / 1e9:.1f} GB" if num_bytes >= 1e9 else f"{num_bytes / 1e6:.1f} MB"
