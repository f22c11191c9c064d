"""The resources of a machine that the configured pools take: memory of each rank, KV where `kv_tokens` is
`auto`, open files, and whether a container has the memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from cluster.config import ClusterConfig, PoolConfig
from cluster.dtypes import resolve_dtype
from cluster.errors import ConfigError
from cluster.serve.capacity import ENGINE_CORE_CPUS, bundles
from cluster.serve.machine import Machine
from cluster.served_model import described_model, read_checkpoint
from kvtransfer.blocks.host_memory import ALIGNMENT_BYTES, mapping_bytes
from kvtransfer.blocks.layout import BlockLayout
from kvtransfer.messages import ITEM_BYTES, Shard
from kvtransfer.store.dram.arena import HUGE_PAGE_BYTES
from kvtransfer.store.nvme.segments import MAX_IDLE_FILES
from workers.config import EngineConfig
from workers.model.model_config import ModelConfig, read_model_config
from workers.model.rank_memory import (
    CUDA_CONTEXT_BYTES,
    PROCESS_BYTES,
    Checkpoint,
    KvDemand,
    RankShape,
    activation_bytes,
    divide_kv,
    least_kv_tokens,
    most_useful_kv_tokens,
    whole_blocks,
)
from workers.model.sizes import part

# The memory of a replica's engine core, or of a gateway.
ENGINE_CORE_BYTES = 150_000_000
# The memory of a Ray node with Serve, and of the processes that it starts in advance.
RAY_BYTES = 1_000_000_000
# The files that any process of ours has open: libraries, logs, Ray's connections.
FILES_OF_A_PROCESS = 256
# Tokens where `kv_tokens` is `auto` and the machine does not report its memory.
_UNKNOWN_KV_TOKENS = 16384


class RankNeed(NamedTuple):
    """Represents the memory of one rank. `offload_bytes` are in host memory whatever the device.
    `kv_token_bytes` is the KV of one token."""

    device: str
    weight_bytes: int
    activation_bytes: int
    kv_bytes: int
    offload_bytes: int
    kv_token_bytes: int

    @property
    def device_bytes(self) -> int:
        context = CUDA_CONTEXT_BYTES if self.device == "cuda" else 0
        return self.weight_bytes + self.activation_bytes + self.kv_bytes + context

    @property
    def host_bytes(self) -> int:
        on_host = self.device_bytes if self.device == "cpu" else 0
        return PROCESS_BYTES + on_host + self.offload_bytes


class PoolNeed(NamedTuple):
    """Represents the needs of one pool. `ranks` are those of each replica, stage by stage."""

    name: str
    num_replicas: int
    ranks: tuple[RankNeed, ...]
    num_threads: int
    tp: int
    block_tokens: int
    # The KV of each replica, and the reason where it is `auto` ("": it is configured). With `auto`, the
    # memory that a GPU has left is not known here: the least is counted.
    kv_tokens: int
    kv_reason: str = ""

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

    @property
    def host_kv_token_bytes(self) -> int:
        """Host memory for the KV of one token."""
        return sum(rank.kv_token_bytes for rank in self.ranks if rank.device == "cpu")

    def with_kv(self, kv_tokens: int, reason: str = "") -> PoolNeed:
        """Return the need with so much KV in each replica."""
        num_tokens = whole_blocks(kv_tokens, self.block_tokens)
        ranks = [
            rank._replace(kv_bytes=mapping_bytes(num_tokens * rank.kv_token_bytes)) for rank in self.ranks
        ]
        return self._replace(ranks=tuple(ranks), kv_tokens=num_tokens, kv_reason=reason)


class ClusterNeed(NamedTuple):
    """Represents the needs of the whole configuration."""

    pools: tuple[PoolNeed, ...]
    # The bytes of one node.
    store_bytes: int
    num_gateways: int
    # The files of the process that opens most.
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

    def of(self, pool_name: str) -> PoolNeed:
        """Return the need of the pool."""
        return next(pool for pool in self.pools if pool.name == pool_name)


class NodeResources(NamedTuple):
    """Represents a Ray node: all that it has by resource, and the CPUs per rank of each pool."""

    total: Mapping[str, float]
    cpus: Mapping[str, float]


def needs_of(
    config: ClusterConfig,
    machine: Machine | None = None,
    node: NodeResources | None = None,
    *,
    is_running: bool = False,
) -> ClusterNeed:
    """Return the needs of the configuration; `CheckpointError` where the model folder cannot be read.

    Where `kv_tokens` is `auto`, it is what `machine` has for it (None: the least). `node` is the machine as a
    Ray node; None: all replicas may be here. While the cluster `is_running`, what is free now is ignored.
    """
    model = read_model_config(described_model(config))
    checkpoint = read_checkpoint(config)
    needs = ClusterNeed(
        pools=tuple(_pool_need(pool, config, model, checkpoint) for pool in config.pools),
        store_bytes=round(config.store.dram_gb * 1e9),
        num_gateways=config.gateway.replicas,
        open_files=_open_files(config),
    )
    if machine is None:
        return needs
    return needs._replace(pools=_with_auto_kv(needs, config, model, machine, node, is_running))


def stage_layers(pool: PoolConfig, num_layers: int) -> Sequence[int]:
    """Return the layers of each stage; equal shares where none are configured (the real ones are
    measured)."""
    return pool.layers or [len(part(num_layers, stage, pool.pp)) for stage in range(pool.pp)]


def _host_bytes(ranks: Sequence[RankNeed]) -> int:
    return sum(rank.host_bytes for rank in ranks)


def _pool_need(
    pool: PoolConfig, config: ClusterConfig, model: ModelConfig, checkpoint: Checkpoint
) -> PoolNeed:
    """Return the needs of the pool; where its `kv_tokens` is `auto`, with the least."""
    item_bytes = ITEM_BYTES[resolve_dtype(config.pools, described_model(config))]
    engine, sizes = pool.engine, pool.engine.step_sizes(pool.stage_devices)
    ranks: list[RankNeed] = []
    first = 0
    for stage, num_layers in enumerate(stage_layers(pool, model.num_layers)):
        for tp_rank in range(pool.tp):
            shape = RankShape(model, first, first + num_layers, tp_rank, pool.tp)
            layout = BlockLayout(
                Shard(0, num_layers, 0, shape.num_kv_heads), model.head_dim, engine.block_tokens, item_bytes
            )
            ranks.append(
                RankNeed(
                    device=pool.stage_devices[stage],
                    weight_bytes=checkpoint.weight_bytes(shape, item_bytes),
                    activation_bytes=activation_bytes(
                        shape, item_bytes, sizes.max_batch_tokens, engine.max_sequences
                    ),
                    kv_bytes=0,
                    offload_bytes=engine.offload_tokens // engine.block_tokens * layout.block_bytes,
                    kv_token_bytes=layout.block_bytes // engine.block_tokens,
                )
            )
        first += num_layers
    need = PoolNeed(
        pool.name, pool.replicas, tuple(ranks), engine.num_threads, pool.tp, engine.block_tokens, 0
    )
    if engine.kv_tokens == "auto":
        return need.with_kv(least_kv_tokens(model, engine.block_tokens), "the least")
    return need.with_kv(engine.kv_tokens)


# ----------------------------------------------------------------------------------------------
# `kv_tokens: auto` in host memory.


class HostMemory(NamedTuple):
    """Represents the memory of this process's control group, or of the machine where that has less."""

    total_bytes: int
    free_bytes: int
    source: str


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
        engine, token_bytes = pool.engine, need.host_kv_token_bytes
        most = most_useful_kv_tokens(model, engine.max_sequences)
        if engine.kv_tokens != "auto":
            planned.append(need)
        elif not token_bytes:
            planned.append(need._replace(kv_reason="what each GPU has left"))
        elif memory is None:
            planned.append(need.with_kv(min(most, _UNKNOWN_KV_TOKENS), "the memory here is unknown"))
        else:
            bounds = [(shares[pool.name], _divided(config, node, memory, engine.memory_share))]
            if not is_running:
                left = round(engine.memory_share * memory.free_bytes) - _fixed_bytes(need)
                bounds.append((left, f"{gb(memory.free_bytes)} are free here now"))
            num_bytes, reason = min(bounds)
            if num_bytes >= most * token_bytes:
                num_bytes, reason = most * token_bytes, "all that max_sequences contexts can use"
            planned.append(need.with_kv(max(num_bytes, 0) // token_bytes, reason))
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
        is_auto = pool.engine.kv_tokens == "auto" and need.host_kv_token_bytes > 0
        left -= counts[pool.name] * (_fixed_bytes(need) if is_auto else need.replica_bytes)
        if is_auto:
            most = most_useful_kv_tokens(model, pool.engine.max_sequences) * need.host_kv_token_bytes
            name_to_wish[pool.name] = KvDemand(counts[pool.name], most)
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


def engine_config(
    config: ClusterConfig, pool_name: str, machine: Machine, node: NodeResources | None = None
) -> EngineConfig:
    """Return the engine's settings for a replica of the pool on this machine, all sizes decided.

    Raises `ConfigError`, with the field and the remedy, where the memory does not suffice. Where the pool is
    on GPUs and its `kv_tokens` is `auto`, the result has the most that is of use: its ranks find out what
    their devices have left.
    """
    pool = next(pool for pool in config.pools if pool.name == pool_name)
    devices, engine = set(pool.stage_devices), pool.engine
    if engine.kv_tokens != "auto":
        check_container_memory(config, pool_name, machine)
        return engine.decided(engine.kv_tokens, devices)
    model = read_model_config(described_model(config))
    if "cpu" not in devices:
        check_container_memory(config, pool_name, machine)
        return engine.decided(most_useful_kv_tokens(model, engine.max_sequences), devices)
    needs = needs_of(config, machine, node)
    need = needs.of(pool_name)
    least = least_kv_tokens(model, engine.block_tokens)
    if need.kv_tokens < least:
        store = 0 if huge_pages_suffice(config, needs, machine) else needs.store_bytes
        parts = _parts(need.ranks, store)
        parts.pop("engine.kv_tokens")
        listed = ", ".join(f"{name} {gb(size)}" for name, size in parts.items() if size)
        raise ConfigError(
            f"pools.{pool_name}.engine.kv_tokens: auto leaves space for {need.kv_tokens} tokens, "
            f"and a replica needs {least} at least ({need.kv_reason}; beside KV a replica takes: {listed}). "
            "Lower store.dram_gb, replicas or max_sequences, set surge: false, raise the memory limit "
            f"(pools.{pool_name}.resources.memory in the chart), or name kv_tokens"
        )
    return engine.decided(need.kv_tokens, devices)


def _open_files(config: ClusterConfig) -> int:
    num_replicas = sum(pool.replicas for pool in config.pools)
    num_ranks = sum(pool.replicas * pool.num_ranks for pool in config.pools)
    of_gateway = 2 * config.gateway.max_requests + 2 * num_replicas
    of_rank = 2 * config.transfer.tcp_streams * num_ranks + 2 * num_replicas
    of_store = MAX_IDLE_FILES + 2 * num_ranks if config.store.dram_gb else 0
    return FILES_OF_A_PROCESS + max(of_gateway, of_rank, of_store)


# ----------------------------------------------------------------------------------------------
# Whether a replica fits into the memory of its container, checked when it starts.


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
    parts = _parts(ranks, 0 if huge_pages_suffice(config, needs, machine) else needs.store_bytes)
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


def _parts(ranks: Sequence[RankNeed], store_bytes: int) -> dict[str, int]:
    """Return by field, or by name, the memory of a replica of these ranks and of its node's store."""
    on_cpu = [rank for rank in ranks if rank.device == "cpu"]
    return {
        "store.dram_gb": store_bytes,
        "weights": sum(rank.weight_bytes for rank in on_cpu),
        "engine.kv_tokens": sum(rank.kv_bytes for rank in on_cpu),
        "engine.offload_tokens": sum(rank.offload_bytes for rank in ranks),
        "activations": sum(rank.activation_bytes for rank in on_cpu),
        "processes": ENGINE_CORE_BYTES + len(ranks) * PROCESS_BYTES,
    }


def huge_pages_suffice(config: ClusterConfig, needs: ClusterNeed, machine: Machine) -> bool:
    """Whether the store takes huge pages alone: these are neither free memory nor part of a control group."""
    has_huge = config.store.huge_pages and machine.memory("Hugepagesize") == HUGE_PAGE_BYTES
    return has_huge and (machine.memory("HugePages_Free") or 0) * HUGE_PAGE_BYTES >= needs.store_bytes


def gb(num_bytes: float) -> str:
    """Return `1.5 GB` (1e9 bytes); small amounts in MB."""
    return f"{num_bytes / 1e9:.1f} GB" if num_bytes >= 1e9 else f"{num_bytes / 1e6:.1f} MB"
