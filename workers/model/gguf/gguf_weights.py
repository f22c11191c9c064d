"""Dequantize the tensors of a GGUF file into safetensors files, piece by piece: what one piece takes in
memory does not depend on the size of the model or of its largest tensor."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Sequence
from io import BufferedWriter
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize

from workers.errors import CheckpointError
from workers.model.gguf.gguf_file import GgufFile, GgufTensor, cut_short
from workers.model.gguf.gguf_names import WrittenTensor, written_tensors
from workers.model.safetensors_stream import StoredTensor, file_header, index_text, shard_name

_MAX_SHARD_BYTES = 4 << 30
# Of one piece, as 32-bit floats.
_PIECE_BYTES = 32 << 20
_SAFETENSORS_DTYPE = {"fp32": "F32", "fp16": "F16", "bf16": "BF16"}
_ITEM_BYTES = {"fp32": 4, "fp16": 2, "bf16": 2}


def check_whole(file: GgufFile) -> None:
    """Raise `CheckpointError` where a part ends before its last tensor does, or a tensor's type is not
    known."""
    part_to_size = {part: part.stat().st_size for part in file.parts}
    for tensor in file.name_to_tensor.values():
        if tensor.offset + _num_stored_bytes(tensor) > part_to_size[tensor.part]:
            raise cut_short(tensor.part)


def weight_bytes(file: GgufFile, dtype: str) -> int:
    """Return how many bytes the dequantized weights have."""
    return sum(tensor.num_items for tensor in written_tensors(file)) * _ITEM_BYTES[dtype]


def write_weights(
    file: GgufFile,
    folder: Path,
    dtype: str,
    progress: Callable[[str], None],
    max_shard_bytes: int = _MAX_SHARD_BYTES,
) -> None:
    """Write model.safetensors, or several shards and their index. Raises `CheckpointError` for what cannot be
    dequantized, and `OSError`. `progress` is called with the number of tensors done."""
    shards = list(_shards(written_tensors(file), _ITEM_BYTES[dtype], max_shard_bytes))
    num_tensors, num_done = sum(map(len, shards)), 0
    tensor_to_file: dict[str, str] = {}
    for index, shard in enumerate(shards):
        name = shard_name(index, len(shards))
        tensor_to_file |= {tensor.name: name for tensor in shard}
        with (folder / name).open("wb") as stream:
            stored = _SAFETENSORS_DTYPE[dtype]
            stream.write(file_header([StoredTensor(it.name, stored, it.shape) for it in shard]))
            for tensor in shard:
                progress(f"converting {file.path.name}, {num_done} of {num_tensors} tensors")
                _write_tensor(stream, tensor, dtype)
                num_done += 1
            stream.flush()
            os.fsync(stream.fileno())
    if len(shards) > 1:
        total = sum(tensor.num_items for shard in shards for tensor in shard) * _ITEM_BYTES[dtype]
        (folder / "model.safetensors.index.json").write_text(index_text(tensor_to_file, total))


def bfloat16_bits(values: npt.NDArray[np.float32]) -> npt.NDArray[np.uint16]:
    """Round to the nearest bfloat16, ties to even, as torch does; NaN stays NaN."""
    bits = values.view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    return np.where(np.isnan(values), np.uint32(0x7FC0), rounded).astype(np.uint16)


def _shards(
    tensors: Sequence[WrittenTensor], item_bytes: int, max_shard_bytes: int
) -> Iterator[list[WrittenTensor]]:
    shard: list[WrittenTensor] = []
    num_bytes = 0
    for tensor in tensors:
        size = tensor.num_items * item_bytes
        if shard and num_bytes + size > max_shard_bytes:
            yield shard
            shard, num_bytes = [], 0
        shard.append(tensor)
        num_bytes += size
    yield shard


def _write_tensor(stream: BufferedWriter, tensor: WrittenTensor, dtype: str) -> None:
    source = tensor.source
    kind = _kind(source)
    num_rows, row_items = (
        (source.shape[0], source.shape[-1]) if len(source.shape) == 2 else (1, tensor.num_items)
    )
    stored: npt.NDArray[np.uint8] = np.memmap(
        source.part, np.uint8, "r", source.offset, (num_rows, _num_stored_bytes(source) // num_rows)
    )
    if tensor.row is not None:
        stored, num_rows = stored[tensor.row : tensor.row + 1], 1
    step = max(1, _PIECE_BYTES // (4 * row_items))
    for first in range(0, num_rows, step):
        rows = slice(first, first + step)
        piece = stored[rows] if tensor.rows is None or num_rows == 1 else stored[tensor.rows[rows]]
        try:
            values = dequantize(np.ascontiguousarray(piece), kind)
        except NotImplementedError as error:
            raise _unknown_type(source) from error
        if tensor.rows is not None and num_rows == 1:
            values = values[:, tensor.rows]
        values = np.ascontiguousarray(values - np.float32(tensor.shift) if tensor.shift else values)
        stream.write(_cast(values, dtype).tobytes())


def _cast(values: npt.NDArray[np.float32], dtype: str) -> npt.NDArray[Any]:
    if dtype == "bf16":
        return bfloat16_bits(values)
    with np.errstate(over="ignore"):  # as torch, which the ranks of a checkpoint in bf16 would use
        return values.astype(np.float16 if dtype == "fp16" else np.float32)


def _num_stored_bytes(tensor: GgufTensor) -> int:
    block_items, block_bytes = GGML_QUANT_SIZES[_kind(tensor)]
    num_items = math.prod(tensor.shape)
    if not tensor.shape or len(tensor.shape) > 2 or num_items == 0 or tensor.shape[-1] % block_items:
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
