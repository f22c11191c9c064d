"""What the configured pools take of a machine: memory of each rank, open files of a process."""

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

# Of a rank's process beside weights and KV: torch, its kernels, and room for one step.
RANK_BYTES = 350_000_000
# Of a replica's brain, or of a gateway.
BRAIN_BYTES = 150_000_000
# Of a Ray node with Serve, and of what it starts in advance.
RAY_BYTES = 1_000_000_000
# That any process of ours has open: libraries, logs, Ray's connections.
FILES_OF_A_PROCESS = 256


class RankNeed(NamedTuple):
    """Of one rank. `offload_bytes` are in host memory whatever the device."""

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
    """Of one pool: its ranks are those of each replica, stage by stage."""

    name: str
    num_replicas: int
    ranks: tuple[RankNeed, ...]
    num_threads: int
    tp: int

    @property
    def replica_bytes(self) -> int:
        """Host memory of one replica."""
        return BRAIN_BYTES + sum(rank.host_bytes for rank in self.ranks)

    @property
    def stage_bytes(self) -> int:
        """Host memory of the largest stage, whose ranks share a node."""
        stages = [self.ranks[first : first + self.tp] for first in range(0, len(self.ranks), self.tp)]
        return max(sum(rank.host_bytes for rank in stage) for stage in stages)


class Needs(NamedTuple):
    """Of everything that the configuration asks for."""

    pools: tuple[PoolNeed, ...]
    # Of one node.
    store_bytes: int
    num_gateways: int
    # Of the process that opens most.
    open_files: int

    @property
    def host_bytes(self) -> int:
        """If all of it ran on one machine."""
        replicas = sum(pool.num_replicas * pool.replica_bytes for pool in self.pools)
        return RAY_BYTES + self.store_bytes + self.num_gateways * BRAIN_BYTES + replicas

    @property
    def num_threads(self) -> int:
        """Of all ranks of the CPU, which compute at once."""
        return sum(
            pool.num_replicas * pool.num_threads
            for pool in self.pools
            for rank in pool.ranks
            if rank.device == "cpu"
        )


def needs_of(config: ClusterConfig) -> Needs:
    """`CheckpointError` where the model folder cannot be read."""
    model = read_model_config(config.model)
    num_weights = count_weights(config.model)
    return Needs(
        pools=tuple(_pool_need(pool, config, model, num_weights) for pool in config.pools),
        store_bytes=round(config.store.dram_gb * 1e9),
        num_gateways=config.gateway.replicas,
        open_files=_open_files(config),
    )


def count_weights(model_dir: Path) -> int:
    """Parameters of the checkpoint, from the headers of its files."""
    num_weights = 0
    for file in weight_files(model_dir):
        _, header = read_header(file)
        shapes = (entry["shape"] for name, entry in header.items() if name != "__metadata__")
        num_weights += sum(math.prod(shape) for shape in shapes)
    return num_weights


def stage_layers(pool: PoolConfig, num_layers: int) -> Sequence[int]:
    """Layers of each stage, where they are not configured in equal shares: the real ones are measured."""
    return pool.layers or [len(part(num_layers, stage, pool.pp)) for stage in range(pool.pp)]


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
# Whether a replica fits into the memory of its container: the doctor's arithmetic, applied at its start.


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


def gb(num_bytes: float) -> str:
    """`1.5 GB`, of 1e9 bytes; small ones in MB."""
    return f"{num_bytes / 1e9:.1f} GB" if num_bytes >= 1e9 else f"{num_bytes / 1e6:.1f} MB"
