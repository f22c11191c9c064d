"""Weights that go to a device through pinned buffers, with CPU tensors in place of the device's."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from workers.model import tensor_files
from workers.model.tensor_files import TensorFiles
from workers.model.weight_uploads import WeightUploads

BUFFER_BYTES = 256
TINY = Path(__file__).resolve().parent.parent.parent / "models" / "tiny"


class DelayedCopy:
    """A copy that is done when somebody waits for it, the latest that a device may do it."""

    def __init__(self, source: Tensor, target: Tensor) -> None:
        self._source, self._target = source, target

    def synchronize(self) -> None:
        self._target.copy_(self._source)


class DelayedCopies:
    """A device that copies as late as it may."""

    device = torch.device("cpu")

    def __init__(self) -> None:
        self.num_buffers = 0

    def buffer(self, num_bytes: int) -> Tensor:
        self.num_buffers += 1
        return torch.empty(num_bytes, dtype=torch.uint8)

    def send(self, source: Tensor, target: Tensor) -> DelayedCopy:
        assert source.is_contiguous()
        return DelayedCopy(source, target)


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
    assert copies.num_buffers in (0, 2)


def test_weights_are_converted_on_the_way() -> None:
    uploads = WeightUploads(DelayedCopies(), BUFFER_BYTES)
    weight = stored(50, 12) / 7
    found = uploads.upload(weight, torch.bfloat16)
    uploads.close()
    assert torch.equal(found, weight.to(torch.bfloat16))


def test_buffers_are_freed_and_taken_again() -> None:
    copies = DelayedCopies()
    uploads = WeightUploads(copies, BUFFER_BYTES)
    for _ in range(2):
        uploads.upload(stored(50, 12), torch.float32)
        uploads.close()
    assert copies.num_buffers == 4


def test_checkpoints_are_read_through_them_where_a_device_is(monkeypatch: pytest.MonkeyPatch) -> None:
    copies = DelayedCopies()
    monkeypatch.setattr(tensor_files, "CudaCopies", lambda device: copies)
    found, wanted = [], []
    with (
        TensorFiles(TINY, torch.float32, torch.device("cuda")) as files,
        TensorFiles(TINY, torch.float32, torch.device("cpu")) as plain,
    ):
        for name in sorted(files.names):
            shape = files.shape_of(name)
            assert shape is not None
            found.append(files.tensor(name, shape))
            wanted.append(plain.tensor(name, shape).clone())
    assert all(map(torch.equal, found, wanted))
    assert copies.num_buffers == 2
