"""Move a weight so that its products with the inputs that come from rounded layers are those of the model as
it is."""

from __future__ import annotations

import torch
from torch import Tensor

from workers.quantizer.gptq import InputProducts
from workers.quantizer.token_weights import token_weights

# The part of the way that a weight is moved. All of the way, it follows the text of the calibration too far.
_PART = 0.5


class PairedInputs:
    """Sums up the inputs of a product in both models: x xT of the inputs x behind rounded layers, and
    (y - x) xT, where y are those of the model as it is. Where the result is added to hidden states, it can
    make up for differences of these, too."""

    def __init__(self, num_inputs: int) -> None:
        self.num_inputs, self.products = num_inputs, InputProducts(num_inputs)
        self._of_inputs = torch.zeros(num_inputs, num_inputs)
        # [num_outputs, num_inputs]
        self._of_states: Tensor | None = None

    def add(
        self, rounded: Tensor, exact: Tensor, missing: Tensor | None = None, states: Tensor | None = None
    ) -> None:
        """Add the inputs [num_tokens, num_inputs] of a window in both models, and what is `missing` in the
        hidden `states` [num_tokens, num_outputs] of the rounded one before the result is added. What is
        missing in states that are far longer than others, as those of the first token, counts as a part of
        their length: in bfloat16 it is mostly their rounding."""
        factors, wide = token_weights(rounded), rounded.float()
        if states is not None:
            factors = torch.minimum(factors, token_weights(states, 1.0))
        weighed = wide * factors
        self.products.add(weighed)
        self._of_inputs.addmm_((exact.float() - wide).mul_(factors).t(), weighed)
        if missing is not None:
            if self._of_states is None:
                self._of_states = torch.zeros(missing.shape[1], wide.shape[1])
            self._of_states.addmm_((missing * factors).t(), weighed)

    def moved(self, weight: Tensor) -> Tensor:
        """Return `weight` in float32 [num_outputs, num_inputs], moved towards the one whose products with the
        inputs behind rounded layers are nearest to those of `weight` with the exact ones."""
        wide = weight.float()
        products = wide @ self._of_inputs
        if self._of_states is not None:
            products += self._of_states
        return wide + _PART * self.products.solved(products)
