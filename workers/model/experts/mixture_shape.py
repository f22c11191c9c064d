"""Describe the experts of a model, as its config.json says, without torch."""

from __future__ import annotations

import math
from typing import Any, Literal, NamedTuple

from workers.model.config_values import ConfigValues
from workers.model.experts.router_rule import RouterRule
from workers.model.families.expert_traits import ExpertTraits

# activation(gate) * up; or, of gpt-oss, (clamp(up) + 1) * gate * sigmoid(alpha * gate), with the gate clamped
# from above; or, of experts without a gate, relu(up) squared.
ExpertActivation = Literal["silu", "gelu_tanh", "clamped_swiglu", "relu2"]

_NUMBER_KEYS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
# Beyond what any model has.
_MAX_EXPERTS = 1 << 14


class Clamp(NamedTuple):
    """The constants of clamped_swiglu."""

    alpha: float = 1.702
    limit: float = 7.0


DEFAULT_CLAMP = Clamp()


class MixtureShape(NamedTuple):
    """The experts of a model: `size` is the number of columns between the products of an expert. The `layers`
    with experts have no other feed-forward, unless it is a branch beside them, but for shared experts, whose
    size together is `shared_size`."""

    rule: RouterRule
    size: int
    layers: tuple[int, ...]
    shared_size: int = 0
    clamp: Clamp | None = None
    has_dense_branch: bool = False
    is_gated: bool = True

    @property
    def num_products(self) -> int:
        """The products of an expert: gate, up and down, or the last two."""
        return 3 if self.is_gated else 2

    def weights_of_expert(self, hidden_size: int) -> int:
        """Return the number of weights of one expert."""
        return self.num_products * self.size * hidden_size

    def weights_beside(self, hidden_size: int) -> int:
        """Return the number of a layer's weights that every token is multiplied by: those of its router and
        of shared experts."""
        return (self.rule.num_experts + self.num_products * self.shared_size) * hidden_size

    def num_touched(self, num_tokens: float) -> float:
        """Return how many experts of a layer so many tokens are expected to choose together, if each chooses
        at random."""
        rule = self.rule
        return rule.num_experts * (1 - math.pow(1 - rule.num_chosen / rule.num_experts, num_tokens))


