"""What the tensors of a GGUF file are called in Hugging Face layout, and how their values differ there."""

from __future__ import annotations

import math
import re
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from workers.errors import CheckpointError
from workers.model.gguf.gguf_config import architecture_of, head_counts
from workers.model.gguf.gguf_experts import SHARED_GATE, expert_names, expert_traits_of
from workers.model.gguf.gguf_file import GgufFile, GgufTensor
from workers.model.gguf.gguf_gemma4 import shared_layers
from workers.model.gguf.gguf_keys import GgufKeys

Rows = npt.NDArray[np.intp]

_LAYER = re.compile(r"blk\.(\d{1,9})\.(.+)\.(weight|bias)")
_TOP = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output_norm.bias": "model.norm.bias",
    "output.weight": "lm_head.weight",
    "per_layer_token_embd.weight": "model.embed_tokens_per_layer.weight",
    "per_layer_model_proj.weight": "model.per_layer_model_projection.weight",
    "per_layer_proj_norm.weight": "model.per_layer_projection_norm.weight",
}
# What config.json says already.
_NOT_NEEDED = frozenset({"rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight"})
_OF_A_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_qkv": "self_attn.qkv_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
# Names that are not those of the weight of a module.
_SCALAR, _SINKS = "layer_scalar", "self_attn.sinks"
# What layers that share the keys and values of an earlier one have, and do not use, in some files.
_OWN_KV = frozenset({"attn_k", "attn_v", "attn_k_norm"})
_GEMMA_NORMS = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_NORM_AFTER_ATTENTION = {"post_attention_norm": "post_attention_layernorm"}
# What architectures name otherwise.
_OF_ARCHITECTURE = {
    "gemma2": _GEMMA_NORMS,
    "gemma3": _GEMMA_NORMS,
    "gemma4": {
        **_GEMMA_NORMS,
        "inp_gate": "per_layer_input_gate",
        "proj": "per_layer_projection",
        "post_norm": "post_per_layer_input_norm",
        "layer_output_scale": _SCALAR,
    },
    "olmo2": {**_NORM_AFTER_ATTENTION, "post_ffw_norm": "post_feedforward_layernorm"},
    "gpt-oss": {**_NORM_AFTER_ATTENTION, "attn_sinks": _SINKS},
    "glm4moe": _NORM_AFTER_ATTENTION,
    "phi3": {"ffn_up": "mlp.gate_up_proj"},
    "glm4": {
        "ffn_up": "mlp.gate_up_proj",
        "post_attention_norm": "post_self_attn_layernorm",
        "post_ffw_norm": "post_mlp_layernorm",
    },
}
# Rows of one tensor that are a tensor for each head.
_OF_HEADS = {
    "stablelm": {
        "attn_q_norm": "self_attn.q_layernorm.norms.{head}",
        "attn_k_norm": "self_attn.k_layernorm.norms.{head}",
    },
}


class WrittenTensor(NamedTuple):
    """A tensor under its name in Hugging Face layout. `rows` are those of the source in the order in which
    they are written (None: as they are); `shift` is taken off each value. Where there is a `part`, that alone
    of the source's first dimension is written: a vector, or the matrix of an expert. `is_one_row`: a vector
    is written as a matrix."""

    name: str
    source: GgufTensor
    rows: Rows | None = None
    shift: float = 0.0
    part: int | None = None
    is_one_row: bool = False

    @property
    def shape(self) -> tuple[int, ...]:
        """The dimensions of what is written."""
        if self.is_one_row:
            return (1, self.num_items)
        return tuple(self.source.shape if self.part is None else self.source.shape[1:])

    @property
    def num_items(self) -> int:
        return math.prod(self.source.shape if self.part is None else self.source.shape[1:])


def written_tensors(file: GgufFile) -> list[WrittenTensor]:
    """Return the tensors of the model in the order of the file; `CheckpointError` for one that has no name
    in Hugging Face layout."""
    names = _Names(file)
    return [written for tensor in file.name_to_tensor.values() for written in names.of(tensor)]


