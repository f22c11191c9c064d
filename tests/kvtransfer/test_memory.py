"""The pool's memory: shared through its descriptor only, and not pulled away from under a tensor."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
import torch

from kvtransfer.blocks.host_memory import ALIGNMENT_BYTES, SCRATCH_BYTES, KvMemory, map_shared, mapping_bytes

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="memory is shared by memfd, on Linux only")


def test_the_descriptor_shares_the_same_bytes_and_leaves_no_file() -> None:
    before = set(Path("/dev/shm").iterdir())
    memory = KvMemory.allocate(3_000_000)
    other = map_shared(memory.fd, mapping_bytes(3_000_000))
    memory.buffer[2_999_999] = 7
    assert other[2_999_999] == 7
    assert len(memory.buffer) == 3_000_000
    assert len(other) == 2 * ALIGNMENT_BYTES + SCRATCH_BYTES
    assert set(Path("/dev/shm").iterdir()) == before
    assert not os.get_inheritable(memory.fd)
    other.close()
    memory.close()


def test_nobody_can_shrink_it() -> None:
    memory = KvMemory.allocate(4096)
    with pytest.raises(PermissionError):
        os.ftruncate(memory.fd, 0)
    memory.close()


def test_a_tensor_outlives_close() -> None:
    memory = KvMemory.allocate(4096)
    tensor = torch.frombuffer(memory.buffer, dtype=torch.uint8)
    tensor.fill_(5)
    fd = memory.fd
    memory.close()
    memory.close()
    assert int(tensor.sum()) == 5 * 4096
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)


def test_populated_memory_has_all_its_pages() -> None:
    memory = KvMemory.allocate(3 << 20)
    assert os.fstat(memory.fd).st_blocks == 0
    memory.populate().join()
    assert os.fstat(memory.fd).st_blocks * 512 >= 3 << 20
    assert memory.buffer == bytes(3 << 20)
    memory.close()
    part = KvMemory.allocate(16 << 20)
    part.populate(2 << 20).join()
    assert 2 << 20 <= os.fstat(part.fd).st_blocks * 512 <= 4 << 20, "rounded up to huge pages at most"
    part.close()


def test_memory_that_is_being_populated_may_be_written_and_closed() -> None:
    memory = KvMemory.allocate(256 << 20)
    populating = memory.populate()
    memory.buffer[-1] = 7
    tensor = torch.frombuffer(memory.buffer, dtype=torch.uint8)
    memory.close()
    assert not populating.is_alive()
    assert int(tensor[-1]) == 7
    assert int(tensor[0]) == 0
