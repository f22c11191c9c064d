"""Run windows of text through a model as it is, and beside it through what has been rounded of it so far, and
pair what the products of the next layer take in both."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from workers.model.decoder import Decoder
from workers.model.products import Linear
from workers.model.weights import ShardSpec
from workers.quantizer.input_sample import InputSample
from workers.quantizer.paired_inputs import PairedInputs
from workers.quantizer.rounded_inputs import round_inputs, round_product_inputs
from workers.quantizer.token_weights import token_weights
from workers.quantizer.watched_product import Passed, WatchedLinear
from workers.quantizer.window_states import WindowStates

# The products of a layer as `DecoderLayer.replace_products` names them, each behind what it depends on.
_ORDER = ("projection", "output", "gate_up", "down")
# Tensors by their names.
Tensors = Mapping[str, Tensor]


class LayerProduct(NamedTuple):
    """A product of a layer, by the layer's number in the model."""

    layer: int
    product: str


class PairedLayers:
    """Runs both models side by side, a stage of `WindowStates.stages` after another."""

    def __init__(
        self, folder: Path, dtype: torch.dtype, windows: list[Tensor], *, rounds_inputs: bool = False
    ) -> None:
        """`rounds_inputs`: products of the rounded model take inputs of 8 bits. Raises the errors of
        `WindowStates`."""
        self._exact, self._rounded = (WindowStates(folder, dtype, windows) for _ in range(2))
        self._num_windows, self._rounds_inputs = len(windows), rounds_inputs
        self._stages = self._exact.stages()
        # The states of the exact model behind this stage, once it has been run.
        self._behind: list[Tensor] = []

    @property
    def stage(self) -> ShardSpec:
        """The stage that is next."""
        return self._stages[0]

    def samples(self) -> dict[LayerProduct, InputSample]:
        """Return samples of what the products of this stage take in the model as it is, in the order in which
        they can be rounded."""
        found: dict[LayerProduct, InputSample] = {}

        def sampling(product: LayerProduct, num_inputs: int) -> Passed:
            found[product] = sample = InputSample(num_inputs)

            def passed(inputs: Tensor, states: Tensor | None) -> Tensor:
                sample.add(inputs.float() * token_weights(inputs))
                return inputs

            return passed

        decoder = self._exact.load(self.stage)
        _watch(decoder, sampling)
        self._behind = [self._exact.run(decoder, number) for number in range(self._num_windows)]
        return dict(sorted(found.items(), key=lambda it: (it[0].layer, _ORDER.index(it[0].product))))

    def pairs(
        self, products: Collection[LayerProduct], exact: Tensors, rounded: Tensors
    ) -> dict[LayerProduct, PairedInputs]:
        """Return what `products` of this stage take in both models, of which each has tensors, `exact` or
        `rounded`, in place of the stored ones of their names. The exact model computes the same with them."""
        of_exact = _Taken(products, rounds_inputs=False)
        of_rounded = _Taken(products, rounds_inputs=self._rounds_inputs)
        one, other = self._exact.load(self.stage, exact), self._rounded.load(self.stage, rounded)
        _watch(one, of_exact.passing)
        _watch(other, of_rounded.passing)
        factor, sums = one.config.residual_multiplier, dict[LayerProduct, PairedInputs]()
        for number in range(self._num_windows):
            expected = of_exact.of_run(functools.partial(self._exact.run, one, number))
            found = of_rounded.of_run(functools.partial(self._rounded.run, other, number))
            for product, (inputs, states) in found.items():
                exact_inputs, exact_states = expected[product]
                missing = None
                if states is not None and exact_states is not None:
                    missing = (exact_states.float() - states.float()) / factor
                pairs = sums.setdefault(product, PairedInputs(inputs.shape[1]))
                pairs.add(inputs, exact_inputs, missing, states)
        return sums

    def advance(self, rounded: Tensors) -> None:
        """Run this stage, with the tensors `rounded` in place of the stored ones of their names in one of
        both models, and go on to the next one."""
        stage = self._stages.pop(0)
        if not self._behind:
            self._exact.advance(stage)
        else:
            self._exact.pass_on(self._behind)
        self._behind = []
        self._rounded.advance(stage, round_product_inputs if self._rounds_inputs else _as_it_is, rounded)


class _RunEnded(Exception):
    """Ends a run: what is behind the watched products is not needed."""


class _Taken:
    """Keeps what the watched products take of a window: inputs [num_tokens, num_inputs] and, where the result
    is added to them, the hidden states [num_tokens, num_outputs] so far."""

    def __init__(self, watched: Collection[LayerProduct], *, rounds_inputs: bool) -> None:
        self._watched, self._rounds_inputs = watched, rounds_inputs
        self._found: dict[LayerProduct, tuple[Tensor, Tensor | None]] = {}

    def passing(self, product: LayerProduct, num_inputs: int) -> Passed:
        """Return what the inputs of a product pass through."""

        def passed(inputs: Tensor, states: Tensor | None) -> Tensor:
            if self._rounds_inputs:
                inputs = round_inputs(inputs)
            if product in self._watched:
                self._found[product] = inputs.clone(), None if states is None else states.clone()
                if len(self._found) == len(self._watched):
                    raise _RunEnded
            return inputs

        return passed

    def of_run(self, run: Callable[[], Tensor]) -> dict[LayerProduct, tuple[Tensor, Tensor | None]]:
        """Return what the products take in a run."""
        self._found = {}
        with contextlib.suppress(_RunEnded):
            run()
        return self._found


def _watch(decoder: Decoder, passing: Callable[[LayerProduct, int], Passed]) -> None:
    """Have the inputs of all products pass through a function of each."""
    for number, layer in enumerate(decoder.layers, decoder.shard.layer_start):

        def replaced(name: str, product: Linear, number: int = number) -> Linear:
            return WatchedLinear(product, passing(LayerProduct(number, name), product.num_inputs))

        layer.replace_products(replaced)


def _as_it_is(decoder: Decoder) -> None:
    pass
