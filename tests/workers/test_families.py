"""What families declare: wrapped checkpoints, and the fingerprints of models that were served before."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from hybrid_variants import DELTA_HEADS
from paged_model import PagedModel, error_of, reference_logits, reference_of, tokens_of
from safetensors.torch import load_file, save_file
from wrapped_checkpoints import SPELLINGS, wrap_checkpoint

from benchmarks.random_checkpoint import write_random_checkpoint
from kvtransfer.common.clock import SystemClock
from workers.errors import CheckpointError
from workers.model.decoder import load_decoder
from workers.model.families.known_families import FAMILIES
from workers.model.fingerprint import DigestCache, _fields_of_kv, model_fingerprint
from workers.model.ignored_keys import ignored_keys
from workers.model.model_config import read_model_config
from workers.model.rope_config import RopeConfig

CPU = torch.device("cpu")
FIRST_FIELDS = {
    "family",
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_layers",
    "num_heads",
    "num_kv_heads",
    "head_dim",
    "rms_norm_eps",
    "rope",
    "sliding_windows",
    "qkv_bias",
    "output_bias",
    "mlp_bias",
    "qk_norm",
    "tie_word_embeddings",
}
FIRST_ROPE_FIELDS = {
    "rope_type",
    "theta",
    "factor",
    "low_freq_factor",
    "high_freq_factor",
    "original_max_positions",
}


MISTRAL = "Mistral3ForConditionalGeneration"
GEMMA = "Gemma3ForConditionalGeneration"
GEMMA_4 = "Gemma4ForConditionalGeneration"
# Odd numbers: 3 cells, of which each has 2 heads of the smaller size.
GEMMA_4_SHAPE: dict[str, Any] = {
    "vocab_size": 211,
    "hidden_size": 67,
    "intermediate_size": 73,
    "num_hidden_layers": 5,
    "num_attention_heads": 12,
    "num_key_value_heads": 6,
    "num_global_key_value_heads": 3,
    "attention_k_eq_v": True,
    "head_dim": 10,
    "global_head_dim": 22,
    "layer_types": [
        *("sliding_attention", "full_attention", "sliding_attention", "sliding_attention", "full_attention"),
    ],
    "sliding_window": 7,
    "num_kv_shared_layers": 2,
    "hidden_size_per_layer_input": 3,
    "vocab_size_per_layer_input": 223,
    "use_bidirectional_attention": "vision",
    "hidden_activation": "gelu_pytorch_tanh",
}


@pytest.mark.parametrize("spelling", SPELLINGS)
@pytest.mark.parametrize(
    ("family", "architecture", "is_tied"),
    [
        ("mistral", MISTRAL, False),
        ("gemma3_text", GEMMA, True),
        ("gemma3_text", GEMMA, False),
        ("gemma4_text", GEMMA_4, True),
        ("qwen3_5_text", "Qwen3_5ForConditionalGeneration", True),
    ],
)
def test_the_text_model_of_a_wrapped_checkpoint_is_served(
    tmp_path: Path, family: str, architecture: str, is_tied: bool, spelling: str
) -> None:
    """The tensors of images are passed over, whatever the names of the others begin with."""
    plain = tmp_path / "plain"
    keys: dict[str, Any] = {"hidden_activation": "gelu_pytorch_tanh"} if architecture == GEMMA else {}
    keys |= GEMMA_4_SHAPE if architecture == GEMMA_4 else {}
    keys |= {**DELTA_HEADS, "full_attention_interval": 2} if family == "qwen3_5_text" else {}
    write_random_checkpoint(plain, family, seed=3, tie_word_embeddings=is_tied, **keys)
    wrapped = wrap_checkpoint(tmp_path / "wrapped", plain, architecture, spelling)
    assert read_model_config(wrapped).is_wrapped
    tokens = tokens_of(1, 40)
    whole, text = (
        PagedModel(load_decoder(folder, torch.float32, CPU), torch.float32).chunked(0, tokens, 40)
        for folder in (plain, wrapped)
    )
    assert torch.equal(whole, text)
    if architecture == GEMMA_4:
        assert error_of(text, reference_logits(reference_of(plain), tokens)) <= 1e-4


def test_a_tensor_that_is_none_of_the_text_model_is_refused(tmp_path: Path) -> None:
    plain = tmp_path / "plain"
    write_random_checkpoint(plain, "gemma3_text", seed=3, hidden_activation="gelu_pytorch_tanh")
    tensors = load_file(plain / "model.safetensors")
    tensors["model.layers.0.mlp.extra.weight"] = torch.zeros(2)
    save_file(tensors, str(plain / "model.safetensors"))
    wrapped = wrap_checkpoint(tmp_path / "wrapped", plain, GEMMA)
    with pytest.raises(
        CheckpointError, match=r"unexpected tensor language_model\.model\.layers\.0\.mlp\.extra"
    ):
        load_decoder(wrapped, torch.float32, CPU)


def test_a_wrapped_text_model_takes_what_it_lacks_from_its_family(tmp_path: Path) -> None:
    """As the config.json of google/gemma-3-4b-it has it: no heads, no vocabulary, no rotary base."""
    text = {
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "model_type": "gemma3_text",
        "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    }
    outer = {
        "architectures": [GEMMA],
        "boi_token_index": 255999,
        "eoi_token_index": 256000,
        "eos_token_id": [1, 106],
        "image_token_index": 262144,
        "initializer_range": 0.02,
        "mm_tokens_per_image": 256,
        "model_type": "gemma3",
        "text_config": text,
        "torch_dtype": "bfloat16",
        "vision_config": {"hidden_size": 1152, "num_hidden_layers": 27},
    }
    (tmp_path / "config.json").write_text(json.dumps(outer))
    config = read_model_config(tmp_path)
    assert (config.num_heads, config.num_kv_heads, config.head_dim) == (8, 4, 256)
    assert (config.vocab_size, config.tie_word_embeddings, config.eos_token_ids) == (262208, True, (1, 106))
    assert config.attention_scale == 256**-0.5
    assert config.checkpoint_dtype == "bfloat16"
    assert config.sliding_windows == tuple(0 if layer % 6 == 5 else 1024 for layer in range(34))
    whole, near = RopeConfig("linear", 1e6, 8.0), RopeConfig("default", 1e4)
    assert config.ropes == tuple(whole if layer % 6 == 5 else near for layer in range(34))
    assert config.max_context_tokens == 131072, "the stretched context, and not eight times as much"
    assert ignored_keys(tmp_path) == {}


def test_a_wrapped_checkpoint_without_text_or_in_an_unknown_form_is_refused(tmp_path: Path) -> None:
    plain = tmp_path / "plain"
    write_random_checkpoint(plain, "mistral", seed=3)
    with pytest.raises(CheckpointError, match="text_config None is missing"):
        read_model_config(wrap_checkpoint(tmp_path / "no-text", plain, MISTRAL, text_config=None))
    hqq = wrap_checkpoint(tmp_path / "hqq", plain, MISTRAL, quantization_config={"quant_method": "hqq"})
    with pytest.raises(CheckpointError, match="hqq"):
        read_model_config(hqq)


@pytest.mark.parametrize("name", ["llama", "mistral", "qwen2", "qwen3"])
def test_fingerprints_of_the_first_families_stay(name: str, tmp_path: Path) -> None:
    """Replicas of neighboring versions hand over to each other while a cluster is rolled."""
    write_random_checkpoint(tmp_path, name, seed=0)
    fields = _fields_of_kv(read_model_config(tmp_path))
    assert fields.keys() == FIRST_FIELDS
    assert fields["rope"].keys() == FIRST_ROPE_FIELDS


def test_what_a_family_adds_is_part_of_its_fingerprint(tmp_path: Path) -> None:
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
    write_random_checkpoint(tmp_path, "granite", seed=0, residual_multiplier=0.5, rope_scaling=yarn)
    fields = _fields_of_kv(read_model_config(tmp_path))
    assert fields["residual_multiplier"] == 0.5
    assert fields["rope"]["scale"] == pytest.approx(0.1 * math.log(4.0) + 1.0)


SMOL = {"no_rope_layers": [1, 0]}
GEMMA_2 = {"hidden_activation": "gelu_pytorch_tanh", "sliding_window": 8}


@pytest.mark.parametrize(
    ("family", "keys", "changed", "field"),
    [
        ("smollm3", SMOL, {"no_rope_layers": [0, 1]}, "layer_ropes"),
        ("gemma3_text", GEMMA_2, {"rope_local_base_freq": 20000.0}, "layer_ropes"),
        ("gemma2", GEMMA_2, {"attn_logit_softcapping": 20.0}, "attention_softcap"),
        ("gemma2", GEMMA_2, {"query_pre_attn_scalar": 100}, "attention_scale"),
        ("gemma", {"hidden_act": "silu"}, {"hidden_act": "gelu_pytorch_tanh"}, "activation"),
        ("glm4", {}, {"partial_rotary_factor": 0.25}, "rope"),
    ],
)
def test_models_whose_kv_differs_have_other_fingerprints(
    tmp_path: Path, family: str, keys: dict[str, Any], changed: dict[str, Any], field: str
) -> None:
    """The weights are the same, and config.json makes another model of them."""
    fields, fingerprints = [], []
    for name, given in (("one", keys), ("other", keys | changed)):
        write_random_checkpoint(tmp_path / name, family, seed=0, **given)
        fields.append(_fields_of_kv(read_model_config(tmp_path / name)))
        fingerprints.append(model_fingerprint(tmp_path / name, DigestCache(None, SystemClock())))
    one, other = fields
    assert {key for key in one.keys() | other.keys() if one.get(key) != other.get(key)} == {field}
    assert fingerprints[0] != fingerprints[1]


def test_the_page_of_models_has_every_family() -> None:
    page = (Path(__file__).parents[2] / "docs" / "models.md").read_text()
    families = page.partition("\n### ")[0]
    rows = [line for line in families.splitlines() if line.startswith("| ") and "`" in line][1:]
    assert rows == [
        f"| {it.models} | `{it.name}` | {', '.join(f'`{name}`' for name in it.architectures)} |"
        for it in FAMILIES
    ]


def test_names_and_architectures_are_of_one_family() -> None:
    names = [family.name for family in FAMILIES]
    architectures = [it for family in FAMILIES for it in family.architectures]
    assert len(names) == len(set(names))
    assert len(architectures) == len(set(architectures))
