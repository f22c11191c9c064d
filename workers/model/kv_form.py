"""The form in which a rank keeps keys and values: as activations, or in 8 bits with scales. No torch."""

from __future__ import annotations

from typing import NamedTuple

from workers.errors import CheckpointError
from workers.model.model_config import ModelConfig

# The size of the float32 by which the elements of a token of a head's keys or values are multiplied.
SCALE_BYTES = 4


class KvForm(NamedTuple):
    """Represents how KV is kept: the bytes of an element, and those of scales for each token of a head's keys
    or values (0: there are none). `name` is that of compatibility records, "" for KV as activations."""

    item_bytes: int
    scale_bytes: int = 0
    name: str = ""

    @staticmethod
    def of(kv_dtype: str, item_bytes: int, num_parts: int = 1) -> KvForm:
        """Return the form of `engine.kv_dtype` beside activations of `item_bytes`, where the vector of a
        token has `num_parts` scales (`KvCells.parts`)."""
        return KvForm(item_bytes) if kv_dtype == "auto" else KvForm(1, SCALE_BYTES * num_parts, kv_dtype)

    def head_bytes(self, head_dim: int) -> int:
        """Return the size of a token of a head's keys or values."""
        return head_dim * self.item_bytes + self.scale_bytes


class ScaledParts(NamedTuple):
    """Represents vectors in 8 bits: the dtype of their elements, as `kv_dtype` of the configuration names it,
    and the sizes of the parts of a vector, each of which has a scale."""

    kv_dtype: str
    parts: tuple[int, ...]

    @staticmethod
    def in_store(config: ModelConfig, store_kv_dtype: str, engine_kv_dtype: str) -> ScaledParts | None:
        """Return the form of KV in records by `store.kv_dtype`, where devices keep KV as activations; None:
        records have the device's own KV."""
        if store_kv_dtype in ("auto", engine_kv_dtype):
            return None
        return ScaledParts(store_kv_dtype, config.kv_cells.parts)

    @property
    def record_form(self) -> KvForm:
        """The bytes of records. The name is not that of a device's KV: KV that was computed over quantized KV
        is other KV than what was quantized afterwards."""
        return KvForm(1, SCALE_BYTES * len(self.parts), f"stored-{self.kv_dtype}")


def refuse_kv_dtype(config: ModelConfig, kv_dtype: str) -> None:
    """Raise CheckpointError, naming the setting and the remedy, where a model's KV is not kept so."""
    shapes = config.layer_shapes
    if kv_dtype != "auto" and (shapes.full_heads is not None or shapes.num_shared):
        raise CheckpointError(
            f"engine.kv_dtype {kv_dtype}: the model's layers have heads of several sizes, or share keys and "
            "values: they are kept as activations; set auto"
        )
