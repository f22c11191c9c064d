"""What people try to serve and cannot: each is refused in one sentence, with its place and what to do."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load_file, save_file

from workers.errors import CheckpointError
from workers.model.decoder import load_decoder
from workers.model.model_config import weight_files


class _Refusal(NamedTuple):
    change: Callable[[Path], Path]
    # In this order, in the message.
    parts: tuple[str, ...]


def _configured(**keys: Any) -> Callable[[Path], Path]:
    def change(folder: Path) -> Path:
        config = json.loads((folder / "config.json").read_text()) | keys
        (folder / "config.json").write_text(json.dumps(config))
        return folder

    return change


def _gemma4(**keys: Any) -> Callable[[Path], Path]:
    """Call the checkpoint Gemma 4, with keys of its own."""
    return _configured(
        architectures=["Gemma4ForCausalLM"], model_type="gemma4_text", sliding_window=20, **keys
    )


_FULL = {"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 0.25}
_SLIDING = {"rope_type": "default", "rope_theta": 1e4}


def _rope_sets(full: dict[str, Any] | None = None, sliding: dict[str, Any] | None = None) -> dict[str, Any]:
    """Return Gemma 4's sets of rotary parameters with these keys added. An added `type` is the only one."""
    sliding = _SLIDING | (sliding or {})
    if "type" in sliding:
        del sliding["rope_type"]
    return {"full_attention": _FULL | (full or {}), "sliding_attention": sliding}


def _pickled(*names: str) -> Callable[[Path], Path]:
    def change(folder: Path) -> Path:
        (folder / "model.safetensors").unlink()
        for name in names:
            (folder / name).write_bytes(b"PK\x03\x04")
        return folder

    return change


def _packed(folder: Path) -> Path:
    """Replace a matrix by what AWQ and GPTQ store, of which config.json says nothing in old checkpoints."""
    tensors = load_file(folder / "model.safetensors")
    name = "model.layers.0.self_attn.q_proj"
    del tensors[f"{name}.weight"]
    tensors |= {
        f"{name}.qweight": torch.zeros(64, 8, dtype=torch.int32),
        f"{name}.scales": torch.zeros(1, 64),
    }
    save_file(tensors, folder / "model.safetensors")
    return folder


def _eight_bits(folder: Path) -> Path:
    tensors = load_file(folder / "model.safetensors")
    name = "model.layers.0.self_attn.q_proj.weight"
    tensors[name] = tensors[name].to(torch.float8_e4m3fn)
    save_file(tensors, folder / "model.safetensors")
    return folder


