"""Read the header of a GGUF file, or of all parts of a split one: its metadata, and where its tensors are.

The reader of the package `gguf` makes several objects of each token of a vocabulary, and takes seconds for
what takes a fraction of one here. Gateways and engine cores read headers as well.
"""

from __future__ import annotations

import math
import mmap
import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import numpy as np

from kvtransfer.common.os_errors import os_reason
from workers.errors import CheckpointError

MAGIC = b"GGUF"
F32_TYPE = 0
_VERSIONS = (2, 3)
_PART_NAME = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf", re.DOTALL)
_MAX_DIMENSIONS = 4
_MAX_ARRAY_DEPTH = 2
_STRING, _ARRAY, _BOOL = 8, 9, 7
# By the number of the type of a value in metadata.
_SCALARS = {
    0: "<u1",
    1: "<i1",
    2: "<u2",
    3: "<i2",
    4: "<u4",
    5: "<i4",
    6: "<f4",
    _BOOL: "?",
    10: "<u8",
    11: "<i8",
    12: "<f8",
}


class GgufTensor(NamedTuple):
    """One tensor: the number of its type, its shape with the rows first, and where its bytes begin."""

    name: str
    type_number: int
    shape: tuple[int, ...]
    part: Path
    offset: int


@dataclass(frozen=True, slots=True)
class GgufFile:
    """The header of a model's GGUF file. `parts` are the files that it consists of, the first one first."""

    parts: tuple[Path, ...]
    metadata: dict[str, Any]
    name_to_tensor: dict[str, GgufTensor]

    @classmethod
    def read(cls, path: Path) -> GgufFile:
        """Read the headers of all parts; `CheckpointError` where one is missing, cut short, or no GGUF
        file."""
        parts = part_paths(path)
        headers = [_read_header(part) for part in parts]
        metadata = headers[0][0]
        num_parts = metadata.get("split.count", 1)
        if num_parts not in (0, 1, len(parts)):
            raise CheckpointError(
                f"{path}: the first of {num_parts} parts, but not named like one; rename its parts to "
                f"NAME-00001-of-{num_parts:05d}.gguf and so on"
            )
        tensors = [tensor for _, found in headers for tensor in found]
        return cls(parts, metadata, {tensor.name: tensor for tensor in tensors})

    @property
    def path(self) -> Path:
        """The file that names the model."""
        return self.parts[0]

    def floats(self, name: str) -> list[float]:
        """Return the values of a small tensor of 32-bit floats; `CheckpointError` where it is another."""
        tensor = self.name_to_tensor[name]
        if tensor.type_number != F32_TYPE:
            raise CheckpointError(f"{self.path}: tensor {name} is not in F32; download the file again")
        num_bytes = 4 * math.prod(tensor.shape)
        with tensor.part.open("rb") as stream:
            stream.seek(tensor.offset)
            raw = stream.read(num_bytes)
        if len(raw) != num_bytes:
            raise cut_short(tensor.part)
        values: list[float] = np.frombuffer(raw, "<f4").tolist()
        return values


def is_gguf(path: Path) -> bool:
    """Whether the path is that of a GGUF file by its name or its first bytes, and not that of a folder."""
    if path.is_dir():
        return False
    if path.suffix == ".gguf":
        return True
    if not path.is_file():
        return False
    with path.open("rb") as stream:
        return stream.read(len(MAGIC)) == MAGIC


def part_paths(path: Path) -> tuple[Path, ...]:
    """Return the files of which `path` is the first, which are all there."""
    found = _PART_NAME.fullmatch(path.name)
    if found is None:
        if not path.is_file():
            raise CheckpointError(
                f"{path}: no such file; name a GGUF file, or a folder in Hugging Face layout"
            )
        return (path,)
    name, number, count = found[1], int(found[2]), int(found[3])
    parts = tuple(path.with_name(f"{name}-{index + 1:05d}-of-{count:05d}.gguf") for index in range(count))
    if number != 1:
        raise CheckpointError(f"{path}: part {number} of a split file; name {name}-00001-of-{count:05d}.gguf")
    for part in parts:
        if not part.is_file():
            raise CheckpointError(f"{part}: this part is missing; download all {count} parts into one folder")
    return parts


