"""The attention of a decoder some of whose layers keep a state, over blocks of both kinds."""

from __future__ import annotations

import dataclasses
import functools

import torch
from torch import Tensor

from workers.model.attention.choice import choose_attention
from workers.model.attention.groups_backend import GroupsAttention
from workers.model.attention.interface import AttentionBackend, StepInput
from workers.model.decoder import Decoder
from workers.model.kv_groups import kv_groups
from workers.model.sizes import kv_heads


def attention_over(decoder: Decoder, kv: Tensor, *, is_deterministic: bool = False) -> AttentionBackend:
    """Return the attention over the KV of all layers that a rank holds, [num_blocks, num_layers, 2,
    num_kv_heads, block_tokens, head_dim]. Layers with a state have blocks of their own, full of NaN."""
    config, shape, shard = decoder.config, decoder.attention_shape, decoder.shard
    make = functools.partial(choose_attention, is_deterministic=is_deterministic)
    if config.state is None:
        return make(shape, kv)
    full, states = kv_groups(config)
    held = range(shard.layer_start, shard.layer_end)
    groups = [[it - held.start for it in group.layers if it in held] for group in (full, states)]
    num_parts = len(kv_heads(config.num_kv_heads, shard.tp_rank, shard.tp_size))
    blocks = torch.full((len(kv), len(groups[1]), 1, num_parts, 1, states.state_size), float("nan"))
    kvs = kv[:, groups[0]].contiguous(), blocks
    return GroupsAttention(shape, groups, kvs, make, has_states=True)


def with_state_tables(decoder: Decoder, step: StepInput) -> StepInput:
    """Return the step with tables of states where the decoder has such: those of KV."""
    if decoder.config.state is None:
        return step
    return dataclasses.replace(step, group_tables=(step.tables,))
