"""The decoder against `transformers`, on random weights of every family and feature.

Letters: T tokens, V vocabulary. Block tables are shuffled, KV memory starts as NaN.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from optional_programs import uses_compiler
from torch import Tensor

from workers.model.attention.choice import choose_attention
from workers.model.attention.interface import SequenceSpan, StepInput
from workers.model.decoder import Decoder, load_decoder

pytestmark = [pytest.mark.usefixtures("backend"), uses_compiler]

CPU = torch.device("cpu")
BLOCK_TOKENS = 16
NUM_BLOCKS = 64
PROMPT_TOKENS = 100
MakeCheckpoint = Callable[..., Path]

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
CASES: dict[str, dict[str, Any]] = {
    "llama-gqa": {"family": "llama"},
    "llama-mha-old-names": {"family": "llama", "num_key_value_heads": None, "head_dim": None},
    "llama-mqa-tied": {"family": "llama", "num_key_value_heads": 1, "tie_word_embeddings": True},
    "llama-biases": {"family": "llama", "attention_bias": True, "mlp_bias": True},
    "llama-head-dim": {"family": "llama", "head_dim": 32, "rms_norm_eps": 1e-5},
    "llama-llama3-rope": {"family": "llama", "rope_scaling": LLAMA3, "rope_theta": 500000.0},
    "llama-llama3-parameters": {
        "family": "llama",
        "rope_theta": None,
        "rope_parameters": LLAMA3 | {"rope_theta": 10000.0},
    },
    "llama-linear-rope-sharded": {
        "family": "llama",
        "rope_scaling": {"type": "linear", "factor": 4.0},
        "sharded": True,
    },
    "mistral-no-window-sharded": {"family": "mistral", "sharded": True, "head_dim": 32},
    "mistral-window-24": {"family": "mistral", "sliding_window": 24},
    "mistral-window-16-mha": {"family": "mistral", "sliding_window": 16, "num_key_value_heads": 4},
    "qwen2-tied": {"family": "qwen2", "tie_word_embeddings": True},
    "qwen2-window-unused": {"family": "qwen2", "sliding_window": 8, "use_sliding_window": False},
    "qwen2-window-later-layers": {
        "family": "qwen2",
        "num_hidden_layers": 3,
        "sliding_window": 21,
        "use_sliding_window": True,
        "max_window_layers": 1,
    },
    "qwen2-layer-types": {
        "family": "qwen2",
        "sliding_window": 40,
        "use_sliding_window": True,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "qwen3-tied-head-dim": {"family": "qwen3", "tie_word_embeddings": True, "head_dim": 32},
    "qwen3-linear-parameters-mha": {
        "family": "qwen3",
        "num_key_value_heads": 4,
        "rope_theta": None,
        "rope_parameters": {"rope_type": "linear", "factor": 2.5, "rope_theta": 1e6},
    },
    "granite-scaled": {
        "family": "granite",
        "embedding_multiplier": 12.0,
        "residual_multiplier": 0.22,
        "attention_multiplier": 0.0625,
        "logits_scaling": 1.5,
        "attention_bias": True,
        "mlp_bias": True,
    },
    "granite-tied-sharded": {
        "family": "granite",
        "embedding_multiplier": 0.5,
        "residual_multiplier": 1.5,
        "attention_multiplier": 0.4,
        "logits_scaling": 0.7,
        "tie_word_embeddings": True,
        "sharded": True,
    },
    "granite-plain": {"family": "granite"},
    "phi3-gqa": {"family": "phi3", "pad_token_id": 0},
    "phi3-window-mha": {
        "family": "phi3",
        "pad_token_id": 0,
        "sliding_window": 24,
        "num_key_value_heads": 4,
        "sharded": True,
    },
    "seed-oss-biases": {"family": "seed_oss", "attention_bias": True, "head_dim": 32},
    "seed-oss-output-bias": {
        "family": "seed_oss",
        "attention_bias": False,
        "attention_out_bias": True,
        "mlp_bias": True,
    },
    "qwen3-yarn": {
        "family": "qwen3",
        "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32},
    },
    "llama-yarn-mscale-whole": {
        "family": "llama",
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 8.0,
            "original_max_position_embeddings": 64,
            "beta_fast": 24,
            "beta_slow": 2,
            "mscale": 0.7,
            "mscale_all_dim": 0.3,
            "truncate": False,
        },
    },
    "qwen3-window-mqa": {
        "family": "qwen3",
        "num_key_value_heads": 1,
        "sliding_window": 5,
        "use_sliding_window": True,
        "max_window_layers": 0,
    },
}
SHAPE = {"vocab_size": 211, "eos_token_id": None}


class PagedModel:
    """A decoder with its KV and block tables; sequences are named by number."""

    def __init__(self, decoder: Decoder, dtype: torch.dtype) -> None:
        config = decoder.config
        self.decoder = decoder
        shape = (NUM_BLOCKS, config.num_layers, 2, config.num_kv_heads, BLOCK_TOKENS, config.head_dim)
        self.kv = torch.full(shape, float("nan"), dtype=dtype)
        self.attention = choose_attention(decoder.attention_shape, self.kv)
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
        step = StepInput.of(spans, BLOCK_TOKENS)
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


def _reference(model_dir: Path, dtype: torch.dtype = torch.float32) -> Any:
    transformers.logging.disable_progress_bar()
    return transformers.AutoModelForCausalLM.from_pretrained(
        model_dir, dtype=dtype, attn_implementation="eager"
    ).eval()


def _tokens(seed: int, count: int = PROMPT_TOKENS, vocab_size: int = 211) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(vocab_size, (count,), generator=generator).tolist()


def _error(actual: Tensor, expected: Tensor) -> float:
    """Largest difference as a part of the largest logit."""
    return float((actual - expected).abs().max() / expected.abs().max())


@torch.inference_mode()
def _logits(reference: Any, tokens: list[int]) -> Tensor:
    logits: Tensor = reference(torch.tensor([tokens])).logits[0].float()
    return logits


@pytest.mark.parametrize("case", CASES)
def test_logits_and_greedy_tokens_equal_transformers(case: str, make_checkpoint: MakeCheckpoint) -> None:
    model_dir = make_checkpoint(**(SHAPE | CASES[case]))
    reference, prompt = _reference(model_dir), _tokens(1)
    expected = _logits(reference, prompt)
    assert expected.std() >= 1.0
    model = PagedModel(load_decoder(model_dir, torch.float32, CPU), torch.float32)
    for sequence, chunk_tokens in enumerate((1, 7, 64, PROMPT_TOKENS)):
        assert _error(model.chunked(sequence, prompt, chunk_tokens), expected) <= 1e-4
    ids = torch.tensor([prompt])
    generated = reference.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=64, do_sample=False, pad_token_id=0
    )
    assert model.greedy(9, prompt, 64) == generated[0, PROMPT_TOKENS:].tolist()


@pytest.mark.parametrize(
    "case", ["llama-mha-old-names", "mistral-window-24", "qwen2-tied", "qwen3-window-mqa"]
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_as_close_to_float32_as_transformers(
    case: str, dtype: torch.dtype, make_checkpoint: MakeCheckpoint
) -> None:
    """Weights stored in `dtype`; the error of rounding activations may be 1.5 times transformers' own."""
    name = str(dtype).removeprefix("torch.")
    model_dir, prompt = make_checkpoint(**(SHAPE | CASES[case] | {"dtype": name})), _tokens(2)
    exact = _logits(_reference(model_dir), prompt)
    allowed = 1.5 * _error(_logits(_reference(model_dir, dtype), prompt), exact)
    assert 1e-4 < allowed < (0.1 if dtype == torch.bfloat16 else 0.02)
    model = PagedModel(load_decoder(model_dir, dtype, CPU), dtype)
    for sequence, chunk_tokens in enumerate((1, 40, PROMPT_TOKENS)):
        logits = model.chunked(sequence, prompt, chunk_tokens)
        assert logits.dtype == torch.float32
        assert _error(logits, exact) <= allowed