UNREAD = ("bitsandbytes", "hqq", "torchao", "quark", "mxfp4")
_GROUPS: dict[str, Any] = {"group_0": {"targets": ["Linear"], "weights": {"type": "int", "num_bits": 4}}}
_COMPRESSED: dict[str, Any] = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "config_groups": _GROUPS,
}
# Configurations of formats of which others are read, and what is said of them.
UNREAD_FORMS: tuple[tuple[str, dict[str, Any], tuple[str, ...]], ...] = (
    ("no method", {"bits": 4}, ("is there without a quant_method",)),
    ("GPTQ of 3 bits", {"quant_method": "gptq", "bits": 3}, ("has GPTQ weights of 3 bits, and 4 and 8 are",)),
    (
        "GPTQ for Marlin",
        {"quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin"},
        ("has the checkpoint_format 'marlin', which is not read",),
    ),
    (
        "odd groups",
        {"quant_method": "gptq", "bits": 4, "group_size": 33},
        ("has the group_size 33, which is no even number",),
    ),
    (
        "AWQ for gemv",
        {"quant_method": "awq", "bits": 4, "version": "GEMV"},
        ("has AWQ weights of version 'gemv', and gemm is read",),
    ),
    ("AWQ of 8 bits", {"quant_method": "awq", "bits": 8}, ("has AWQ weights of 8 bits, and 4 are read",)),
    (
        "AutoRound",
        {"quant_method": "auto-round", "packing_format": "auto_round"},
        ("has the packing_format 'auto_round', which is not read",),
    ),
    (
        "ModelOpt",
        {"quant_method": "modelopt", "quant_algo": "W4A8_AWQ"},
        ("has weights by ModelOpt in 'W4A8_AWQ', and FP8 and NVFP4 are read",),
    ),
    ("experts of FP4", {"quant_method": "fp8", "expert_dtype": "fp4"}, ("has experts of 'fp4'",)),
    (
        "no block",
        {"quant_method": "fp8", "weight_block_size": [128]},
        ("has the weight_block_size [128], which is no pair",),
    ),
    ("no groups", {"quant_method": "compressed-tensors"}, ("has no config_groups",)),
    (
        "no weights in a group",
        _COMPRESSED | {"config_groups": {"group_0": {"targets": ["Linear"]}}},
        ("says nothing of the weights of config_groups.group_0",),
    ),
    (
        "no targets",
        _COMPRESSED | {"config_groups": {"group_0": {"weights": {}}}},
        ("has no list of targets in config_groups.group_0",),
    ),
    (
        "a bad pattern",
        _COMPRESSED | {"config_groups": {"group_0": {"weights": {}, "targets": ["re:("]}}},
        ("has a pattern in config_groups.group_0.targets that cannot be read: '('",),
    ),
    (
        "sparse",
        _COMPRESSED | {"sparsity_config": {"format": "sparse-24-bitmask"}},
        ("has sparse weights ('sparse-24-bitmask')",),
    ),
    (
        "transforms",
        _COMPRESSED | {"transform_config": {"config_groups": {"R1": {}}}},
        ("has transforms of activations",),
    ),
    ("marlin-24", _COMPRESSED | {"format": "marlin-24"}, ("has the format 'marlin-24', which is not read",)),
    (
        "2 bits",
        _COMPRESSED
        | {"config_groups": {"a": {"targets": ["Linear"], "weights": {"type": "int", "num_bits": 2}}}},
        ("has pack-quantized weights of type 'int' and 2 bits, which are not read",),
    ),
)
REFUSALS = {
    "missing": _Refusal(lambda folder: folder / "none", ("none: no such folder; name a folder", "org/name")),
    "a file": _Refusal(
        lambda folder: folder / "model.safetensors",
        ("model.safetensors: is a file, and no GGUF file; name a folder",),
    ),
    "no config": _Refusal(
        lambda folder: _without(folder, "config.json"), ("config.json: no such file; download",)
    ),
    "no weights": _Refusal(
        lambda folder: _without(folder, "model.safetensors"),
        ("neither model.safetensors nor model.safetensors.index.json; download the weights",),
    ),
    "bin": _Refusal(
        _pickled("pytorch_model.bin"),
        ("pytorch_model.bin, which is never loaded", "download a revision with safetensors, or convert it"),
    ),
    "bin in parts": _Refusal(
        _pickled("pytorch_model-00001-of-00002.bin", "pytorch_model.bin.index.json"),
        ("pytorch_model-00001-of-00002.bin, which is never loaded",),
    ),
    "pth": _Refusal(_pickled("consolidated.00.pth"), ("consolidated.00.pth, which is never loaded",)),
    "architecture": _Refusal(
        _configured(architectures=["MambaForCausalLM"]),
        ("config.json: architectures 'MambaForCausalLM' is not supported; docs/models.md lists",),
    ),
    "an architecture with a slip": _Refusal(
        _configured(architectures=["LlamaForCausalLm"]),
        ("'LlamaForCausalLm' is not supported, and the nearest supported name is LlamaForCausalLM; docs",),
    ),
    "a model_type": _Refusal(
        _configured(architectures=None, model_type="qwen22"),
        ("model_type 'qwen22' is not supported, and the nearest supported name is qwen2; docs",),
    ),
    "neither": _Refusal(
        _configured(architectures=[], model_type=None), ("model_type is missing; docs/models.md lists",)
    ),
    "no experts": _Refusal(
        _gemma4(enable_moe_block=True),
        ("config.json: moe_intermediate_size None", "is not a positive integer"),
    ),
    "too many chosen experts": _Refusal(
        _gemma4(enable_moe_block=True, moe_intermediate_size=8, num_experts=3, top_k_experts=4),
        ("config.json: top_k_experts 4 is more than num_experts 3",),
    ),
    "groups that do not divide experts": _Refusal(
        _configured(architectures=["Glm4MoeForCausalLM"], n_group=3, n_routed_experts=8),
        ("config.json: n_group 3 does not divide the 8 experts",),
    ),
    "too few experts in the chosen groups": _Refusal(
        _configured(
            architectures=["Glm4MoeForCausalLM"],
            n_group=4,
            topk_group=1,
            n_routed_experts=8,
            num_experts_per_tok=3,
        ),
        ("config.json: num_experts_per_tok 3 is more than the experts of 1 groups",),
    ),
    "dense layers that are no list": _Refusal(
        _configured(architectures=["Qwen3MoeForCausalLM"], mlp_only_layers="all"),
        ("config.json: mlp_only_layers 'all' is not a list of layers",),
    ),
    "three experts of sparsemixer": _Refusal(
        _configured(architectures=["PhiMoEForCausalLM"], num_experts_per_tok=3),
        ("config.json: num_experts_per_tok 3 is not 2",),
    ),
    "attention to both sides": _Refusal(
        _gemma4(use_bidirectional_attention="all"),
        ("config.json: use_bidirectional_attention 'all'", "is not supported"),
    ),
    "all share keys": _Refusal(
        _gemma4(num_kv_shared_layers=2),
        ("config.json: num_kv_shared_layers 2", "leaves a kind of layers without keys and values"),
    ),
    "heads that differ in one kind": _Refusal(
        _gemma4(per_layer_config={"0": {"head_dim": 32}}, layer_types=["full_attention"] * 2),
        ("config.json: per_layer_config", "gives layers of one kind different heads"),
    ),
    "other keys of a layer": _Refusal(
        _gemma4(per_layer_config={"0": {"sliding_window": 32}}),
        ("config.json: per_layer_config", "supported for layers: head_dim, num_key_value_heads"),
    ),
    "uneven full heads": _Refusal(
        _gemma4(attention_k_eq_v=True, num_global_key_value_heads=3),
        ("config.json: num_global_key_value_heads 3", "does not divide the 4 attention heads"),
    ),
    "few inputs": _Refusal(
        _gemma4(hidden_size_per_layer_input=4, vocab_size_per_layer_input=7),
        ("config.json: vocab_size_per_layer_input 7", "is less than the vocab_size 256"),
    ),
    "sets of rotary parameters": _Refusal(
        _gemma4(rope_parameters={"rope_type": "proportional", "rope_theta": 1e6}),
        ("config.json: rope_parameters", "has no set for sliding_attention"),
    ),
    "rotary parameters of one kind": _Refusal(
        _gemma4(rope_parameters={"sliding_attention": _SLIDING}),
        ("config.json: rope_parameters", "has no set for full_attention"),
    ),
    "a set that is null": _Refusal(
        _gemma4(rope_parameters={"sliding_attention": None, "full_attention": _FULL}),
        ("config.json: rope_parameters", "has no set for sliding_attention"),
    ),
    "scaled windows": _Refusal(
        _gemma4(rope_parameters=_rope_sets(sliding={"type": "linear", "factor": 8.0})),
        ("config.json: rope_parameters", "changes the rotary embedding of layers with a window"),
    ),
    "half-rotated windows": _Refusal(
        _gemma4(rope_parameters=_rope_sets(sliding={"partial_rotary_factor": 0.5})),
        ("config.json: rope_parameters", "changes the rotary embedding of layers with a window"),
    ),
    "an unknown rope type": _Refusal(
        _gemma4(rope_parameters=_rope_sets(full={"rope_type": "folded"})),
        ("config.json: rope_parameters", "has an unsupported rope type 'folded' (supported: "),
    ),
    "a part of default rope": _Refusal(
        _gemma4(rope_parameters=_rope_sets(full={"rope_type": "default"})),
        ("config.json: partial_rotary_factor 0.25, but heads of this family are rotated whole",),
    ),
    "huge heads": _Refusal(_configured(head_dim=1 << 39), ("config.json: head_dim 549755813888 is more",)),
    "huge heads without a key": _Refusal(
        _configured(head_dim=None, hidden_size=1 << 39),
        ("config.json: head_dim 137438953472 (hidden_size 549755813888 // 4 heads) is more than 65536",),
    ),
    "huge heads of some layers": _Refusal(
        _gemma4(global_head_dim=1 << 39), ("config.json: global_head_dim 549755813888 is more than 65536",)
    ),
    "odd heads of a layer": _Refusal(
        _gemma4(per_layer_config={"1": {"head_dim": 7}}),
        ("config.json: per_layer_config", "has head_dim 7, which is odd"),
    ),
    "uneven heads of a layer": _Refusal(
        _gemma4(per_layer_config={"1": {"num_key_value_heads": 3}}),
        ("config.json: per_layer_config", "has num_key_value_heads 3, which does not divide the 4"),
    ),
    "no heads in a layer": _Refusal(
        _gemma4(per_layer_config={"1": {"num_key_value_heads": 0}}),
        ("config.json: per_layer_config.1.num_key_value_heads 0 is not a positive integer",),
    ),
    "a layer that is not there": _Refusal(
        _gemma4(per_layer_config={"01": {"head_dim": 32}}),
        ("config.json: per_layer_config", "names '01', which is none of 2 layers"),
    ),
    "a list of layers": _Refusal(
        _gemma4(per_layer_config=[{}, {"head_dim": 32}]),
        ("config.json: per_layer_config", "is not an object with an entry for each layer"),
    ),
    "no pairs": _Refusal(
        _gemma4(rope_parameters={"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 2}),
        ("config.json: rope_parameters", "rotates 512 of 256 pairs"),
    ),
    "tensors of AWQ": _Refusal(_packed, ("q_proj.weight is missing", "16 or 32 bits")),
    "8 bits": _Refusal(_eight_bits, ("model.layers.0.self_attn.q_proj.weight", "16 or 32 bits")),
    **{
        method: _Refusal(
            _configured(quantization_config={"quant_method": method, "bits": 4}),
            (
                f"config.json: quantization_config says that the weights are quantized ({method})",
                "take the checkpoint in 16 or 32 bits",
                "or one in compressed-tensors, GPTQ, AWQ or FP8",
            ),
        )
        for method in UNREAD
    },
    **{
        name: _Refusal(
            _configured(quantization_config=config), ("config.json: quantization_config", *parts, "16 or 32")
        )
        for name, config, parts in UNREAD_FORMS
    },
}


def _without(folder: Path, name: str) -> Path:
    (folder / name).unlink()
    return folder


@pytest.mark.parametrize("case", REFUSALS)
def test_it_is_refused_in_a_sentence(case: str, make_checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    folder = Path(shutil.copytree(make_checkpoint("llama"), tmp_path / "model"))
    model = REFUSALS[case].change(folder)
    with pytest.raises(CheckpointError) as caught:
        load_decoder(model, torch.float32, torch.device("cpu"))
    message = str(caught.value)
    assert str(folder) in message
    assert "\n" not in message
    places = [message.find(part) for part in REFUSALS[case].parts]
    assert -1 not in places, message
    assert places == sorted(places)


def test_weights_are_whole_before_one_is_refused(make_checkpoint: Callable[..., Path]) -> None:
    """The checkpoint of the cases above loads as it is."""
    folder = make_checkpoint("llama")
    assert len(weight_files(folder)) == 1
    load_decoder(folder, torch.float32, torch.device("cpu"))


def test_a_refusal_is_short_where_the_value_is_long(
    make_checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(make_checkpoint("llama"), tmp_path / "model"))
    layers = {str(layer): {"experts": "many"} for layer in range(10_000)}
    _gemma4(per_layer_config=layers)(folder)
    expected = r"config\.json: per_layer_config \{'0': .*\.\.\. names '2'"
    with pytest.raises(CheckpointError, match=expected) as caught:
        load_decoder(folder, torch.float32, torch.device("cpu"))
    assert len(str(caught.value)) < len(str(folder)) + 400