class _Names:
    """The names of one file's tensors in Hugging Face layout."""

    def __init__(self, file: GgufFile) -> None:
        self._file, self._architecture = file, architecture_of(file)
        keys, architecture_name = GgufKeys(file), str(file.metadata["general.architecture"])
        self._of_a_layer = _OF_A_LAYER | _OF_ARCHITECTURE.get(architecture_name, {})
        self._of_heads = _OF_HEADS.get(architecture_name, {})
        traits = expert_traits_of(self._architecture.class_name) if self._architecture.experts_key else None
        self._of_experts = expert_names(traits.names) if traits else {}
        self._part_to_heads = _permuted_parts(file) if self._architecture.is_permuted else {}
        self._shared_kv = shared_layers(keys)
        # Layers that predict further tokens.
        self._left = range(keys.num_layers, keys.count("block_count"))

    def of(self, tensor: GgufTensor) -> list[WrittenTensor]:
        """Return what is written of a tensor of the file."""
        layer = _LAYER.fullmatch(tensor.name)
        if tensor.name in _NOT_NEEDED or (layer and self._is_unused(int(layer[1]), layer[2])):
            return []
        if layer and f"{layer[2]}.{layer[3]}" in self._of_experts:
            return self._experts(tensor, layer[1], f"{layer[2]}.{layer[3]}")
        if layer and layer[2] in self._of_heads and len(tensor.shape) == 2:
            stem = f"model.layers.{layer[1]}.{self._of_heads[layer[2]]}.{layer[3]}"
            heads = range(tensor.shape[0])
            return [WrittenTensor(stem.format(head=head), tensor, part=head) for head in heads]
        name = _TOP.get(tensor.name)
        if layer and (part := self._of_a_layer.get(layer[2])) is not None:
            suffix = "" if part in (_SCALAR, _SINKS) else f".{layer[3]}"
            name = f"model.layers.{layer[1]}.{part}{suffix}"
        if name is None:
            raise CheckpointError(
                f"{self._file.path}: tensor {tensor.name[:100]} is not known in this architecture; take the "
                "model in Hugging Face layout"
            )
        num_heads = self._part_to_heads.get(layer[2]) if layer else None
        rows = None if num_heads is None else _rotary_rows(tensor, num_heads)
        shift = self._architecture.norm_shift if tensor.name.endswith("norm.weight") else 0.0
        return [WrittenTensor(name, tensor, rows, shift)]

    def _is_unused(self, layer: int, part: str) -> bool:
        return layer in self._left or (part in _OWN_KV and layer in self._shared_kv)

    def _experts(self, tensor: GgufTensor, layer: str, part: str) -> list[WrittenTensor]:
        """Return what is written of a tensor of a layer's router or experts."""
        name = f"model.layers.{layer}.{self._of_experts[part]}"
        if "{expert}" in name:
            experts = range(tensor.shape[0])
            return [WrittenTensor(name.format(expert=expert), tensor, part=expert) for expert in experts]
        is_shared_gate = part == SHARED_GATE and len(tensor.shape) == 1
        return [WrittenTensor(name, tensor, is_one_row=is_shared_gate)]


def _permuted_parts(file: GgufFile) -> dict[str, int]:
    """Return the tensors of a layer whose rows are in another order, and their numbers of heads."""
    num_heads, num_kv_heads = head_counts(file)
    return {"attn_q": num_heads, "attn_k": num_kv_heads}


def _rotary_rows(tensor: GgufTensor, num_heads: int) -> Rows:
    """Return which rows of the file are those of a head in Hugging Face layout, where the two parts of each
    rotated pair are half a head apart rather than neighbors."""
    num_rows = tensor.shape[0]
    if num_rows % (2 * num_heads):
        raise CheckpointError(
            f"{tensor.part}: tensor {tensor.name} has {num_rows} rows for {num_heads} heads; "
            "download it again"
        )
    order = np.arange(num_rows).reshape(num_heads, num_rows // num_heads // 2, 2)
    return order.swapaxes(1, 2).reshape(num_rows)
