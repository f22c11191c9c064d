"""The decoder against `transformers`, on random weights of every family and feature.

Letters: T tokens, V vocabulary. Block tables are shuffled, KV memory starts as NaN.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from optional_programs import needs_compiler, uses_compiler
from paged_model import (
    BLOCK_TOKENS,
    PagedModel,
    error_of,
    greedy_tokens,
    reference_logits,
    reference_of,
    tokens_of,
)
from slow_cases import slow_rows_but
from torch import Tensor

from workers.model.attention.interface import SequenceSpan, StepInput
from workers.model.decoder import load_decoder

pytestmark = [pytest.mark.usefixtures("backend"), uses_compiler]

CPU = torch.device("cpu")
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
# What torch computes by code of its own: rotary embeddings, windows, scales and biases. The rest is slow.
FAST_BY_TORCH = (
    *("llama-gqa", "llama-llama3-rope", "mistral-window-24", "qwen2-layer-types", "qwen3-yarn"),
    *("granite-scaled", "phi3-window-mha", "seed-oss-output-bias"),
)


@pytest.mark.parametrize(
    ("case", "backend"),
    [
        *(pytest.param(case, "kernels", marks=needs_compiler) for case in CASES),
        *slow_rows_but(((case, "torch") for case in CASES), *((case, "torch") for case in FAST_BY_TORCH)),
    ],
    indirect=["backend"],
)
def test_logits_and_greedy_tokens_equal_transformers(case: str, make_checkpoint: MakeCheckpoint) -> None:
    model_dir = make_checkpoint(**(SHAPE | CASES[case]))
    reference, prompt = reference_of(model_dir), tokens_of(1)
    expected = reference_logits(reference, prompt)
    assert expected.std() >= 1.0
    model = PagedModel(load_decoder(model_dir, torch.float32, CPU), torch.float32)
    for sequence, chunk_tokens in enumerate((1, 7, 64, PROMPT_TOKENS)):
        assert error_of(model.chunked(sequence, prompt, chunk_tokens), expected) <= 1e-4
    assert model.greedy(9, prompt, 64) == greedy_tokens(reference, prompt, 64)


@pytest.mark.parametrize(
    "case", ["llama-mha-old-names", "mistral-window-24", "qwen2-tied", "qwen3-window-mqa"]
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_as_close_to_float32_as_transformers(
    case: str, dtype: torch.dtype, make_checkpoint: MakeCheckpoint
) -> None:
    """Weights stored in `dtype`; the error of rounding activations may be 1.5 times transformers' own."""
    name = str(dtype).removeprefix("torch.")
    model_dir, prompt = make_checkpoint(**(SHAPE | CASES[case] | {"dtype": name})), tokens_of(2)
    exact = reference_logits(reference_of(model_dir), prompt)
    allowed = 1.5 * error_of(reference_logits(reference_of(model_dir, dtype), prompt), exact)
    assert 1e-4 < allowed < (0.1 if dtype == torch.bfloat16 else 0.02)
    model = PagedModel(load_decoder(model_dir, dtype, CPU), dtype)
    for sequence, chunk_tokens in enumerate((1, 40, PROMPT_TOKENS)):
        logits = model.chunked(sequence, prompt, chunk_tokens)
        assert logits.dtype == torch.float32
        assert error_of(logits, exact) <= allowed


@pytest.mark.parametrize("stored", ["bfloat16", "float16"])
def test_half_precision_weights_are_computed_exactly_in_float32(
    stored: str, make_checkpoint: MakeCheckpoint
) -> None:
    model_dir, prompt = make_checkpoint("qwen3", dtype=stored, **SHAPE), tokens_of(3)
    model = PagedModel(load_decoder(model_dir, torch.float32, CPU), torch.float32)
    assert error_of(model.chunked(0, prompt, 64), reference_logits(reference_of(model_dir), prompt)) <= 1e-4


@pytest.mark.parametrize("case", ["llama-gqa", "mistral-window-24", "qwen2-window-later-layers"])
def test_a_mixed_batch_equals_each_sequence_alone(case: str, make_checkpoint: MakeCheckpoint) -> None:
    """Prefill chunks at any start and decoding sequences of very unlike lengths, in one call."""
    decoder = load_decoder(make_checkpoint(**(SHAPE | CASES[case])), torch.float32, CPU)
    together, alone = PagedModel(decoder, torch.float32), PagedModel(decoder, torch.float32)
    lengths = [3, 97, 16, 150, 31, 64]
    texts = [tokens_of(10 + number, length + 40) for number, length in enumerate(lengths)]
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
        assert error_of(torch.cat(outputs[number]), whole[length:]) <= 1e-5


def test_a_reused_block_hides_what_lay_in_it(make_checkpoint: MakeCheckpoint) -> None:
    """NaN left in a block by anyone must not reach the sequence that gets it next."""
    decoder = load_decoder(make_checkpoint("llama", **SHAPE), torch.float32, CPU)
    model = PagedModel(decoder, torch.float32)
    prompt = tokens_of(4, 33)
    first = model.chunked(0, prompt, 33)
    model.kv[model.tables[0]] = float("nan")
    model.free.extend(model.tables.pop(0))
    assert torch.equal(model.chunked(1, prompt, 33), first)
    assert model.greedy(2, prompt, 20) == model.greedy(3, prompt, 20)


def test_rows_are_asked_for_logits_one_by_one(make_checkpoint: MakeCheckpoint) -> None:
    decoder = load_decoder(make_checkpoint("qwen3", **SHAPE), torch.float32, CPU)
    model = PagedModel(decoder, torch.float32)
    span = SequenceSpan(0, 40, (5, 9, 2, 11))
    tokens = torch.tensor(tokens_of(5, 40))
    hidden = decoder.forward(tokens, StepInput.of([span], BLOCK_TOKENS), model.attention)
    kept = hidden.clone()
    every = decoder.logits(hidden)
    assert every.shape == (40, 211)
    torch.testing.assert_close(decoder.logits(hidden[[39, 3]]), every[[39, 3]], rtol=0, atol=1e-5)
    assert torch.equal(hidden, kept)
