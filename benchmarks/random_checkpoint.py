"""Write checkpoints of random weights, in the Hugging Face layout, for tests and benchmarks."""

from __future__ import annotations

import dataclasses
import json
import math
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from benchmarks.random_delta import delta_tensors
from benchmarks.random_experts import expert_tensors
from benchmarks.random_latents import RandomMatrix, latent_matrices, latent_norms
from workers.model.families.known_families import NAME_TO_FAMILY
from workers.model.model_config import ModelConfig, read_model_config
from workers.model.state.delta_shape import DeltaShape

_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "generation_config.json",
)
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_SHAPE: dict[str, Any] = {
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "sliding_window": None,
    "bos_token_id": 0,
    "eos_token_id": 1,
}

# The shape of Llama 3 8B, as keys of config.json.
LLAMA_8B: dict[str, Any] = {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 32768,
    "rope_theta": 500000.0,
    "vocab_size": 128256,
}
# The shape of Qwen3-30B-A3B, as keys of config.json, with a quarter of its 48 layers.
QWEN3_30B_QUARTER: dict[str, Any] = {
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
    "num_hidden_layers": 12,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "max_position_embeddings": 40960,
    "rope_theta": 1000000.0,
    "vocab_size": 151936,
}
# The shape of Qwen3.5 9B, three of whose four layers keep a state, as keys of config.json.
QWEN3_5_9B: dict[str, Any] = {
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 32,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "max_position_embeddings": 262144,
    "vocab_size": 248320,
}
# The shape of Qwen3-30B-A3B, with a fourth of its weights in half of its layers, as keys of config.json.
QWEN3_MOE_SCALED: dict[str, Any] = {
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "moe_intermediate_size": 384,
    "num_experts": 64,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "max_position_embeddings": 40960,
    "vocab_size": 151936,
    "tie_word_embeddings": True,
}
# The shape of Qwen3-0.6B, as keys of config.json.
QWEN3_06B: dict[str, Any] = {
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 40960,
    "vocab_size": 151936,
    "tie_word_embeddings": True,
}

# A shape of Qwen3.5 of 0.8 billion weights, three of whose four layers keep a state, as keys of config.json.
QWEN3_5_08B: dict[str, Any] = {
    "hidden_size": 1024,
    "intermediate_size": 3584,
    "num_hidden_layers": 24,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 16,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "max_position_embeddings": 262144,
    "vocab_size": 248320,
    "tie_word_embeddings": True,
}


def write_random_checkpoint(
    path: Path,
    family: str,
    *,
    seed: int,
    dtype: str = "float32",
    sharded: bool = False,
    tokenizer_from: Path | None = None,
    device: str = "cpu",
    **config_overrides: Any,
) -> None:
    """Write config.json and weights drawn from `seed`, on a device, into the folder `path`, made if missing.

    `config_overrides` are keys of config.json (a value of None is written as null). Weights are scaled so
    that activations stay near 1 and the logits' standard deviation is about 2. `sharded` writes two files
    and an index. `tokenizer_from` is a checkpoint folder whose tokenizer and end tokens are taken over,
    with its vocabulary size unless that is overridden.
    """
    path.mkdir(parents=True, exist_ok=True)
    shape = _copy_tokenizer(tokenizer_from, path) if tokenizer_from is not None else {}
    write_config(path, family, dtype, **(shape | config_overrides))
    tensors = _draw_weights(read_model_config(path), seed, _DTYPES[dtype], device)
    if not sharded:
        save_file(tensors, str(path / "model.safetensors"), metadata={"format": "pt"})
        return
    names = sorted(tensors)
    weight_map: dict[str, str] = {}
    for number, part in enumerate((names[::2], names[1::2]), start=1):
        file = f"model-{number:05d}-of-00002.safetensors"
        save_file({name: tensors[name] for name in part}, str(path / file), metadata={"format": "pt"})
        weight_map |= dict.fromkeys(part, file)
    num_bytes = sum(tensor.nbytes for tensor in tensors.values())
    index = {"metadata": {"total_size": num_bytes}, "weight_map": weight_map}
    (path / "model.safetensors.index.json").write_text(json.dumps(index, indent=1) + "\n", encoding="utf-8")


