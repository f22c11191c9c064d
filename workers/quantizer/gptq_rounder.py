"""Rounds the weights of a model by the inputs that its layers have in a text."""

from __future__ import annotations

import re
from pathlib import Path

import torch
from torch import Tensor

from workers.quantizer.gptq import InputProducts, gptq_rounded
from workers.quantizer.rounding import NearestRounder, Rounded
from workers.quantizer.target import QuantizationTarget
from workers.quantizer.watched_layers import WatchedLayers

_LAYER = re.compile(r".*layers\.\d+\.(?P<rest>.+)\.weight")
# The product of a layer, as `DecoderLayer.replace_products` names it, that a module is a part of.
_PRODUCT_OF = {
    "self_attn.q_proj": "projection",
    "self_attn.k_proj": "projection",
    "self_attn.v_proj": "projection",
    "self_attn.qkv_proj": "projection",
    "self_attn.o_proj": "output",
    "mlp.gate_proj": "gate_up",
    "mlp.up_proj": "gate_up",
    "mlp.gate_up_proj": "gate_up",
    "mlp.down_proj": "down",
}


class GptqRounder:
    """Rounds by GPTQ what takes part in every token: the products of attention and of the feed-forward.
    Experts, which see a part of the text each, are rounded to the nearest code."""

    def __init__(
        self, folder: Path, target: QuantizationTarget, windows: list[Tensor], dtype: torch.dtype
    ) -> None:
        """Run the `windows` of tokens through the model in `folder`, computing in `dtype`. Raises the errors
        of `WindowStates`."""
        self._target, self._nearest = target, NearestRounder(target)
        self._layers = WatchedLayers(folder, dtype, windows, InputProducts)
        self._product_to_inputs: dict[str, InputProducts] = {}

    def begin_layer(self, layer: int) -> None:
        """Run the layers up to this one, and watch what its products take."""
        self._product_to_inputs = self._layers.advance(layer)

    def rounded(self, name: str, weight: Tensor, dtype: torch.dtype) -> Rounded:
        inputs = self._product_to_inputs.get(product_of(name))
        if inputs is None or len(inputs.total) != weight.shape[1]:
            return self._nearest.rounded(name, weight, dtype)
        return gptq_rounded(weight, inputs, self._target, dtype)

    def kept(self, name: str, tensor: Tensor) -> Tensor:
        return tensor


def product_of(name: str) -> str:
    """Return the product that a weight of a layer is a part of, as `DecoderLayer.replace_products` names it;
    "": none of them."""
    found = _LAYER.fullmatch(name)
    return _PRODUCT_OF.get(found["rest"], "") if found else ""
