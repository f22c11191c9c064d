"""A decoder with paged KV, as a rank has it, and the model of `transformers` that it is compared with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers
from hybrid_attention import attention_over, with_state_tables
from torch import Tensor

from workers.model.attention.interface import SequenceSpan, StepInput
from workers.model.decoder import Decoder

BLOCK_TOKENS = 16
NUM_BLOCKS = 64


class PagedModel:
    """A decoder with its KV and block tables; sequences are named by number."""

    def __init__(self, decoder: Decoder, dtype: torch.dtype) -> None:
        config = decoder.config
        self.decoder = decoder
        cells = config.kv_cells
        shape = (NUM_BLOCKS, cells.num_layers, cells.num_kinds, cells.num_cells, BLOCK_TOKENS, cells.width)
        self.kv = torch.full(shape, float("nan"), dtype=dtype)
        self.attention = attention_over(decoder, self.kv)
        self.free = torch.randperm(NUM_BLOCKS, generator=torch.Generator().manual_seed(7)).tolist()
        self.tables: dict[int, list[int]] = {}
        self.lengths: dict[int, int] = {}

    def step(self, work: list[tuple[int, list[int]]]) -> list[Tensor]:
        """Compute (sequence, next tokens) pairs in one call; logits [t, V] of each."""
        spans = []
        for sequence, tokens in work:
            start = self.lengths.get(sequence, 0)
            table = self.tables.setdefault(sequence, [])
            while len(table) * BLOCK_TOKENS < start + len(tokens):
                table.append(self.free.pop())
            spans.append(SequenceSpan(start, len(tokens), tuple(table)))
            self.lengths[sequence] = start + len(tokens)
        step = with_state_tables(self.decoder, StepInput.of(spans, BLOCK_TOKENS))
        flat = torch.tensor([token for _, tokens in work for token in tokens])
        logits = self.decoder.logits(self.decoder.forward(flat, step, self.attention))
        return list(torch.split(logits, [len(tokens) for _, tokens in work]))

    def chunked(self, sequence: int, tokens: list[int], chunk_tokens: int) -> Tensor:
        chunks = [tokens[at : at + chunk_tokens] for at in range(0, len(tokens), chunk_tokens)]
        return torch.cat([self.step([(sequence, chunk)])[0] for chunk in chunks])

    def greedy(self, sequence: int, prompt: list[int], num_tokens: int) -> list[int]:
        output = [int(self.step([(sequence, prompt)])[0][-1].argmax())]
        while len(output) < num_tokens:
            output.append(int(self.step([(sequence, output[-1:])])[0][-1].argmax()))
        return output


def reference_of(model_dir: Path, dtype: torch.dtype = torch.float32) -> Any:
    transformers.logging.disable_progress_bar()
    return transformers.AutoModelForCausalLM.from_pretrained(
        model_dir, dtype=dtype, attn_implementation="eager", experts_implementation="eager"
    ).eval()


def tokens_of(seed: int, count: int = 100, vocab_size: int = 211) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(vocab_size, (count,), generator=generator).tolist()


def error_of(actual: Tensor, expected: Tensor) -> float:
    """Largest difference as a part of the largest logit."""
    return float((actual - expected).abs().max() / expected.abs().max())


@torch.inference_mode()
def reference_logits(reference: Any, tokens: list[int]) -> Tensor:
    logits: Tensor = reference(torch.tensor([tokens])).logits[0].float()
    return logits


def greedy_tokens(reference: Any, prompt: list[int], num_tokens: int) -> list[int]:
    """Return what the model of `transformers` generates after the prompt."""
    ids = torch.tensor([prompt])
    generated = reference.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=num_tokens, do_sample=False, pad_token_id=0
    )
    tokens: list[int] = generated[0, len(prompt) :].tolist()
    return tokens


def continued(model_dir: Path, prompt: list[int], num_tokens: int) -> list[int]:
    """Return what the checkpoint's model of `transformers` generates after the prompt, past any end token."""
    reference = reference_of(model_dir)
    reference.generation_config.eos_token_id = None
    return greedy_tokens(reference, prompt, num_tokens)
