"""The choice of an implementation of experts, and of a router's choice."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from workers.model import cuda, native
from workers.model.experts.expert_products import Experts, ExpertWeights, TorchExperts
from workers.model.experts.native_routing import choose_by
from workers.model.experts.packed_experts import PackedExperts
from workers.model.experts.packed_quantized_experts import packed_quantized_experts
from workers.model.experts.quantized_experts import QuantizedExperts, QuantizedExpertWeights
from workers.model.experts.router_rule import RouterRule
from workers.model.experts.routing import Routing, choose_experts
from workers.model.experts.stored_experts import ReadWhenTaken
from workers.model.make_linear import refuse_nondeterministic
from workers.model.quantization.quantized_weight import QuantizedWeight


def make_experts(weights: ExpertWeights, *, is_deterministic: bool = False) -> Experts:
    """Return the experts, by kernels of the device if there are any. `is_deterministic`: a token's result
    shall not depend on the other tokens; raise WorkerError where it may."""
    device, dtype = weights.ups[0].device, weights.ups[0].dtype
    if native.serves(device, dtype):
        kernels = native.load()
        assert kernels is not None
        return PackedExperts(kernels, weights)
    if cuda.serves(device):
        from workers.model.experts.triton_experts import TritonExperts

        return TritonExperts(weights, is_deterministic=is_deterministic)
    if is_deterministic:
        refuse_nondeterministic(device, dtype)
    return TorchExperts(weights)


def make_quantized_experts(weights: QuantizedExpertWeights, *, is_deterministic: bool = False) -> Experts:
    """Return experts with quantized weights as `make_experts` does. On CUDA, where no host sees which experts
    are chosen, those of a layer that have several forms are dequantized."""
    if (packed := packed_quantized_experts(weights)) is not None:
        return packed
    if not cuda.serves(weights.ups[0].packed.device):
        return QuantizedExperts(weights, is_deterministic=is_deterministic)
    from workers.model.experts.triton_quantized_experts import triton_quantized_experts

    kept = triton_quantized_experts(weights, is_deterministic=is_deterministic)
    return kept or make_experts(_dequantized(weights), is_deterministic=is_deterministic)


def _dequantized(weights: QuantizedExpertWeights) -> ExpertWeights:
    """Return the weights as floats, each of which is dequantized when it is taken."""

    def each(of: Sequence[QuantizedWeight]) -> ReadWhenTaken[Tensor]:
        return ReadWhenTaken(len(of), lambda expert: of[expert].dequantized(weights.dtype))

    return ExpertWeights(
        each(weights.gates),
        each(weights.ups),
        each(weights.downs),
        weights.activation,
        weights.gate_up_bias,
        weights.down_bias,
        weights.clamp,
    )


def choose(logits: Tensor, rule: RouterRule, bias: Tensor | None = None) -> Routing:
    """Choose experts as `choose_experts` does, by a kernel of the device where there is one."""
    if native.serves(logits.device, logits.dtype):
        kernels = native.load()
        assert kernels is not None
        return choose_by(kernels, logits, rule, bias)
    if cuda.serves(logits.device):
        from workers.model.cuda.expert_choice import choose_in_one, serves_rule

        if serves_rule(rule):
            return choose_in_one(logits, rule, bias)
    return choose_experts(logits, rule, bias)
