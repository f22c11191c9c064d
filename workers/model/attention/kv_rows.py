"""The KV as rows, from which `TorchAttention` gathers and to which it writes."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class KvRows(NamedTuple):
    """The KV, or a view of it, as rows of a head of a block: the `memory` [num_rows, block_tokens * head_dim]
    in which they lie, with scales if it has any, the number of rows from block to block and from layer to
    layer, the rows of the `heads` of a layer, [2, num_kv_heads], and the tokens of a row."""

    memory: Tensor
    of_block: int
    of_layer: int
    heads: Tensor
    block_tokens: int

    @property
    def heads_of_blocks(self) -> Tensor:
        """The memory as [num_rows, block_tokens, head_dim], the last with the bytes of scales."""
        return self.memory.view(len(self.memory), self.block_tokens, -1)

    @staticmethod
    def of(kv: Tensor) -> KvRows:
        """Return the rows of `kv` [num_blocks, num_layers, 2, num_kv_heads, block_tokens, head_dim]."""
        size = kv.shape[4] * kv.shape[5]
        assert kv.stride()[4:] == (kv.shape[5], 1), "tokens of a head are contiguous"
        assert not any(stride % size for stride in kv.stride()[:4]), "heads lie in places of their size"
        of_block, of_layer, of_kind, of_head = (stride // size for stride in kv.stride()[:4])
        num_rows = kv.shape[0] * of_block
        kinds = torch.arange(2, device=kv.device)[:, None] * of_kind
        heads = kinds + torch.arange(kv.shape[3], device=kv.device) * of_head
        return KvRows(kv.as_strided((num_rows, size), (size, 1)), of_block, of_layer, heads, kv.shape[4])
