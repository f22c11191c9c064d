"""The parts that a `ModelRunner` is made from: its checkpoint, how it computes, what it has space for, and
its place among the ranks of the replica."""

from __future__ import annotations

from pathlib import Path
from typing import Literal, NamedTuple

import torch

from workers.errors import WorkerError
from workers.messages.rank_channel import RankSpec
from workers.model.fingerprint import FingerprintTask
from workers.model.host_kv import OffloadMode
from workers.model.kv_form import ScaledParts
from workers.model.kv_groups import StateCapacity, WindowCapacity
from workers.model.model_config import read_model_config
from workers.model.quantization.weight_form import AS_STORED, WeightForm
from workers.model.weights import ShardSpec
from workers.rank.collectives import RankGroups
from workers.rank.device_queue import DeviceQueue

_DTYPES = {
    "float32": torch.float32,
    "fp32": torch.float32,
    "bfloat16": torch.bfloat16,
    "bf16": torch.bfloat16,
    "float16": torch.float16,
    "fp16": torch.float16,
}


def read_dtype(name: str) -> torch.dtype:
    """Return the dtype of that name. Raises `WorkerError`, naming the known ones."""
    dtype = _DTYPES.get(name)
    if dtype is None:
        raise WorkerError(f"dtype {name!r} is not one of {', '.join(_DTYPES)}")
    return dtype


class CheckpointFolder(NamedTuple):
    """The folder of a checkpoint, and the task that computes its fingerprint; None: the runner begins it."""

    path: Path
    fingerprint: FingerprintTask | None = None


class ComputeSettings(NamedTuple):
    """Configures how a rank computes: in `dtype`, on `device`, with `num_threads` of the CPU.

    `is_deterministic`: products and attention of a sequence must depend on nothing else. With a `queue`
    (default: on CUDA, unless stages are on several ranks) tokens stay on the device and steps that decode are
    graphs, also on a CPU, where Triton then runs in its interpreter. `expert_offload` experts of each layer
    are computed by the CPU, also where `device` is one, as tests have it. The rank has slots for copies of
    `expert_copies` experts of each layer. `weights` is the form of weights in products.
    """

    dtype: torch.dtype
    device: torch.device
    num_threads: int
    is_deterministic: bool = False
    queue: DeviceQueue | None = None
    expert_offload: int = 0
    expert_copies: int = 0
    weights: WeightForm = AS_STORED

    @classmethod
    def of(cls, spec: RankSpec, device: torch.device) -> ComputeSettings:
        """Return how the rank of a specification computes on a device."""
        return cls(
            read_dtype(spec.dtype),
            device,
            spec.num_threads,
            is_deterministic=spec.deterministic,
            expert_offload=spec.expert_offload,
            expert_copies=spec.expert_copies,
            weights=WeightForm(spec.weight_dtype),
        )


class AutoKv(NamedTuple):
    """Configures how a rank on CUDA decides its KV capacity: what is left of `memory_share` of its device's
    memory after all else that it is measured to take, in steps of up to `max_batch_tokens` rows."""

    memory_share: float
    max_batch_tokens: int


class RankCapacity(NamedTuple):
    """Configures what a rank has space for: KV in blocks of `block_tokens`, and `max_sequences` at a time.
    Plans use the slots below `max_sequences`.

    Block ids after those of the device's `num_kv_tokens` denote `num_offload_tokens` in host memory; with the
    mode "auto" the warm-up measures which way to read them is faster, if attention has both. With `auto_kv`
    the device's are at most `num_kv_tokens`, and as many as all ranks have memory for. With `windows`, layers
    with a window have KV apart, of as many blocks as these need. Layers with a recurrent state always have
    blocks apart; None: as many as `max_sequences` sequences need. `kv_dtype` is `engine.kv_dtype`, and
    `records` the form of KV in the store (None: that of the device). `latent_kv` is `engine.latent_kv`.
    Steps with a chunk of up to `mixed_tokens` are graphs, too.
    """

    block_tokens: int
    num_kv_tokens: int
    max_sequences: int = 64
    num_offload_tokens: int = 0
    offload_mode: OffloadMode | Literal["auto"] = "auto"
    auto_kv: AutoKv | None = None
    windows: WindowCapacity | None = None
    states: StateCapacity | None = None
    kv_dtype: str = "auto"
    records: ScaledParts | None = None
    latent_kv: str = "replicated"
    mixed_tokens: int = 0

    @classmethod
    def of(cls, spec: RankSpec) -> RankCapacity:
        """Return what the rank of a specification has space for. Raises `CheckpointError`."""
        config = read_model_config(Path(spec.model_dir))
        windows = WindowCapacity(spec.block_tokens, spec.max_sequences, spec.max_batch_tokens, spec.pp)
        return cls(
            spec.block_tokens,
            spec.num_kv_tokens,
            spec.max_sequences,
            spec.num_offload_tokens,
            auto_kv=AutoKv(spec.kv_share, spec.max_batch_tokens) if spec.kv_share else None,
            kv_dtype=spec.kv_dtype,
            records=ScaledParts.in_store(config, spec.store_kv_dtype, spec.kv_dtype),
            latent_kv=spec.latent_kv,
            mixed_tokens=spec.max_batch_tokens if spec.mixed_graphs else 0,
            windows=windows if spec.frees_windows else None,
            states=StateCapacity(spec.max_sequences, spec.pp, spec.state_snapshots),
        )


class RankPlace(NamedTuple):
    """The place of a rank in its replica: its part of the model (None: the whole), and the collectives with
    the other ranks (None: there are none)."""

    shard: ShardSpec | None = None
    groups: RankGroups | None = None
