"""Rounds the weights of a model by the inputs that its layers have in a text."""

from __future__ import annotations

import re
from pathlib import Path

import torch
from torch import Tensor

from workers.model.decoder import Decoder
from workers.model.products import Linear
from workers.quantizer.gptq import InputProducts, gptq_rounded
from workers.quantizer.rounding import NearestRounder, Rounded
from workers.quantizer.target import QuantizationTarget
from workers.quantizer.window_states import WindowStates

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
        self._model = WindowStates(folder, dtype, windows)
        self._stages = iter(self._model.stages())
        self._num_run = 0
        self._layer_to_inputs: dict[int, dict[str, InputProducts]] = {}
        self._layer = 0

    def begin_layer(self, layer: int) -> None:
        """Run the layers up to this one, and watch what its products take."""
        self._layer = layer
        if layer < self._num_run:  # of a stage of several
            return
        self._layer_to_inputs = {}
        for stage in self._stages:
            is_asked = layer < stage.layer_end
            self._model.advance(stage, self._watch if is_asked else lambda decoder: None)
            self._num_run = stage.layer_end
            if is_asked:
                return

    def rounded(self, name: str, weight: Tensor, dtype: torch.dtype) -> Rounded:
        found = _LAYER.fullmatch(name)
        product = _PRODUCT_OF.get(found["rest"], "") if found else ""
        inputs = self._layer_to_inputs.get(self._layer, {}).get(product)
        if inputs is None or len(inputs.total) != weight.shape[1]:
            return self._nearest.rounded(name, weight, dtype)
        return gptq_rounded(weight, inputs, self._target, dtype)

    def _watch(self, decoder: Decoder) -> None:
        for number, layer in enumerate(decoder.layers, decoder.shard.layer_start):
            name_to_inputs = self._layer_to_inputs.setdefault(number, {})

            def watched(
                name: str, product: Linear, into: dict[str, InputProducts] = name_to_inputs
            ) -> Linear:
                into[name] = InputProducts(product.num_inputs)
                return WatchedLinear(product, into[name])

            layer.replace_products(watched)


class WatchedLinear(Linear):
    """A product whose inputs are summed up."""

    def __init__(self, product: Linear, inputs: InputProducts) -> None:
        self._product, self._inputs = product, inputs
        self.num_inputs, self.num_outputs = product.num_inputs, product.num_outputs

    def __call__(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        self._inputs.add(x)
        return self._product(x, out)

    def add_to(self, hidden: Tensor, x: Tensor) -> Tensor | None:
        self._inputs.add(x)
        return self._product.add_to(hidden, x)

    def gated(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        self._inputs.add(x)
        return self._product.gated(x, out)

    def floats(self, x: Tensor) -> Tensor:
        self._inputs.add(x)
        return self._product.floats(x)

    def lookup(self, ids: Tensor) -> Tensor:
        return self._product.lookup(ids)
