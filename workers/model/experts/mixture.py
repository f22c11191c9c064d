"""The feed-forward of a layer with experts: a router, the experts that it chooses, and those that all tokens
share."""

from __future__ import annotations

import torch
from torch import Tensor

from workers.model import native
from workers.model.apply_norm import apply_norm
from workers.model.experts.copied_experts import CopiedExperts, with_slots
from workers.model.experts.copy_slots import CopySlots
from workers.model.experts.expert_products import CountingExperts, Experts
from workers.model.experts.host_experts import SplitExperts, split_experts
from workers.model.experts.make_experts import choose, make_experts, make_quantized_experts
from workers.model.experts.mixture_weights import MixtureWeights, SharedWeights
from workers.model.experts.packed_experts import PackedExperts
from workers.model.experts.packed_mixture import PackedMixture
from workers.model.experts.packed_quantized_experts import PackedQuantizedExperts
from workers.model.experts.quantized_experts import QuantizedExpertWeights
from workers.model.experts.router_rule import RouterRule
from workers.model.experts.routing import Routing
from workers.model.make_linear import make_linear
from workers.model.products import GatedActivation, PackedLinear
from workers.model.relu2 import relu2


class ExpertRouter:
    """Chooses experts for hidden states [num_tokens, hidden_size], by float32 logits."""

    def __init__(self, weights: MixtureWeights, rule: RouterRule, *, is_deterministic: bool) -> None:
        router = weights.router
        self._dtype = router.tensors[0].dtype
        self.logits = make_linear(router.parts, router.bias, is_deterministic=is_deterministic)
        self._rule, self._correction = rule, weights.correction
        self._norm, self._scale = weights.router_norm, weights.expert_scale

    def __call__(self, x: Tensor) -> Routing:
        if self._norm is not None:
            x = apply_norm(x, self._norm)
        experts, of_experts = choose(self.logits.floats(x.to(self._dtype)), self._rule, self._correction)
        if self._scale is not None:
            of_experts = of_experts * self._scale[experts]
        return Routing(experts, of_experts)


class SharedExperts:
    """The experts that all tokens share, with their gate if they have one. `activation` is that of their
    gates; None: they have ups alone, of which `relu2` is taken."""

    def __init__(
        self, weights: SharedWeights, activation: GatedActivation | None, *, is_deterministic: bool
    ) -> None:
        self._has_gates = activation is not None
        self.gate_up = make_linear(weights.gate_up.parts, gate=activation, is_deterministic=is_deterministic)
        self.down = make_linear(weights.down.parts, is_deterministic=is_deterministic)
        gate = weights.gate
        self.gate = None if gate is None else make_linear(gate.clone(), is_deterministic=is_deterministic)

    def __call__(self, x: Tensor) -> Tensor:
        result = self.down(self.gate_up.gated(x) if self._has_gates else relu2(self.gate_up(x)))
        return result if self.gate is None else _scale_by_sigmoid(result, self.gate(x))


