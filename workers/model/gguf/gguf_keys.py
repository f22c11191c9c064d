"""Read the keys that the metadata of a GGUF file has under the name of its architecture."""

from __future__ import annotations

import math
from typing import Any, NoReturn

from workers.errors import CheckpointError
from workers.model.gguf.gguf_file import GgufFile


class GgufKeys:
    """The keys of one file, without the `name` of its architecture, and which tensors its layers have. What
    is missing or not of its type raises `CheckpointError`, naming the key."""

    def __init__(self, file: GgufFile) -> None:
        self.file = file
        self.name = str(file.metadata.get("general.architecture", ""))

    def count(self, key: str, default: int | None = None) -> int:
        """Return a positive integer of this architecture, or one that is equal in all layers."""
        value = self.get(key)
        if isinstance(value, list) and value and len(set(value)) == 1:
            value = value[0]
        if value is None:
            value = default
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            self.refuse(key, value, "a positive integer that is equal in all layers")
        return value

    @property
    def num_layers(self) -> int:
        """The layers of the model, without those behind them that predict further tokens."""
        return self.count("block_count") - self.count_or_none("nextn_predict_layers")

    def count_or_none(self, key: str) -> int:
        """Return a count of this architecture; 0 where the key is missing or 0."""
        return self.count(key) if self.get(key) else 0

    def counts(self, key: str, default: int | None = None) -> list[int]:
        """Return a positive integer for each layer: from a list, or one for all."""
        value, num_layers = self.get(key), self.count("block_count")
        if not isinstance(value, list):
            return [self.count(key, default)] * num_layers
        is_whole = all(isinstance(it, int) and not isinstance(it, bool) and it > 0 for it in value)
        if len(value) != num_layers or not is_whole:
            self.refuse(key, value, f"a positive integer for each of the {num_layers} layers")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """Return a positive number of this architecture, as 32-bit floats are written."""
        value = self.get(key)
        if value is None:
            value = default
        if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < math.inf:
            self.refuse(key, value, "a positive number")
        return float(f"{value:.7g}")  # 9.999999747378752e-06 was 1e-05 before it became a 32-bit float

    def get(self, key: str) -> Any:
        """Return the value of any type, None where the key is missing."""
        return self.file.metadata.get(f"{self.name}.{key}")

    def refuse(self, key: str, value: object, wanted: str) -> NoReturn:
        """Raise `CheckpointError` for a value that is not what is `wanted`."""
        found = "is missing" if value is None else f"is {str(value)[:100]}"
        raise CheckpointError(
            f"{self.file.path}: {self.name}.{key} {found}, not {wanted}; take another conversion of the model"
        )

    def has(self, name: str, layer: int = 0) -> bool:
        """Whether the layer has the tensor."""
        return f"blk.{layer}.{name}" in self.file.name_to_tensor
