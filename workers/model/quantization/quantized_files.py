"""The tensors of a checkpoint with quantized weights, by the names that these would have otherwise."""

from __future__ import annotations

import functools
from collections.abc import Hashable
from pathlib import Path

import torch
from torch import Tensor

from workers.errors import CheckpointError
from workers.model.quantization.quantized_weight import QuantizedWeight
from workers.model.quantization.stored_format import QuantizationScheme, plain_name, product_of
from workers.model.quantization.stored_weights import StoredWeight
from workers.model.quantization.weight_form import AS_STORED, WeightForm
from workers.model.quantization.weight_parts import columns_of, moved
from workers.model.tensor_files import FLOATS, TensorFiles, WeightSlice

_ALL = slice(None)


class QuantizedTensorFiles(TensorFiles):
    """`TensorFiles` whose names are those of the weights, not of the tensors that hold them. A quantized
    weight is dequantized where it is read as a tensor."""

    def __init__(
        self,
        model_dir: Path,
        dtype: torch.dtype,
        device: torch.device,
        scheme: QuantizationScheme,
        form: WeightForm = AS_STORED,
    ) -> None:
        super().__init__(model_dir, dtype, device, form)
        self._scheme = scheme

    def __contains__(self, name: str) -> bool:
        return super().__contains__(name) or name in self._plain_to_stored

    @property
    def names(self) -> set[str]:
        return {name for name in self._plain_to_stored if name and not self._is_idle_bias(name)}

    def file_of(self, name: str) -> Path:
        return super().file_of(self._plain_to_stored.get(name, [name])[0])

    def is_quantized(self, name: str) -> bool:
        return self._plain_to_stored.get(name, [name]) != [name]

    def kind_of(self, name: str) -> Hashable:
        return self._scheme.format_of(product_of(plain_name(name))), super().kind_of(name)

    def tensor(
        self, name: str, shape: tuple[int, ...], *slices: slice, dtype: torch.dtype | None = None
    ) -> Tensor:
        if not self.is_quantized(name):
            return super().tensor(name, shape, *slices, dtype=dtype)
        if len(shape) == 2:
            return self._dequantized(name, shape, slices, None, dtype or self.dtype)
        of_experts = range(shape[0])[slices[0] if slices else _ALL]
        each = [self._dequantized(name, shape, slices[1:], it, dtype or self.dtype) for it in of_experts]
        return torch.stack(each)

    @property
    def may_quantize(self) -> bool:
        return self.form.keeps_stored or super().may_quantize

    def quantized(self, part: WeightSlice, *, is_table: bool = False) -> QuantizedWeight | None:
        if not self.form.keeps_stored:
            return super().quantized(part, is_table=is_table)
        if not self.is_quantized(part.name):
            return None
        return columns_of(self._stored_rows(part.name, part.shape, part.rows, part.expert), part.columns)

    def _dequantized(
        self,
        name: str,
        shape: tuple[int, ...],
        slices: tuple[slice, ...],
        expert: int | None,
        dtype: torch.dtype,
    ) -> Tensor:
        """Read the slices of a weight, of the expert where there are several."""
        rows, columns = (*slices, _ALL, _ALL)[:2]
        of_rows = self._stored_rows(name, shape, rows, expert)
        part = columns_of(of_rows, columns)
        return of_rows.dequantized(dtype)[:, columns] if part is None else part.dequantized(dtype)

    def _stored_rows(
        self, name: str, shape: tuple[int, ...], rows: slice, expert: int | None
    ) -> QuantizedWeight:
        product = product_of(name)
        stored = self._scheme.format_of(product)
        if stored is None:
            raise CheckpointError(
                f"{self.file_of(name)}: {product} is quantized, and quantization_config of config.json does "
                "not say how; take another revision of the checkpoint"
            )
        self.read.add(name)
        weight = StoredWeight(self, name, stored, shape, expert).rows(rows)
        return moved(weight, self.on_device)

    @functools.cached_property
    def _plain_to_stored(self) -> dict[str, list[str]]:
        """The names of the tensors of each weight; of all that are passed over, behind ""."""
        found: dict[str, list[str]] = {}
        for name in sorted(super().names):
            found.setdefault(plain_name(name), []).append(name)
        return found

    def _is_idle_bias(self, name: str) -> bool:
        """Whether the tensor is a bias of zeros that was not read: some programs write one for each quantized
        product."""
        product = name.removesuffix(".bias")
        if product == name or name in self.read or not self.is_quantized(f"{product}.weight"):
            return False
        shape = self.shape_of(name)
        return shape is not None and not bool(self.mapped(name, shape, (), FLOATS).any())
