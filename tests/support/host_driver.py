"""A driver for memory of this process in the place of a card's."""

from __future__ import annotations

import ctypes

import torch

from kvtransfer.errors import PathError
from kvtransfer.transports.cuda_driver import HANDLE_BYTES, CudaDriver, Exported


class HostDriver(CudaDriver):
    """Memory of this process."""

    def __init__(self) -> None:
        self.mapped: list[bytes] = []
        self.fails_to_map = 0

    def export(self, address: int) -> Exported:
        base = address - 24
        return Exported(base.to_bytes(HANDLE_BYTES, "little"), 24)

    def map(self, handle: bytes) -> int:
        if len(self.mapped) + 1 == self.fails_to_map:
            raise PathError("cannot be mapped")
        self.mapped.append(handle)
        return int.from_bytes(handle, "little")

    def unmap(self, handle: bytes) -> None:
        self.mapped.remove(handle)

    def view(self, address: int, num_bytes: int) -> torch.Tensor:
        memory = (ctypes.c_uint8 * num_bytes).from_address(address)
        return torch.frombuffer(memory, dtype=torch.uint8)
