"""The layout of the blocks that a rank keeps of a model's KV. No torch."""

from __future__ import annotations

from dataclasses import replace

from kvtransfer.blocks.layout import BlockLayout
from kvtransfer.messages import Shard
from workers.model.kv_form import KvForm, ScaledParts
from workers.model.model_config import ModelConfig
from workers.model.sizes import kv_heads, part


def token_parts(config: ModelConfig, block_tokens: int, form: KvForm) -> int:
    """Return in how many parts of its tokens a block is addressed: those of latents one by one, unless
    scales lie behind the tokens of a block."""
    return block_tokens if config.latent is not None and not form.scale_bytes else 1


def kv_layout(
    config: ModelConfig,
    layers: range,
    tp_rank: int,
    tp: int,
    block_tokens: int,
    form: KvForm,
    *,
    is_split: bool = False,
) -> BlockLayout:
    """Return the layout of the blocks of these layers, as far as they have KV, at one of `tp` ranks: of its
    heads, or of all latents. With `is_split` a rank keeps its part of the tokens of each block of latents."""
    cells, num_parts = config.kv_cells, token_parts(config, block_tokens, form)
    held = kv_heads(cells.num_cells, tp_rank, tp)
    if num_parts > 1:
        held = part(num_parts, tp_rank, tp) if is_split else range(num_parts)
    shard = Shard(layers.start, min(layers.stop, cells.num_layers), held.start, held.stop)
    sizes = cells.width, block_tokens // num_parts, form.item_bytes, form.scale_bytes, cells.num_kinds
    return BlockLayout(shard, *sizes)


def record_layout(layout: BlockLayout, form: ScaledParts) -> BlockLayout:
    """Return the layout of records of `form` of blocks of this layout."""
    kv_form = form.record_form
    return replace(layout, item_bytes=kv_form.item_bytes, scale_bytes=kv_form.scale_bytes)
