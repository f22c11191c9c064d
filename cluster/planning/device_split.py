"""Split a replica over devices, and compute what each of them holds."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from cluster.config import ClusterConfig, PoolConfig, Role
from cluster.errors import ConfigError
from cluster.planning.device_profile import DeviceProfile
from cluster.planning.planned_model import ITEM_BYTES, PlannedModel
from cluster.serve.resource_needs import RankNeed, pool_need
from workers.model.rank_memory import CUDA_CONTEXT_BYTES, least_kv_tokens

ROLES: tuple[Role, ...] = ("prefill", "decode", "both")
# The most nodes over which one replica is laid.
MAX_NODES = 8


class DeviceSplit(NamedTuple):
    """The devices of one replica: `tp` ranks share each layer, within a node; `pp` stages of them follow one
    another. Experts are split into `ep` parts."""

    tp: int
    pp: int = 1
    ep: int = 1

    @property
    def num_devices(self) -> int:
        return self.tp * self.pp

    @property
    def name(self) -> str:
        parts = [f"tp {self.tp}", *([f"pp {self.pp}"] if self.pp > 1 else [])]
        return ", ".join([*parts, *([f"ep {self.ep}"] if self.ep > 1 else [])])


class HeldMemory(NamedTuple):
    """What the fullest device of a replica holds, in bytes, and the tokens of KV for which there is memory.
    `allowed` is the share of the device that a rank may use."""

    weights: int
    activations: int
    context: int
    allowed: float
    kv_bytes: float
    kv_tokens: int
    # Of KV, by token on that device, all groups of layers together.
    token_bytes: float


def pool_keys(
    model: PlannedModel, profile: DeviceProfile, split: DeviceSplit, role: Role
) -> dict[str, object]:
    """Return the pool as the cluster's file has it, without replicas."""
    keys: dict[str, object] = {"name": role, "role": role, "device": profile.kind, "dtype": "bf16"}
    of_split = {name: value for name, value in split._asdict().items() if value > 1}
    if model.form.name != "auto":
        keys["weight_dtype"] = model.form.name
    engine: dict[str, object] = {"kv_dtype": model.kv_dtype} if model.kv_dtype != "auto" else {}
    if profile.threads > 1:
        engine["num_threads"] = profile.threads
    return {**keys, **({"engine": engine} if engine else {}), **of_split}


def with_sequences(keys: dict[str, object], max_sequences: int) -> dict[str, object]:
    """Return the pool with so many sequences in a step."""
    engine = keys.get("engine", {})
    assert isinstance(engine, dict)
    return {**keys, "engine": {**engine, "max_sequences": max_sequences}}


def held_memory(
    model: PlannedModel, profile: DeviceProfile, split: DeviceSplit, max_sequences: int
) -> HeldMemory | None:
    """Return what a device holds, whatever its role; None where weights and activations leave too little for
    the least KV. Raises `ConfigError` where the model cannot be split so."""
    keys = with_sequences(pool_keys(model, profile, split, "both"), max_sequences)
    config = ClusterConfig.model_validate({"model": model.source, "pools": [keys]})
    pool = config.pools[0]
    pool.check_model(model.shape)
    need = pool_need(pool, config, model.shape, model.weights, ITEM_BYTES)
    block_tokens = pool.engine.block_tokens
    context = CUDA_CONTEXT_BYTES if profile.kind == "cuda" else 0
    allowed = pool.engine.memory_share * profile.memory_bytes
    found: HeldMemory | None = None
    for rank in need.ranks:
        held = _of_rank(rank, context, allowed, pool)
        if held.kv_tokens < least_kv_tokens(model.shape, block_tokens):
            return None
        if found is None or held.kv_tokens < found.kv_tokens:
            found = held
    return found


def _of_rank(rank: RankNeed, context: int, allowed: float, pool: PoolConfig) -> HeldMemory:
    left = allowed - rank.weight_bytes - rank.activation_bytes - context
    num_blocks = rank.block_bytes.fitting_blocks(max(int(left), 0))
    kv_tokens = num_blocks * pool.engine.block_tokens
    token_bytes = rank.block_bytes.bytes_of(num_blocks) / kv_tokens if kv_tokens else 0.0
    return HeldMemory(
        rank.weight_bytes, rank.activation_bytes, context, allowed, left, kv_tokens, token_bytes
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
        try:
            keys = pool_keys(model, profile, split, "both")
            PoolConfig.model_validate(keys).check_model(model.shape)
        except ConfigError:
            continue
        yield split
