"""Which device a rank takes, with CUDA's two calls for it replaced; `tests/gpu` has one."""

from __future__ import annotations

import pytest
import torch

from workers.rank.device_queue import take_device


@pytest.mark.parametrize(("name", "index"), [("cuda", 2), ("cuda:2", 2), ("cuda:0", 0)])
def test_a_device_is_taken_with_its_index(monkeypatch: pytest.MonkeyPatch, name: str, index: int) -> None:
    """One without an index is that of the thread."""
    taken: list[int] = []
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", taken.append)
    assert take_device(torch.device(name)) == torch.device("cuda", index)
    assert taken == [index]


def test_a_cpu_is_there_already() -> None:
    assert take_device(torch.device("cpu")) == torch.device("cpu")
