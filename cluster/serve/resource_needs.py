"""The resources that the configured pools take: the memory of each rank and process, threads, open files."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from cluster.config import ClusterConfig, PoolConfig
from cluster.dtypes import resolve_dtype
from cluster.served_model import described_model, read_checkpoint
from kvtransfer.blocks.host_memory import mapping_bytes
from kvtransfer.messages import ITEM_BYTES, KvGroup
from kvtransfer.store.nvme.segment_files import MAX_IDLE_FILES
from workers.config import StepSizes
from workers.model.kv_form import KvForm
from workers.model.kv_groups import GroupBytes, StateCapacity, WindowCapacity, group_limits, kv_groups
from workers.model.kv_layout import kv_layout
from workers.model.model_config import ModelConfig, read_model_config
from workers.model.quantization.form_on_device import form_on_device
from workers.model.quantization.weight_form import WeightForm
from workers.model.rank_memory import (
    CUDA_CONTEXT_BYTES,
    PROCESS_BYTES,
    RankShape,
    activation_bytes,
    least_kv_tokens,
)
from workers.model.sizes import equal_stages

# The memory of a replica's engine core, or of a gateway.
ENGINE_CORE_BYTES = 150_000_000
# The memory of a Ray node with Serve, and of the processes that it starts in advance.
RAY_BYTES = 1_000_000_000
# The files that any process of ours has open: libraries, logs, Ray's connections.
FILES_OF_A_PROCESS = 256


class RankNeed(NamedTuple):
    """Represents the memory of one rank. `offload_bytes` of KV and `expert_bytes` of weights are in host
    memory whatever the device. `block_bytes` are those of a block of KV in each group of layers."""

    device: str
    weight_bytes: int
    activation_bytes: int
    kv_bytes: int
    offload_bytes: int
    block_bytes: GroupBytes
    expert_bytes: int = 0

    @property
    def device_bytes(self) -> int:
        context = CUDA_CONTEXT_BYTES if self.device == "cuda" else 0
        return self.weight_bytes + self.activation_bytes + self.kv_bytes + context

    @property
    def host_bytes(self) -> int:
        on_host = self.device_bytes if self.device == "cpu" else 0
        return PROCESS_BYTES + on_host + self.offload_bytes + self.expert_bytes


class PoolNeed(NamedTuple):
    """Represents the needs of one pool. `ranks` are those of each replica, stage by stage."""

    name: str
    num_replicas: int
    ranks: tuple[RankNeed, ...]
    num_threads: int
    tp: int
    block_tokens: int
    # `engine.max_sequences`, or what it is where that is `auto`.
    max_sequences: int
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
    def has_host_kv(self) -> bool:
        """Whether some of its KV is in host memory."""
        return any(rank.device == "cpu" for rank in self.ranks)

    def host_kv_bytes(self, kv_tokens: int) -> int:
        """Return the host memory for the KV of so many tokens."""
        return self._host_kv.bytes_of(kv_tokens // self.block_tokens)

    def saved_kv_bytes(self, kv_tokens: int) -> int:
        """Return the host memory that windows of layers save with the KV of so many tokens."""
        return self._host_kv.saved_bytes(kv_tokens // self.block_tokens)

    def state_bytes(self, kv_tokens: int) -> int:
        """Return the host memory for recurrent states and their snapshots beside the KV of so many tokens."""
        return self._host_kv.state_bytes(kv_tokens // self.block_tokens)

    def fitting_kv_tokens(self, num_bytes: int) -> int:
        """Return how many tokens' KV fits into host memory of this size."""
        return self._host_kv.fitting_blocks(max(num_bytes, 0)) * self.block_tokens

    @property
    def _host_kv(self) -> GroupBytes:
        return GroupBytes.sum([rank.block_bytes for rank in self.ranks if rank.device == "cpu"])

    def with_kv(self, kv_tokens: int, reason: str = "") -> PoolNeed:
        """Return the need with so much KV in each replica."""
        num_blocks = kv_tokens // self.block_tokens
        ranks = [
            rank._replace(kv_bytes=mapping_bytes(rank.block_bytes.bytes_of(num_blocks)))
            for rank in self.ranks
        ]
        num_tokens = num_blocks * self.block_tokens
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


def needs_of(config: ClusterConfig) -> ClusterNeed:
    """Return the needs of the configuration; where `kv_tokens` is `auto`, with the least KV, which
    `cluster.serve.auto_kv` decides on a machine. Raises `CheckpointError` where the model folder cannot be
    read."""
    model = read_model_config(described_model(config))
    checkpoint = read_checkpoint(config)
    item_bytes = ITEM_BYTES[resolve_dtype(config.pools, described_model(config))]
    return ClusterNeed(
        pools=tuple(pool_need(pool, config, model, checkpoint, item_bytes) for pool in config.pools),
        store_bytes=round(config.store.dram_gb * 1e9),
        num_gateways=config.gateway.replicas,
        open_files=_open_files(config),
    )


