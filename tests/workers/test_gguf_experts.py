"""GGUF files of mixtures of experts: from a random model of transformers, written as llama.cpp's converter
writes them, with all experts of a layer in one tensor, back to the same tensors and logits."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import gguf_files
import numpy as np
import pytest
import torch
import transformers
from decoder_logits import decoder_logits
from gguf import GGMLQuantizationType
from gguf_files import Floats
from optional_programs import uses_compiler
from safetensors.torch import load_file
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

from workers.errors import CheckpointError
from workers.model.gguf.gguf_config import ARCHITECTURES
from workers.model.gguf.gguf_file import GgufFile
from workers.model.gguf.gguf_forms import kept_forms
from workers.model.gguf.gguf_names import written_tensors
from workers.model.model_config import read_model_config
from workers.model.model_folder import described_folder, weights_folder
from workers.model.quantization.quantized_files import QuantizedTensorFiles
from workers.model.quantization.weight_form import AS_STORED
from workers.model.rank_memory import Checkpoint, RankShape

pytestmark = uses_compiler

SHAPE: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "bos_token_id": None,
    "eos_token_id": 127,
    "pad_token_id": None,
    "tie_word_embeddings": False,
}
EXPERTS: dict[str, Any] = {"expert_count": 5, "expert_used_count": 2}
TYPES = tuple(GGMLQuantizationType[it] for it in ("Q4_0", "Q8_0", "MXFP4", "Q5_1", "IQ4_NL", "Q4_1", "Q5_0"))
TOKENS = torch.randint(128, (1, 50), generator=torch.Generator().manual_seed(5))
_STACKED = re.compile(r"model\.layers\.(\d+)\.\w+\.experts\.(gate_up|down)_proj(_bias)?")
_LAYER = re.compile(r"model\.layers\.(\d+)\.")


class _Case(NamedTuple):
    """A configuration of transformers, and the keys that the converter writes beside those of every model."""

    config: transformers.PreTrainedConfig
    metadata: dict[str, Any]
    is_permuted: bool = False
    # Whether transformers reads files of this architecture too.
    is_read_by_transformers: bool = False


def _rope(theta: float, **fields: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": "default", "rope_theta": theta, **fields}}


def _without(*keys: str) -> dict[str, Any]:
    return {key: value for key, value in SHAPE.items() if key not in keys}


_YARN = {
    "rope.scaling.type": "yarn",
    "rope.scaling.factor": 8.0,
    "rope.scaling.original_context_length": 32,
}
_CORRECTED: dict[str, Any] = {
    "expert_shared_count": 2,
    "leading_dense_block_count": 1,
    "expert_feed_forward_length": 32,
}
CASES = {
    "llama": _Case(
        transformers.MixtralConfig(
            **SHAPE, num_local_experts=5, num_experts_per_tok=2, sliding_window=None, **_rope(1e6)
        ),
        {"rope.freq_base": 1e6, "rope.dimension_count": 16},
        is_permuted=True,
    ),
    "qwen2moe": _Case(
        transformers.Qwen2MoeConfig(
            **SHAPE,
            num_experts=5,
            num_experts_per_tok=2,
            moe_intermediate_size=32,
            shared_expert_intermediate_size=64,
            **_rope(1e6),
        ),
        {
            "rope.freq_base": 1e6,
            "expert_feed_forward_length": 32,
            "expert_shared_feed_forward_length": 64,
        },
        is_read_by_transformers=True,
    ),
    "qwen3moe": _Case(
        transformers.Qwen3MoeConfig(
            **SHAPE,
            num_experts=5,
            num_experts_per_tok=2,
            moe_intermediate_size=32,
            norm_topk_prob=True,
            **_rope(1e6),
        ),
        {"attention.key_length": 16, "rope.freq_base": 1e6, "expert_feed_forward_length": 32},
        is_read_by_transformers=True,
    ),
    "olmoe": _Case(
        transformers.OlmoeConfig(**_without("head_dim"), num_experts=5, num_experts_per_tok=2, **_rope(1e4)),
        {"rope.freq_base": 1e4},
    ),
    "granitemoe": _Case(
        transformers.GraniteMoeConfig(
            **_without("head_dim"),
            num_local_experts=5,
            num_experts_per_tok=2,
            attention_multiplier=0.2,
            embedding_multiplier=6.0,
            residual_multiplier=0.3,
            logits_scaling=4.0,
            **_rope(1e4),
        ),
        {
            "rope.freq_base": 1e4,
            "attention.scale": 0.2,
            "embedding_scale": 6.0,
            "residual_scale": 0.3,
            "logit_scale": 4.0,
        },
        is_permuted=True,
    ),
    "gpt-oss": _Case(
        transformers.GptOssConfig(
            **SHAPE,
            num_local_experts=5,
            num_experts_per_tok=2,
            sliding_window=16,
            layer_types=["sliding_attention", "full_attention", "sliding_attention"],
            **_rope(
                1e4,
                rope_type="yarn",
                factor=8.0,
                beta_fast=32.0,
                beta_slow=1.0,
                truncate=False,
                original_max_position_embeddings=32,
            ),
        ),
        {
            "attention.key_length": 16,
            "attention.sliding_window": 16,
            "rope.freq_base": 1e4,
            "expert_feed_forward_length": 96,
            **_YARN,
        },
    ),
    "glm4moe": _Case(
        transformers.Glm4MoeConfig(
            **SHAPE,
            n_routed_experts=5,
            num_experts_per_tok=2,
            moe_intermediate_size=32,
            n_shared_experts=2,
            first_k_dense_replace=1,
            routed_scaling_factor=1.5,
            use_qk_norm=True,
            attention_bias=True,
            **_rope(1e4, partial_rotary_factor=0.5),
        ),
        {
            **_CORRECTED,
            "attention.key_length": 16,
            "rope.dimension_count": 8,
            "rope.freq_base": 1e4,
            "expert_gating_func": 2,
            "expert_weights_scale": 1.5,
            "expert_weights_norm": True,
            # One more layer, that predicts the token after the next one.
            "block_count": 4,
            "nextn_predict_layers": 1,
        },
    ),
    "ernie4_5-moe": _Case(
        transformers.Ernie4_5_MoeConfig(
            **SHAPE,
            moe_num_experts=5,
            moe_k=2,
            moe_intermediate_size=32,
            moe_num_shared_experts=2,
            moe_layer_start_index=1,
            **_rope(5e5),
        ),
        {
            **_CORRECTED,
            "attention.key_length": 16,
            "rope.freq_base": 5e5,
            "interleave_moe_layer_step": 1,
            "expert_gating_func": 1,
        },
    ),
}


class _Written(NamedTuple):
    name: str
    model: Any
    folder: Path


def _random_model(config: transformers.PreTrainedConfig) -> Any:
    torch.manual_seed(7)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").float().eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.normal_(1.0, 0.2)
            else:
                parameter.normal_(0.0, 0.3 if "bias" in name or "sinks" in name else 0.16)
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.normal_(0.0, 0.2)
    return model


def _tensors(model: Any) -> Iterator[tuple[str, Floats]]:
    """Iterate over the tensors of a model as the converter has them: those of experts, of all in a layer, by
    their names in the file, and others by those of transformers."""
    is_gpt_oss = model.config.model_type == "gpt_oss"
    for name, tensor in model.state_dict().items():
        values, layer = tensor.numpy(), _LAYER.match(name)
        if found := _STACKED.fullmatch(name):
            kind, block = "bias" if found[3] else "weight", f"blk.{found[1]}.ffn"
            rows = values.swapaxes(1, 2) if is_gpt_oss and kind == "weight" else values
            if found[2] == "down":
                yield f"{block}_down_exps.{kind}", np.ascontiguousarray(rows)
                continue
            halves = (rows[:, ::2], rows[:, 1::2]) if is_gpt_oss else np.split(rows, 2, axis=1)
            for half, values in zip(("gate", "up"), halves, strict=True):
                yield f"{block}_{half}_exps.{kind}", np.ascontiguousarray(values)
        elif layer and name.endswith("e_score_correction_bias"):
            yield f"blk.{layer[1]}.exp_probs_b.bias", values.reshape(-1)
        elif layer and ".block_sparse_moe.router." in name:
            yield f"blk.{layer[1]}.ffn_gate_inp.weight", values
        else:
            yield name, values.reshape(-1) if "shared_expert_gate" in name else values


def _write_file(file: Path, name: str, model: Any, types: Sequence[GGMLQuantizationType] = ()) -> Path:
    case, layer = CASES[name], {"blk.3.nextn.eh_proj.weight": np.ones((64, 128), np.float32)}
    metadata = {
        "block_count": 3,
        "context_length": 512,
        "embedding_length": 64,
        "feed_forward_length": 96,
        "attention.head_count": 4,
        "attention.head_count_kv": 2,
        "attention.layer_norm_rms_epsilon": case.config.rms_norm_eps,
    }
    return gguf_files.write_family(
        file,
        name,
        dict(_tensors(model)),
        metadata | EXPERTS | case.metadata,
        num_heads=4 if case.is_permuted else 0,
        num_kv_heads=2 if case.is_permuted else 0,
        types=types,
        others=layer if "nextn_predict_layers" in case.metadata else None,
    )


@pytest.fixture(scope="module", params=list(CASES))
def written(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> _Written:
    model = _random_model(CASES[request.param].config)
    return _Written(request.param, model, tmp_path_factory.mktemp("gguf"))


def test_logits_are_those_of_the_model(written: _Written) -> None:
    file = _write_file(written.folder / "model.gguf", written.name, written.model)
    folder = weights_folder(file, "fp32", written.folder / "cache")
    with torch.inference_mode():
        expected = written.model(TOKENS).logits[0]
    assert expected.std() > 0.3
    found = decoder_logits(folder, TOKENS[0].tolist())
    assert float((found - expected).abs().max() / expected.abs().max()) <= 1e-4
    if CASES[written.name].is_read_by_transformers:
        read = load_gguf_checkpoint(file, return_tensors=True, model_to_load=written.model)["tensors"]
        state = written.model.state_dict()
        assert read.keys() == state.keys()
        assert all(torch.equal(state[name], tensor.float()) for name, tensor in read.items())


def test_quantized_experts_are_worth_what_the_file_says(written: _Written) -> None:
    """Each expert kept as it is in the file, bit for bit, and results within the rounding of products; in
    memory that was counted before."""
    file = _write_file(written.folder / "quantized.gguf", written.name, written.model, TYPES)
    kept, plain = (
        weights_folder(file, "fp32", written.folder / "cache", keeps_quantized=keeps)
        for keeps in (True, False)
    )
    source, tensors = gguf_files.dequantized([file]), load_file(plain / "model.safetensors")
    scheme = read_model_config(kept).quantization
    assert scheme is not None
    num_experts = 0
    with QuantizedTensorFiles(kept, torch.float32, torch.device("cpu"), scheme) as files:
        assert files.names == tensors.keys()
        for name, tensor in tensors.items():
            assert torch.equal(files.tensor(name, tuple(tensor.shape)), tensor), name
            if not (found := re.search(r"layers\.(\d+)\..*experts\.(\d+)\.(\w+)\.weight", name)):
                continue
            part = {"w1": "gate", "w2": "down", "w3": "up"}.get(found[3], found[3].removesuffix("_proj"))
            of_all = source[f"blk.{found[1]}.ffn_{part}_exps.weight"]
            assert np.array_equal(tensor.numpy(), of_all[int(found[2])]), name
            assert files.is_quantized(name)
            num_experts += 1
    num_layers = sum("ffn_gate_exps.weight" in name for name in source)
    assert num_experts == num_layers * 3 * EXPERTS["expert_count"] > 0
    of_file = written_tensors(GgufFile.read(file))
    counted = Checkpoint({it.name: it.num_items for it in of_file}, kept_forms(of_file))
    rank = RankShape(read_model_config(kept), 0, 3)
    assert counted.weight_bytes(rank, 2, AS_STORED) == Checkpoint.read(kept).weight_bytes(rank, 2, AS_STORED)
    expected = decoder_logits(plain, TOKENS[0].tolist())
    found_logits = decoder_logits(kept, TOKENS[0].tolist())
    assert float((found_logits - expected).abs().max() / expected.abs().max()) <= 2e-3


def test_every_architecture_with_experts_has_a_case() -> None:
    names = {name for name, architecture in ARCHITECTURES.items() if architecture.experts_key}
    assert names | {"llama"} == CASES.keys()


@pytest.mark.parametrize(
    ("name", "metadata", "message"),
    [
        ("qwen3moe", {"expert_gating_func": 2}, "qwen3moe.expert_gating_func is 2, not 1, as in all models"),
        ("qwen3moe", {"expert_used_count": None}, "qwen3moe.expert_used_count is missing"),
        ("qwen2moe", {"expert_group_count": 4}, "qwen2moe.expert_group_count is 4, not 1"),
        ("olmoe", {"attention.clamp_kqv": 8.0}, "olmoe.attention.clamp_kqv is 8.0, not absent"),
        ("llama", {}, "no layer has a tensor ffn_gate_exps.weight of all its experts; take a newer"),
    ],
)
def test_experts_that_are_not_supported_are_refused(
    name: str, metadata: dict[str, Any], message: str, tmp_path: Path
) -> None:
    """The file of `llama` has a tensor for each expert, as those of early 2024."""
    changed: dict[str, Any] = {"block_count": 1, "context_length": 512, "embedding_length": 64}
    changed |= {"feed_forward_length": 96, "attention.head_count": 4, **EXPERTS}
    changed |= {"attention.layer_norm_rms_epsilon": 1e-5}
    changed |= CASES[name].metadata | metadata
    stacked = {"blk.0.ffn_gate_exps.weight": np.zeros((5, 32, 64), np.float32)}
    each = {"blk.0.ffn_gate.0.weight": np.zeros((32, 64), np.float32)}
    file = gguf_files.write_family(
        tmp_path / "model.gguf",
        name,
        {"model.embed_tokens.weight": np.zeros((128, 64), np.float32)},
        {key: value for key, value in changed.items() if value is not None},
        others=each if name == "llama" else stacked,
    )
    with pytest.raises(CheckpointError, match=message) as caught:
        described_folder(file, tmp_path / "cache")
    assert "\n" not in str(caught.value)


def test_the_keys_of_experts_are_those_of_the_file(tmp_path: Path) -> None:
    """Also where transformers' defaults are the same as the file's."""
    model = _random_model(CASES["glm4moe"].config)
    folder = described_folder(_write_file(tmp_path / "model.gguf", "glm4moe", model), tmp_path / "cache")
    config = json.loads((folder / "config.json").read_text())
    keys = ("n_routed_experts", "num_experts_per_tok", "moe_intermediate_size", "n_shared_experts")
    assert [config[key] for key in keys] == [5, 2, 32, 2]
    assert [config[it] for it in ("n_group", "topk_group", "first_k_dense_replace")] == [1, 1, 1]
    assert (config["num_hidden_layers"], config["routed_scaling_factor"]) == (3, 1.5)
    assert config["norm_topk_prob"]
