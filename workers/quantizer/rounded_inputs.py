"""Round the inputs of products to 8 bits, as engines do with a model of `w8a8`."""

from __future__ import annotations

from torch import Tensor

from workers.model.decoder import Decoder
from workers.quantizer.watched_product import WatchedLinear

_LARGEST_CODE = 127.0
_LEAST_SCALE = 1e-12


def round_inputs(inputs: Tensor) -> Tensor:
    """Round inputs [num_tokens, num_inputs] to 8 bits, by a scale of each token."""
    wide = inputs.float()
    scales = wide.abs().amax(1, keepdim=True).div_(_LARGEST_CODE).clamp_(min=_LEAST_SCALE)
    return (wide / scales).round_().mul_(scales).to(inputs.dtype)


def round_product_inputs(decoder: Decoder) -> None:
    """Have the products of attention and feed-forward round their inputs. Those that do so by themselves
    compute the same as before."""
    for layer in decoder.layers:
        layer.replace_products(
            lambda name, product: WatchedLinear(product, lambda inputs, states: round_inputs(inputs))
        )
