"""Weights that go to a device through pinned buffers, with CPU tensors in place of the device's."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from delayed_copies import DelayedCopies
from torch import Tensor

from workers.model import tensor_files, weight_uploads
from workers.model.tensor_files import TensorFiles
from workers.model.weight_uploads import CudaCopies, WeightUploads

BUFFER_BYTES = 256
CUDA = torch.device("cuda")
TINY = Path(__file__).resolve().parent.parent.parent / "models" / "tiny"


class OneBuffer(DelayedCopies):
    """A device of a host that has memory for one buffer."""

    def buffer(self, num_bytes: int) -> Tensor:
        if self.held:
            raise MemoryError
        return super().buffer(num_bytes)


def stored(*shape: int) -> Tensor:
    return torch.arange(torch.Size(shape).numel(), dtype=torch.float32).view(shape)


@pytest.mark.parametrize(
    "view",
    [
        stored(7),
        stored(50, 12),
        stored(50, 12)[13:40],
        stored(50, 12)[:, 3:9],
        stored(9, 4, 4)[2:8, 1:3],
        stored(3, 64),
        stored(3, 65),  # a row of more than the buffer
        stored(2, 3, 5, 20)[:, 1:],
        stored(0, 5),
        torch.tensor(3.0),
    ],
)
def test_no_buffer_is_filled_again_before_its_copy_is_done(view: Tensor) -> None:
    copies = DelayedCopies()
    uploads = WeightUploads(copies, BUFFER_BYTES)
    found = [uploads.upload(view + number, torch.float32) for number in range(3)]
    uploads.close()
    for number, tensor in enumerate(found):
        assert torch.equal(tensor, view + number)
    assert copies.num_bytes == 3 * view.nbytes
    assert copies.num_buffers == (2 if view.numel() else 0)


def test_weights_are_converted_on_the_way() -> None:
    uploads = WeightUploads(DelayedCopies(), BUFFER_BYTES)
    weight = stored(50, 12) / 7
    found = uploads.upload(weight, torch.bfloat16)
    uploads.close()
    assert torch.equal(found, weight.to(torch.bfloat16))


def test_buffers_are_given_back_and_taken_again() -> None:
    copies = DelayedCopies()
    uploads = WeightUploads(copies, BUFFER_BYTES)
    for _ in range(2):
        uploads.upload(stored(50, 12), torch.float32)
        assert len(copies.held) == 2
        uploads.close()
        assert not copies.held
    assert copies.num_buffers == 4


def test_a_buffer_is_given_back_where_there_is_no_other() -> None:
    copies = OneBuffer()
    uploads = WeightUploads(copies, BUFFER_BYTES)
    with pytest.raises(MemoryError):
        uploads.upload(stored(7), torch.float32)
    uploads.close()
    assert not copies.held


@pytest.mark.parametrize("can_pin", [True, False])
def test_cuda_unpins_what_it_has_pinned(can_pin: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch would keep it."""
    pinned: set[tuple[int, int]] = set()

    def pin(address: int, num_bytes: int, device: torch.device) -> bool:
        assert device == CUDA
        if can_pin:
            pinned.add((address, num_bytes))
        return can_pin

    monkeypatch.setattr(weight_uploads, "pin", pin)
    monkeypatch.setattr(weight_uploads, "unpin", lambda address: pinned.remove((address, 5000)))
    copies = CudaCopies(CUDA)
    buffers = [copies.buffer(5000) for _ in range(2)]
    assert pinned == {(it.data_ptr(), 5000) for it in buffers if can_pin}
    for buffer in buffers:
        copies.release(buffer)
    assert not pinned


@pytest.fixture
def copies(monkeypatch: pytest.MonkeyPatch) -> DelayedCopies:
    """Those of every device of CUDA."""
    delayed = DelayedCopies()
    monkeypatch.setattr(tensor_files, "CudaCopies", lambda device: delayed)
    return delayed


def test_checkpoints_are_read_through_them_where_a_device_is(copies: DelayedCopies) -> None:
    found, wanted = [], []
    with (
        TensorFiles(TINY, torch.float32, CUDA) as files,
        TensorFiles(TINY, torch.float32, torch.device("cpu")) as plain,
    ):
        for name in sorted(files.names):
            shape = files.shape_of(name)
            assert shape is not None
            found.append(files.tensor(name, shape))
            wanted.append(plain.tensor(name, shape).clone())
    assert all(map(torch.equal, found, wanted))
    assert copies.num_buffers == 2
    assert not copies.held
