"""The choice of a reader for the kind of state that a model's layers keep."""

from __future__ import annotations

from workers.model.model_config import ModelConfig
from workers.model.split_products import SplitProducts
from workers.model.state.delta_shape import DeltaShape
from workers.model.state.delta_weights import DeltaWeightReader
from workers.model.state.mamba2_shape import Mamba2Shape
from workers.model.state.mamba2_weights import Mamba2WeightReader
from workers.model.state.short_conv_shape import ShortConvShape
from workers.model.state.short_conv_weights import ShortConvWeightReader
from workers.model.state.state_shape import StateShape
from workers.model.state.state_weights import StateWeightReader


def state_reader(
    products: SplitProducts, shape: StateShape, held: range, config: ModelConfig
) -> StateWeightReader:
    """Return what reads layers of this shape at a rank that holds these parts of their states."""
    num_parts = config.num_kv_heads
    match shape:
        case DeltaShape():
            return DeltaWeightReader(products, shape, held, num_parts)
        case ShortConvShape():
            return ShortConvWeightReader(products, shape, held, num_parts)
        case Mamba2Shape():
            return Mamba2WeightReader(products, shape, held, num_parts, config.rms_norm_eps)
        case _:
            raise AssertionError(f"no reader for {type(shape).__name__}")
