"""Split a replica over devices, and compute what each of them holds."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

from cluster.config import ClusterConfig, PoolConfig, Role
from cluster.errors import ConfigError
from cluster.planning.device_profile import DeviceProfile
from cluster.planning.planned_model import ITEM_BYTES, PlannedModel
from cluster.serve.resource_needs import ENGINE_CORE_BYTES, RAY_BYTES, RankNeed, pool_need
from kvtransfer.blocks.host_memory import ALIGNMENT_BYTES, mapping_bytes
from kvtransfer.blocks.transfer_memory import transfer_buffer_bytes
from workers.model.rank_memory import (
    CUDA_CONTEXT_BYTES,
    GRAPH_LAYER_BYTES,
    GROUP_BYTES,
    PROCESS_BYTES,
    graph_sizes,
    least_kv_tokens,
    most_useful_kv_tokens,
)

ROLES: tuple[Role, ...] = ("prefill", "decode", "both")
# The most nodes over which one replica is laid.
MAX_NODES = 8
# Threads of a rank on a GPU that leaves experts to the CPU.
_HOST_THREADS = 16
# Plans leave so many parts of a layer's experts to the CPU.
_EXPERT_PARTS = 8


class DeviceSplit(NamedTuple):
    """The devices of one replica: `tp` ranks share each layer, within a node; `pp` stages of them follow one
    another. Experts are split into `ep` parts. The CPU computes `expert_offload` experts of each layer, and
    host memory has `offload_tokens` of KV beside the devices'."""

    tp: int
    pp: int = 1
    ep: int = 1
    expert_offload: int = 0
    offload_tokens: int = 0

    @property
    def num_devices(self) -> int:
        return self.tp * self.pp

    @property
    def name(self) -> str:
        parts = [f"tp {self.tp}", *([f"pp {self.pp}"] if self.pp > 1 else [])]
        if self.ep > 1:
            parts.append(f"ep {self.ep}")
        if self.expert_offload:
            parts.append(f"{self.expert_offload} experts of a layer on the CPU")
        if self.offload_tokens:
            parts.append(f"{self.offload_tokens:,} tokens in host memory")
        return ", ".join(parts)

    @property
    def has_host(self) -> bool:
        """Whether host memory has some of the weights or of the KV."""
        return bool(self.expert_offload or self.offload_tokens)


class HeldMemory(NamedTuple):
    """What the fullest device of a replica holds, in bytes, and the tokens of KV for which there is memory.
    `allowed` is the share of the device that a rank may use; `context` is of CUDA, on CPUs of processes."""

    weights: int
    activations: int
    context: int
    allowed: float
    kv_bytes: float
    kv_tokens: int
    # Of KV, by token on that device, all groups of layers together.
    token_bytes: float
    # Buffers of transfers, graphs, and groups of ranks; on CPUs the area by which paths are measured.
    staging: int = 0
    # Of weights and KV in host memory.
    host_bytes: int = 0
    # Tokens of KV there.
    host_tokens: int = 0

    @property
    def all_tokens(self) -> int:
        return self.kv_tokens + self.host_tokens


def pool_keys(
    model: PlannedModel, profile: DeviceProfile, split: DeviceSplit, role: Role
) -> dict[str, object]:
    """Return the pool as the cluster's file has it, without replicas."""
    keys: dict[str, object] = {"name": role, "role": role, "device": profile.kind, "dtype": "bf16"}
    of_split = {name: value for name in ("tp", "pp", "ep") if (value := getattr(split, name)) > 1}
    if model.form.name != "auto":
        keys["weight_dtype"] = model.form.name
    engine: dict[str, object] = {"kv_dtype": model.kv_dtype} if model.kv_dtype != "auto" else {}
    if model.latent_kv != "replicated":
        engine["latent_kv"] = model.latent_kv
    if split.expert_offload:
        engine["expert_offload"] = split.expert_offload
    if split.offload_tokens:
        engine["offload_tokens"] = split.offload_tokens
    num_threads = max(profile.threads, _HOST_THREADS if split.expert_offload else 1)
    if num_threads > 1:
        engine["num_threads"] = num_threads
    return {**keys, **({"engine": engine} if engine else {}), **of_split}


def with_engine(keys: dict[str, object], **settings: object) -> dict[str, object]:
    """Return the pool with these settings of its engine, too."""
    engine = keys.get("engine", {})
    assert isinstance(engine, dict)
    return {**keys, "engine": {**engine, **settings}}


def refusal(model: PlannedModel, profile: DeviceProfile, split: DeviceSplit) -> str:
    """Return the sentence by which a replica refuses the model on this split; "" where it starts."""
    try:
        PoolConfig.model_validate(pool_keys(model, profile, split, "both")).check_model(model.shape)
    except ConfigError as error:
        return str(error)
    return ""


def held_memory(
    model: PlannedModel, profile: DeviceProfile, split: DeviceSplit, max_sequences: int
) -> HeldMemory | None:
    """Return what a device holds, whatever its role; None where weights and activations leave too little for
    the least KV."""
    keys = with_engine(pool_keys(model, profile, split, "both"), max_sequences=max_sequences)
    config = ClusterConfig.model_validate({"model": model.source, "pools": [keys]})
    pool = config.pools[0]
    need = pool_need(pool, config, model.shape, model.weights, ITEM_BYTES)
    found: HeldMemory | None = None
    for rank in need.ranks:
        most_blocks = most_useful_kv_tokens(model.shape, max_sequences) // pool.engine.block_tokens
        beside = _beside(model, profile, split, max_sequences, rank)
        held = _of_rank(rank, beside, profile, pool, most_blocks)
        if held.kv_tokens < least_kv_tokens(model.shape, pool.engine.block_tokens):
            return None
        if found is None or held.kv_tokens < found.kv_tokens:
            found = held
    if found is not None and found.host_bytes > profile.host_memory_gb * 1e9 / profile.devices_per_node:
        return None
    return found


