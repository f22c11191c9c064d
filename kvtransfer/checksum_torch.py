"""The piece checksum of `kvtransfer.checksum` in torch, for pieces that lie on a device. Bit for bit equal.

Run on the CPU in the tests; int64 arithmetic wraps the same way on CUDA.
"""

from __future__ import annotations

import torch

from kvtransfer.checksum import GOLDEN, MULTIPLIER_1, MULTIPLIER_2, SHIFT, WORD_BYTES, finish

_LOW = (1 << SHIFT) - 1


def checksum_torch(tensor: torch.Tensor) -> int:
    """The checksum of a tensor's bytes in its logical (row-major) order; synchronizes with the device."""
    data = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    num_bytes = data.numel()
    words = _as_words(data)
    positions = torch.arange(1, words.numel() + 1, dtype=torch.int64, device=words.device)
    mixed = positions.mul_(_signed(GOLDEN)).add_(words)
    for multiplier in (MULTIPLIER_1, MULTIPLIER_2):
        mixed.bitwise_xor_(_shifted(mixed)).mul_(_signed(multiplier))
    mixed.bitwise_xor_(_shifted(mixed))
    return finish(int(mixed.sum().item()) & ((1 << 64) - 1), num_bytes)


def _as_words(data: torch.Tensor) -> torch.Tensor:
    """uint8 [n] -> int64 [ceil(n / 8)], zero padded; a view when it can be one."""
    padding = -data.numel() % WORD_BYTES
    if padding:
        data = torch.nn.functional.pad(data, (0, padding))
    elif data.data_ptr() % WORD_BYTES:
        data = data.clone()
    return data.view(torch.int64)


def _shifted(words: torch.Tensor) -> torch.Tensor:
    """Logical shift right of int64, whose own shift keeps the sign."""
    return (words >> SHIFT).bitwise_and_(_LOW)


def _signed(word: int) -> int:
    return word - (1 << 64) if word >> 63 else word
