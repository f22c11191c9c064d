"""Rounds weights by GPTQ after the range of inputs has moved into them, as SmoothQuant does."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from workers.quantizer.checkpoint_plan import SourceTensors
from workers.quantizer.factor_search import searched_factors
from workers.quantizer.gptq import InputProducts, gptq_rounded
from workers.quantizer.gptq_rounder import product_of
from workers.quantizer.input_sample import InputSample
from workers.quantizer.rounding import NearestRounder, Rounded
from workers.quantizer.smoothing_factors import LayerFactors
from workers.quantizer.smoothing_pairs import LayerPairs
from workers.quantizer.target import QuantizationTarget
from workers.quantizer.watched_layers import WatchedLayers


class SmoothRounder:
    """Finds factors for the inputs of a layer's products, and rounds with them. Experts are rounded to the
    nearest code, without factors."""

    def __init__(
        self, folder: Path, target: QuantizationTarget, windows: list[Tensor], dtype: torch.dtype
    ) -> None:
        """Run the `windows` of tokens through the model in `folder`, computing in `dtype`. Raises the errors
        of `WindowStates`."""
        self._folder, self._target, self._nearest = folder, target, NearestRounder(target)
        self._layers = WatchedLayers(folder, dtype, windows, _Inputs)
        self._factors = LayerFactors()
        self._product_to_seen: dict[str, _Inputs] = {}
        # The sums for inputs that are divided by the factors, once for all weights of a product.
        self._product_to_inputs: dict[str, InputProducts] = {}

    def begin_layer(self, layer: int) -> None:
        """Run the layers up to this one, and find its factors."""
        self._product_to_seen = seen = self._layers.advance(layer)
        self._product_to_inputs = {}
        with SourceTensors(self._folder) as source:
            known = {tensor.name for tensor in source.tensors}
            factored = []
            for pair in LayerPairs(source.config, source.names, layer, known).all():
                if pair.product in seen:
                    weights = [source.tensor(name).float() for name in pair.weights]
                    factored.append((pair, searched_factors(pair, seen[pair.product].sample, weights)))
            self._factors = LayerFactors.of(factored, source.tensor)

    def rounded(self, name: str, weight: Tensor, dtype: torch.dtype) -> Rounded:
        factored, inputs = self._factors.applied(name, weight), self._inputs_of(name)
        if inputs is None or len(inputs.total) != weight.shape[1]:
            return self._nearest.rounded(name, factored, dtype)
        return gptq_rounded(factored, inputs, self._target, dtype)

    def kept(self, name: str, tensor: Tensor) -> Tensor:
        return self._factors.applied(name, tensor)

    def _inputs_of(self, name: str) -> InputProducts | None:
        product = product_of(name)
        seen = self._product_to_seen.get(product)
        if seen is None:
            return None
        if product not in self._product_to_inputs:
            columns, products = self._factors.columns.get(name), seen.products
            self._product_to_inputs[product] = products if columns is None else products.divided(columns)
        return self._product_to_inputs[product]


class _Inputs:
    """What is kept of the inputs of a product."""

    def __init__(self, num_inputs: int) -> None:
        self.sample, self.products = InputSample(num_inputs), InputProducts(num_inputs)

    def add(self, inputs: Tensor) -> None:
        self.sample.add(inputs)
        self.products.add(inputs)
