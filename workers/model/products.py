"""Linear products of the decoder, with packed weights where there are CPU kernels and by torch elsewhere.

A packed weight is the only copy of it: panels of 32 outputs as `native/panel.h` describes. A row's result
then depends neither on the other rows of the call nor on the number of threads, and so it is with
`InvariantLinear` on CUDA. Products by torch round as well, but promise nothing of the kind."""

from __future__ import annotations

import contextlib
import ctypes
import enum
import itertools
import mmap
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from workers.model import cuda, native

PANEL = 32
_HUGE_PAGE = 2 << 20
_LARGEST_FLOAT8 = torch.finfo(torch.float8_e4m3fn).max
# The scale of a row of zeros, which has none of its own.
_LEAST_SCALE = 1e-12


class Epilogue(enum.IntEnum):
    """The treatment of the sums of a packed product: `Epilogue` of `native/products.h`."""

    STORE = 0
    ADD = 1
    GATED = 2
    STORE_FLOAT = 3
    GATED_GELU = 4


# The activations of a gate.
GatedActivation = Literal["silu", "gelu_tanh"]
GATES: dict[GatedActivation, Epilogue] = {"silu": Epilogue.GATED, "gelu_tanh": Epilogue.GATED_GELU}


class Workspace:
    """Keeps the scratch tensors of a step, one for each name: they grow to the largest step and stay."""

    def __init__(self) -> None:
        self._name_to_memory: dict[str, Tensor] = {}

    @contextlib.contextmanager
    def separate(self) -> Iterator[None]:
        """Take tensors from other memory inside the block, which is not kept: a CUDA graph's must stay where
        they were when it was captured, while these move when a larger step comes."""
        own, self._name_to_memory = self._name_to_memory, {}
        try:
            yield
        finally:
            self._name_to_memory = own

    def take(self, name: str, like: Tensor, num_columns: int) -> Tensor:
        """Return the tensor of this name, [len(like), num_columns] of undefined values, of the dtype and
        device of `like`. It holds until the name is taken again."""
        num_items = like.shape[0] * num_columns
        memory = self._name_to_memory.get(name)
        if memory is None or memory.numel() < num_items or memory.dtype != like.dtype:
            memory = self._name_to_memory[name] = torch.empty(num_items, dtype=like.dtype, device=like.device)
        return memory[:num_items].view(like.shape[0], num_columns)


