"""Declare the experts of a family: what the keys of its config.json mean, and how its tensors are named."""

from __future__ import annotations

import dataclasses
from typing import Literal

from workers.model.experts.router_rule import GroupScore, Scoring

# Which layers have experts: all; all where `enable_moe_block` is set, else none; all where the number of
# experts is not 0; every `decoder_sparse_step`-th that is not in `mlp_only_layers`; those from
# `first_k_dense_replace` on; those that `mlp_layer_types` says, or else the same; or every
# `moe_layer_interval`-th from `moe_layer_start_index` to `moe_layer_end_index`; or those of the kind of
# layers with experts, in families whose layers are of one block each.
ExpertLayers = Literal["all", "enabled", "if_any", "stepped", "after_first", "named", "interval", "by_kind"]
# What an expert does between its products: the activation of the family's other feed-forwards, or
# `clamped_swiglu`, which has keys of its own.
ExpertGate = Literal["activation", "clamped_swiglu"]


@dataclasses.dataclass(frozen=True, slots=True)
class ExpertNames:
    """The names of a layer's tensors of experts, without the `block` that they begin with; "": there is none.

    The products of an expert are a tensor each, with {expert} in their names (`each_gate` "": experts have no
    gates), or those of all experts are in one tensor: `gate_up` [num_experts, 2 * size, hidden_size], the
    rows of a gate first, and `down` [num_experts, hidden_size, size]."""

    block: str = "mlp."
    router: str = "gate.weight"
    router_bias: str = ""
    # The bias of the scores by which experts are chosen.
    correction: str = ""
    each_gate: str = "experts.{expert}.gate_proj.weight"
    each_up: str = "experts.{expert}.up_proj.weight"
    each_down: str = "experts.{expert}.down_proj.weight"
    gate_up: str = "experts.gate_up_proj"
    down: str = "experts.down_proj"
    # Biases of these, one row for each expert: of gates and ups together, or else of each.
    gate_up_bias: str = ""
    gate_bias: str = ""
    up_bias: str = ""
    down_bias: str = ""
    # These tensors have inputs as rows, and the outputs of gate and up, as columns, take turns; quantized to
    # MXFP4, in tensors with _blocks and _scales after these names, outputs are rows that take turns.
    is_transposed: bool = False
    # What the names of shared experts begin with, which are one feed-forward; and the product of the hidden
    # states whose sigmoid multiplies its result.
    shared: str = ""
    shared_gate: str = ""
    # The rows of gate and up in one tensor, "": there are two; and the product of what is between.
    shared_gate_up: str = ""
    shared_down: str = "down_proj"
    # The weight of the norm of what the router takes, which is divided by the square root of the hidden size;
    # and the factors of the weights of chosen experts, one for each.
    router_norm: str = ""
    expert_scale: str = ""

    @property
    def is_gated(self) -> bool:
        """Whether experts have gates beside their ups."""
        return bool(self.each_gate)


@dataclasses.dataclass(frozen=True, slots=True)
class BranchNormNames:
    """The names of the norms of a layer whose experts are a branch beside its feed-forward: of what the
    feed-forward gives, and of what the experts take and give. Their sum has the norm that follows."""

    dense_output: str
    experts_input: str
    experts_output: str


@dataclasses.dataclass(frozen=True, slots=True)
class ExpertTraits:
    """The experts of a family. A key that is "" is none of the family's."""

    scoring: Scoring
    names: ExpertNames = ExpertNames()
    # The number of experts where no key says it.
    num_experts: int = 0
    num_chosen_key: str = "num_experts_per_tok"
    size_key: str = "moe_intermediate_size"
    layers: ExpertLayers = "all"
    # Whether the weights of the chosen experts are divided by their sum: always, never, or as this key says.
    is_normalized: bool | str = False
    # What is added to this sum, and the key of the least that it is divided by.
    sum_offset: float = 0.0
    least_sum_key: str = ""
    scale_key: str = ""
    # The keys `n_group` and `topk_group` say from which groups of experts those of a token are.
    has_groups: bool = False
    group_score: GroupScore = "best_two"
    # The key of the part of a logit of sparsemixer.
    jitter_key: str = ""
    # The key of the size of the shared experts, or of their number, each of the size of an expert.
    shared_size_key: str = ""
    num_shared_key: str = ""
    gate: ExpertGate = "activation"
    # The `quant_method` in which experts alone may be quantized, and are dequantized as they are read; "":
    # none.
    quantization: str = ""
    # Layers with experts have a feed-forward beside them; None: they have experts instead.
    branch_norms: BranchNormNames | None = None
