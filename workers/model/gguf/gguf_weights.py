"""Write the tensors of a GGUF file into safetensors files, piece by piece: what one piece takes in memory
does not depend on the size of the model or of its largest tensor. Matrices are dequantized, or stay quantized
in the form of `workers.model.quantization.own_format`."""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Callable, Iterator
from io import BufferedWriter
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize

from workers.errors import CheckpointError
from workers.model.gguf.gguf_blocks import Bytes
from workers.model.gguf.gguf_file import GgufFile, GgufTensor, cut_short
from workers.model.gguf.gguf_forms import kept_forms, rows_in_form
from workers.model.gguf.gguf_names import WrittenTensor, written_tensors
from workers.model.quantization.stored_format import StoredFormat
from workers.model.safetensors_stream import StoredTensor, file_header, index_text, shard_name

_MAX_SHARD_BYTES = 4 << 30
# Of one piece, as 32-bit floats.
_PIECE_BYTES = 32 << 20
_SAFETENSORS_DTYPE = {"fp32": "F32", "fp16": "F16", "bf16": "BF16"}


def check_whole(file: GgufFile) -> None:
    """Raise `CheckpointError` where a part ends before its last tensor does, or a tensor's type is not
    known."""
    part_to_size = {part: part.stat().st_size for part in file.parts}
    for tensor in file.name_to_tensor.values():
        if tensor.offset + _num_stored_bytes(tensor) > part_to_size[tensor.part]:
            raise cut_short(tensor.part)