@pytest.mark.parametrize("stored", ["bfloat16", "float16"])
def test_half_precision_weights_are_computed_exactly_in_float32(
    stored: str, make_checkpoint: MakeCheckpoint
) -> None:
    model_dir, prompt = make_checkpoint("qwen3", dtype=stored, **SHAPE), _tokens(3)
    model = PagedModel(load_decoder(model_dir, torch.float32, CPU), torch.float32)
    assert _error(model.chunked(0, prompt, 64), _logits(_reference(model_dir), prompt)) <= 1e-4


@pytest.mark.parametrize("case", ["llama-gqa", "mistral-window-24", "qwen2-window-later-layers"])
def test_a_mixed_batch_equals_each_sequence_alone(case: str, make_checkpoint: MakeCheckpoint) -> None:
    """Prefill chunks at any start and decoding sequences of very unlike lengths, in one call."""
    decoder = load_decoder(make_checkpoint(**(SHAPE | CASES[case])), torch.float32, CPU)
    together, alone = PagedModel(decoder, torch.float32), PagedModel(decoder, torch.float32)
    lengths = [3, 97, 16, 150, 31, 64]
    texts = [_tokens(10 + number, length + 40) for number, length in enumerate(lengths)]
    for number, length in enumerate(lengths):
        together.step([(number, texts[number][:length])])
    schedule = [[1, 1, 9, 1, 1, 1], [1, 1, 1, 20, 2, 1], [17, 1, 1, 1, 16, 7], [1, 1, 1, 1, 1, 1]]
    outputs: dict[int, list[Tensor]] = {number: [] for number in range(len(lengths))}
    at = list(lengths)
    for counts in schedule:
        order = sorted(range(len(lengths)), key=lambda number: (number * 5 + 2) % 7)
        work = [(number, texts[number][at[number] : at[number] + counts[number]]) for number in order]
        for (number, _), logits in zip(work, together.step(work), strict=True):
            outputs[number].append(logits)
        at = [position + count for position, count in zip(at, counts, strict=True)]
    for number, length in enumerate(lengths):
        whole = alone.chunked(number, texts[number][: at[number]], PROMPT_TOKENS)
        assert _error(torch.cat(outputs[number]), whole[length:]) <= 1e-5


