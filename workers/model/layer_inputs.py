"""Compute the inputs that each layer of Gemma 4 has beside the hidden states, and add them.

They are computed with the embedding, for all layers, and travel with the hidden states from stage to stage:
[num_tokens, hidden_size + num_layers * input_size] of the layers that are still to be computed."""

from __future__ import annotations

import dataclasses

import torch.nn.functional as F
from torch import Tensor

from workers.model import native
from workers.model.apply_norm import add_normed, apply_norm
from workers.model.layer_products import Product
from workers.model.norm import Norm
from workers.model.products import GatedActivation, Linear

# The factor of the sum of both parts of an input.
_SUM_SCALE = 2.0**-0.5


@dataclasses.dataclass(slots=True)
class InputEmbedding:
    """Computes the inputs of all layers, [num_tokens, num_layers * input_size]: each is a row of the table
    that `lookup` reads, times `multiplier`, plus a `projection` of the embedding, times `scale`, after its
    `norm`. `workers.model.parallel` replaces `lookup` by one that joins the parts of several ranks."""

    lookup: Product
    multiplier: float
    projection: Linear
    scale: float
    norm: Norm

    def __call__(self, tokens: Tensor, embedded: Tensor) -> Tensor:
        """Compute them for token ids [num_tokens] and their embeddings [num_tokens, hidden_size]."""
        projected = self.projection(embedded).mul_(self.scale)
        by_layer = projected.view(-1, len(self.norm.weight))
        apply_norm(by_layer, self.norm, by_layer)
        looked_up = self.lookup(tokens)
        return projected.add_(looked_up.mul_(self.multiplier)).mul_(_SUM_SCALE)


@dataclasses.dataclass(frozen=True, slots=True)
class InputGate:
    """Adds its input to the hidden states of a layer: as much of it as a `gate` lets through, projected and
    normalized."""

    gate: Linear
    activation: GatedActivation
    projection: Linear
    norm: Norm

    def add_to(self, hidden: Tensor, layer_input: Tensor) -> None:
        """Add `layer_input` [num_tokens, input_size] to `hidden` [num_tokens, hidden_size], in place."""
        let_through = self._activated(self.gate(hidden), layer_input)
        add_normed(hidden, self.projection(let_through), self.norm)

    def _activated(self, gate: Tensor, layer_input: Tensor) -> Tensor:
        """Return activation(gate) * layer_input; `gate` may be overwritten."""
        is_gelu = self.activation == "gelu_tanh"
        if native.serves(gate.device, gate.dtype):
            kernels = native.load()
            assert kernels is not None
            return kernels.gate_mul(gate, layer_input, is_gelu=is_gelu)
        activated = F.gelu(gate, approximate="tanh") if is_gelu else F.silu(gate)
        return activated.mul_(layer_input)
