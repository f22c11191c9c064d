"""The checksum of `kvtransfer.blocks.checksum` in torch, on any device."""

from __future__ import annotations

import torch

from kvtransfer.blocks.checksum import GOLDEN, MASK, MULTIPLIER_1, MULTIPLIER_2, SHIFT, WORD_BYTES, finish

_LOW = (1 << SHIFT) - 1


def checksum_torch(tensor: torch.Tensor) -> int:
    """Compute the checksum of a tensor's bytes in logical (row-major) order. Synchronizes with the device."""
    data = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    return finish_totals(piece_totals(data.unsqueeze(0)), data.numel())[0]


def piece_totals(pieces: torch.Tensor) -> torch.Tensor:
    """Sum the mixed words of each row of uint8 [num_pieces, num_bytes], for `finish_totals`. Only queues work
    on the pieces' device, which needs three temporaries of their size."""
    words = _as_words(pieces)
    mixed = torch.arange(1, words.shape[1] + 1, dtype=torch.int64, device=words.device)
    mixed = mixed.mul_(_signed(GOLDEN)) + words
    for multiplier in (MULTIPLIER_1, MULTIPLIER_2):
        mixed.bitwise_xor_(_shifted(mixed)).mul_(_signed(multiplier))
    return mixed.bitwise_xor_(_shifted(mixed)).sum(dim=1)


def finish_totals(totals: torch.Tensor, num_bytes: int) -> list[int]:
    """Compute the checksums of pieces of `num_bytes` from their totals. Synchronizes with the device."""
    return [finish(total & MASK, num_bytes) for total in totals.tolist()]


def _as_words(pieces: torch.Tensor) -> torch.Tensor:
    """Convert uint8 [num_pieces, num_bytes] to zero-padded int64 words; a view if possible."""
    padding = -pieces.shape[1] % WORD_BYTES
    if padding:
        pieces = torch.nn.functional.pad(pieces, (0, padding))
    elif pieces.data_ptr() % WORD_BYTES or pieces.storage_offset() % WORD_BYTES or not pieces.is_contiguous():
        pieces = pieces.clone(memory_format=torch.contiguous_format)
    return pieces.view(torch.int64)


def _shifted(words: torch.Tensor) -> torch.Tensor:
    """Shift int64 right logically; its own shift keeps the sign."""
    return (words >> SHIFT).bitwise_and_(_LOW)


def _signed(word: int) -> int:
    return word - (1 << 64) if word >> 63 else word
