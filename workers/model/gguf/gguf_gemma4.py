"""Turn the metadata of a GGUF file of Gemma 4 into what config.json says of its layers.

They have heads of two sizes, some share the keys and values of others, and each may have an input of its own.
"""

from __future__ import annotations

import math
from typing import Any

from workers.errors import CheckpointError
from workers.model.gguf.gguf_keys import GgufKeys

# Texts of tokens that end an answer. The converter calls the last one the user's own, so that llama.cpp
# shows it, as it does the other markers, which are special in the tokenizer of transformers.
END_TEXTS = frozenset({"<eos>", "<turn|>", "<|tool_response>"})
MARKERS = frozenset(
    {
        "<|channel>",
        "<channel|>",
        "<|tool_call>",
        "<tool_call|>",
        "<|tool_response>",
        "<tool_response|>",
        '<|"|>',
    }
)
# A frequency that is divided by this rotates nothing.
_STILL = 1e29


def gemma4_config(keys: GgufKeys) -> dict[str, Any]:
    """Return the keys of config.json by which Gemma 4 differs from other families. Raises `CheckpointError`
    for experts, and for layers that these keys cannot describe."""
    if (num_experts := keys.get("expert_count")) is not None and num_experts != 0:
        raise CheckpointError(
            f"{keys.file.path}: gemma4.expert_count is {num_experts}, but experts are not supported; take a "
            "dense model"
        )
    kinds = _layer_kinds(keys)
    own = range(shared_layers(keys).start)
    full_dim = _head_dim(keys, "")
    return {
        "hidden_activation": "gelu_pytorch_tanh",
        "head_dim": _head_dim(keys, "_swa"),
        "global_head_dim": full_dim,
        "sliding_window": keys.count("attention.sliding_window"),
        "layer_types": kinds,
        "num_kv_shared_layers": len(kinds) - len(own),
        "rope_parameters": _ropes(keys, full_dim),
        **_key_value_heads(keys, kinds, own),
        **_feed_forward(keys, own),
        **_layer_inputs(keys),
    }


def shared_layers(keys: GgufKeys) -> range:
    """Return the layers, the last, that attend to the keys and values of an earlier one."""
    num_layers, key = keys.count("block_count"), "attention.shared_kv_layers"
    num_shared = keys.count_or_none(key)
    if num_shared >= num_layers:
        keys.refuse(key, num_shared, f"less than the {num_layers} layers")
    return range(num_layers - num_shared, num_layers)


def _layer_kinds(keys: GgufKeys) -> list[str]:
    """Return which layers have a window. In transformers the last has none, whatever its key says."""
    num_layers, key = keys.count("block_count"), "attention.sliding_window_pattern"
    found = keys.get(key)
    is_list = isinstance(found, list) and len(found) == num_layers
    if not is_list or not all(isinstance(it, bool) for it in found) or found[-1]:
        keys.refuse(key, found, f"a boolean for each of the {num_layers} layers, the last of them false")
    return ["sliding_attention" if it else "full_attention" for it in found]


def _head_dim(keys: GgufKeys, suffix: str) -> int:
    """Return the size of the heads of one kind of layers: keys and values have the same, and are rotated
    whole (`rope_freqs.weight` has which pairs stay)."""
    head_dim = keys.count(f"attention.key_length{suffix}")
    for key in (f"attention.value_length{suffix}", f"rope.dimension_count{suffix}"):
        if (found := keys.count(key, head_dim)) != head_dim:
            keys.refuse(key, found, f"the {head_dim} of a whole head")
    return head_dim


def _key_value_heads(keys: GgufKeys, kinds: list[str], own: range) -> dict[str, Any]:
    """Return the heads of keys and values of both kinds of layers, and whether those without a window take
    their keys for values: of the layers with their `own`, these then have no tensor of values."""
    full = [layer for layer in own if kinds[layer] == "full_attention"]
    without_values = [layer for layer in own if not keys.has("attn_v.weight", layer)]
    if without_values not in ([], full):
        raise CheckpointError(
            f"{keys.file.path}: tensor blk.{without_values[0]}.attn_v.weight is missing, but not those of "
            "all layers without a window alone; download the file again"
        )
    key = "attention.head_count_kv"
    counts = keys.counts(key, keys.count("attention.head_count"))
    kind_to_counts: dict[str, set[int]] = {}
    for kind, count in zip(kinds, counts, strict=True):
        kind_to_counts.setdefault(kind, set()).add(count)
    of_full = kind_to_counts["full_attention"]
    of_sliding = kind_to_counts.get("sliding_attention", of_full)
    is_same = of_full == of_sliding
    if len(of_full) > 1 or len(of_sliding) > 1 or not (is_same or without_values):
        keys.refuse(
            key,
            counts,
            "one number for all layers, or two, that of layers without a window where these have no values",
        )
    found = {"num_key_value_heads": min(of_sliding), "attention_k_eq_v": bool(without_values)}
    return found if is_same else found | {"num_global_key_value_heads": min(of_full)}


def _feed_forward(keys: GgufKeys, own: range) -> dict[str, Any]:
    key = "feed_forward_length"
    sizes = keys.counts(key)
    doubled = [sizes[0] if layer in own else 2 * sizes[0] for layer in range(len(sizes))]
    if sizes not in ([sizes[0]] * len(sizes), doubled):
        keys.refuse(key, sizes, "one number, twice that in layers that share keys and values")
    return {"intermediate_size": sizes[0], "use_double_wide_mlp": sizes[-1] != sizes[0]}


def _layer_inputs(keys: GgufKeys) -> dict[str, Any]:
    size = keys.count_or_none("embedding_length_per_layer_input")
    if not size:
        return {"hidden_size_per_layer_input": 0}
    table = keys.file.name_to_tensor.get("per_layer_token_embd.weight")
    if table is None or len(table.shape) != 2:
        raise CheckpointError(
            f"{keys.file.path}: tensor per_layer_token_embd.weight is missing; download the file again"
        )
    return {"hidden_size_per_layer_input": size, "vocab_size_per_layer_input": table.shape[0]}


def _ropes(keys: GgufKeys, full_dim: int) -> dict[str, Any]:
    """Return the rotary embedding of both kinds of layers. In those without a window the first pairs are
    rotated: the frequencies of the others are divided by a number so large that they stay."""
    kind = keys.get("rope.scaling.type")
    if kind not in (None, "none"):
        keys.refuse("rope.scaling.type", kind, "none")
    name, num_pairs = "rope_freqs.weight", full_dim // 2
    factors = keys.file.floats(name) if name in keys.file.name_to_tensor else []
    num_rotated = factors.count(1.0)
    are_first = all(it == 1.0 for it in factors[:num_rotated])
    is_rest_still = all(it >= _STILL for it in factors[num_rotated:])
    if len(factors) != num_pairs or not num_rotated or not are_first or not is_rest_still:
        raise CheckpointError(
            f"{keys.file.path}: {name} is not that of Gemma 4, which rotates the first of the {num_pairs} "
            "pairs of a head; take another conversion of the model"
        )
    part = num_rotated / num_pairs
    if int(part * full_dim // 2) < num_rotated:  # as transformers counts them
        part = math.nextafter(part, 1.0)
    return {
        "full_attention": {
            "rope_type": "proportional",
            "rope_theta": keys.number("rope.freq_base"),
            "partial_rotary_factor": part,
        },
        "sliding_attention": {"rope_type": "default", "rope_theta": keys.number("rope.freq_base_swa")},
    }
