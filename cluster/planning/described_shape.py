"""Describe a model by its sizes alone: those of `--shape layers=32,hidden=4096,...`, or of a config.json that
the engine refuses."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from cluster.errors import ConfigError


class _Size(NamedTuple):
    """A size by its name in `--shape`: the keys that a config.json may have it under, and its value where it
    is not given (None: it has to be)."""

    keys: tuple[str, ...]
    default: int | None = 0


_NAME_TO_SIZE: Mapping[str, _Size] = {
    "layers": _Size(("num_hidden_layers", "n_layer", "n_layers"), None),
    "hidden": _Size(("hidden_size", "n_embd", "d_model"), None),
    "heads": _Size(("num_attention_heads", "n_head", "n_heads"), None),
    "vocab": _Size(("vocab_size",), None),
    # Of the feed-forward of layers without experts.
    "intermediate": _Size(("intermediate_size", "ffn_hidden_size", "n_inner")),
    # 0: as many as there are heads.
    "kv_heads": _Size(("num_key_value_heads", "num_kv_heads")),
    # 0: hidden / heads.
    "head_dim": _Size(("head_dim",)),
    "experts": _Size(("n_routed_experts", "num_experts", "num_local_experts", "moe_num_experts")),
    "chosen": _Size(("num_experts_per_tok", "moe_k", "moe_topk"), 2),
    "expert_intermediate": _Size(("moe_intermediate_size", "expert_ffn_hidden_size")),
    "shared_experts": _Size(("n_shared_experts", "num_shared_experts")),
    # The first layers, which have no experts.
    "dense_layers": _Size(("first_k_dense_replace",)),
    # Of latent attention: what is kept of a token, and what queries are made from (0: of hidden states).
    "latent": _Size(("kv_lora_rank",)),
    "rotary": _Size(("qk_rope_head_dim",), 64),
    "query_latent": _Size(("q_lora_rank",)),
    "key_dim": _Size(("qk_nope_head_dim",), 128),
    "value_dim": _Size(("v_head_dim",), 128),
    # Tokens that a layer sees, but for every `full_every`-th layer, which sees all.
    "window": _Size(("sliding_window",)),
    "full_every": _Size(("sliding_window_pattern",), 6),
    "context": _Size(("max_position_embeddings", "n_positions", "max_seq_len"), 131072),
    # 1: the embedding is the head too.
    "tied": _Size(("tie_word_embeddings",)),
}
_REQUIRED = tuple(name for name, size in _NAME_TO_SIZE.items() if size.default is None)


def described_shape(text: str) -> dict[str, Any]:
    """Return a config.json with the sizes of `--shape`. Raises `ConfigError`, naming the size and the remedy,
    for one that is unknown, missing, or no whole number."""
    sizes: dict[str, int] = {}
    for entry in filter(None, (part.strip() for part in text.split(","))):
        name, separator, number = (part.strip() for part in entry.partition("="))
        if name not in _NAME_TO_SIZE or not separator:
            raise ConfigError(
                f"--shape {entry}: give sizes as layers=32; there are {', '.join(_NAME_TO_SIZE)}"
            )
        if not number.isdecimal() or (name in _REQUIRED and not int(number)):
            raise ConfigError(f"--shape {entry}: {name} must be a whole number above 0")
        sizes[name] = int(number)
    return _config("--shape", sizes)


def stand_in(keys: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return a config.json that the engine accepts, with the sizes of one that it refuses: attention over
    heads or latents, and experts. None where these keys do not have the sizes."""
    of_text = keys.get("text_config")
    known = {**keys, **of_text} if isinstance(of_text, Mapping) else keys
    sizes: dict[str, int] = {}
    for name, size in _NAME_TO_SIZE.items():
        found = next((known[key] for key in size.keys if isinstance(known.get(key), int)), None)
        if found is not None and found >= 0:
            sizes[name] = int(found)
    try:
        return _config("config.json", sizes)
    except ConfigError:
        return None


def _config(what: str, sizes: Mapping[str, int]) -> dict[str, Any]:
    if missing := [name for name in _REQUIRED if not sizes.get(name)]:
        raise ConfigError(f"{what}: has no {', '.join(missing)}")
    of = {name: sizes.get(name, size.default) for name, size in _NAME_TO_SIZE.items()}
    if not of["intermediate"] and (not of["experts"] or of["dense_layers"]):
        raise ConfigError(f"{what}: has no intermediate, the size of the feed-forward")
    keys: dict[str, Any] = {
        "vocab_size": of["vocab"],
        "hidden_size": of["hidden"],
        "intermediate_size": of["intermediate"] or of["expert_intermediate"],
        "num_hidden_layers": of["layers"],
        "num_attention_heads": of["heads"],
        "num_key_value_heads": of["kv_heads"] or of["heads"],
        "max_position_embeddings": of["context"],
        "tie_word_embeddings": bool(of["tied"]),
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e6,
        "hidden_act": "silu",
        "torch_dtype": "bfloat16",
        "eos_token_id": 1,
    }
    if of["experts"]:
        keys |= _experts(of)
    if of["latent"]:
        return keys | _latents(of)
    keys["head_dim"] = of["head_dim"] or _head_dim(what, of)
    if of["experts"]:
        others = {"partial_rotary_factor": 1.0, "use_qk_norm": False, "n_group": 1, "topk_group": 1}
        return keys | others | {"model_type": "glm4_moe", "architectures": ["Glm4MoeForCausalLM"]}
    if of["window"]:
        return keys | _windows(of)
    return keys | {"model_type": "llama", "architectures": ["LlamaForCausalLM"]}


def _head_dim(what: str, of: Mapping[str, Any]) -> int:
    if of["hidden"] % of["heads"]:
        raise ConfigError(f"{what}: heads {of['heads']} do not divide hidden {of['hidden']}; give head_dim")
    return int(of["hidden"] // of["heads"])


def _experts(of: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "n_routed_experts": of["experts"],
        "num_experts_per_tok": min(of["chosen"], of["experts"]),
        "moe_intermediate_size": of["expert_intermediate"] or of["intermediate"],
        "n_shared_experts": of["shared_experts"],
        "first_k_dense_replace": of["dense_layers"],
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.0,
    }


def _latents(of: Mapping[str, Any]) -> dict[str, Any]:
    # Without experts all layers are dense ones of a model that could have some.
    all_dense = {**of, "experts": 1, "chosen": 1, "dense_layers": of["layers"]}
    return {
        **_experts(of if of["experts"] else all_dense),
        "model_type": "deepseek_v3",
        "architectures": ["DeepseekV3ForCausalLM"],
        "num_key_value_heads": of["heads"],
        "kv_lora_rank": of["latent"],
        "qk_rope_head_dim": of["rotary"],
        "q_lora_rank": of["query_latent"] or None,
        "qk_nope_head_dim": of["key_dim"],
        "v_head_dim": of["value_dim"],
        "n_group": 1,
        "topk_group": 1,
        "moe_layer_freq": 1,
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
    }


def _windows(of: Mapping[str, Any]) -> dict[str, Any]:
    every = max(of["full_every"], 1)
    kinds = [
        "full_attention" if (layer + 1) % every == 0 else "sliding_attention" for layer in range(of["layers"])
    ]
    return {
        "model_type": "qwen3",
        "architectures": ["Qwen3ForCausalLM"],
        "use_sliding_window": True,
        "sliding_window": of["window"],
        "max_window_layers": 0,
        "layer_types": kinds,
    }
