"""A driver for memory of this process in the place of a card's, which it maps by address: as for memory of a
card that a process does not see, there is no tensor of what is mapped."""

from __future__ import annotations

import ctypes

from kvtransfer.errors import PathError
from kvtransfer.transports.cuda_driver import HANDLE_BYTES, CudaDriver, Exported


class HostDriver(CudaDriver):
    """Memory of this process."""

    def __init__(self) -> None:
        self.mapped: list[bytes] = []
        self.fails_to_map = 0
        self.num_copies = 0
        self.fails_to_copy = 0

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

    def copy(self, source: int, target: int, num_bytes: int, stream: int) -> None:
        self.num_copies += 1
        if self.num_copies == self.fails_to_copy:
            raise PathError("cannot be copied")
        ctypes.memmove(target, source, num_bytes)