def write_config(path: Path, family: str, dtype: str, **config_overrides: Any) -> None:
    """Write config.json alone into the folder `path`. `config_overrides` are as above."""
    config = {
        "architectures": [NAME_TO_FAMILY[family].architectures[0]],
        "model_type": family,
        "dtype": dtype,
        **_SHAPE,
        **config_overrides,
    }
    if NAME_TO_FAMILY[family].has_latent_attention:
        # Heads of keys and values are as many as those of queries, and other keys say their size.
        config["num_key_value_heads"] = config["num_attention_heads"]
        del config["head_dim"]
    (path / "config.json").write_text(json.dumps(config, indent=1) + "\n", encoding="utf-8")


def _copy_tokenizer(source: Path, path: Path) -> dict[str, Any]:
    """Copy the tokenizer's files. Returns the keys of config.json that belong to it."""
    for name in _TOKENIZER_FILES:
        if (source / name).is_file():
            shutil.copyfile(source / name, path / name)
    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    names = ("vocab_size", "bos_token_id", "eos_token_id", "pad_token_id")
    return {name: config[name] for name in names if name in config}


def _draw_weights(config: ModelConfig, seed: int, dtype: torch.dtype, device: str) -> dict[str, Tensor]:
    generator = torch.Generator(device).manual_seed(seed)
    hidden = config.hidden_size

    def matrix(rows: int, columns: int, gain: float = 1.0) -> Tensor:
        drawn = torch.randn(rows, columns, generator=generator, device=device)
        return (drawn * (gain / math.sqrt(columns))).to(dtype).cpu()

    def vector(size: int, mean: float, spread: float) -> Tensor:
        return (mean + spread * torch.randn(size, generator=generator, device=device)).to(dtype).cpu()

    norm_mean = 1.0 - config.traits.norm_offset
    tensors = {
        "model.embed_tokens.weight": matrix(config.vocab_size, hidden, 2.0),
        "model.norm.weight": vector(hidden, norm_mean, 0.1),
    }
    if config.traits.has_norm_bias:
        tensors["model.norm.bias"] = vector(hidden, 0.0, 0.1)
    if not config.tie_word_embeddings:
        tensors["lm_head.weight"] = matrix(config.vocab_size, hidden, 2.0)
    if config.head_bias:
        tensors["lm_head.bias"] = vector(config.vocab_size, 0.0, 0.1)
    shapes = config.layer_shapes
    if size := shapes.input_size:
        all_inputs = config.num_layers * size
        tensors["model.embed_tokens_per_layer.weight"] = matrix(shapes.input_vocab_size, all_inputs, 2.0)
        tensors["model.per_layer_model_projection.weight"] = matrix(all_inputs, hidden)
        tensors["model.per_layer_projection_norm.weight"] = vector(size, norm_mean, 0.1)
    # Each layer adds to the residual stream twice; this keeps its variance near one.
    depth_gain = 1 / math.sqrt(2 * config.num_layers)
    for layer in range(config.num_layers):
        prefix = f"model.layers.{layer}."
        (num_kv_heads, head_dim), ffn = config.heads_of(layer), config.intermediate_size_of(layer)
        num_q, num_kv = config.num_heads * head_dim, num_kv_heads * head_dim
        matrices = {
            **_attention_matrices(config, layer, depth_gain),
            "mlp.gate_proj": (ffn, hidden, 1.0, config.mlp_bias),
            "mlp.up_proj": (ffn, hidden, 1.0, config.mlp_bias),
            "mlp.down_proj": (hidden, ffn, depth_gain, config.mlp_bias),
        }
        if not config.traits.is_gated:
            del matrices["mlp.gate_proj"]
            tensors |= _xielu_parameters(f"{prefix}mlp.act_fn.", dtype)
        if shapes.input_size:
            matrices["per_layer_input_gate"] = (shapes.input_size, hidden, 1.0, False)
            matrices["per_layer_projection"] = (hidden, shapes.input_size, depth_gain, False)
        if not ffn:
            matrices = {name: it for name, it in matrices.items() if not name.startswith("mlp.")}
        if isinstance(config.state, DeltaShape) and config.has_state(layer):
            block = f"{prefix}linear_attn."
            tensors |= delta_tensors(config.state, hidden, block, depth_gain, matrix, vector)
        if config.has_experts(layer):
            tensors |= expert_tensors(config, prefix, depth_gain, matrix, vector)
        for name, (rows, columns, gain, has_bias) in matrices.items():
            tensors[f"{prefix}{name}.weight"] = matrix(rows, columns, gain)
            if has_bias:
                tensors[f"{prefix}{name}.bias"] = vector(rows, 0.0, 0.3)
        names = dataclasses.astuple(config.norm_names(layer))
        norms = dict.fromkeys(filter(None, names), hidden)
        if config.traits.has_norm_bias:
            tensors |= {f"{prefix}{name}.bias": vector(hidden, 0.0, 0.1) for name in norms}
        if config.latent is not None:
            norms |= latent_norms(config.latent)
        if config.qk_norm and config.has_attention(layer):
            norms["self_attn.q_norm"] = head_dim
            norms |= {"self_attn.k_norm": head_dim} if config.has_own_kv(layer) else {}
        if shapes.input_size:
            norms["post_per_layer_input_norm"] = hidden
        if config.traits.has_sinks:
            tensors[f"{prefix}self_attn.sinks"] = vector(config.num_heads, 0.0, 2.0)
        if config.traits.has_layer_shapes:
            tensors[f"{prefix}layer_scalar"] = vector(1, 1.0, 0.1)
        if config.qk_row_norm:
            norms |= {"self_attn.q_norm": num_q, "self_attn.k_norm": num_kv}
        if config.qk_own_norms:
            q_name, k_name = (f"{prefix}self_attn.{name}" for name in config.traits.qk_norm_names)
            tensors |= _own_norms(q_name, vector(num_q, 1.0, 0.1), head_dim)
            tensors |= _own_norms(k_name, vector(num_kv, 1.0, 0.1), head_dim)
        for name, size in norms.items():
            # Scores have a standard deviation near one, whatever factor the family gives them.
            is_of_scores = config.traits.score_scale and name.startswith("self_attn.")
            mean = (config.traits.score_scale * head_dim) ** -0.25 if is_of_scores else norm_mean
            tensors[f"{prefix}{name}.weight"] = vector(size, mean, 0.1)
        if config.traits.is_qkv_fused:
            _fuse(tensors, f"{prefix}self_attn.", ("q_proj", "k_proj", "v_proj"), "qkv_proj")
        if config.traits.is_gate_up_fused:
            _fuse(tensors, f"{prefix}mlp.", ("gate_proj", "up_proj"), "gate_up_proj")
    return tensors


