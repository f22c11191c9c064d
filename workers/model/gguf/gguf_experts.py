"""Turn the metadata and the tensors of experts in a GGUF file into what config.json and the names in Hugging
Face layout say.

A file has the weights of all experts of a layer in one tensor for each of the three products, and a rank
reads a tensor of each expert: `workers.model.families.expert_traits` says how a family calls these, and its
keys.
"""

from __future__ import annotations

from typing import Any

from workers.errors import CheckpointError
from workers.model.families.expert_traits import ExpertNames, ExpertTraits
from workers.model.families.known_families import ARCHITECTURE_TO_FAMILY
from workers.model.gguf.gguf_keys import GgufKeys

# How the metadata numbers what becomes of a router's logits: by softmax, by sigmoid, and by softmax of the
# chosen ones alone. A softmax of all that is normalized among the chosen ones is the same.
_SCORING_TO_NUMBERS = {"softmax": (1,), "sigmoid": (2,), "softmax_chosen": (1, 3)}
_GATES = "ffn_gate_exps.weight"
# The product whose sigmoid multiplies the result of shared experts, a vector in files.
SHARED_GATE = "ffn_gate_inp_shexp.weight"


def expert_traits_of(class_name: str) -> ExpertTraits | None:
    """Return the experts of the family with this class; None where it has none."""
    family = ARCHITECTURE_TO_FAMILY.get(class_name)
    return None if family is None else family.experts


def expert_names(names: ExpertNames) -> dict[str, str]:
    """Return what the tensors of a layer's experts are called behind the name of the layer, by their names in
    GGUF files: with {expert} where those of all experts are in one tensor of the file."""
    shared = {f"ffn_{it}_shexp.weight": f"{names.shared}{it}_proj.weight" for it in ("gate", "up", "down")}
    found = {
        "ffn_gate_inp.weight": names.router,
        "ffn_gate_inp.bias": names.router_bias,
        "exp_probs_b.bias": names.correction,
        _GATES: names.each_gate,
        "ffn_up_exps.weight": names.each_up,
        "ffn_down_exps.weight": names.each_down,
        "ffn_gate_exps.bias": names.gate_bias,
        "ffn_up_exps.bias": names.up_bias,
        "ffn_down_exps.bias": names.down_bias,
        SHARED_GATE: names.shared_gate,
        **(shared if names.shared else {}),
    }
    return {stored: f"{names.block}{name}" for stored, name in found.items() if name}


def experts_config(keys: GgufKeys, traits: ExpertTraits, number_key: str) -> dict[str, Any]:
    """Return the keys of config.json about experts; `number_key` is that of their number. Raises
    `CheckpointError`, naming the key or the tensor, for what is missing or not supported."""
    first = _first_layer(keys)
    size = keys.file.name_to_tensor[f"blk.{first}.{_GATES}"].shape[1]
    _check_scoring(keys, traits)
    config: dict[str, Any] = {
        number_key: keys.count("expert_count"),
        traits.num_chosen_key: keys.count("expert_used_count"),
        traits.size_key: size,
        **_layers(keys, traits),
        **_groups(keys, traits),
        **_shared(keys, traits, first, size),
    }
    if isinstance(traits.is_normalized, str):
        config[traits.is_normalized] = _is_normalized(keys)
    if traits.scale_key:
        key = "expert_weights_scale"
        config[traits.scale_key] = keys.number(key) if keys.get(key) else 1.0
    return config


def _first_layer(keys: GgufKeys) -> int:
    """Return the first layer with experts."""
    for layer in range(keys.num_layers):
        tensor = keys.file.name_to_tensor.get(f"blk.{layer}.{_GATES}")
        if tensor is not None and len(tensor.shape) == 3:
            return layer
    raise CheckpointError(
        f"{keys.file.path}: no layer has a tensor {_GATES} of all its experts; take a newer conversion of "
        "the model, with a tensor each for gates, ups and downs"
    )


def _check_scoring(keys: GgufKeys, traits: ExpertTraits) -> None:
    number, known = keys.get("expert_gating_func"), _SCORING_TO_NUMBERS[traits.scoring]
    if number not in (None, 0, *known):
        keys.refuse("expert_gating_func", number, f"{known[0]}, as in all models of this architecture")


def _is_normalized(keys: GgufKeys) -> bool:
    """Return whether the weights of the chosen experts are divided by their sum. Files of Qwen3 do not say
    so: llama.cpp always does."""
    found = keys.get("expert_weights_norm")
    return keys.name == "qwen3moe" if found is None else bool(found)


def _layers(keys: GgufKeys, traits: ExpertTraits) -> dict[str, Any]:
    """Return which layers have experts."""
    num_dense = keys.count_or_none("leading_dense_block_count")
    match traits.layers:
        case "after_first":
            return {"first_k_dense_replace": num_dense}
        case "interval":
            every = keys.count("interleave_moe_layer_step", 1)
            return {"moe_layer_start_index": num_dense, "moe_layer_interval": every}
        case "stepped":
            layers = range(keys.num_layers)
            dense = [layer for layer in layers if not keys.has("ffn_gate_inp.weight", layer)]
            return {"decoder_sparse_step": 1, "mlp_only_layers": dense}
        case _:
            return {}


def _groups(keys: GgufKeys, traits: ExpertTraits) -> dict[str, int]:
    num_groups = keys.count("expert_group_count", 1)
    if traits.has_groups:
        return {"n_group": num_groups, "topk_group": keys.count("expert_group_used_count", num_groups)}
    if num_groups > 1:
        keys.refuse("expert_group_count", num_groups, "1, as in all models of this architecture")
    return {}


def _shared(keys: GgufKeys, traits: ExpertTraits, layer: int, size: int) -> dict[str, int]:
    """Return the size or the number of the experts that all tokens share, in a layer with experts of this
    `size`."""
    tensor = keys.file.name_to_tensor.get(f"blk.{layer}.ffn_gate_shexp.weight")
    shared_size = 0 if tensor is None else tensor.shape[0]
    if traits.shared_size_key:
        return {traits.shared_size_key: shared_size}
    if not traits.num_shared_key:
        return {}
    if shared_size % size:
        raise CheckpointError(
            f"{keys.file.path}: tensor blk.{layer}.ffn_gate_shexp.weight has {shared_size} rows, and experts "
            f"have {size}; download the file again"
        )
    return {traits.num_shared_key: shared_size // size}
