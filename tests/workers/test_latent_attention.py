"""Latent attention: what is read of published and hostile config.json files, which tensors are passed over,
and what is counted. Logits are compared with `transformers` for every family in test_family_parity.py."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from family_checkpoints import CASES, LATENT, write_family_checkpoint
from optional_programs import needs_compiler, uses_compiler
from paged_model import PagedModel, error_of, tokens_of
from safetensors.torch import load_file, save_file

from kvtransfer.common.clock import SystemClock
from workers.engine_bench import roofline
from workers.engine_bench.roofline import LayerProducts
from workers.errors import CheckpointError
from workers.model.attention.choice import choose_attention
from workers.model.decoder import load_decoder
from workers.model.ignored_keys import ignored_keys
from workers.model.latent_shape import LatentShape
from workers.model.model_config import read_model_config
from workers.model.rank_memory import Checkpoint, RankShape, activation_bytes
from workers.model.sizes import ModelWork
from workers.rank.probe import Probe

CPU = torch.device("cpu")
# Of all of these models but GLM's.
_SIZES: dict[str, Any] = {
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "moe_layer_freq": 1,
    "attention_bias": False,
    "attention_dropout": 0.0,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-06,
    "tie_word_embeddings": False,
}
_YARN = {"type": "yarn", "original_max_position_embeddings": 4096, "beta_fast": 32, "beta_slow": 1}
_V3: dict[str, Any] = _SIZES | {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "first_k_dense_replace": 3,
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "max_position_embeddings": 163840,
    "moe_intermediate_size": 2048,
    "n_group": 8,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 61,
    "num_key_value_heads": 128,
    "num_nextn_predict_layers": 1,
    "q_lora_rank": 1536,
    "rope_scaling": _YARN | {"factor": 40, "mscale": 1.0, "mscale_all_dim": 1.0},
    "rope_theta": 10000,
    "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid",
    "topk_group": 4,
    "topk_method": "noaux_tc",
    "vocab_size": 129280,
}


class Published(NamedTuple):
    """A config.json as its makers published it, but for quantization and keys about training and tokens; and
    what follows from it."""

    config: dict[str, Any]
    num_context: int
    # By how much scores are scaled for the longer context.
    score_factor: float
    kv_token_bytes: int
    num_dense: int
    shared_size: int
    num_groups: int
    num_extra_layers: int = 0


MODELS = {
    "deepseek-ai/DeepSeek-V2-Lite": Published(
        _SIZES
        | {
            "architectures": ["DeepseekV2ForCausalLM"],
            "model_type": "deepseek_v2",
            "first_k_dense_replace": 1,
            "hidden_size": 2048,
            "intermediate_size": 10944,
            "max_position_embeddings": 163840,
            "moe_intermediate_size": 1408,
            "n_group": 1,
            "n_routed_experts": 64,
            "n_shared_experts": 2,
            "norm_topk_prob": False,
            "num_attention_heads": 16,
            "num_experts_per_tok": 6,
            "num_hidden_layers": 27,
            "num_key_value_heads": 16,
            "q_lora_rank": None,
            "rope_scaling": _YARN | {"factor": 40, "mscale": 0.707, "mscale_all_dim": 0.707},
            "rope_theta": 10000,
            "routed_scaling_factor": 1.0,
            "scoring_func": "softmax",
            "topk_group": 1,
            "topk_method": "greedy",
            "vocab_size": 102400,
        },
        163840,
        (0.1 * 0.707 * math.log(40) + 1) ** 2,
        27 * 1152,
        1,
        2816,
        1,
    ),
    "deepseek-ai/DeepSeek-V3": Published(
        _V3, 163840, (0.1 * math.log(40) + 1) ** 2, 61 * 1152, 3, 2048, 8, 1
    ),
    "moonshotai/Kimi-K2-Instruct": Published(
        _V3
        | {
            "model_type": "kimi_k2",
            "first_k_dense_replace": 1,
            "max_position_embeddings": 131072,
            "n_group": 1,
            "n_routed_experts": 384,
            "num_attention_heads": 64,
            "num_key_value_heads": 64,
            "num_nextn_predict_layers": 0,
            "rope_scaling": _YARN
            | {"factor": 32.0, "beta_fast": 1.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0},
            "rope_theta": 50000.0,
            "routed_scaling_factor": 2.827,
            "topk_group": 1,
            "vocab_size": 163840,
        },
        131072,
        (0.1 * math.log(32) + 1) ** 2,
        61 * 1152,
        1,
        2048,
        1,
    ),
    "zai-org/GLM-4.7-Flash": Published(
        _SIZES
        | {
            "architectures": ["Glm4MoeLiteForCausalLM"],
            "model_type": "glm4_moe_lite",
            "first_k_dense_replace": 1,
            "hidden_size": 2048,
            "intermediate_size": 10240,
            "max_position_embeddings": 202752,
            "moe_intermediate_size": 1536,
            "n_group": 1,
            "n_routed_experts": 64,
            "n_shared_experts": 1,
            "norm_topk_prob": True,
            "num_attention_heads": 20,
            "num_experts_per_tok": 4,
            "num_hidden_layers": 47,
            "num_key_value_heads": 20,
            "num_nextn_predict_layers": 1,
            "partial_rotary_factor": 1.0,
            "q_lora_rank": 768,
            "qk_nope_head_dim": 192,
            "rms_norm_eps": 1e-05,
            "rope_scaling": None,
            "rope_theta": 1000000,
            "routed_scaling_factor": 1.8,
            "topk_group": 1,
            "topk_method": "noaux_tc",
            "v_head_dim": 256,
            "vocab_size": 154880,
        },
        202752,
        1.0,
        47 * 1152,
        1,
        1536,
        1,
        1,
    ),
}


def _write(folder: Path, keys: dict[str, Any]) -> Path:
    (folder / "config.json").write_text(json.dumps(keys), encoding="utf-8")
    return folder


@pytest.mark.parametrize("name", MODELS)
def test_published_keys_are_read(name: str, tmp_path: Path) -> None:
    wanted = MODELS[name]
    config = read_model_config(_write(tmp_path, wanted.config))
    assert ignored_keys(tmp_path) == {}
    latent, mixture = config.latent, config.mixture
    assert latent is not None
    assert latent == LatentShape(*(wanted.config[key] or 0 for key in LatentShape._fields))
    assert (config.rope.num_rotated, config.rope.is_interleaved) == (64, True)
    assert config.rope.scale == 1.0
    assert config.attention_scale == pytest.approx(latent.head_dim**-0.5 * wanted.score_factor)
    assert config.max_context_tokens == wanted.num_context
    whole = RankShape(config, 0, config.num_layers)
    assert whole.kv_token_bytes(2) == wanted.kv_token_bytes
    # Every rank of a split holds it.
    parts = [RankShape(config, 0, config.num_layers, tp_rank, 4) for tp_rank in range(4)]
    assert {it.kv_token_bytes(2) for it in parts} == {wanted.kv_token_bytes}
    assert sum(it.num_heads for it in parts) == config.num_heads
    assert mixture is not None
    assert mixture.layers == tuple(range(wanted.num_dense, config.num_layers))
    assert (mixture.shared_size, mixture.rule.num_groups) == (wanted.shared_size, wanted.num_groups)
    assert mixture.rule.scale == wanted.config["routed_scaling_factor"]
    assert config.num_extra_layers == wanted.num_extra_layers


def test_sums_of_weights_that_v2_does_not_take_are_named_as_ignored(tmp_path: Path) -> None:
    """As `transformers` computes it; the code beside the published checkpoints does not scale them then."""
    _write(tmp_path, MODELS["deepseek-ai/DeepSeek-V2-Lite"].config | {"norm_topk_prob": True})
    assert not read_model_config(tmp_path).mixture.rule.is_normalized  # type: ignore[union-attr]
    assert set(ignored_keys(tmp_path)) == {"norm_topk_prob"}


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"architectures": ["DeepseekV32ForCausalLM"]}, "'DeepseekV32ForCausalLM' .* choose by an index"),
        ({"architectures": ["GlmMoeDsaForCausalLM"]}, "'GlmMoeDsaForCausalLM' .* choose by an index"),
        ({"architectures": None, "model_type": "deepseek_v32"}, "'deepseek_v32' .* choose by an index"),
        ({"index_topk": 2048}, "index_topk 2048 says that layers choose by an index"),
        ({"kv_lora_rank": 0}, "kv_lora_rank 0 is not a positive integer"),
        ({"q_lora_rank": "many"}, "q_lora_rank 'many' is not a positive integer"),
        ({"qk_rope_head_dim": 63}, "qk_rope_head_dim 63 is odd"),
        ({"qk_nope_head_dim": 1 << 17}, "qk_nope_head_dim 131072 makes a head of 131136 dimensions"),
        ({"v_head_dim": 193}, "v_head_dim 193 is more than the 192 dimensions of a head of keys"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5, but heads of this family"),
        ({"num_nextn_predict_layers": -1}, "num_nextn_predict_layers -1 is not a positive integer"),
        ({"scoring_func": "softmax"}, "scoring_func 'softmax' is not supported in this family"),
        ({"moe_layer_freq": 2}, "moe_layer_freq 2 is not 1"),
        ({"rope_scaling": _YARN | {"factor": 40, "mscale_all_dim": -1}}, "mscale_all_dim -1 is not a pos"),
        ({"rope_scaling": _YARN | {"factor": 40, "beta_slow": 33}}, "has a beta_fast that is below"),
        (
            {"architectures": ["DeepseekV2ForCausalLM"], "scoring_func": "softmax"},
            "topk_method 'noaux_tc' is not supported",
        ),
        (
            {"architectures": ["Glm4MoeLiteForCausalLM"], "mlp_layer_types": ["dense"]},
            r"mlp_layer_types \['dense'\] does not name the 61 layers",
        ),
        (
            {"architectures": ["Glm4MoeLiteForCausalLM"], "mlp_layer_types": ["thin"] * 61},
            "is not supported .supported: dense, sparse",
        ),
    ],
)
def test_what_is_not_supported_is_refused_by_its_key(
    keys: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(CheckpointError, match=message):
        read_model_config(_write(tmp_path, _V3 | keys))


@pytest.mark.parametrize("case", ["deepseek_v3-1", "glm4_moe-1", "glm4_moe_lite-1"])
def test_layers_that_predict_further_tokens_are_passed_over(case: str, tmp_path: Path) -> None:
    """As many as config.json says, behind the last; others are refused, and none of them are counted."""
    write_family_checkpoint(tmp_path, **CASES[case])
    config = json.loads((tmp_path / "config.json").read_text())
    _write(tmp_path, config | {"num_nextn_predict_layers": 1})
    read = read_model_config(tmp_path)
    shape = RankShape(read, 0, read.num_layers)
    counted = Checkpoint.read(tmp_path).weight_bytes(shape, 4)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    more = {f"model.layers.4.{name}": torch.zeros(3) for name in ("eh_proj.weight", "embed_tokens.weight")}
    save_file(tensors | more, file)
    assert len(load_decoder(tmp_path, torch.float32, CPU).layers) == 4
    assert Checkpoint.read(tmp_path).weight_bytes(shape, 4) == counted
    save_file(tensors | more | {"model.layers.5.enorm.weight": torch.zeros(3)}, file)
    with pytest.raises(CheckpointError, match=r"unexpected tensor model.layers.5.enorm.weight"):
        load_decoder(tmp_path, torch.float32, CPU)
    _write(tmp_path, config | {"num_nextn_predict_layers": 0})
    save_file(tensors | more, file)
    with pytest.raises(CheckpointError, match=r"unexpected tensor model.layers.4"):
        load_decoder(tmp_path, torch.float32, CPU)


@pytest.mark.parametrize("case", [f"{family}-{number}" for family in LATENT for number in (1, 2)])
def test_work_and_products_are_those_of_the_matrices_of_the_checkpoint(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_family_checkpoint(tmp_path, **CASES[case])
    config = read_model_config(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    matrices = {name: it for name, it in tensors.items() if it.dim() == 2 and "embed_tokens" not in name}
    num_weights = sum(it.numel() for it in matrices.values())
    assert ModelWork(config, 1).weight_bytes == num_weights
    # A product takes as many seconds as it has weights.
    monkeypatch.setattr(roofline, "_candidates", lambda outputs, inputs, _: [outputs * inputs])
    monkeypatch.setattr(LayerProducts, "_best_s", lambda self, candidate, rows, num_runs: candidate)
    outside = ("lm_head.weight", ".mlp.gate.weight")
    num_multiplied = sum(it.numel() for name, it in matrices.items() if not name.endswith(outside))
    assert LayerProducts(config, torch.float32, 64, SystemClock()).seconds() == num_multiplied


def test_activations_of_latent_attention_take_its_columns(tmp_path: Path) -> None:
    """Beside those of one head of keys and values, with as many of queries, as wide as a latent."""
    write_family_checkpoint(tmp_path, **CASES["deepseek_v3-1"])
    config = read_model_config(tmp_path)
    shapes = [RankShape(it, 0, 4, 1, 2) for it in (config, dataclasses.replace(config, latent=None))]
    own, other = (activation_bytes(shape, 2, 1000, 1) for shape in shapes)
    width, num_heads = 26 + 6, 3
    taken = num_heads * 16 + width
    scratch = 29 + width + 29 + num_heads * (6 + 2 * width + 9)
    # The context is rounded up to a power of two for keys and values of all heads.
    expanded = config.max_context_tokens * width + 2 * num_heads * 512 * 16
    assert config.max_context_tokens == 512
    difference = 1000 * (taken + scratch - 3 * num_heads * width - 2 * width) + expanded
    assert own - other == 2 * difference


@pytest.mark.parametrize("family", LATENT)
def test_the_probe_measures_a_layer_of_a_rank(family: str, tmp_path: Path) -> None:
    write_family_checkpoint(tmp_path, **CASES[f"{family}-1"])
    config = read_model_config(tmp_path)
    probe = Probe(
        config, tp=2, tp_rank=1, dtype=torch.float32, device=CPU, block_tokens=16, clock=SystemClock()
    )
    assert probe.measure(32, 4).cost.layer_s > 0


@uses_compiler
@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("family", LATENT)
def test_the_kv_has_the_normed_latent_and_the_rotated_part_of_keys(family: str, tmp_path: Path) -> None:
    """As the weights of the first layer say. The firsts of all pairs that are rotated come before the
    seconds; rotation leaves the lengths of pairs."""
    write_family_checkpoint(tmp_path, **(CASES[f"{family}-1"] | {"rope_scaling": None}))
    model = PagedModel(load_decoder(tmp_path, torch.float32, CPU), torch.float32)
    latent, tokens = model.decoder.config.latent, tokens_of(3, 16)
    assert latent is not None
    model.step([(0, tokens)])
    assert model.kv.shape[2:] == (1, 1, 16, latent.width)
    kept = model.kv[model.tables[0][0], 0, 0, 0]
    tensors = load_file(tmp_path / "model.safetensors")
    layer = "model.layers.0"
    rows = tensors["model.embed_tokens.weight"][tokens]
    normed = F.rms_norm(rows, rows.shape[1:], tensors[f"{layer}.input_layernorm.weight"], 1e-6)
    attention = f"{layer}.self_attn"
    products = normed @ tensors[f"{attention}.kv_a_proj_with_mqa.weight"].T
    latents, shared = products.split([latent.kv_lora_rank, latent.qk_rope_head_dim], 1)
    weight = tensors[f"{attention}.kv_a_layernorm.weight"]
    expected = F.rms_norm(latents, latents.shape[1:], weight, 1e-6)
    torch.testing.assert_close(kept[:, : latent.kv_lora_rank], expected, rtol=1e-4, atol=1e-5)
    firsts, seconds = kept[:, latent.kv_lora_rank :].chunk(2, 1)
    pairs = shared.view(len(tokens), -1, 2)
    torch.testing.assert_close(firsts[0], pairs[0, :, 0], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(seconds[0], pairs[0, :, 1], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(torch.hypot(firsts, seconds), pairs.norm(dim=2), rtol=1e-4, atol=1e-5)


def test_the_form_with_fewer_operations_is_taken() -> None:
    """Counted for DeepSeek V2's heads, product by product."""
    shape = LatentShape(0, 512, 128, 64, 128)

    def is_cheaper(start: int, num_tokens: int) -> bool:
        num_pairs = sum(start + token + 1 for token in range(num_tokens))
        absorbed = num_tokens * 2 * (128 * 512 + 512 * 128) + num_pairs * 2 * (512 + 64 + 512)
        expanded = (start + num_tokens) * 2 * 512 * (128 + 128) + num_pairs * 2 * (128 + 64 + 128)
        return expanded < absorbed

    for start in (0, 1, 16, 100, 1000, 10_000, 100_000):
        for num_tokens in (1, 2, 100, 160, 170, 171, 172, 200, 1000):
            assert shape.is_expansion_cheaper(start, num_tokens) == is_cheaper(start, num_tokens)
    assert not shape.is_expansion_cheaper(10_000, 100)
    assert shape.is_expansion_cheaper(10_000, 200)


