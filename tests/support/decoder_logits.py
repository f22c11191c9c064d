"""Compute the logits of a prompt with the decoder of a folder, in one step, on the CPU."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from workers.model.attention.choice import choose_attention
from workers.model.attention.interface import SequenceSpan, StepInput
from workers.model.decoder import load_decoder

_BLOCK_TOKENS = 16


@torch.inference_mode()
def decoder_logits(folder: Path, tokens: Sequence[int]) -> Tensor:
    """Return the logits in float32, `[num_tokens, vocab_size]`."""
    decoder = load_decoder(folder, torch.float32, torch.device("cpu"))
    config, num_blocks = decoder.config, -(-len(tokens) // _BLOCK_TOKENS)
    cells = config.kv_cells
    kv = torch.zeros(
        num_blocks, cells.num_layers, cells.num_kinds, cells.num_cells, _BLOCK_TOKENS, cells.width
    )
    step = StepInput.of([SequenceSpan(0, len(tokens), tuple(range(num_blocks)))], _BLOCK_TOKENS)
    attention = choose_attention(decoder.attention_shape, kv)
    return decoder.logits(decoder.forward(torch.tensor(list(tokens)), step, attention))
