"""Linear products with quantized weights by the CPU kernels of `native/quantized_products.h`.

No weight and no input is rounded: codes are multiplied as they are, in bfloat16 or in float32, and the
sums of a group by its scale. A row's result depends neither on the other rows nor on the number of threads,
as that of `PackedLinear`."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from workers.model import native
from workers.model.products import GATES, Epilogue, GatedActivation, Linear, PackedWeights, allocate_panels
from workers.model.quantization.packed_codes import PANEL, PackedForm
from workers.model.quantization.quantized_weight import QuantizedWeight


class NativeForm(ctypes.Structure):
    """`QuantizedPanels` of `native/quantized_products.h`."""

    _fields_ = (
        ("table", ctypes.c_void_p),
        ("order", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("codes", "group", "scale_kind", "offset_kind")),
    )

    @staticmethod
    def of(form: PackedForm, order: Tensor | None = None) -> NativeForm:
        """Describe panels of the form, whose table and order must live until the result is used no more."""
        assert form.table.is_contiguous()
        order_address = None if order is None else order.data_ptr()
        kinds = (form.kind, form.group, form.scales, form.offsets)
        return NativeForm(form.table.data_ptr(), order_address, *kinds)


class PackedQuantizedLinear(Linear):
    """A product with panels of codes, on a CPU. It takes rows of any floating dtype; those that are neither
    bfloat16 nor float32 are multiplied in float32."""

    def __init__(
        self,
        kernels: native.Kernels,
        weight: QuantizedWeight,
        form: PackedForm,
        bias: Tensor | None = None,
        *,
        gate: GatedActivation | None = None,
    ) -> None:
        """Pack `weight`, whose form is `form`; it is not needed afterwards."""
        self.num_outputs, self.num_inputs = weight.shape
        # The kernels pad inputs themselves.
        self.is_padded = False
        # What the kernels do with the sums of a product that is not added to anything.
        self.epilogue = Epilogue.STORE if gate is None else GATES[gate]
        self._run, self._gather = kernels.library.tandem_linear, kernels.library.tandem_gather_outputs
        half, size = PANEL // 2, self.num_outputs // 2
        num_panels = -(-self.num_outputs // PANEL) if gate is None else -(-size // half)
        memory = allocate_panels(num_panels * form.num_panel_bytes, torch.uint8)
        self._panels = memory.view(num_panels, form.num_panel_bytes)
        if gate is None:
            form.pack(weight, self._panels)
        else:
            form.pack(weight.rows(slice(0, size)), self._panels, half, 0)
            form.pack(weight.rows(slice(size, None)), self._panels, half, half)
            if bias is not None:  # in the order of the outputs in the panels
                halves = F.pad(bias.view(2, -1), (0, num_panels * half - size)).view(2, num_panels, half)
                bias = halves.transpose(0, 1).reshape(-1)
        self._table, self._order = form.table, weight.order
        self._form = NativeForm.of(form, weight.order)
        self._biases = {
            dtype: None if bias is None else bias.to(dtype).contiguous() for dtype in native.DTYPES
        }
        self._weights = {dtype: self._weights_for(dtype) for dtype in native.DTYPES}

    def address_for(self, dtype: torch.dtype) -> int:
        """Return the address at which the kernels find the weights for rows of `dtype`, while this object
        lives."""
        return ctypes.addressof(self._weights[dtype])

    def __call__(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        return self._result(x, Epilogue.STORE, self.num_outputs, out)

    def add_to(self, hidden: Tensor, x: Tensor) -> Tensor | None:
        """Add the rounded product."""
        if x.dtype not in self._weights:
            return self(x)
        self._multiply(x, Epilogue.ADD, hidden)
        return None

    def gated(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        assert self.epilogue != Epilogue.STORE
        return self._result(x, self.epilogue, self.num_outputs // 2, out)

    def floats(self, x: Tensor) -> Tensor:
        out = torch.empty((x.shape[0], self.num_outputs), dtype=torch.float32)
        return self._multiply(x if x.dtype in self._weights else x.float(), Epilogue.STORE_FLOAT, out)

    def lookup(self, ids: Tensor) -> Tensor:
        """Return the rows in float32, which holds them best."""
        assert self.epilogue == Epilogue.STORE
        ids = ids.contiguous()
        out = torch.empty((len(ids), self.num_inputs), dtype=torch.float32)
        self._gather(
            ctypes.byref(self._weights[torch.float32]),
            ctypes.c_void_p(ids.data_ptr()),
            ctypes.c_int64(len(ids)),
            ctypes.c_void_p(out.data_ptr()),
            ctypes.c_int64(out.stride(0)),
        )
        return out

    def _weights_for(self, dtype: torch.dtype) -> PackedWeights:
        bias = self._biases[dtype]
        return PackedWeights(
            self._panels.data_ptr(),
            None if bias is None else bias.data_ptr(),
            self.num_outputs,
            self.num_inputs,
            dtype == torch.bfloat16,
            ctypes.addressof(self._form),
        )

    def _result(self, x: Tensor, epilogue: Epilogue, num_columns: int, out: Tensor | None) -> Tensor:
        if x.dtype not in self._weights:
            wide = self._result(x.float(), epilogue, num_columns, None)
            return wide.to(x.dtype) if out is None else out.copy_(wide)
        if out is None:
            out = torch.empty((x.shape[0], num_columns), dtype=x.dtype)
        return self._multiply(x, epilogue, out)

    def _multiply(self, x: Tensor, epilogue: Epilogue, out: Tensor) -> Tensor:
        assert x.shape[1] == self.num_inputs, x.shape
        if x.stride(1) != 1:
            x = x.contiguous()
        self._run(
            ctypes.byref(self._weights[x.dtype]),
            ctypes.c_void_p(x.data_ptr()),
            ctypes.c_int64(x.stride(0)),
            ctypes.c_int64(x.shape[0]),
            ctypes.c_int64(epilogue),
            ctypes.c_void_p(out.data_ptr()),
            ctypes.c_int64(out.stride(0)),
        )
        return out


def packed_quantized(
    weights: Sequence[QuantizedWeight], bias: Tensor | None, gate: GatedActivation | None
) -> PackedQuantizedLinear | None:
    """Return the product by the kernels; None where there are none, or none for this form."""
    kernels = native.load() if weights[0].packed.device.type == "cpu" else None
    whole = weights[0] if len(weights) == 1 else QuantizedWeight.joined(weights)
    if kernels is None or whole is None:
        return None
    form = PackedForm.of([whole])
    return None if form is None else PackedQuantizedLinear(kernels, whole, form, bias, gate=gate)
