"""A router and its experts in one call of the CPU kernels: `native/mixture.h`."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from workers.model import native
from workers.model.experts.native_routing import RuleArguments
from workers.model.experts.packed_experts import PackedExperts
from workers.model.experts.packed_quantized_experts import PackedQuantizedExperts
from workers.model.experts.router_rule import RouterRule
from workers.model.products import PackedLinear


class _Mixture(ctypes.Structure):
    """`Mixture` of `native/mixture.h`."""

    _fields_ = tuple(
        (name, ctypes.c_void_p) for name in ("router", "choice_bias", "rule", "experts", "counts")
    )


class PackedMixture:
    """Computes, for each token, the weighted sum of the results of the experts that its router chooses.

    The weights of the router are float32 or of the dtype of the rows, and its logits float32. `counts`,
    int64 [num_experts], are the tokens that each expert has had."""

    def __init__(
        self,
        kernels: native.Kernels,
        router: PackedLinear,
        rule: RouterRule,
        experts: PackedExperts | PackedQuantizedExperts,
        choice_bias: Tensor | None = None,
    ) -> None:
        """Take float32 `choice_bias` [num_experts], the bias of `choose_experts`, if there is one."""
        assert (router.num_outputs, router.num_inputs) == (rule.num_experts, experts.hidden_size)
        assert not router.is_padded
        assert not (isinstance(experts, PackedExperts) and experts.is_padded)
        assert choice_bias is None or (choice_bias.dtype == torch.float32 and choice_bias.is_contiguous())
        self.counts = experts.counts
        self._parts = router, experts, choice_bias
        self._rule = RuleArguments.of(rule)
        self._dtype_to_mixture: dict[torch.dtype, _Mixture] = {}
        self._run = kernels.library.tandem_run_mixture

    def address_for(self, dtype: torch.dtype) -> int:
        """Return the address at which the kernels find the mixture for rows of `dtype`, while this object
        lives."""
        return ctypes.addressof(self._mixture_for(dtype))

    def _mixture_for(self, dtype: torch.dtype) -> _Mixture:
        if dtype not in self._dtype_to_mixture:
            router, experts, choice_bias = self._parts
            self._dtype_to_mixture[dtype] = _Mixture(
                router.address,
                None if choice_bias is None else choice_bias.data_ptr(),
                ctypes.addressof(self._rule),
                experts.address_for(dtype),
                self.counts.data_ptr(),
            )
        return self._dtype_to_mixture[dtype]

    def __call__(self, x: Tensor) -> Tensor:
        """Compute the sums for x [num_tokens, hidden_size], which has contiguous rows; [num_tokens,
        hidden_size]."""
        return self._sum(x, torch.empty(x.shape, dtype=x.dtype), is_added=False)

    def add_to(self, hidden: Tensor, x: Tensor) -> None:
        """Add the rounded sums to `hidden` [num_tokens, hidden_size]."""
        self._sum(x, hidden, is_added=True)

    def _sum(self, x: Tensor, out: Tensor, *, is_added: bool) -> Tensor:
        experts = self._parts[1]
        assert x.dtype == out.dtype, (x.dtype, out.dtype)
        assert x.shape == out.shape == (len(x), experts.hidden_size), (x.shape, out.shape)
        assert x.stride(1) == out.stride(1) == 1
        self._run(
            ctypes.byref(self._mixture_for(x.dtype)),
            ctypes.c_void_p(x.data_ptr()),
            ctypes.c_int64(x.stride(0)),
            ctypes.c_int64(len(x)),
            ctypes.c_int64(is_added),
            ctypes.c_void_p(out.data_ptr()),
            ctypes.c_int64(out.stride(0)),
        )
        return out