def test_a_reused_block_hides_what_lay_in_it(make_checkpoint: MakeCheckpoint) -> None:
    """NaN left in a block by anyone must not reach the sequence that gets it next."""
    decoder = load_decoder(make_checkpoint("llama", **SHAPE), torch.float32, CPU)
    model = PagedModel(decoder, torch.float32)
    prompt = _tokens(4, 33)
    first = model.chunked(0, prompt, 33)
    model.kv[model.tables[0]] = float("nan")
    model.free.extend(model.tables.pop(0))
    assert torch.equal(model.chunked(1, prompt, 33), first)
    assert model.greedy(2, prompt, 20) == model.greedy(3, prompt, 20)


def test_rows_are_asked_for_logits_one_by_one(make_checkpoint: MakeCheckpoint) -> None:
    decoder = load_decoder(make_checkpoint("qwen3", **SHAPE), torch.float32, CPU)
    model = PagedModel(decoder, torch.float32)
    span = SequenceSpan(0, 40, (5, 9, 2, 11))
    tokens = torch.tensor(_tokens(5, 40))
    hidden = decoder.forward(tokens, StepInput.of([span], BLOCK_TOKENS), model.attention)
    kept = hidden.clone()
    every = decoder.logits(hidden)
    assert every.shape == (40, 211)
    torch.testing.assert_close(decoder.logits(hidden[[39, 3]]), every[[39, 3]], rtol=0, atol=1e-5)
    assert torch.equal(hidden, kept)