def model_name_of(path: Path) -> str:
    """Return the name of a model without what marks a GGUF file, or a part of one; of a folder its own."""
    found = _PART_NAME.fullmatch(path.name)
    return found[1] if found else path.name.removesuffix(".gguf")


def cut_short(part: Path) -> CheckpointError:
    """Return the error of a file that ends before its header says."""
    return CheckpointError(f"{part}: cut short at {part.stat().st_size} bytes; download it again")


def _read_header(part: Path) -> tuple[dict[str, Any], list[GgufTensor]]:
    try:
        with part.open("rb") as stream:
            if stream.read(len(MAGIC)) != MAGIC:
                raise CheckpointError(
                    f"{part}: not a GGUF file, which begins with the letters GGUF; download it again"
                )
            with mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as data:
                return _HeaderReader(part, data).read()
    except OSError as error:
        raise CheckpointError(f"{part}: unreadable: {os_reason(error, has_path=True)}") from error


class _HeaderReader:
    """Reads from the start of one part; each method continues where the one before ended."""

    def __init__(self, part: Path, data: mmap.mmap) -> None:
        self._part = part
        self._data = data
        self._at = len(MAGIC)

    def read(self) -> tuple[dict[str, Any], list[GgufTensor]]:
        try:
            return self._read()
        except (struct.error, ValueError) as error:
            if self._at > len(self._data) or isinstance(error, struct.error):
                raise cut_short(self._part) from error
            self._refuse(str(error))

    def _read(self) -> tuple[dict[str, Any], list[GgufTensor]]:
        version = self._number("<I")
        if version not in _VERSIONS:
            self._refuse(f"version {version}, or of the other byte order")
        num_tensors, num_keys = self._number("<Q"), self._number("<Q")
        metadata = {}
        for _ in range(num_keys):
            key = self._string()
            metadata[key] = self._value(self._number("<I"))
        found = [
            (self._string(), self._shape(), self._number("<I"), self._number("<Q"))
            for _ in range(num_tensors)
        ]
        alignment = metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment < 1:
            self._refuse(f"general.alignment {alignment!r}")
        start = -(-self._at // alignment) * alignment
        return metadata, [
            GgufTensor(name, number, shape, self._part, start + offset)
            for name, shape, number, offset in found
        ]

    def _refuse(self, what: str) -> NoReturn:
        raise CheckpointError(f"{self._part}: not a GGUF file that is understood ({what}); download it again")

    def _number(self, form: str) -> int:
        (value,) = struct.unpack_from(form, self._data, self._at)
        self._at += struct.calcsize(form)
        return int(value)

    def _bytes(self, num_bytes: int) -> bytes:
        end = self._at + num_bytes
        if end > len(self._data):
            raise struct.error("the end of the file")
        found = self._data[self._at : end]
        self._at = end
        return found

    def _string(self) -> str:
        return self._bytes(self._number("<Q")).decode("utf-8", "replace")

    def _shape(self) -> tuple[int, ...]:
        """Read the dimensions, of which the file has the innermost one first."""
        num_dimensions = self._number("<I")
        if num_dimensions > _MAX_DIMENSIONS:
            self._refuse(f"a tensor of {num_dimensions} dimensions")
        return tuple(self._number("<Q") for _ in range(num_dimensions))[::-1]

    def _value(self, number: int, depth: int = 0) -> Any:
        if number == _STRING:
            return self._string()
        if number != _ARRAY:
            return self._scalars(number, 1)[0]
        if depth == _MAX_ARRAY_DEPTH:
            self._refuse("arrays of arrays of arrays")
        inner, length = self._number("<I"), self._number("<Q")
        if inner in (_STRING, _ARRAY):
            return list(self._values(inner, length, depth + 1))
        return self._scalars(inner, length)

    def _values(self, number: int, length: int, depth: int) -> Iterator[Any]:
        for _ in range(length):
            yield self._value(number, depth)

    def _scalars(self, number: int, length: int) -> list[Any]:
        if number not in _SCALARS:
            self._refuse(f"a value of type {number}")
        form = np.dtype(_SCALARS[number])
        values: list[Any] = np.frombuffer(self._bytes(length * form.itemsize), form).tolist()
        return values
