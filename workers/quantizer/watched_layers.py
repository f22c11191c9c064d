"""Run windows of text through a model, layer by layer, and watch what its products take."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Generic, Protocol, TypeVar

import torch
from torch import Tensor

from workers.model.decoder import Decoder
from workers.model.products import Linear
from workers.quantizer.window_states import WindowStates

# A token's inputs are made so many times as long as the median of a window at most.
_LONGEST = 4.0


class InputWatcher(Protocol):
    """Sees the inputs of one product."""

    def add(self, inputs: Tensor) -> None:
        """See the inputs of a window, float32 [num_tokens, num_inputs], without outliers among tokens."""


W = TypeVar("W", bound=InputWatcher)


class WatchedLayers(Generic[W]):
    """Runs the windows up to the layer that is asked for. Watchers are kept of one stage at a time."""

    def __init__(
        self, folder: Path, dtype: torch.dtype, windows: list[Tensor], make: Callable[[int], W]
    ) -> None:
        """`make` makes what watches a product of so many inputs. Raises the errors of `WindowStates`."""
        self._model, self._make = WindowStates(folder, dtype, windows), make
        self._stages = iter(self._model.stages())
        self._num_run = 0
        self._layer_to_watchers: dict[int, dict[str, W]] = {}

    def advance(self, layer: int) -> dict[str, W]:
        """Run the layers up to this one; return what watched its products, by the names of
        `DecoderLayer.replace_products`. Layers are in order, but some may be left out."""
        if layer >= self._num_run:
            self._layer_to_watchers = {}
        for stage in self._stages if layer >= self._num_run else ():
            is_asked = layer < stage.layer_end
            self._model.advance(stage, self._watch if is_asked else lambda decoder: None)
            self._num_run = stage.layer_end
            if is_asked:
                break
        return self._layer_to_watchers.get(layer, {})

    def _watch(self, decoder: Decoder) -> None:
        for number, layer in enumerate(decoder.layers, decoder.shard.layer_start):
            name_to_watcher = self._layer_to_watchers.setdefault(number, {})

            def replaced(name: str, product: Linear, into: dict[str, W] = name_to_watcher) -> Linear:
                into[name] = watcher = self._make(product.num_inputs)
                return watched(product, watcher)

            layer.replace_products(replaced)


class WatchedLinear(Linear):
    """A product whose inputs pass through a function."""

    def __init__(self, product: Linear, passed: Callable[[Tensor], Tensor]) -> None:
        self._product, self._passed = product, passed
        self.num_inputs, self.num_outputs = product.num_inputs, product.num_outputs

    def __call__(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        return self._product(self._passed(x), out)

    def add_to(self, hidden: Tensor, x: Tensor) -> Tensor | None:
        return self._product.add_to(hidden, self._passed(x))

    def gated(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        return self._product.gated(self._passed(x), out)

    def floats(self, x: Tensor) -> Tensor:
        return self._product.floats(self._passed(x))

    def lookup(self, ids: Tensor) -> Tensor:
        return self._product.lookup(ids)


def watched(product: Linear, watcher: InputWatcher) -> WatchedLinear:
    """Return the product, whose inputs `watcher` sees."""

    def seen(x: Tensor) -> Tensor:
        watcher.add(_shortened(x))
        return x

    return WatchedLinear(product, seen)


def _shortened(inputs: Tensor) -> Tensor:
    """Shorten inputs [num_tokens, num_inputs] that are far longer than those of other tokens, in float32. In
    some layers those of the first token are a thousand times as long, and all sums would be theirs alone,
    although the norm that follows makes an error of theirs small."""
    wide = inputs.float()
    lengths = wide.norm(dim=1, keepdim=True)
    factors: Tensor = (_LONGEST * lengths.median() / lengths).nan_to_num(1.0, 1.0).clamp(max=1.0)
    return wide * factors
