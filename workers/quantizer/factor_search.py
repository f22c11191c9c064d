"""Search the factors by which SmoothQuant moves the range of a product's inputs into its weights."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from workers.quantizer.input_sample import InputSample
from workers.quantizer.rounded_inputs import round_inputs
from workers.quantizer.smoothing_factors import of_all_heads
from workers.quantizer.smoothing_pairs import SharingHeads, SmoothingPair

# How much of the range of inputs moves: a factor is `magnitude ** alpha / largest weight ** (1 - alpha)`.
_ALPHAS = (0.35, 0.5, 0.65, 0.8, 0.9, 1.0)
_LARGEST_CODE = 127.0
_LEAST = 1e-5
# Factors are 2 ** x of x to this magnitude.
_LARGEST_EXPONENT = 8.0


def searched_factors(pair: SmoothingPair, sample: InputSample, weights: Sequence[Tensor]) -> Tensor:
    """Return the factors with which products of rounded inputs and weights change least; ones, if none are
    better. With heads there is a factor for each value, [num_kv_heads * head_dim]."""
    largest = torch.stack([it.abs().amax(0) for it in weights]).amax(0)
    inputs, heads = sample.magnitudes, pair.heads
    if heads is not None:
        largest, inputs = (_shared(it, heads) for it in (largest, inputs))
    best = torch.ones_like(inputs)
    least = _error(best, heads, sample.rows, weights)
    for alpha in _ALPHAS:
        found = _factors(inputs, largest, alpha)
        error = _error(found, heads, sample.rows, weights)
        if error < least:
            best, least = found, error
    return best


def _factors(inputs: Tensor, weights: Tensor, alpha: float) -> Tensor:
    """Return factors by the magnitudes of inputs and the largest of their weights."""
    exponents = alpha * inputs.clamp(min=_LEAST).log2() - (1 - alpha) * weights.clamp(min=_LEAST).log2()
    exponents -= exponents.mean()  # what all inputs have in common changes nothing
    return torch.exp2(exponents.clamp(-_LARGEST_EXPONENT, _LARGEST_EXPONENT))


def _error(factors: Tensor, heads: SharingHeads | None, inputs: Tensor, weights: Sequence[Tensor]) -> float:
    """Return the sum of the squares of what rounding changes of the products of `inputs` [num_tokens,
    num_inputs] with all weights."""
    of_columns = factors if heads is None else of_all_heads(factors, heads)
    rounded, error = round_inputs(inputs / of_columns), 0.0
    for weight in weights:
        product = rounded @ _rounded_rows(weight * of_columns).t()
        error += float(product.sub_(inputs @ weight.t()).double().square().sum())
    return error


def _rounded_rows(weight: Tensor) -> Tensor:
    scales = weight.abs().amax(1, keepdim=True).div_(_LARGEST_CODE).clamp_(min=_LEAST * _LEAST)
    return (weight / scales).round_().mul_(scales)


def _shared(values: Tensor, heads: SharingHeads) -> Tensor:
    """Return the largest of the values [num_heads * head_dim] of heads of queries that share theirs."""
    return values.view(heads).amax(1).flatten()
