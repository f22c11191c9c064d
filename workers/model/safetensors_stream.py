"""Write a safetensors file tensor by tensor: what it will hold is known before, and no tensor need be in
memory whole."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

ITEM_BYTES = {
    "BOOL": 1,
    "U8": 1,
    "I8": 1,
    "F8_E4M3": 1,
    "F8_E5M2": 1,
    "F8_E8M0": 1,
    "I16": 2,
    "U16": 2,
    "F16": 2,
    "BF16": 2,
    "I32": 4,
    "U32": 4,
    "F32": 4,
    "I64": 8,
    "U64": 8,
    "F64": 8,
}


class StoredTensor(NamedTuple):
    """The name, the dtype as safetensors spells it, and the shape of a tensor in a file."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        """The bytes of its values."""
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]


def file_header(tensors: Sequence[StoredTensor]) -> bytes:
    """Return the beginning of a file: the length of its header, and the header. The bytes of the tensors
    follow in this order, with nothing between them."""
    ends = accumulate((tensor.num_bytes for tensor in tensors), initial=0)
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    for tensor, offsets in zip(tensors, pairwise(ends), strict=True):
        header[tensor.name] = {
            "dtype": tensor.dtype,
            "shape": list(tensor.shape),
            "data_offsets": list(offsets),
        }
    raw = json.dumps(header, separators=(",", ":")).encode()
    raw += b" " * (-len(raw) % 8)
    return len(raw).to_bytes(8, "little") + raw


def shard_name(index: int, num_shards: int) -> str:
    """Return the name of a file with weights; that of the only one has no number."""
    if num_shards == 1:
        return "model.safetensors"
    return f"model-{index + 1:05d}-of-{num_shards:05d}.safetensors"


def index_text(name_to_file: dict[str, str], num_bytes: int) -> str:
    """Return what model.safetensors.index.json says of tensors in several files."""
    return json.dumps({"metadata": {"total_size": num_bytes}, "weight_map": name_to_file}, indent=1)
