"""Buffers between ranks without a driver: files of a folder that each process maps, which stand for the
memory of one card."""

from __future__ import annotations

import mmap
import socket
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from kvtransfer.errors import PathError
from workers.rank.peer_buffers import PeerBuffers

OFFSET = 4096


class FileDriver:
    """Shares memory that `allocate` has made. It may fail in the call named `fails`."""

    bus_id = "files"

    def __init__(self, folder: Path, fails: str = "") -> None:
        self._folder = folder
        self._fails = fails
        self._address_to_path: dict[int, Path] = {}
        # Handles of mappings that are not undone.
        self.mapped: list[bytes] = []
        self._kept: list[mmap.mmap] = []

    def allocate(self, name: str, num_bytes: int) -> Tensor:
        """Return zeros, uint8 [num_bytes], in a file of this name."""
        path = self._folder / name
        path.write_bytes(bytes(OFFSET + num_bytes))
        memory = self._map(path)[OFFSET:]
        self._address_to_path[memory.data_ptr()] = path
        return memory

    def export(self, address: int) -> tuple[bytes, int]:
        self._fail_in("export")
        return str(self._address_to_path[address]).encode(), OFFSET

    def map(self, handle: bytes) -> int:
        self._fail_in("map")
        self.mapped.append(handle)
        return self._map(Path(handle.decode())).data_ptr()

    def unmap(self, handle: bytes) -> None:
        self.mapped.remove(handle)

    def check_atomics(self, bus_id: str) -> None:
        self._fail_in("check_atomics")

    def _map(self, path: Path) -> Tensor:
        with path.open("r+b") as file:
            self._kept.append(mmap.mmap(file.fileno(), 0))
        return torch.from_numpy(np.frombuffer(self._kept[-1], np.uint8))

    def _fail_in(self, call: str) -> None:
        if call == self._fails:
            raise PathError(f"{call}: CUDA_ERROR_NOT_SUPPORTED")


def file_buffers(
    folder: Path, sockets: Mapping[int, socket.socket], num_bytes: int, tp_rank: int
) -> PeerBuffers:
    """Form the buffers of a rank over files."""
    driver = FileDriver(folder)
    own = driver.allocate(f"buffer {tp_rank}", num_bytes)
    formed = PeerBuffers.form(driver, sockets, own, tp_rank)
    assert isinstance(formed, PeerBuffers), formed
    return formed