def test_the_work_of_a_step_is_that_of_the_cheaper_form(tmp_path: Path) -> None:
    """Of 27 layers of 16 heads. A token that decodes reads 1,152 bytes of each that it sees."""
    config = read_model_config(_write(tmp_path, MODELS["deepseek-ai/DeepSeek-V2-Lite"].config))
    work = ModelWork(config, 2)
    far, near = (work.of([], 0, [start]) for start in (2048, 0))
    assert far.read_bytes - near.read_bytes == 2048 * 27 * 1152
    assert far.flops - near.flops == 2048 * 27 * 16 * 2 * (512 + 64 + 512)
    for num_tokens in (20, 500):
        later, first = (work.of([(start, num_tokens)], 0).flops for start in (1000, 0))
        num_pairs = num_tokens * 1000 + num_tokens * (num_tokens + 1) // 2
        absorbed = num_pairs * 2 * (512 + 64 + 512)
        expanded = num_pairs * 2 * (128 + 64 + 128) + 1000 * 2 * 512 * (128 + 128)
        of_first = num_tokens * (num_tokens + 1) // 2 * 2 * (128 + 64 + 128)
        assert later - first == 27 * 16 * (min(absorbed, expanded) - of_first)
        assert (expanded < absorbed) == (num_tokens == 500)