class GgufWeights:
    """The weights of a file as they are written: in `dtype` (fp32, fp16 or bf16), but for matrices that stay
    quantized, if `keeps_quantized`."""

    def __init__(self, file: GgufFile, dtype: str, *, keeps_quantized: bool = False) -> None:
        self.file, self.dtype, self.keeps_quantized = file, dtype, keeps_quantized

    @property
    def num_bytes(self) -> int:
        """The bytes that are written."""
        return sum(it.num_bytes for tensor in self._tensors for it in self._stored(tensor))

    def write(
        self, folder: Path, progress: Callable[[str], None], max_shard_bytes: int = _MAX_SHARD_BYTES
    ) -> None:
        """Write model.safetensors, or several shards and their index. Raises `CheckpointError` for what
        cannot be dequantized, and `OSError`. `progress` is called with the number of tensors done."""
        shards = list(self._shards(max_shard_bytes))
        num_tensors, num_done = sum(map(len, shards)), 0
        tensor_to_file: dict[str, str] = {}
        for index, shard in enumerate(shards):
            name = shard_name(index, len(shards))
            stored = [it for tensor in shard for it in self._stored(tensor)]
            tensor_to_file |= {it.name: name for it in stored}
            with (folder / name).open("wb") as stream:
                stream.write(file_header(stored))
                for tensor in shard:
                    progress(f"converting {self.file.path.name}, {num_done} of {num_tensors} tensors")
                    self._write_tensor(stream, tensor)
                    num_done += 1
                stream.flush()
                os.fsync(stream.fileno())
        if len(shards) > 1:
            text = index_text(tensor_to_file, self.num_bytes)
            (folder / "model.safetensors.index.json").write_text(text)

    def _shards(self, max_shard_bytes: int) -> Iterator[list[WrittenTensor]]:
        shard: list[WrittenTensor] = []
        num_bytes = 0
        for tensor in self._tensors:
            size = sum(it.num_bytes for it in self._stored(tensor))
            if shard and num_bytes + size > max_shard_bytes:
                yield shard
                shard, num_bytes = [], 0
            shard.append(tensor)
            num_bytes += size
        yield shard

    def _stored(self, tensor: WrittenTensor) -> list[StoredTensor]:
        """Return what is stored for a tensor."""
        form = self._forms.get(tensor.name)
        if form is None:
            return [StoredTensor(tensor.name, _SAFETENSORS_DTYPE[self.dtype], tensor.shape)]
        num_rows, num_inputs = tensor.shape
        of_groups = (num_rows, num_inputs // form.group)
        offsets = [StoredTensor(f"{tensor.name}_offsets", "F32", of_groups)] if form.has_zeros else []
        return [
            StoredTensor(f"{tensor.name}_codes", "U8", (num_rows, num_inputs * form.codes.num_bits // 8)),
            StoredTensor(f"{tensor.name}_scales", "F32", of_groups),
            *offsets,
        ]

    def _write_tensor(self, stream: BufferedWriter, tensor: WrittenTensor) -> None:
        """Write a piece of all that is stored for the tensor after another."""
        sizes = [it.num_bytes for it in self._stored(tensor)]
        *begins, end = accumulate(sizes, initial=stream.tell())
        for piece in _pieces(tensor):
            for number, part in enumerate(self._parts(piece, tensor)):
                stream.seek(begins[number])
                begins[number] += stream.write(np.ascontiguousarray(part).tobytes())
        stream.seek(end)

    def _parts(self, piece: Bytes, tensor: WrittenTensor) -> list[npt.NDArray[Any]]:
        """Return what is stored for rows of the tensor."""
        form = self._forms.get(tensor.name)
        if form is None:
            return [_cast(_values(piece, tensor), self.dtype)]
        return [part for part in rows_in_form(piece, _kind(tensor.source), form) if part is not None]

    @functools.cached_property
    def _forms(self) -> dict[str, StoredFormat]:
        return kept_forms(self._tensors) if self.keeps_quantized else {}

    @functools.cached_property
    def _tensors(self) -> list[WrittenTensor]:
        return written_tensors(self.file)


def bfloat16_bits(values: npt.NDArray[np.float32]) -> npt.NDArray[np.uint16]:
    """Round to the nearest bfloat16, ties to even, as torch does; NaN stays NaN."""
    bits = values.view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    return np.where(np.isnan(values), np.uint32(0x7FC0), rounded).astype(np.uint16)


def _pieces(tensor: WrittenTensor) -> Iterator[Bytes]:
    """Iterate over the rows that are written, [num_rows, num_stored_bytes], some at a time."""
    source = tensor.source
    num_rows = math.prod(source.shape[:-1])
    stored: Bytes = np.memmap(
        source.part, np.uint8, "r", source.offset, (num_rows, _num_stored_bytes(source) // num_rows)
    )
    if tensor.part is not None:
        num_rows //= source.shape[0]
        stored = stored[tensor.part * num_rows :][:num_rows]
    step = max(1, _PIECE_BYTES // (4 * source.shape[-1]))
    for first in range(0, num_rows, step):
        rows = slice(first, first + step)
        yield stored[rows] if tensor.rows is None or num_rows == 1 else stored[tensor.rows[rows]]


def _values(piece: Bytes, tensor: WrittenTensor) -> npt.NDArray[np.float32]:
    """Dequantize rows."""
    try:
        values = dequantize(np.ascontiguousarray(piece), _kind(tensor.source))
    except NotImplementedError as error:
        raise _unknown_type(tensor.source) from error
    if tensor.rows is not None and len(tensor.shape) == 1:
        values = values[:, tensor.rows]
    return np.ascontiguousarray(values - np.float32(tensor.shift) if tensor.shift else values)


def _cast(values: npt.NDArray[np.float32], dtype: str) -> npt.NDArray[Any]:
    if dtype == "bf16":
        return bfloat16_bits(values)
    with np.errstate(over="ignore"):  # as torch, which the ranks of a checkpoint in bf16 would use
        return values.astype(np.float16 if dtype == "fp16" else np.float32)


def _num_stored_bytes(tensor: GgufTensor) -> int:
    block_items, block_bytes = GGML_QUANT_SIZES[_kind(tensor)]
    num_items = math.prod(tensor.shape)
    most = 3 if tensor.name.endswith("_exps.weight") else 2
    if not 0 < len(tensor.shape) <= most or num_items == 0 or tensor.shape[-1] % block_items:
        raise CheckpointError(
            f"{tensor.part}: tensor {tensor.name[:100]} has shape {list(tensor.shape)}; download it again"
        )
    return num_items // block_items * block_bytes


def _kind(tensor: GgufTensor) -> GGMLQuantizationType:
    try:
        return GGMLQuantizationType(tensor.type_number)
    except ValueError as error:
        raise _unknown_type(tensor) from error


def _unknown_type(tensor: GgufTensor) -> CheckpointError:
    return CheckpointError(
        f"{tensor.part}: tensor {tensor.name[:100]} has type {tensor.type_number}, which is not supported; "
        "take the model in another quantization, such as Q8_0 or Q4_K_M"
    )