class _Beside(NamedTuple):
    """Bytes beside weights, activations and KV."""

    context: int
    staging: int


def _beside(
    model: PlannedModel, profile: DeviceProfile, split: DeviceSplit, max_sequences: int, rank: RankNeed
) -> _Beside:
    if profile.kind == "cpu":
        # The store of a node has 1 GB where nothing else is said.
        of_node = RAY_BYTES + 1_000_000_000
        processes = PROCESS_BYTES + ENGINE_CORE_BYTES // split.num_devices
        of_pool = mapping_bytes(0) + ALIGNMENT_BYTES
        staging = len(rank.block_bytes.block_bytes) * of_pool
        return _Beside(processes + of_node // profile.devices_per_node, staging)
    staging = sum(transfer_buffer_bytes(size) for size in rank.block_bytes.block_bytes)
    if not split.expert_offload and split.pp == 1:
        num_layers = math.ceil(model.shape.num_layers / split.pp)
        staging += len(graph_sizes(max_sequences)) * num_layers * GRAPH_LAYER_BYTES
    if split.num_devices > 1:
        staging += GROUP_BYTES
    return _Beside(CUDA_CONTEXT_BYTES, staging)


def _of_rank(
    rank: RankNeed, beside: _Beside, profile: DeviceProfile, pool: PoolConfig, most_blocks: int
) -> HeldMemory:
    allowed = pool.engine.memory_share * profile.memory_bytes
    left = allowed - rank.weight_bytes - rank.activation_bytes - sum(beside)
    num_blocks = min(rank.block_bytes.fitting_blocks(max(int(left), 0)), most_blocks)
    kv_tokens = num_blocks * pool.engine.block_tokens
    token_bytes = rank.block_bytes.bytes_of(num_blocks) / kv_tokens if kv_tokens else 0.0
    return HeldMemory(
        rank.weight_bytes,
        rank.activation_bytes,
        beside.context,
        allowed,
        left,
        kv_tokens,
        token_bytes,
        beside.staging,
        rank.offload_bytes + rank.expert_bytes,
        pool.engine.offload_tokens,
    )


def device_splits(model: PlannedModel, profile: DeviceProfile) -> Iterator[DeviceSplit]:
    """Yield the splits that the model can have, the smallest first: `tp` within a node, `pp` over stages
    within a node and over nodes."""
    powers = [1 << power for power in range(profile.devices_per_node.bit_length())]
    of_node = [size for size in powers if size <= profile.devices_per_node]
    candidates = [
        DeviceSplit(tp, pp, ep)
        for tp in of_node
        for pp in range(1, MAX_NODES * profile.devices_per_node // tp + 1)
        for ep in ({1, tp} if model.shape.mixture is not None else {1})
        if tp * pp in of_node or (tp == of_node[-1] and pp <= MAX_NODES)
    ]
    for split in sorted(candidates, key=lambda it: (it.num_devices, it.pp, it.ep)):
        if not refusal(model, profile, split):
            yield split


def host_splits(
    model: PlannedModel, profile: DeviceProfile, sequence_tokens: int, max_sequences: int
) -> Iterator[DeviceSplit]:
    """Yield splits of small cards: experts of each layer that the CPU computes, and KV in host memory as far
    as that fits there and `max_sequences` of `sequence_tokens` can use it."""
    if profile.kind == "cpu":
        return
    if (mixture := model.shape.mixture) is not None:
        num_experts = mixture.rule.num_experts
        for part in range(1, _EXPERT_PARTS + 1):
            split = DeviceSplit(1, expert_offload=math.ceil(part * num_experts / _EXPERT_PARTS))
            if not refusal(model, profile, split):
                yield split
    for split in device_splits(model, profile):
        is_one_stage = split.pp == 1 and split.ep == 1
        held = held_memory(model, profile, split, max_sequences) if is_one_stage else None
        if held is None:
            continue
        yield from _with_host_kv(model, profile, split, held, sequence_tokens * max_sequences)


def _with_host_kv(
    model: PlannedModel, profile: DeviceProfile, split: DeviceSplit, held: HeldMemory, num_tokens: int
) -> Iterator[DeviceSplit]:
    """Yield the split with as much KV in host memory as is of use: up to `offload_share` of a sequence."""
    defaults: dict[str, Any] = {"name": "both", "role": "both"}
    share = PoolConfig.model_validate(defaults).engine.offload_share
    of_share = int(held.kv_tokens * share / (1 - share)) if share < 1 else 10 * held.kv_tokens
    of_memory = int(profile.host_memory_gb * 1e9 / profile.devices_per_node / held.token_bytes)
    most = min(of_share, of_memory, max(num_tokens, held.kv_tokens))
    offloaded = split._replace(offload_tokens=most // 256 * 256)
    if offloaded.offload_tokens and not refusal(model, profile, offloaded):
        yield offloaded
