"""Describe the attention of a rank's part of a model: the heads, windows, rotations and layers of the KV that
its layers have."""

from __future__ import annotations

import torch

from workers.model.attention.interface import AttentionShape, HeadKind, LayerAttention, Rotation
from workers.model.layer_shapes import HeadShape
from workers.model.model_config import ModelConfig
from workers.model.rope import rotation_of
from workers.model.rope_config import RopeConfig
from workers.model.sizes import layer_heads
from workers.model.value_norm import ValueNorm
from workers.model.weights import ShardSpec


def attention_shape(
    config: ModelConfig, shard: ShardSpec, device: torch.device, dtype: torch.dtype
) -> AttentionShape:
    """Describe the attention of a rank's layers, whose activations have this dtype."""
    start, sources = shard.layer_start, config.kv_sources[shard.layer_start : shard.layer_end]
    of_kv = list(dict.fromkeys(sources))
    windows = tuple(config.sliding_windows[layer] for layer in of_kv)
    tp_rank, tp = shard.tp_rank, shard.tp_size

    def rotations(heads: HeadShape) -> tuple[Rotation, ...]:
        dim = heads.head_dim if config.latent is None else config.latent.qk_rope_head_dim
        return tuple(rotation_of(rope, dim, device) for rope in _rotations(config, shard, heads))

    kinds = []
    for heads in _head_kinds(config, shard):
        layers = [layer for layer in of_kv if config.heads_of(layer) == heads]
        kinds.append(
            HeadKind(
                len(layer_heads(config, layers[0], tp_rank, tp).keys),
                heads.head_dim,
                tuple(layer - start for layer in layers),
                tuple(config.sliding_windows[layer] for layer in layers),
                rotations(heads),
            )
        )
    return AttentionShape(
        len(layer_heads(config, start, tp_rank, tp).queries),
        windows,
        () if kinds else rotations(config.heads_of(start)),
        config.attention_scale or None,
        config.attention_softcap,
        tuple(kinds),
        tuple(source - start for source in sources) if kinds else (),
        has_sinks=config.traits.has_sinks,
        latent=config.latent,
        dtype=dtype,
    )


def layer_attention(config: ModelConfig, shard: ShardSpec, layer: int) -> LayerAttention:
    """Describe the attention of a layer, but for the norms and sinks of heads."""
    heads, kinds = config.heads_of(layer), _head_kinds(config, shard)
    # Layers that do not attend are numbered as the others.
    source = config.kv_sources[layer]
    return LayerAttention(
        source - shard.layer_start,
        config.sliding_windows[layer],
        rotation=_rotations(config, shard, heads).index(config.ropes[layer]),
        kind=kinds.index(heads) if kinds else 0,
        has_own_kv=source == layer,
    )


def value_norm(config: ModelConfig, shard: ShardSpec, layer: int) -> ValueNorm | None:
    """Return the norm of a layer's values; None where they have none, or are those of another layer."""
    if not config.traits.has_value_norm or not config.has_own_kv(layer):
        return None
    keys = layer_heads(config, layer, shard.tp_rank, shard.tp_size).keys
    head_dim, are_keys = config.heads_of(layer).head_dim, config.has_key_values(layer)
    return ValueNorm(len(keys), head_dim, config.rms_norm_eps, are_keys=are_keys)


def _head_kinds(config: ModelConfig, shard: ShardSpec) -> list[HeadShape]:
    """Return the kinds of heads of the rank's layers, in a model in which layers differ by their heads or
    whose KV they attend to; none for any other."""
    shapes = config.layer_shapes
    if shapes.full_heads is None and not shapes.num_shared:
        return []
    return list(dict.fromkeys(map(config.heads_of, range(shard.layer_start, shard.layer_end))))


def _rotations(config: ModelConfig, shard: ShardSpec, heads: HeadShape) -> list[RopeConfig | None]:
    """Return the rotary embeddings of the rank's layers with these heads, each once."""
    held = range(shard.layer_start, shard.layer_end)
    return list(dict.fromkeys(config.ropes[layer] for layer in held if config.heads_of(layer) == heads))
