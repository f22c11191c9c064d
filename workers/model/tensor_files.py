"""Map the tensors of a checkpoint's safetensors files, checked against the shapes that they must have."""

from __future__ import annotations

import copy
import math
from collections.abc import Collection, Hashable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from kvtransfer.common.panics import PanicError, panics_as_errors
from workers.errors import CheckpointError
from workers.model.linear_weights import Parts
from workers.model.model_config import weight_files
from workers.model.quantization.kept_forms import has_products
from workers.model.quantization.quantized_weight import QuantizedWeight, are_alike
from workers.model.quantization.rounded_weight import rounded
from workers.model.quantization.weight_form import AS_STORED, WeightForm
from workers.model.quantization.weight_parts import columns_of
from workers.model.weight_uploads import CudaCopies, WeightUploads

_ALL = slice(None)
_BYTES = ("U8",)
# The bytes in float32 of the rows that are rounded together.
_ROUNDED_BYTES = 64 << 20
_STORED_DTYPES = {
    "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "F8_E4M3": torch.float8_e4m3fn,
    "F8_E8M0": torch.float8_e8m0fnu, "I64": torch.int64, "I32": torch.int32, "I16": torch.int16,
    "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip
# How the names of tensors end that say which group of a quantized weight an input belongs to.
_ORDERS = "g_idx"
FLOATS = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


class WeightSlice(NamedTuple):
    """Rows and columns of the tensor of this name, which is a product's weight of this shape; or of that of
    one expert, where the tensor has those of all [num_experts, num_outputs, num_inputs]."""

    name: str
    shape: tuple[int, ...]
    rows: slice = _ALL
    columns: slice = _ALL
    expert: int | None = None


@dataclass
class _Amount:
    num_bytes: int = 0


class _Unwritten(Mapping[str, Tensor]):
    """Memory like that of the tensors of files. Those that order the inputs of a weight, which are checked,
    and single numbers, with which the host computes, have their values."""

    def __init__(self, name_to_file: Mapping[str, tuple[Path, Any]]) -> None:
        self._name_to_file = name_to_file

    def __getitem__(self, name: str) -> Tensor:
        opened = self._name_to_file[name][1]
        stored = opened.get_slice(name)
        if name.endswith(_ORDERS) or math.prod(stored.get_shape()) == 1:
            read: Tensor = opened.get_tensor(name)
            return read
        return torch.empty(stored.get_shape(), dtype=_STORED_DTYPES[stored.get_dtype()])

    def __iter__(self) -> Iterator[str]:
        return iter(self._name_to_file)

    def __len__(self) -> int:
        return len(self._name_to_file)


class TensorFiles:
    """The tensors of one checkpoint, cast to `dtype` on `device`. A context manager.

    Tensors may be views of the mapped files: a serving model must not change with its files, so they are to
    be packed or copied once."""

    def __init__(
        self,
        model_dir: Path,
        dtype: torch.dtype,
        device: torch.device,
        form: WeightForm = AS_STORED,
    ) -> None:
        """`form` is that of the weights of linear products."""
        self.dtype, self.device, self.form = dtype, device, form
        self._amount = _Amount()
        # The names of the tensors that were read.
        self.read: set[str] = set()
        # The names of those that other ranks read.
        self.left: set[str] = set()
        # What is read in place of the tensors of these names.
        self._replaced: Mapping[str, Tensor] = {}
        # None: the tensors stay in host memory, or have no values.
        self._uploads = WeightUploads(CudaCopies(device)) if device.type == "cuda" else None
        self._dir = model_dir
        self._stack = ExitStack()
        self._name_to_file: dict[str, tuple[Path, Any]] = {}

    def __enter__(self) -> TensorFiles:
        for file in weight_files(self._dir):
            try:
                with panics_as_errors:
                    opened = self._stack.enter_context(safe_open(str(file), framework="pt", device="cpu"))
                    self._name_to_file |= dict.fromkeys(opened.keys(), (file, opened))
            except (OSError, SafetensorError, PanicError) as error:
                raise CheckpointError(f"{file}: unreadable: {error}") from error
        return self

    def __exit__(self, *_: object) -> None:
        with self._stack:
            if self._uploads is not None:
                self._uploads.close()

    def in_host_memory(self) -> TensorFiles:
        """Return the same tensors, but in host memory; reading them counts here as well."""
        files = copy.copy(self)
        files.device, files._uploads = torch.device("cpu"), None
        return files

    def replace(self, tensors: Mapping[str, Tensor]) -> None:
        """Read these, of the same shapes, in place of the tensors of their names."""
        self._replaced = tensors

    def omit_values(self) -> None:
        """Read every tensor as memory of its shape and dtype in which nothing was written."""
        self._replaced = _Unwritten(self._name_to_file)
        self._uploads = None

    @property
    def num_bytes(self) -> int:
        """The bytes of the parts that were read, as they are stored."""
        return self._amount.num_bytes

    def __contains__(self, name: str) -> bool:
        return name in self._name_to_file

    @property
    def names(self) -> set[str]:
        """The names of all tensors."""
        return set(self._name_to_file)

    def file_of(self, name: str) -> Path:
        """Return the file that the tensor is in."""
        return self._name_to_file[name][0]

    def is_quantized(self, name: str) -> bool:
        """Whether the tensor is a quantized weight, which is dequantized where it is read."""
        return False

    def dtype_of(self, name: str) -> torch.dtype | None:
        """Return the dtype in which the tensor is stored; None if there is none or it is none of floats."""
        if name not in self._name_to_file:
            return None
        return FLOATS.get(self._name_to_file[name][1].get_slice(name).get_dtype())

    @property
    def stored_names(self) -> Collection[str]:
        """The names of all tensors in the files."""
        return self._name_to_file.keys()

    def kind_of(self, name: str) -> Hashable:
        """Return what tensors of the files that are stored alike have in common."""
        stored = self._name_to_file[name][1].get_slice(name)
        return tuple(stored.get_shape()), stored.get_dtype()

    def num_dims_of(self, name: str) -> int:
        """Return how many dimensions the tensor has; 0 if there is none of this name."""
        if name not in self._name_to_file:
            return 0
        return len(self._name_to_file[name][1].get_slice(name).get_shape())

    def shape_of(self, name: str) -> tuple[int, ...] | None:
        """Return the shape of the tensor; None if there is none of this name."""
        if name not in self._name_to_file:
            return None
        return tuple(self._name_to_file[name][1].get_slice(name).get_shape())

    def bytes_of(self, name: str, shape: tuple[int, ...], *slices: slice) -> Tensor:
        """Map slices of a tensor of bytes, [shape], where it is, after checking its shape and dtype."""
        return self.mapped(name, shape, slices, _BYTES)

    def tensor(
        self, name: str, shape: tuple[int, ...], *slices: slice, dtype: torch.dtype | None = None
    ) -> Tensor:
        """Map the tensor, or slices of its dimensions, after checking its whole shape and dtype. Returns a
        copy where it must be converted to `self.dtype`, or to the given one, or moved."""
        return self.on_device(self.mapped(name, shape, slices, FLOATS), dtype or self.dtype)

    def on_device(self, tensor: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """Return what was read of the files on `self.device`, converted to `dtype` if there is one: a copy
        where it must be converted or moved."""
        dtype = dtype or tensor.dtype
        if self._uploads is not None and tensor.device.type == "cpu":
            return self._uploads.upload(tensor, dtype)
        return tensor.to(device=self.device, dtype=dtype)

    def product_parts(self, slices: Sequence[WeightSlice], *, is_table: bool = False) -> Parts:
        """Read the parts of one linear product's weight: quantized, where the checkpoint or the form of
        weights says so and there are such products; else as tensors of the same values, so that the form
        alone says what KV they make. `is_table`: it is that of embedding or head."""
        parts = [self.quantized(part, is_table=is_table) for part in slices] if self.may_quantize else []
        kept = tuple(part for part in parts if part is not None)
        if kept and len(kept) == len(slices) and all(map(has_products, kept)) and are_alike(kept):
            return kept
        return tuple(
            self.tensor(*it[:2], it.rows, it.columns) if part is None else part.dequantized(self.dtype)
            for it, part in zip_longest(slices, parts)
        )

    @property
    def may_quantize(self) -> bool:
        """Whether some products may have quantized weights."""
        return self.form.rounded is not None

    def quantized(self, part: WeightSlice, *, is_table: bool = False) -> QuantizedWeight | None:
        """Read a part of a weight, or of a table of embedding or head, as it is kept quantized; None where it
        is not. Rows are rounded whole, so that ranks that share them have the same weights."""
        form = self.form.rounded_table if is_table else self.form.rounded
        if form is None:
            return None
        rows, step = range(part.shape[-2])[part.rows], max(1, _ROUNDED_BYTES // (4 * part.shape[-1]))
        found = []
        for first in rows[::step]:
            weight = rounded(self._rows(part, slice(first, min(first + step, rows.stop))), form)
            if weight is None:
                return None
            found.append(weight)
        whole = found[0] if len(found) == 1 else QuantizedWeight.joined(found)
        assert whole is not None, "blocks of rows have one form"
        return columns_of(whole, part.columns)

    def _rows(self, part: WeightSlice, rows: slice) -> Tensor:
        """Read rows of a weight, of the expert where there are several, in float32."""
        if part.expert is None:
            return self.tensor(part.name, part.shape, rows, dtype=torch.float32)
        expert = slice(part.expert, part.expert + 1)
        return self.tensor(part.name, part.shape, expert, rows, dtype=torch.float32)[0]

    def mapped(
        self, name: str, shape: tuple[int, ...], slices: tuple[slice, ...], dtypes: Collection[str]
    ) -> Tensor:
        """Map slices of a tensor where it is, after checking that it has this shape and one of these dtypes,
        by their names in safetensors."""
        if name not in self._name_to_file:
            raise CheckpointError(
                f"{self._dir}: tensor {name} is missing; take the whole checkpoint in 16 or 32 bits"
            )
        file, opened = self._name_to_file[name]
        self.read.add(name)
        try:
            with panics_as_errors:
                stored = self._checked(file, opened, name, shape, dtypes)[slices]
                self._amount.num_bytes += stored.nbytes
                return stored
        except (SafetensorError, PanicError) as error:
            raise CheckpointError(f"{file}: tensor {name} is unreadable: {error}") from error

    def _checked(
        self, file: Path, opened: Any, name: str, shape: tuple[int, ...], dtypes: Collection[str]
    ) -> Tensor:
        """Map the whole tensor, if it has this shape and one of these dtypes."""
        stored = opened.get_slice(name)
        if tuple(stored.get_shape()) != shape:
            found = list(stored.get_shape())
            raise CheckpointError(f"{file}: tensor {name} has shape {found}, config.json says {list(shape)}")
        if stored.get_dtype() not in dtypes:
            *most, last = dtypes
            supported = f"{', '.join(most)} or {last}" if most else last
            raise CheckpointError(
                f"{file}: tensor {name} has dtype {stored.get_dtype()}, not {supported}; "
                "take the checkpoint in 16 or 32 bits"
            )
        tensor: Tensor = self._replaced[name] if name in self._replaced else opened.get_tensor(name)
        return tensor
