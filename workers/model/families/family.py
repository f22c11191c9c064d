"""Declare a family of models: what its config.json means, and how its tensors are named."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal

from workers.model.families.expert_traits import ExpertTraits
from workers.model.families.state_traits import StateTraits

# Which layers have a sliding window: none; all, where `sliding_window` is set; those that
# `use_sliding_window` with `max_window_layers`, or `layer_types`, say, of which the second kind has them in
# every other layer before, and the first in all layers from there; or those that `layer_types` says, else all
# but every `sliding_window_pattern`-th.
Windows = Literal["none", "all", "switched", "alternating", "pattern"]
# What is normalized of queries and keys: nothing, each head, or all heads of a token together, by RMS norms;
# or each head by a LayerNorm with weights of its own.
QkNorm = Literal["none", "head", "row", "own"]
# Which layers have no rotary embedding: none; those with a 0 in `no_rope_layers`, else every
# `no_rope_layer_interval`-th; or, where some layers have a window, those without; all, unless
# `position_embedding_type` is "rope"; or all.
NoRope = Literal["none", "listed", "unless_sliding", "unless_rope", "all"]


@dataclasses.dataclass(frozen=True, slots=True)
class Multipliers:
    """The keys of config.json that scale values; "": the family has none. Logits are divided by `logits`, or
    multiplied by `logits_scale`."""

    embeddings: str = ""
    residuals: str = ""
    attention_scores: str = ""
    logits: str = ""
    logits_scale: str = ""


@dataclasses.dataclass(frozen=True, slots=True)
class NormNames:
    """The names of a layer's norms: of what attention and feed-forward take from the hidden states, and of
    what they add to them; "": there is none."""

    attention_input: str = "input_layernorm"
    attention_output: str = ""
    feed_forward_input: str = "post_attention_layernorm"
    feed_forward_output: str = ""


@dataclasses.dataclass(frozen=True, slots=True)
class TensorTraits:
    """The names of a family's tensors. Those of a layer's attention and feed-forward begin with `attention`
    and `feed_forward`; the others are the names of products without these."""

    embedding: str = "embed_tokens"
    final_norm: str = "norm"
    attention: str = "self_attn."
    output: str = "o_proj"
    feed_forward: str = "mlp."
    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"
    # The rows of gate and up in one tensor.
    gate_up: str = "gate_up_proj"


@dataclasses.dataclass(frozen=True, slots=True)
class Rotary:
    """The rotary embedding of a family, beside what config.json says of it."""

    # Only this part of a head is rotated, unless `partial_rotary_factor` says otherwise; None: all of it is.
    partial_factor: float | None = None
    # The key of the size of this part; "": there is none.
    size_key: str = ""
    # Pairs are neighbors, (2i, 2i + 1), and not halves; or the key that says so.
    is_interleaved: bool | str = False
    # The key of the base of layers with a sliding window, which no scaling of longer contexts concerns; "":
    # all layers rotate alike.
    sliding_theta: str = ""
    # Or there is a set of `rope_parameters` for each kind of layers, and no key beside these.
    is_by_kind: bool = False
    # Dimensions are rotated by positions in time, height and width, which are all the same for text.
    has_sections: bool = False
    # With linear scaling, `max_position_embeddings` is the stretched context already.
    is_context_stretched: bool = False
    without: NoRope = "none"


@dataclasses.dataclass(frozen=True, slots=True)
class Family:
    """A family of decoders: layers of attention and feed-forward that are added to hidden states.

    Whether there are biases is a constant of the family, or the name of the key that says so.
    """

    name: str
    # The models as people call them, for docs/models.md.
    models: str
    # In `architectures` of config.json; `name` is its `model_type`.
    architectures: tuple[str, ...]
    # Defaults of transformers for keys that config.json lacks, where they differ from the other families'.
    defaults: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    # Other names of keys, that count before these.
    key_aliases: Mapping[str, str] = dataclasses.field(default_factory=dict)
    tensors: TensorTraits = TensorTraits()
    # Biases: of queries, keys and values; of the attention's output; of the feed-forward.
    qkv_bias: bool | str = False
    output_bias: bool | str = False
    mlp_bias: bool | str = False
    # Of logits.
    head_bias: bool | str = False
    qk_norm: QkNorm = "none"
    # Whether these norms are there, as with biases, and the names of their weights. With {head} in a name,
    # the weights of each head are a tensor.
    has_qk_norm: bool | str = True
    qk_norm_names: tuple[str, str] = ("q_norm", "k_norm")
    # Each head of values has an RMS norm without weights.
    has_value_norm: bool = False
    # Each query head has a gate, whose sigmoid multiplies what the head mixes: `q_proj` has the rows of a
    # head's gate behind those of its query.
    has_output_gate: bool = False
    # Each query head has a learned score without a key and a value, in `self_attn.sinks`.
    has_sinks: bool = False
    windows: Windows = "none"
    # The last layer has no window, whatever config.json says.
    is_last_layer_full: bool = False
    rotary: Rotary = Rotary()
    # The key of a context length that is served where it is larger than `max_position_embeddings`; "": none.
    context_key: str = ""
    norms: NormNames = NormNames()
    # Attention and feed-forward both take the norm `attention_input`; there is no `feed_forward_input` then.
    is_parallel: bool | str = False
    # Norms of hidden states are LayerNorms, which subtract the mean, and not RMS norms; they may have a bias.
    is_layer_norm: bool = False
    has_norm_bias: bool = False
    # The key of what norms add to the mean square, or variance.
    norm_eps: str = "rms_norm_eps"
    # Norms multiply by their weight plus this.
    norm_offset: float = 0.0
    # Norms round to the dtype before they multiply by their weight, and not only after.
    is_norm_rounded_first: bool = True
    # The key of the activation.
    activation: str = "hidden_act"
    # Values of this key that mean another one.
    activation_aliases: Mapping[str, str] = dataclasses.field(default_factory=dict)
    # The key of the columns of a feed-forward that is no expert's.
    feed_forward_key: str = "intermediate_size"
    # The activation multiplies another product of the same inputs; else there is only the activated one.
    is_gated: bool = True
    # Queries, keys and values are one tensor `qkv_proj`; gate and up are one tensor `gate_up_proj`.
    is_qkv_fused: bool = False
    is_gate_up_fused: bool = False
    multipliers: Multipliers = Multipliers()
    # Embeddings are multiplied by the square root of `hidden_size`.
    is_embedding_scaled: bool = False
    # The key whose inverse square root multiplies scores; "": that of `head_dim` does.
    query_scalar: str = ""
    # The factor of scores where no key says it; 0: the inverse square root of `head_dim`.
    score_scale: float = 0.0
    # Scores and logits are capped where `attn_logit_softcapping` and `final_logit_softcapping` say so.
    has_softcaps: bool = False
    # Logits alone are capped.
    has_logits_softcap: bool = False
    # Layers differ as the keys of Gemma 4 say: `global_head_dim`, `num_global_key_value_heads` or
    # `per_layer_config`, `attention_k_eq_v`, `num_kv_shared_layers`, `use_double_wide_mlp`; and each of them
    # has an input of its own, of `hidden_size_per_layer_input`, and a factor `layer_scalar`.
    has_layer_shapes: bool = False
    # A layer is one block, of attention, of a state or of a feed-forward, with the norm `attention_input`.
    has_single_blocks: bool = False
    # The layers that keep a recurrent state; None: all layers attend.
    state: StateTraits | None = None
    # The experts of some or all layers; None: the family has none.
    experts: ExpertTraits | None = None
    # Keys and values are expanded from a latent, as `workers.model.latent_shape` describes.
    has_latent_attention: bool = False
    # The key of the number of layers behind the last, which predict further tokens and are passed over; "":
    # there are none.
    extra_layers_key: str = ""
    # What the names of other tensors begin with that are passed over.
    passed_over: tuple[str, ...] = ()
