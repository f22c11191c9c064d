"""The parts of a model over which the kernels of a rank are found (`workers.rank.kernel_rehearsal`).

The layers of a stage are decided when all ranks have measured their devices, and the rehearsal begins before.
So it takes the layers that the stage may have, which meet all kernels that any of them do. Kernels also
differ by whether strides are multiples of 16 elements. That does not depend on the number of a stage's layers
where what a block holds of one layer is such a multiple. A rank for which it does depend compiles what is
missing in its warm-up."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from pathlib import Path

import torch

from workers.messages.rank_channel import RankSpec
from workers.model.model_config import ModelConfig, read_model_config
from workers.model.sizes import last_stage_limit, refuse_stages
from workers.model.weights import ShardSpec, WeightReader
from workers.rank.runner_settings import read_dtype


def rehearsed_shards(spec: RankSpec) -> list[ShardSpec]:
    """Return parts of the model that launch, together, every kernel that the part of the rank may launch: all
    layers that its stage may have, and one that begins with each further kind of layer with which the stage
    may begin, since the first norm of a stage adds nothing. Raises `CheckpointError`."""
    config = read_model_config(Path(spec.model_dir))
    refuse_stages(config, spec.pp)
    starts, end = _possible_layers(spec.stage, spec.pp, config.num_layers, last_stage_limit(config))
    firsts = [starts[0]] if len(starts) == 1 else _first_of_kinds(spec, config, starts)
    is_last = spec.stage == spec.pp - 1
    ends = [end if is_last or first == starts[0] else first + 1 for first in firsts]
    return [
        ShardSpec(first, its_end, spec.tp_rank, spec.tp, spec.ep)
        for first, its_end in zip(firsts, ends, strict=True)
    ]


def layer_kinds(config: ModelConfig, reader: WeightReader) -> list[Hashable]:
    """Return what decides the kernels of each layer of the model. How its weights are stored is a part of
    that."""
    return [
        (
            stored,
            config.heads_of(layer),
            config.sliding_windows[layer],
            config.ropes[layer],
            config.intermediate_size_of(layer),
            config.has_experts(layer),
            config.has_state(layer),
            config.has_attention(layer),
            config.has_own_kv(layer),
            config.has_key_values(layer),
        )
        for layer, stored in enumerate(reader.stored_kinds())
    ]


def num_first_layers(kinds: Sequence[Hashable]) -> int:
    """Return how many of the first layers are of all `kinds` that there are, each behind all kinds that it
    follows, since a norm may add what the layer before it leaves."""
    pairs = list(zip([None, *kinds], kinds, strict=False))
    return max(map(pairs.index, pairs)) + 1


def _possible_layers(stage: int, pp: int, num_layers: int, last_limit: int) -> tuple[range, int]:
    """Return the layers at which a stage may begin, and the latest end of one that is there. The last stage
    begins at most at `last_limit`, and no stage is empty."""
    if stage == pp - 1:
        return range(stage, (0 if pp == 1 else last_limit) + 1), num_layers
    end = last_limit - (pp - 2 - stage)
    return range(stage, end if stage else 1), end


def _first_of_kinds(spec: RankSpec, config: ModelConfig, layers: range) -> list[int]:
    """Return the first of each kind of some layers."""
    dtype, whole = read_dtype(spec.dtype), ShardSpec.whole(config)
    with WeightReader(Path(spec.model_dir), config, whole, dtype, torch.device("meta")) as reader:
        kinds = layer_kinds(config, reader)
    return sorted({kinds[layer]: layer for layer in reversed(layers)}.values())
