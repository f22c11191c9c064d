"""Rounds the weights of a model by the inputs that its layers have in a text, behind the layers that are
rounded already."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor

from workers.quantizer.checkpoint_plan import SourceTensors
from workers.quantizer.factor_search import searched_factors
from workers.quantizer.gptq import gptq_rounded
from workers.quantizer.input_sample import InputSample
from workers.quantizer.paired_inputs import PairedInputs
from workers.quantizer.paired_layers import LayerProduct, PairedLayers
from workers.quantizer.rounding import NearestRounder, Rounded
from workers.quantizer.smoothing_factors import LayerFactors
from workers.quantizer.smoothing_pairs import LayerPairs
from workers.quantizer.target import QuantizationTarget

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


class CalibratedRounder:
    """Rounds by GPTQ what takes part in every token: the products of attention and of the feed-forward, in
    the order in which they are computed, each by the inputs that it has behind the rounded ones. Experts,
    which see a part of the text each, are rounded to the nearest code. Where inputs are rounded as well,
    their range moves into weights before, as SmoothQuant does."""

    def __init__(
        self, folder: Path, target: QuantizationTarget, windows: list[Tensor], dtype: torch.dtype
    ) -> None:
        """Run the `windows` of tokens through the model in `folder`, computing in `dtype`. Raises the errors
        of `WindowStates`."""
        self._folder, self._target, self._nearest = folder, target, NearestRounder(target)
        self._layers = PairedLayers(folder, dtype, windows, rounds_inputs=target.quantizes_inputs)
        self._is_stage_rounded = False
        self._begin_stage()

    def begin_layer(self, layer: int) -> None:
        """Round the products of this layer, and of those that can only be run together with it."""
        self._reach(layer)
        if self._is_stage_rounded:
            return
        with SourceTensors(self._folder) as source:
            samples = self._layers.samples()
            if self._target.quantizes_inputs:
                self._factors = _searched(source, samples)
            self._round_stage(source, list(samples))
        self._is_stage_rounded = True

    def follow(self, layer: int, values: Callable[[], Mapping[str, Tensor]]) -> None:
        self._reach(layer)
        self._followed.add(layer)
        self._name_to_value |= values()

    def rounded(self, name: str, weight: Tensor, dtype: torch.dtype) -> Rounded:
        found = self._name_to_rounded.pop(name, None)
        if found is None:
            found = self._nearest.rounded(name, self._factors.applied(name, weight), dtype)
            self._name_to_value[name] = found.values().to(dtype)
        return found

    def kept(self, name: str, tensor: Tensor) -> Tensor:
        return self._factors.applied(name, tensor).to(tensor.dtype)

    def _begin_stage(self) -> None:
        self._factors, self._is_stage_rounded = LayerFactors(), False
        # The layers of the stage that an earlier run has written.
        self._followed: set[int] = set()
        # The weights of the stage that are not asked for yet, and the values of its tensors that are
        # different from the stored ones.
        self._name_to_rounded: dict[str, Rounded] = {}
        self._name_to_value: dict[str, Tensor] = {}

    def _reach(self, layer: int) -> None:
        while self._layers.stage.layer_end <= layer:
            self._layers.advance(self._name_to_value)
            self._begin_stage()

    def _round_stage(self, source: SourceTensors, products: list[LayerProduct]) -> None:
        """Round the products of the layers that are not followed."""
        factored = {
            name: self.kept(name, source.tensor(name))
            for name in {*self._factors.columns, *self._factors.rows}
        }
        self._name_to_value = factored | self._name_to_value
        product_to_weights = _weights_of(source, self._target)
        for watched in self._rounds(products):
            if not any(product in product_to_weights for product in watched):
                continue
            pairs = self._layers.pairs(watched, factored, self._name_to_value)
            for product, inputs in pairs.items():
                for name in product_to_weights.get(product, ()):
                    self._round(name, source.tensor(name), inputs)

    def _rounds(self, products: list[LayerProduct]) -> Iterator[list[LayerProduct]]:
        """Iterate over the products that are rounded together: one after another, but layers that can only be
        run together would have to be run too often, so that each of them is a round."""
        layers = dict.fromkeys(product.layer for product in products)
        if len(layers) == 1:
            yield from ([product] for product in products if product.layer not in self._followed)
            return
        for layer in layers:
            if layer not in self._followed:
                yield [product for product in products if product.layer == layer]

    def _round(self, name: str, weight: Tensor, inputs: PairedInputs) -> None:
        if weight.shape[1] != inputs.num_inputs:
            return
        moved = inputs.moved(self._factors.applied(name, weight))
        rounded = gptq_rounded(moved, inputs.products, self._target, weight.dtype)
        self._name_to_rounded[name] = rounded
        self._name_to_value[name] = rounded.values().to(weight.dtype)


def _weights_of(source: SourceTensors, target: QuantizationTarget) -> dict[LayerProduct, list[str]]:
    """Return the names of the weights of each product, as far as they have whole groups."""
    found: dict[LayerProduct, list[str]] = {}
    for tensor in source.tensors:
        layer, rest = source.names.layer_of(tensor.name) or (-1, "")
        product = _PRODUCT_OF.get(rest.removesuffix(".weight"), "") if rest.endswith(".weight") else ""
        if product and target.fits(tensor.shape):
            found.setdefault(LayerProduct(layer, product), []).append(tensor.name)
    return found


def _searched(source: SourceTensors, samples: Mapping[LayerProduct, InputSample]) -> LayerFactors:
    """Return the factors of the layers that have these samples."""
    known = {tensor.name for tensor in source.tensors}
    factored = []
    for layer in dict.fromkeys(product.layer for product in samples):
        for pair in LayerPairs(source.config, source.names, layer, known).all():
            sample = samples.get(LayerProduct(layer, pair.product))
            if sample is not None:
                weights = [source.tensor(name).float() for name in pair.weights]
                factored.append((pair, searched_factors(pair, sample, weights)))
    return LayerFactors.of(factored, source.tensor)