def _attention_matrices(config: ModelConfig, layer: int, depth_gain: float) -> dict[str, RandomMatrix]:
    """Return the matrices of a layer's attention, if it has such."""
    if not config.has_attention(layer):
        return {}
    if config.latent is not None:
        return latent_matrices(config, config.latent, depth_gain)
    (num_kv_heads, head_dim), hidden = config.heads_of(layer), config.hidden_size
    num_q, num_kv = config.num_heads * head_dim, num_kv_heads * head_dim
    num_rows = num_q * (1 + config.traits.has_output_gate)
    matrices = {"self_attn.q_proj": RandomMatrix(num_rows, hidden, 1.5, config.qkv_bias)}
    if config.has_own_kv(layer):
        matrices["self_attn.k_proj"] = RandomMatrix(num_kv, hidden, 1.0, config.qkv_bias)
        if not config.has_key_values(layer):
            matrices["self_attn.v_proj"] = RandomMatrix(num_kv, hidden, 1.0, config.qkv_bias)
    matrices["self_attn.o_proj"] = RandomMatrix(hidden, num_q, depth_gain, config.output_bias)
    return matrices


def _own_norms(name: str, weights: Tensor, head_dim: int) -> dict[str, Tensor]:
    """Name the weights of heads that have their own, in one tensor or in one for each head."""
    rows = weights.view(-1, head_dim)
    if "{head}" not in name:
        return {f"{name}.weight": rows}
    return {f"{name.format(head=head)}.weight": row.clone() for head, row in enumerate(rows)}


def _xielu_parameters(prefix: str, dtype: torch.dtype) -> dict[str, Tensor]:
    values = {"alpha_p": [0.3], "alpha_n": [-0.5], "beta": 0.5, "eps": -1e-6}
    return {f"{prefix}{name}": torch.tensor(value, dtype=dtype) for name, value in values.items()}


def _fuse(tensors: dict[str, Tensor], prefix: str, names: tuple[str, ...], fused: str) -> None:
    """Store products one after another in one tensor."""
    tensors[f"{prefix}{fused}.weight"] = torch.cat([tensors.pop(f"{prefix}{name}.weight") for name in names])
