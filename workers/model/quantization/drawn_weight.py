"""Make quantized weights of a format with any codes, by which products are measured."""

from __future__ import annotations

import torch

from workers.model.quantization.quantized_weight import QuantizedWeight
from workers.model.quantization.stored_format import CodeType, StoredFormat
from workers.model.quantization.stored_weights import CODES

# No byte of codes above this is a NaN of float8.
_NUM_BYTES = 0x70
_SCALE = 1e-4


def drawn_weight(
    stored: StoredFormat, num_outputs: int, num_inputs: int, device: torch.device
) -> QuantizedWeight | None:
    """Return a weight of this format, whose codes repeat; None where its groups are no whole ones."""
    group = stored.group or num_inputs
    if num_inputs % group:
        return None
    pattern = torch.arange(_NUM_BYTES, dtype=torch.uint8, device=device)
    size = num_outputs * num_inputs * stored.codes.num_bits // 8
    packed = pattern.repeat(-(-size // _NUM_BYTES))[:size].view(num_outputs, -1)
    scales = torch.full((num_outputs, num_inputs // group), _SCALE, device=device)
    # Codes of integers of 4 bits have a zero point in their middle where none is stored.
    has_offsets = stored.has_zeros or stored.codes is CodeType.INT4
    offsets = -scales if has_offsets else None
    return QuantizedWeight(
        CODES[stored.codes], packed, scales, group, offsets, quantizes_inputs=stored.quantizes_inputs
    )