class Mixture:
    """A feed-forward of experts; an `AddedProduct`. Over normed hidden states, or over hidden states that it
    normalizes, for router and experts each in its way, where experts are a branch beside a feed-forward.

    `counts`, int64 [num_owned + num_slots], are the tokens that each expert of this rank has had, and then
    each slot for copies, counted on the device, those included with which a CUDA graph is padded."""

    def __init__(
        self,
        weights: MixtureWeights,
        rule: RouterRule,
        activation: GatedActivation | None,
        *,
        is_deterministic: bool = False,
    ) -> None:
        self._router = ExpertRouter(weights, rule, is_deterministic=is_deterministic)
        self._experts = _experts(weights, is_deterministic=is_deterministic)
        self._shared = None
        if weights.shared is not None:
            self._shared = SharedExperts(weights.shared, activation, is_deterministic=is_deterministic)
        norms = weights.branch_norms
        self._norm = None if norms is None else norms.experts_input
        self._first, self._num_owned = weights.held.start, len(weights.held)
        self._holds_all = len(weights.held) == rule.num_experts
        self._packed = self._packed_mixture(weights, rule)
        device = weights.router.tensors[0].device  # that of the hidden states, also with an offload
        self.counts = torch.zeros(self._experts.num_experts, dtype=torch.int64, device=device)
        if isinstance(self._experts, CountingExperts):
            self.counts = self._experts.counts
        self._copies: CopiedExperts | None = None
        if (place := weights.copies) is not None:
            slots = CopySlots(rule.num_experts, place, device)
            self._copies = CopiedExperts(self._experts, weights.held, slots, self.counts)
        self._one = torch.ones(1, dtype=torch.int64, device=device)

    @property
    def packed(self) -> PackedMixture | None:
        """The router and the experts for the CPU kernels, if these compute them from one set of rows."""
        return self._packed

    @property
    def shared(self) -> SharedExperts | None:
        """The experts that all tokens share, if there are any."""
        return self._shared

    @property
    def split(self) -> SplitExperts | None:
        """The experts, if the CPU computes some of them for another device."""
        return self._experts if isinstance(self._experts, SplitExperts) else None

    @property
    def copies(self) -> CopiedExperts | None:
        """The experts with their copies, if ranks may hold copies of experts of others."""
        return self._copies

    def _packed_mixture(self, weights: MixtureWeights, rule: RouterRule) -> PackedMixture | None:
        experts, router = self._experts, self._router.logits
        if not isinstance(router, PackedLinear) or router.is_padded:
            return None
        if not isinstance(experts, PackedExperts | PackedQuantizedExperts):
            return None
        is_plain = weights.router_norm is None and weights.expert_scale is None
        is_padded = isinstance(experts, PackedExperts) and experts.is_padded
        if not (self._holds_all and is_plain) or is_padded:
            return None
        return PackedMixture(experts.kernels, router, rule, experts, weights.correction)

    def __call__(self, x: Tensor) -> Tensor:
        result = self._of_experts(x)
        return result if self._shared is None else result.add_(self._shared(x))

    def add_to(self, hidden: Tensor, x: Tensor) -> Tensor | None:
        if self._shared is not None:
            return self(x)
        if (packed := self._packed_for(x)) is not None:
            packed.add_to(hidden, x)
            return None
        return self._experts.add_to(hidden, self._normed(x), self._of_rank(x, self.route(x)))

    def route(self, x: Tensor) -> Routing:
        """Choose experts, by the numbers that they have in the layer."""
        return self._router(x)

    def sum_held(self, x: Tensor, routing: Routing) -> Tensor:
        """Compute the weighted sums of the results of the experts that this rank computes for each row,
        without shared ones."""
        return self._experts(self._normed(x), self._of_rank(x, routing))

    def _of_experts(self, x: Tensor) -> Tensor:
        if (packed := self._packed_for(x)) is not None:
            return packed(x)
        return self.sum_held(x, self.route(x))

    def _packed_for(self, x: Tensor) -> PackedMixture | None:
        """Return the router and the experts for the kernels, if these compute rows as of x."""
        return self._packed if x.dtype in native.DTYPES else None

    def _normed(self, x: Tensor) -> Tensor:
        return x if self._norm is None else apply_norm(x, self._norm)

    def _of_rank(self, x: Tensor, routing: Routing) -> Routing:
        """Return the experts by the numbers that they have at this rank, which computes them: -1 for those
        that other ranks compute."""
        if self._copies is not None:
            routing = routing._replace(experts=self._copies.slots.places(x, routing.experts))
        elif not self._holds_all:
            experts = routing.experts - self._first
            is_foreign = (experts < 0) | (experts >= self._num_owned)
            routing = routing._replace(experts=experts.masked_fill_(is_foreign, -1))
        if not isinstance(self._experts, CountingExperts):
            self._count(routing)
        return routing

    def _count(self, routing: Routing) -> None:
        """Count the tokens of this rank's experts, which the kernels count where they choose or sort them."""
        experts = routing.experts.flatten()
        if self._holds_all:
            self.counts.index_add_(0, experts, self._one.expand(len(experts)))
        else:
            self.counts.index_add_(0, experts.clamp(min=0), (experts >= 0).long())


def _experts(weights: MixtureWeights, *, is_deterministic: bool) -> Experts:
    if isinstance(experts := weights.experts, QuantizedExpertWeights):
        return make_quantized_experts(experts, is_deterministic=is_deterministic)
    if weights.copies is not None:
        with_copies = with_slots(experts, weights.copies.num_slots)
        return make_experts(with_copies, is_deterministic=is_deterministic)
    if (offload := weights.offload) is None:
        return make_experts(experts, is_deterministic=is_deterministic)
    return split_experts(experts, offload.device, offload.num_in_host, offload.upload)


def _scale_by_sigmoid(x: Tensor, gates: Tensor) -> Tensor:
    """Multiply x [num_tokens, size], in place, by the sigmoid of `gates` [num_tokens, 1]. On a CPU torch
    computes the last numbers of a tensor in another way than the others, and the kernel all alike."""
    if native.serves(x.device, x.dtype):
        kernels = native.load()
        assert kernels is not None
        return kernels.scale_by_sigmoid(x, gates)
    return x.mul_(torch.sigmoid(gates))
