"""Rounds weights to the nearest code after the range of inputs has moved into them, as SmoothQuant does."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from workers.quantizer.checkpoint_plan import SourceTensors
from workers.quantizer.factor_search import searched_factors
from workers.quantizer.input_sample import InputSample
from workers.quantizer.rounding import NearestRounder, Rounded
from workers.quantizer.smoothing_factors import LayerFactors
from workers.quantizer.smoothing_pairs import LayerPairs
from workers.quantizer.target import QuantizationTarget
from workers.quantizer.watched_layers import WatchedLayers


class SmoothRounder:
    """Finds factors for the inputs of a layer's products, and rounds with them."""

    def __init__(
        self, folder: Path, target: QuantizationTarget, windows: list[Tensor], dtype: torch.dtype
    ) -> None:
        """Run the `windows` of tokens through the model in `folder`, computing in `dtype`. Raises the errors
        of `WindowStates`."""
        self._folder, self._nearest = folder, NearestRounder(target)
        self._layers = WatchedLayers(folder, dtype, windows, InputSample)
        self._factors = LayerFactors()

    def begin_layer(self, layer: int) -> None:
        """Run the layers up to this one, and find its factors."""
        samples = self._layers.advance(layer)
        with SourceTensors(self._folder) as source:
            known = {tensor.name for tensor in source.tensors}
            factored = [
                (pair, searched_factors(pair, sample, [source.tensor(name).float() for name in pair.weights]))
                for pair in LayerPairs(source.config, source.names, layer, known).all()
                if (sample := samples.get(pair.product)) is not None
            ]
            self._factors = LayerFactors.of(factored, source.tensor)

    def rounded(self, name: str, weight: Tensor, dtype: torch.dtype) -> Rounded:
        return self._nearest.rounded(name, self._factors.applied(name, weight), dtype)

    def kept(self, name: str, tensor: Tensor) -> Tensor:
        return self._factors.applied(name, tensor)