def step_sizes(pool: PoolConfig, config: ClusterConfig, model: ModelConfig) -> StepSizes:
    """Return the sizes of steps of the pool's replicas, each `auto` decided: for all that is computed from
    them, and for the engines that start."""
    return pool.engine.step_sizes(pool.stage_devices, has_groups=bool(_groups_apart(config, model)))


def gb(num_bytes: float) -> str:
    """Return `1.5 GB` (1e9 bytes); small amounts in MB."""
    return f"{num_bytes / 1e9:.1f} GB" if num_bytes >= 1e9 else f"{num_bytes / 1e6:.1f} MB"


def _groups_apart(config: ClusterConfig, model: ModelConfig) -> tuple[KvGroup, ...]:
    """Return the groups of layers that have blocks apart; none where all layers have the same blocks."""
    return kv_groups(model) if config.frees_windows or model.state is not None else ()


def _host_bytes(ranks: Sequence[RankNeed]) -> int:
    return sum(rank.host_bytes for rank in ranks)


class RankWeights(Protocol):
    """What is known of a model's weights: by the files of a checkpoint, or by its shape alone."""

    def weight_bytes(self, rank: RankShape, item_bytes: int, form: WeightForm) -> int:
        """Return the size of the weights that the rank keeps on its device."""

    def host_expert_bytes(self, rank: RankShape, item_bytes: int) -> int:
        """Return the size of the weights of experts that it keeps in host memory."""


def pool_need(
    pool: PoolConfig, config: ClusterConfig, model: ModelConfig, weights: RankWeights, item_bytes: int
) -> PoolNeed:
    """Return the needs of a pool of the configuration, whose activations have `item_bytes`; where its
    `kv_tokens` is `auto`, with the least."""
    engine, sizes = pool.engine, step_sizes(pool, config, model)
    form = KvForm.of(engine.kv_dtype, item_bytes, len(model.kv_cells.parts))
    groups = _groups_apart(config, model)
    windows = WindowCapacity(engine.block_tokens, sizes.max_sequences, sizes.max_batch_tokens, pool.pp)
    states = StateCapacity(sizes.max_sequences, pool.pp, engine.num_state_snapshots)
    limits = group_limits(model, groups, form, windows, states, engine.block_tokens)
    ranks: list[RankNeed] = []
    first = 0
    for stage, num_layers in enumerate(pool.layers or equal_stages(model, pool.pp)):
        for tp_rank in range(pool.tp):
            layers = (first, first + num_layers)
            shape = RankShape(
                model,
                *layers,
                tp_rank,
                pool.tp,
                ep=pool.ep,
                expert_offload=engine.expert_offload,
                expert_copies=engine.expert_copies,
                splits_latents=engine.latent_kv == "split",
            )
            layout = kv_layout(
                model,
                range(*layers),
                tp_rank,
                pool.tp,
                engine.block_tokens,
                form,
                is_split=engine.latent_kv == "split",
            )
            layouts = [layout.of_group(group) for group in groups] or [layout]
            ranks.append(
                RankNeed(
                    device=pool.stage_devices[stage],
                    weight_bytes=weights.weight_bytes(
                        shape, item_bytes, form_on_device(pool.weight_dtype, pool.stage_devices[stage])
                    ),
                    activation_bytes=activation_bytes(
                        shape,
                        item_bytes,
                        sizes.max_batch_tokens,
                        sizes.max_sequences,
                        is_on_cuda=pool.stage_devices[stage] == "cuda",
                    ),
                    kv_bytes=0,
                    offload_bytes=engine.offload_tokens // engine.block_tokens * layouts[0].block_bytes,
                    block_bytes=GroupBytes([it.block_bytes for it in layouts], limits),
                    expert_bytes=weights.host_expert_bytes(shape, item_bytes),
                )
            )
        first += num_layers
    need = PoolNeed(
        pool.name,
        pool.replicas,
        tuple(ranks),
        engine.num_threads,
        pool.tp,
        engine.block_tokens,
        sizes.max_sequences,
        kv_tokens=0,
    )
    if engine.kv_tokens == "auto":
        return need.with_kv(least_kv_tokens(model, engine.block_tokens), "the least")
    return need.with_kv(engine.kv_tokens)


def _open_files(config: ClusterConfig) -> int:
    num_replicas = sum(pool.replicas for pool in config.pools)
    num_ranks = sum(pool.replicas * pool.num_ranks for pool in config.pools)
    of_gateway = 2 * config.gateway.max_requests + 2 * num_replicas
    of_rank = 2 * config.transfer.tcp_streams * num_ranks + 2 * num_replicas
    of_store = MAX_IDLE_FILES + 2 * num_ranks if config.store.dram_gb else 0
    return FILES_OF_A_PROCESS + max(of_gateway, of_rank, of_store)
