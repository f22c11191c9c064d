"""The form in which a rank keeps keys and values: as activations, or in 8 bits with scales. No torch."""

from __future__ import annotations

import math
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
    def of(kv_dtype: str, item_bytes: int) -> KvForm:
        """Return the form of `engine.kv_dtype` beside activations of `item_bytes`."""
        return KvForm(item_bytes) if kv_dtype == "auto" else KvForm(1, SCALE_BYTES, kv_dtype)

    def head_bytes(self, head_dim: int) -> int:
        """Return the size of a token of a head's keys or values."""
        return head_dim * self.item_bytes + self.scale_bytes


class RecordForm(NamedTuple):
    """Represents how the store's records keep, in 8 bits, KV that devices keep as activations.

    `kv_dtype` is that of the elements, as `store.kv_dtype` names it. A token of a cell of KV
    (`workers.model.layer_shapes`) is divided into `parts` of these sizes, each with a scale of its own: the
    heads of the cell, or a latent and the rotated part of keys."""

    kv_dtype: str
    parts: tuple[int, ...]

    @staticmethod
    def of(config: ModelConfig, store_kv_dtype: str, engine_kv_dtype: str) -> RecordForm | None:
        """Return the form of `store.kv_dtype`; None: that of the device's own KV."""
        if store_kv_dtype in ("auto", engine_kv_dtype):
            return None
        if (latent := config.latent) is not None:
            return RecordForm(store_kv_dtype, (latent.kv_lora_rank, latent.qk_rope_head_dim))
        cells = config.kv_cells
        size = math.gcd(*(config.heads_of(layer).head_dim for layer in range(cells.num_layers)))
        return RecordForm(store_kv_dtype, (size,) * (cells.width // size))

    @property
    def kv_form(self) -> KvForm:
        """The bytes of records. The name is not that of a device's KV: KV that was computed over quantized KV
        is other KV than what was quantized afterwards."""
        return KvForm(1, SCALE_BYTES * len(self.parts), f"stored-{self.kv_dtype}")


def refuse_kv_dtype(config: ModelConfig, kv_dtype: str) -> None:
    """Raise CheckpointError, naming the setting and the remedy, where a model's KV is not kept so."""
    if kv_dtype == "auto":
        return
    if config.latent is not None:
        problem = "the model's keys and values are products of latents"
    elif config.layer_shapes.full_heads is not None or config.layer_shapes.num_shared:
        problem = "the model's layers have heads of several sizes, or share keys and values"
    else:
        return
    raise CheckpointError(f"engine.kv_dtype {kv_dtype}: {problem}: they are kept as activations; set auto")
