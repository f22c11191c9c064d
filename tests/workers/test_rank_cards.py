"""Which cards the ranks of a machine take, and what a rank sees that has its own alone."""

from __future__ import annotations

import pytest
import torch

from benchmarks.rank_cards import card_of, own_card


def see(monkeypatch: pytest.MonkeyPatch, num_cards: int, visible: str | None) -> None:
    """Let there be so many cards, and CUDA_VISIBLE_DEVICES as given."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: num_cards)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)


def test_ranks_take_the_cards_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    see(monkeypatch, 2, None)
    assert [card_of(rank).index for rank in range(4)] == [0, 1, 0, 1]
    see(monkeypatch, 1, None)
    assert [card_of(rank).index for rank in range(2)] == [0, 0]


@pytest.mark.parametrize(
    ("num_cards", "visible", "names"),
    [
        (2, None, ["0", "1", "0"]),
        (2, "", ["0", "1", "0"]),
        (2, "5,3", ["5", "3", "5"]),
        (1, "GPU-a", ["GPU-a"]),
    ],
)
def test_a_rank_may_see_its_own_card_alone(
    monkeypatch: pytest.MonkeyPatch, num_cards: int, visible: str | None, names: list[str]
) -> None:
    see(monkeypatch, num_cards, visible)
    found = [own_card(rank) for rank in range(len(names))]
    assert found == [{"CUDA_VISIBLE_DEVICES": name} for name in names]


def test_without_cards_nothing_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    see(monkeypatch, 0, None)
    assert own_card(1) == {}
