"""What is read from a checkpoint's config.json, and what is refused."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import transformers

from workers.errors import CheckpointError
from workers.model.ignored_keys import ignored_keys
from workers.model.model_config import file_problem, read_model_config, weight_files

MakeCheckpoint = Callable[..., Path]
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
SPARSE = {
    "hidden_size": 4096,
    "intermediate_size": 160,
    "num_hidden_layers": 30,
    "num_attention_heads": 32,
    "vocab_size": 211,
}


def _write(path: Path, **config: Any) -> Path:
    (path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return path


def _edit(model_dir: Path, **config: Any) -> None:
    file = model_dir / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | config), encoding="utf-8")


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3"])
@pytest.mark.parametrize("sliding", [{}, {"use_sliding_window": True}, {"sliding_window": None}])
def test_silent_keys_mean_what_transformers_takes_them_for(
    family: str, sliding: dict[str, Any], tmp_path: Path
) -> None:
    config = read_model_config(_write(tmp_path, model_type=family, **SPARSE, **sliding))
    expected = transformers.AutoConfig.from_pretrained(tmp_path)
    head_dim = getattr(expected, "head_dim", None) or expected.hidden_size // expected.num_attention_heads
    assert config.num_kv_heads == expected.num_key_value_heads
    assert config.head_dim == head_dim
    assert config.max_context_tokens == expected.max_position_embeddings
    assert config.rms_norm_eps == expected.rms_norm_eps
    assert config.rope.theta == expected.rope_parameters["rope_theta"]
    assert config.tie_word_embeddings == expected.tie_word_embeddings
    window = getattr(expected, "sliding_window", None) or 0
    kinds = getattr(expected, "layer_types", None)
    if kinds is None:
        assert config.sliding_windows == ((window if family == "mistral" else 0),) * 30
    else:
        assert config.sliding_windows == tuple(window * (kind == "sliding_attention") for kind in kinds)


def test_old_and_new_names_of_rope_are_the_same(tmp_path: Path) -> None:
    old = _write(tmp_path, model_type="llama", rope_theta=5e5, rope_scaling=LLAMA3, **SPARSE)
    first = read_model_config(old)
    new = _write(tmp_path, model_type="llama", rope_parameters=LLAMA3 | {"rope_theta": 5e5}, **SPARSE)
    assert read_model_config(new) == first
    assert first.rope.rope_type == "llama3"
    assert first.rope.original_max_positions == 2048


def test_the_old_name_of_a_rope_type_is_read_for_every_type(tmp_path: Path) -> None:
    """The proportional type has keys of its own, and is not taken for llama3 with keys of that."""
    proportional = {**LLAMA3, "rope_type": "proportional", "partial_rotary_factor": 0.25}
    _write(tmp_path, model_type="llama", rope_theta=5e5, rope_scaling=proportional, **SPARSE)
    new = read_model_config(tmp_path)
    proportional["type"] = proportional.pop("rope_type")
    _write(tmp_path, model_type="llama", rope_theta=5e5, rope_scaling=proportional, **SPARSE)
    assert read_model_config(tmp_path) == new
    assert (new.rope.rope_type, new.rope.theta, new.rope.num_rotated) == ("proportional", 5e5, 32)


@pytest.mark.parametrize(
    ("rope", "num_tokens"),
    [
        ({"type": "linear", "factor": 4.0}, 16384),
        ({"rope_type": "linear", "factor": 2.5}, 10240),
        ({"rope_type": "llama3", **LLAMA3, "original_max_position_embeddings": 1024}, 4096),
        ({"rope_type": "default"}, 4096),
        (None, 4096),
    ],
)
def test_linear_scaling_stretches_the_context(
    rope: dict[str, Any] | None, num_tokens: int, tmp_path: Path
) -> None:
    """As in vicuna-16k, whose config.json names the 4096 positions of its base model."""
    _write(tmp_path, model_type="llama", max_position_embeddings=4096, rope_scaling=rope, **SPARSE)
    assert read_model_config(tmp_path).max_context_tokens == num_tokens


@pytest.mark.parametrize(
    ("config", "keys"),
    [
        ({}, set()),
        ({"attention_multiplier": 0.5, "model_type": "granite"}, set()),
        ({"dual_chunk_attention_config": None, "logit_scale": 1.0, "clip_qkv": None}, set()),
        ({"logits_scaling": 8.0, "use_qk_norm": True}, {"logits_scaling", "use_qk_norm"}),
        ({"use_qk_norm": True, "logit_scale": 0.5, "model_type": "cohere"}, set()),
        ({"qk_layernorm": True, "model_type": "stablelm"}, set()),
        ({"no_rope_layers": [1, 0]}, {"no_rope_layers"}),
        ({"sliding_window": 4096}, {"sliding_window"}),
        ({"model_type": "mistral", "sliding_window": 4096}, set()),
        ({"rope_scaling": LLAMA3}, set()),
        (
            {"rope_scaling": {"type": "default", "mrope_section": [16, 24]}},
            {"rope_scaling.mrope_section"},
        ),
    ],
)
def test_keys_that_are_left_out_are_named(config: dict[str, Any], keys: set[str], tmp_path: Path) -> None:
    _write(tmp_path, **{"model_type": "llama", **SPARSE, **config})
    read_model_config(tmp_path)
    assert set(ignored_keys(tmp_path)) == keys


def test_end_tokens_are_those_of_generation_config(tmp_path: Path) -> None:
    _write(tmp_path, model_type="llama", eos_token_id=2, **SPARSE)
    assert read_model_config(tmp_path).eos_token_ids == (2,)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [7, 9]}')
    assert read_model_config(tmp_path).eos_token_ids == (7, 9)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "architectures 'GPT2LMHeadModel' is not supported"),
        ({"architectures": None, "model_type": "mamba"}, "model_type 'mamba' is not supported"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5"),
        ({"rope_scaling": {"rope_type": "longrope", "factor": 4.0}}, "rope_scaling {'rope_type': 'longrope'"),
        (
            {"dual_chunk_attention_config": {"chunk_size": 262144}},
            "dual_chunk_attention_config is there, and attention in chunks is not supported",
        ),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1.0}}}, "rope_parameters"),
        ({"rope_scaling": {"type": "linear"}}, "factor None is not a positive number"),
        ({"rope_scaling": LLAMA3 | {"low_freq_factor": 9.0}}, "low_freq_factor"),
        ({"num_attention_heads": 0}, "num_attention_heads 0 is not a positive integer"),
        ({"hidden_size": None}, "hidden_size None is not a positive integer"),
        ({"num_key_value_heads": 3}, "num_key_value_heads 3 does not divide"),
        ({"head_dim": 15}, "head_dim 15 is odd"),
        (
            {"architectures": ["LlamaForCausalLM"], "head_dim": None, "hidden_size": 60},
            "head_dim 15 (hidden_size 60 // 4 heads) is odd",
        ),
        ({"rms_norm_eps": "small"}, "rms_norm_eps 'small' is not a positive number"),
        ({"layer_types": ["full_attention"]}, "layer_types ['full_attention'] does not name the 2 layers"),
        ({"layer_types": ["chunked_attention"] * 2}, "layer_types"),
        ({"layer_types": ["sliding_attention"] * 2}, "use_sliding_window is not set"),
        ({"eos_token_id": "</s>"}, "eos_token_id '</s>'"),
        ({"rms_norm_eps": 10**400}, "is not a positive number"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps nan is not a positive number"),
        ({"rope_scaling": {"type": "linear", "factor": float("inf")}}, "factor inf is not a positive number"),
        ({"rope_scaling": {"type": "linear", "factor": 1e29}}, "factor 1e+29 makes"),
        ({"rope_scaling": {"type": "linear", "factor": 1e-9}}, "factor 1e-09 makes 0 of"),
        ({"rope_scaling": LLAMA3 | {"original_max_position_embeddings": 1e29}}, "original_max_position"),
        ({"max_position_embeddings": 1 << 31}, "max_position_embeddings 2147483648 is not a positive"),
        ({"eos_token_id": 10**30}, f"eos_token_id {10**30} is not a token id"),
        ({"eos_token_id": [1, 1 << 31]}, "eos_token_id [1, 2147483648] is not a token id"),
        ({"eos_token_id": list(range(1_000_000))}, "eos_token_id [0, 1, 2, "),
        ({"eos_token_id": True}, "eos_token_id True is not a token id"),
        ({"num_hidden_layers": 1 << 40}, "num_hidden_layers 1099511627776 is not a positive integer up to"),
        (
            {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": "x"},
            "max_window_layers 'x'",
        ),
        ({"layer_types": [["full_attention"]] * 2}, "layer_types"),
    ],
)
def test_a_refusal_names_file_key_and_value(
    change: dict[str, Any], named: str, make_checkpoint: MakeCheckpoint, tmp_path: Path
) -> None:
    model_dir = shutil.copytree(make_checkpoint("qwen3"), tmp_path / "model")
    _edit(model_dir, **change)
    with pytest.raises(CheckpointError) as caught:
        read_model_config(model_dir)
    assert named in str(caught.value)
    assert str(model_dir / "config.json") in str(caught.value)


def test_mistral_with_layer_types_is_refused(tmp_path: Path) -> None:
    _write(tmp_path, model_type="mistral", layer_types=["full_attention"] * 30, **SPARSE)
    with pytest.raises(CheckpointError, match="layer_types"):
        read_model_config(tmp_path)


@pytest.mark.parametrize("text", [None, "{", "[]", "[" * 100_000])
def test_an_unreadable_config_is_refused_by_name(text: str | None, tmp_path: Path) -> None:
    if text is not None:
        (tmp_path / "config.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"config\.json"):
        read_model_config(tmp_path)


def test_a_name_that_no_file_can_have_is_not_in_the_folder(tmp_path: Path) -> None:
    index = {"weight_map": {"a": "x" * 5000}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match="which is not in the folder"):
        weight_files(tmp_path)


def _linked(folder: Path, target: Path | str) -> None:
    """A checkpoint whose index names one file, which is a link."""
    folder.mkdir(parents=True, exist_ok=True)
    index = {"weight_map": {"a": "part-1.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "part-1.safetensors").symlink_to(target)


def test_a_link_that_leaves_the_folder_is_refused(tmp_path: Path) -> None:
    outside = tmp_path / "outside.safetensors"
    outside.write_bytes(b"somebody else's")
    targets: tuple[Path | str, ...] = (outside, "../outside.safetensors", "../models--b/blobs/x")
    for number, target in enumerate(targets):
        folder = tmp_path / "models--a" / "snapshots" / str(number)
        _linked(folder, target)
        (tmp_path / "models--b/blobs").mkdir(parents=True, exist_ok=True)
        (tmp_path / "models--b/blobs/x").touch()
        (tmp_path / "models--a/snapshots/outside.safetensors").touch()
        (tmp_path / "models--a/snapshots/models--b/blobs").mkdir(parents=True, exist_ok=True)
        (tmp_path / "models--a/snapshots/models--b/blobs/x").touch()
        with pytest.raises(CheckpointError, match=r"names part-1\.safetensors, which is a link that leaves"):
            weight_files(folder)
    (tmp_path / "single").mkdir()
    (tmp_path / "single/model.safetensors").symlink_to(outside)
    with pytest.raises(CheckpointError, match=r"model\.safetensors: is a link that leaves"):
        weight_files(tmp_path / "single")


def test_links_within_the_folder_and_into_the_blobs_of_the_hubs_cache_are_followed(tmp_path: Path) -> None:
    snapshot = tmp_path / "models--org--name/snapshots/0123abcd"
    _linked(snapshot, "../../blobs/digest")
    (tmp_path / "models--org--name/blobs").mkdir()
    (tmp_path / "models--org--name/blobs/digest").touch()
    assert weight_files(snapshot) == (snapshot / "part-1.safetensors",)
    (tmp_path / "link").symlink_to(snapshot)  # the folder itself may be anywhere
    assert weight_files(tmp_path / "link") == (tmp_path / "link/part-1.safetensors",)
    mounted = tmp_path / "mounted"  # as Kubernetes mounts a ConfigMap
    _linked(mounted, "..data/part-1.safetensors")
    (mounted / "..2026").mkdir()
    (mounted / "..2026/part-1.safetensors").touch()
    (mounted / "..data").symlink_to("..2026")
    assert weight_files(mounted) == (mounted / "part-1.safetensors",)


@pytest.mark.parametrize("end", ["x", None, [1], True, 1.5])
def test_a_header_whose_offsets_are_no_numbers_is_refused(end: object, tmp_path: Path) -> None:
    header = json.dumps({"a": {"data_offsets": [0, 4]}, "b": {"data_offsets": [4, end]}}).encode()
    file = tmp_path / "model.safetensors"
    file.write_bytes(len(header).to_bytes(8, "little") + header + bytes(8))
    with pytest.raises(CheckpointError, match="is not an offset"):
        file_problem(file)


def test_odd_architectures_beside_a_model_type_are_passed_over(
    make_checkpoint: MakeCheckpoint, tmp_path: Path
) -> None:
    model_dir = shutil.copytree(make_checkpoint("llama"), tmp_path / "model")
    _edit(model_dir, architectures={"a": 1}, model_type="llama", sliding_window=8)
    assert read_model_config(model_dir).family == "llama"
    assert list(ignored_keys(model_dir)) == ["sliding_window"]


def test_engine_cores_and_gateways_get_no_torch_by_it() -> None:
    code = "import sys, workers.model.model_config; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == 0