@uses_compiler
@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("case", [f"{family}-{number}" for family in LATENT for number in (1, 2)])
def test_both_forms_give_the_same_logits(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whichever chunks take which: a prompt in chunks beside others that decode, of one layout of blocks."""
    write_family_checkpoint(tmp_path, **CASES[case])
    decoder = load_decoder(tmp_path, torch.float32, CPU)
    prompt = tokens_of(4, 90)
    results = []
    for is_cheaper in (lambda *_: False, lambda *_: True, lambda _, start, __: start > 20):
        monkeypatch.setattr(LatentShape, "is_expansion_cheaper", is_cheaper)
        model = PagedModel(decoder, torch.float32)
        model.step([(0, prompt[:30])])
        mixed = model.step([(0, prompt[30:31]), (1, prompt[:50]), (2, prompt[:3])])
        mixed += model.step([(1, prompt[50:]), (0, prompt[31:32]), (2, prompt[3:])])
        results.append(torch.cat(mixed))
    for other in results[1:]:
        assert error_of(other, results[0]) < 1e-5


@needs_compiler
def test_logits_of_the_kernels_are_the_same_bits_in_chunks(tmp_path: Path) -> None:
    write_family_checkpoint(tmp_path, **(CASES["deepseek_v3-1"] | {"first_k_dense_replace": 4}))
    decoder = load_decoder(tmp_path, torch.float32, CPU, is_deterministic=True)
    model, prompt = PagedModel(decoder, torch.float32), tokens_of(4, 70)
    model.attention = choose_attention(decoder.attention_shape, model.kv, is_deterministic=True)
    whole = model.chunked(0, prompt, 70)
    for sequence, chunk_tokens in enumerate((1, 7, 33), 1):
        assert torch.equal(model.chunked(sequence, prompt, chunk_tokens), whole)
