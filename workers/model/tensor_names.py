"""Name the tensors of a checkpoint outside of its layers, and tell which layer the others belong to."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import NamedTuple

from workers.model.families.family import Family
from workers.model.model_config import ModelConfig

_LAYER = re.compile(r"layers\.(\d{1,9})\.")
# Where models of text and images keep their text model: as they are published, and as transformers 5 writes
# them; what the names of its layers begin with, and the name of its head.
_WRAPPED = (
    ("language_model.model.", "language_model.lm_head.weight"),
    ("model.language_model.", "lm_head.weight"),
)
_PLAIN = (("model.", "lm_head.weight"), ("backbone.", "lm_head.weight"))
# How the names of tensors begin, in a layer, that checkpoints may carry where the layer attends to the keys
# and values of another.
OF_OWN_KV = tuple(f"self_attn.{name}." for name in ("k_proj", "v_proj", "k_norm", "v_norm"))


class TensorNames(NamedTuple):
    """The names of a checkpoint's tensors: they begin with `model`, but for the `head`."""

    model: str
    head: str
    family: Family

    @staticmethod
    def of(names: Iterable[str], config: ModelConfig) -> TensorNames:
        """Find how the tensors `names` of a checkpoint are named."""
        spellings = _WRAPPED if config.is_wrapped else _PLAIN
        known = list(names)
        for model, head in spellings:
            if any(name.startswith(model) for name in known):
                return TensorNames(model, head, config.traits)
        return TensorNames(*spellings[0], config.traits)

    @property
    def head_bias(self) -> str:
        """The bias of logits, in families that have one."""
        return f"{self.head.removesuffix('weight')}bias"

    @property
    def embedding(self) -> str:
        return f"{self.model}{self.family.tensors.embedding}.weight"

    @property
    def input_embedding(self) -> str:
        """The table of the layers' inputs, in families whose layers have such."""
        return f"{self.model}embed_tokens_per_layer.weight"

    @property
    def input_projection(self) -> str:
        """The product of the embedding that is a part of these inputs."""
        return f"{self.model}per_layer_model_projection.weight"

    @property
    def input_norm(self) -> str:
        """The norm of this product."""
        return f"{self.model}per_layer_projection_norm.weight"

    @property
    def norm(self) -> str:
        """The norm after the last layer."""
        return f"{self.model}{self.family.tensors.final_norm}.weight"

    @property
    def norm_bias(self) -> str:
        """The bias of this norm, in families whose norms have one."""
        return f"{self.model}{self.family.tensors.final_norm}.bias"

    def is_of_text(self, name: str) -> bool:
        """Whether the tensor belongs to the text model, and not to one that is wrapped with it."""
        return name in (self.head, self.head_bias) or name.startswith(self.model)

    def layer_of(self, name: str) -> tuple[int, str] | None:
        """Return the layer that the tensor belongs to, and its name there; None if it belongs to none."""
        if not name.startswith(self.model):
            return None
        rest = name.removeprefix(self.model)
        layer = _LAYER.match(rest)
        return None if layer is None else (int(layer[1]), rest[layer.end() :])