class MixtureReader(ConfigValues):
    """Reads the keys of config.json about experts."""

    def read(
        self, traits: ExpertTraits, num_layers: int, of_kind: tuple[int, ...] = ()
    ) -> MixtureShape | None:
        """Read them for a family with these traits; None where no layer has experts. `of_kind` are the layers
        with experts where the kinds of layers say so."""
        layers = self._layers(traits, num_layers, of_kind)
        if not layers:
            return None
        if self.raw.get("moe_latent_size") is not None:
            self.refuse(
                "moe_latent_size", "is not supported: experts that take a latent of the hidden states"
            )
        if not traits.names.is_gated and self.raw.get("mlp_bias"):
            self.refuse("mlp_bias", "is not supported beside experts")
        size = self.count(traits.size_key)
        return MixtureShape(
            self._rule(traits),
            size,
            layers,
            self._shared_size(traits, size),
            self._clamp() if traits.gate == "clamped_swiglu" else None,
            traits.branch_norms is not None,
            traits.names.is_gated,
        )

    def _rule(self, traits: ExpertTraits) -> RouterRule:
        key = self._key_of_number()
        num_experts = self.count(key, traits.num_experts, most=_MAX_EXPERTS)
        num_chosen = self.count(traits.num_chosen_key)
        if num_chosen > num_experts:
            self.refuse(traits.num_chosen_key, f"is more than {key} {num_experts}")
        if traits.scoring == "sparsemixer" and num_chosen != 2:
            self.refuse(traits.num_chosen_key, "is not 2, the only number that sparsemixer is defined for")
        if self.raw.get("scoring_func") not in (None, traits.scoring):
            self.refuse("scoring_func", f"is not supported in this family (supported: {traits.scoring})")
        num_groups, num_chosen_groups = self._groups(traits, num_experts, num_chosen)
        normalized = traits.is_normalized
        return RouterRule(
            num_experts,
            num_chosen,
            traits.scoring,
            bool(self.raw.get(normalized)) if isinstance(normalized, str) else normalized,
            traits.sum_offset,
            self.number(traits.least_sum_key, self.raw) if traits.least_sum_key else 0.0,
            self.number(traits.scale_key, self.raw, 1.0) if traits.scale_key else 1.0,
            num_groups,
            num_chosen_groups,
            traits.group_score,
            self.number(traits.jitter_key, self.raw) if traits.jitter_key else 0.0,
        )

    def _key_of_number(self) -> str:
        """Return the key of the number of experts: that of the model's authors, or that of transformers."""
        return next((key for key in _NUMBER_KEYS if self.raw.get(key) is not None), _NUMBER_KEYS[0])

    def _groups(self, traits: ExpertTraits, num_experts: int, num_chosen: int) -> tuple[int, int]:
        """Return the number of groups of experts, and how many of them a token chooses from."""
        method = self.raw.get("topk_method")
        if traits.group_score == "best" and method not in (None, "greedy", "group_limited_greedy"):
            self.refuse("topk_method", "is not supported (supported: greedy, group_limited_greedy)")
        if not traits.has_groups or method == "greedy":
            return 1, 1
        num_groups = self.count("n_group", 1)
        num_chosen_groups = self.count("topk_group", num_groups)
        if num_experts % num_groups:
            self.refuse("n_group", f"does not divide the {num_experts} experts")
        in_group = num_experts // num_groups
        if num_groups > 1 and traits.group_score == "best_two" and in_group < 2:
            self.refuse("n_group", "leaves groups of one expert, and groups are chosen by their best two")
        if num_chosen_groups > num_groups:
            self.refuse("topk_group", f"is more than n_group {num_groups}")
        if num_chosen > num_chosen_groups * in_group:
            self.refuse(traits.num_chosen_key, f"is more than the experts of {num_chosen_groups} groups")
        return num_groups, num_chosen_groups

    def _shared_size(self, traits: ExpertTraits, size: int) -> int:
        if traits.shared_size_key:
            return self.count(traits.shared_size_key)
        key = traits.num_shared_key
        return self.count(key) * size if key and self.raw.get(key) else 0

    def _clamp(self) -> Clamp:
        return Clamp(
            self.number("swiglu_alpha", self.raw, DEFAULT_CLAMP.alpha),
            self.number("swiglu_limit", self.raw, DEFAULT_CLAMP.limit),
        )

    def _layers(self, traits: ExpertTraits, num_layers: int, of_kind: tuple[int, ...]) -> tuple[int, ...]:
        layers = range(num_layers)
        if traits.layers in ("after_first", "named") and self.raw.get("moe_layer_freq") not in (None, 1):
            self.refuse("moe_layer_freq", "is not 1, the only frequency that is supported")
        match traits.layers:
            case "all":
                return tuple(layers)
            case "by_kind":
                return of_kind
            case "enabled":
                return tuple(layers) if self.raw.get("enable_moe_block") else ()
            case "if_any":
                is_none = self.raw.get(self._key_of_number()) == 0
                return () if is_none else tuple(layers)
            case "after_first":
                return tuple(layers[self._number_of_layers("first_k_dense_replace") :])
            case "named":
                named = self._named_layers(num_layers)
                first = self._number_of_layers("first_k_dense_replace")
                return tuple(layers[first:]) if named is None else named
            case "interval":
                every = self.count("moe_layer_interval", 1)
                start = self._number_of_layers("moe_layer_start_index")
                end = self.raw.get("moe_layer_end_index")
                end = num_layers - 1 if end in (None, -1) else self._number_of_layers("moe_layer_end_index")
                return tuple(it for it in layers if (it + 1) % every == 0 and start <= it <= end)
            case "stepped":
                every, dense = self.count("decoder_sparse_step", 1), self._dense_layers()
                return tuple(it for it in layers if (it + 1) % every == 0 and it not in dense)

    def _named_layers(self, num_layers: int) -> tuple[int, ...] | None:
        """Return the layers that `mlp_layer_types` says have experts; None if it is not there."""
        kinds = self.raw.get("mlp_layer_types")
        if kinds is None:
            return None
        if not isinstance(kinds, list) or len(kinds) != num_layers:
            self.refuse("mlp_layer_types", f"does not name the {num_layers} layers")
        if not all(kind in ("dense", "sparse") for kind in kinds):
            self.refuse("mlp_layer_types", "is not supported (supported: dense, sparse)")
        return tuple(layer for layer, kind in enumerate(kinds) if kind == "sparse")

    def _number_of_layers(self, key: str) -> int:
        """Return the whole number of the key; 0 where it is missing, null or 0."""
        return self.count(key) if self.raw.get(key) else 0

    def _dense_layers(self) -> list[Any]:
        value = self.raw.get("mlp_only_layers") or []
        if not isinstance(value, list) or not all(type(layer) is int for layer in value):
            self.refuse("mlp_only_layers", "is not a list of layers")
        return value
