"""The choice of a reader for the kind of state that a model's layers keep."""

from __future__ import annotations

from workers.model.split_products import SplitProducts
from workers.model.state.short_conv_shape import ShortConvShape
from workers.model.state.short_conv_weights import ShortConvWeightReader
from workers.model.state.state_shape import StateShape
from workers.model.state.state_weights import StateWeightReader


def state_reader(
    products: SplitProducts, shape: StateShape, held: range, num_parts: int
) -> StateWeightReader:
    """Return what reads layers of this shape at a rank that holds these parts of their states."""
    match shape:
        case ShortConvShape():
            return ShortConvWeightReader(products, shape, held, num_parts)
        case _:
            raise AssertionError(f"no reader for {type(shape).__name__}")