class Linear(ABC):
    """Maps x [num_tokens, num_inputs] to [num_tokens, num_outputs]; the weights' dtype is that of x.

    x and what the results are written to are contiguous in their last dimension. Results go to `out` where it
    is given, to a new tensor otherwise."""

    num_inputs: int
    num_outputs: int

    @abstractmethod
    def __call__(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        """Compute the product, rounded to the dtype of x."""

    @abstractmethod
    def add_to(self, hidden: Tensor, x: Tensor) -> Tensor | None:
        """Add the product to `hidden` [num_tokens, num_outputs] and return None; or return the product, for
        the norm that follows to add, where that takes fewer kernels."""

    @abstractmethod
    def gated(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        """Compute activation(gate) * up, [num_tokens, num_outputs / 2], of a weight whose first half of
        outputs is gate and whose second half is up. It was made with a `gate`."""

    @abstractmethod
    def floats(self, x: Tensor) -> Tensor:
        """Compute the product in float32."""

    @abstractmethod
    def lookup(self, ids: Tensor) -> Tensor:
        """Return the rows `ids` [num_ids] of the weight, [num_ids, num_inputs]."""


# [num_outputs, num_inputs], or the parts [num_rows, num_inputs] of one whose rows follow one another.
Weight = Tensor | Sequence[Tensor]


class UnpackedLinear(Linear):
    """A product whose weight is a tensor as it was given."""

    # The activation of its gate, of those that are gated.
    gate: GatedActivation | None = None

    def add_to(self, hidden: Tensor, x: Tensor) -> Tensor | None:
        return self(x)

    def gated(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        return gate_mul(self(x), self.gate or "silu", out)

    def floats(self, x: Tensor) -> Tensor:
        return self(x).float()


def gate_mul(gate_up: Tensor, activation: GatedActivation, out: Tensor | None = None) -> Tensor:
    """Compute activation(gate) * up of `gate_up` [num_tokens, 2 * size], whose first half of columns is
    gate."""
    if cuda.serves(gate_up.device):
        from workers.model.cuda import layer_ops

        return layer_ops.gate_mul(gate_up, activation, out)
    gate, up = gate_up.chunk(2, dim=-1)
    activated = F.silu(gate) if activation == "silu" else F.gelu(gate, approximate="tanh")
    return torch.mul(activated, up, out=out)


class TorchLinear(UnpackedLinear):
    """A product by torch, on any device and of any dtype."""

    def __init__(
        self, weight: Tensor, bias: Tensor | None = None, *, gate: GatedActivation | None = None
    ) -> None:
        self._weight, self._bias, self.gate = weight, bias, gate
        self._transposed = weight.t()
        self.num_outputs, self.num_inputs = weight.shape

    def __call__(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        if self._bias is None:
            return torch.mm(x, self._transposed, out=out)
        return torch.addmm(self._bias, x, self._transposed, out=out)

    def add_to(self, hidden: Tensor, x: Tensor) -> Tensor | None:
        if self._bias is not None:
            return self(x)
        hidden.addmm_(x, self._transposed)
        return None

    def floats(self, x: Tensor) -> Tensor:
        if x.is_cuda and self._bias is None and x.dtype != torch.float32:
            return torch.mm(x, self._transposed, out_dtype=torch.float32)
        return self(x).float()

    def lookup(self, ids: Tensor) -> Tensor:
        return F.embedding(ids, self._weight)


class InvariantLinear(UnpackedLinear):
    """A product by Triton in which a row's result depends on nothing else."""

    def __init__(
        self, weight: Tensor, bias: Tensor | None = None, *, gate: GatedActivation | None = None
    ) -> None:
        from workers.model.cuda.product_choice import chosen_product

        self._multiply = chosen_product(weight.device, weight.dtype)
        self._weight, self._bias, self.gate = weight, bias, gate
        self.num_outputs, self.num_inputs = weight.shape

    def __call__(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        result = x.new_empty(x.shape[0], self.num_outputs) if out is None else out
        self._multiply(x, self._weight, self._bias, result)
        return result

    def add_to(self, hidden: Tensor, x: Tensor) -> None:
        self._multiply(x, self._weight, self._bias, hidden, is_added=True)

    def floats(self, x: Tensor) -> Tensor:
        result = x.new_empty(x.shape[0], self.num_outputs, dtype=torch.float32)
        self._multiply(x, self._weight, self._bias, result)
        return result

    def lookup(self, ids: Tensor) -> Tensor:
        return F.embedding(ids, self._weight)


class ScaledLinear(UnpackedLinear):
    """A product of float8 weights, `weight` [num_outputs, num_inputs] times a scale for each output, `scales`
    float32 [num_outputs], with inputs that are scaled to float8 row by row. Sizes are multiples of 16."""

    def __init__(self, weight: Tensor, scales: Tensor, bias: Tensor | None = None) -> None:
        assert weight.dtype == torch.float8_e4m3fn
        self._weight, self._bias = weight, bias
        self._scales = scales.float().view(1, -1)
        self.num_outputs, self.num_inputs = weight.shape

    def __call__(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        wide = x.float()
        scales = wide.abs().amax(1, keepdim=True).div_(_LARGEST_FLOAT8).clamp_(min=_LEAST_SCALE)
        product = F.scaled_mm(
            (wide / scales).to(self._weight.dtype),
            self._weight.t(),
            scale_a=scales,
            scale_recipe_a=F.ScalingType.RowWise,
            scale_b=self._scales,
            scale_recipe_b=F.ScalingType.RowWise,
            bias=self._bias,
            output_dtype=x.dtype,
        )
        return product if out is None else out.copy_(product)

    def lookup(self, ids: Tensor) -> Tensor:
        """Return the rows in float32, which holds them best."""
        return self._weight[ids].float() * self._scales[0, ids, None]


class PackedWeights(ctypes.Structure):
    """`LinearWeights` of `native/products.h`."""

    _fields_ = [
        ("panels", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
        ("num_outputs", ctypes.c_int64),
        ("num_inputs", ctypes.c_int64),
        ("is_bf16", ctypes.c_int64),
        ("quantized", ctypes.c_void_p),
    ]


class PackedLinear(Linear):
    """A product with packed float32 or bfloat16 weights, on a CPU."""

    def __init__(
        self,
        kernels: native.Kernels,
        weight: Weight,
        bias: Tensor | None = None,
        *,
        gate: GatedActivation | None = None,
    ) -> None:
        """Pack the weight, or its parts from where they are, as `make_linear` describes them."""
        parts = (weight,) if isinstance(weight, Tensor) else tuple(weight)
        self.num_outputs, self.num_inputs = sum(map(len, parts)), parts[0].shape[1]
        is_gated = gate is not None
        # What the kernels do with the sums of a product that is not added to anything.
        self.epilogue = Epilogue.STORE if gate is None else GATES[gate]
        self._dtype = dtype = parts[0].dtype
        self._run, self._gather = kernels.library.tandem_linear, kernels.library.tandem_gather_outputs
        # A pair of bfloat16 inputs lies side by side: the last one is padded with zero.
        self.is_padded = dtype == torch.bfloat16 and self.num_inputs % 2 == 1
        num_inputs = self.num_inputs + self.is_padded
        half = PANEL // 2
        if is_gated:
            gates, ups = parts if len(parts) == 2 else parts[0].chunk(2)
            assert len(gates) == len(ups)
            num_panels = -(-len(gates) // half)
            # The places of the rows: the first panel, the width of their part of a panel, and its offset
            # there.
            places = [(gates, 0, half, 0), (ups, 0, half, half)]
        else:
            num_panels = -(-self.num_outputs // PANEL)
            if any(len(part) % PANEL for part in parts[:-1]):  # panels hold rows of several parts
                parts = (torch.cat(parts),)
            ends = itertools.accumulate(map(len, parts))
            places = [
                (part, (end - len(part)) // PANEL, PANEL, 0) for part, end in zip(parts, ends, strict=True)
            ]
        self._panels = allocate_panels(num_panels * num_inputs * PANEL, dtype)
        for rows, panel, width, offset in places:
            assert rows.stride(1) == 1
            kernels.library.tandem_pack_rows(
                ctypes.c_void_p(rows.data_ptr()),
                *(ctypes.c_int64(value) for value in (rows.stride(0), *rows.shape, width, offset)),
                ctypes.c_int64(dtype == torch.bfloat16),
                ctypes.c_void_p(self._panels[panel * num_inputs * PANEL :].data_ptr()),
            )
        # The bias lies in the order of the outputs in the panels, and covers whole panels of gates and ups.
        self._bias = None if bias is None else bias.contiguous()
        if is_gated and bias is not None:
            padding = num_panels * half - self.num_outputs // 2
            halves = F.pad(bias.view(2, -1), (0, padding)).view(2, num_panels, half)
            self._bias = halves.transpose(0, 1).reshape(-1).contiguous()
        self._weights = PackedWeights(
            self._panels.data_ptr(),
            None if self._bias is None else self._bias.data_ptr(),
            self.num_outputs,
            num_inputs,
            dtype == torch.bfloat16,
        )
        self._reference = ctypes.byref(self._weights)

    @property
    def address(self) -> int:
        """The address at which the kernels find the weights, while this object lives."""
        return ctypes.addressof(self._weights)

    def __call__(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        if out is None:
            out = torch.empty((x.shape[0], self.num_outputs), dtype=self._dtype)
        return self._multiply(x, Epilogue.STORE, out)

    def add_to(self, hidden: Tensor, x: Tensor) -> None:
        """Add the rounded product."""
        self._multiply(x, Epilogue.ADD, hidden)

    def gated(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        assert self.epilogue != Epilogue.STORE
        if out is None:
            out = torch.empty((x.shape[0], self.num_outputs // 2), dtype=self._dtype)
        return self._multiply(x, self.epilogue, out)

    def floats(self, x: Tensor) -> Tensor:
        out = torch.empty((x.shape[0], self.num_outputs), dtype=torch.float32)
        return self._multiply(x, Epilogue.STORE_FLOAT, out)

    def lookup(self, ids: Tensor) -> Tensor:
        assert self.epilogue == Epilogue.STORE
        ids = ids.contiguous()
        out = torch.empty((len(ids), self.num_inputs + self.is_padded), dtype=self._dtype)
        self._gather(
            self._reference,
            ctypes.c_void_p(ids.data_ptr()),
            ctypes.c_int64(len(ids)),
            ctypes.c_void_p(out.data_ptr()),
            ctypes.c_int64(out.stride(0)),
        )
        return out[:, : self.num_inputs]

    def _multiply(self, x: Tensor, epilogue: Epilogue, out: Tensor) -> Tensor:
        assert x.dtype == self._dtype, x.dtype
        assert x.shape[1] == self.num_inputs, x.shape
        if self.is_padded:
            x = F.pad(x, (0, 1))
        elif x.stride(1) != 1:
            x = x.contiguous()
        self._run(
            self._reference,
            ctypes.c_void_p(x.data_ptr()),
            ctypes.c_int64(x.stride(0)),
            ctypes.c_int64(x.shape[0]),
            ctypes.c_int64(epilogue),
            ctypes.c_void_p(out.data_ptr()),
            ctypes.c_int64(out.stride(0)),
        )
        return out


def allocate_panels(num_items: int, dtype: torch.dtype) -> Tensor:
    """Return zeros, in huge pages as far as whole ones fit: streams of weights then cross fewer pages."""
    num_bytes = num_items * dtype.itemsize
    if num_bytes < _HUGE_PAGE:
        return torch.zeros(num_items, dtype=dtype)
    memory = mmap.mmap(-1, num_bytes + _HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    whole = torch.frombuffer(memory, dtype=torch.uint8)
    first = -whole.data_ptr() % _HUGE_PAGE
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE, first, num_bytes // _HUGE_PAGE * _HUGE_PAGE)
    return whole[first : first + num_bytes].view(dtype)
