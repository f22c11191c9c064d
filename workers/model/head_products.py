"""Products of heads: each head of a token's inputs with a weight of its own."""

from __future__ import annotations

import ctypes
from abc import ABC, abstractmethod

import torch
import torch.nn.functional as F
from torch import Tensor

from workers.model import cuda, native
from workers.model.products import PANEL, PackedLinear


class HeadProducts(ABC):
    """Maps x [num_tokens, num_heads, num_inputs] to out [num_tokens, num_heads, num_outputs]; the weights'
    dtype is that of x. Both are contiguous in their last dimension."""

    def __init__(self, weights: Tensor) -> None:
        self.num_heads, self.num_outputs, self.num_inputs = weights.shape

    @abstractmethod
    def __call__(self, x: Tensor, out: Tensor, first_head: int = 0) -> Tensor:
        """Compute the products of as many heads as x has, by the weights from `first_head` on."""


def make_head_products(weights: Tensor, *, is_deterministic: bool = False) -> HeadProducts:
    """Return the products with `weights` [num_heads, num_outputs, num_inputs], packed if there are CPU
    kernels for them. `is_deterministic` is as in `workers.model.make_linear`."""
    if native.serves(weights.device, weights.dtype):
        kernels = native.load()
        assert kernels is not None
        return PackedHeads(kernels, weights)
    if is_deterministic and cuda.serves(weights.device):
        return InvariantHeads(weights)
    return TorchHeads(weights)


class TorchHeads(HeadProducts):
    """Products by torch, on any device and of any dtype, with weights that may be a view."""

    def __init__(self, weights: Tensor) -> None:
        super().__init__(weights)
        self._transposed = weights.transpose(1, 2)

    def __call__(self, x: Tensor, out: Tensor, first_head: int = 0) -> Tensor:
        own = self._transposed[first_head : first_head + x.shape[1]]
        return out.copy_(torch.bmm(x.transpose(0, 1), own).transpose(0, 1))


class InvariantHeads(HeadProducts):
    """Products by Triton in which a row's result depends on nothing else: a launch for each head."""

    def __init__(self, weights: Tensor) -> None:
        from workers.model.cuda.invariant_product import multiply

        super().__init__(weights)
        self._multiply = multiply
        self._weights = weights.contiguous()

    def __call__(self, x: Tensor, out: Tensor, first_head: int = 0) -> Tensor:
        for head in range(x.shape[1]):
            self._multiply(x[:, head], self._weights[first_head + head], None, out[:, head])
        return out


class PackedHeads(HeadProducts):
    """Products with packed float32 or bfloat16 weights, on a CPU, in one call."""

    def __init__(self, kernels: native.Kernels, weights: Tensor) -> None:
        super().__init__(weights)
        assert weights.dtype == torch.float32 or self.num_inputs % 2 == 0
        # The panels of each head are its own.
        whole = F.pad(weights, (0, 0, 0, -self.num_outputs % PANEL)).flatten(0, 1).contiguous()
        self._packed = PackedLinear(kernels, whole)
        self._run = kernels.library.tandem_multiply_heads
        pointer, size = ctypes.c_void_p, ctypes.c_int64
        self._run.argtypes = (pointer, *(size,) * 3, pointer, *(size,) * 3, pointer, *(size,) * 2)
        self._dtype = weights.dtype

    def __call__(self, x: Tensor, out: Tensor, first_head: int = 0) -> Tensor:
        num_tokens, num_heads, num_inputs = x.shape
        assert x.dtype == out.dtype == self._dtype
        assert num_inputs == self.num_inputs
        assert out.shape == (num_tokens, num_heads, self.num_outputs)
        assert first_head + num_heads <= self.num_heads
        assert x.stride(2) == out.stride(2) == 1
        self._run(
            self._packed.address, self.num_outputs, first_head, num_heads,
            x.data_ptr(), x.stride(0), x.stride(1), num_tokens,
            out.data_ptr(), out.stride(0), out.stride(1),
        )  # fmt: skip
        return out
