"""The benchmark of pairs between two cards, over gloo on the CPU, and its line."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks import nccl_pair_rate
from benchmarks.gpu import MODEL_TO_SIZES, block_layout
from benchmarks.nccl_pair_rate import PairRate, nccl_pair, pair_rate
from kvtransfer.blocks.layout import BlockLayout
from kvtransfer.messages import Shard

CPU = torch.device("cpu")


def bench_on(device: str) -> Any:
    return SimpleNamespace(device=torch.device(device), sizes=MODEL_TO_SIZES["tiny"])


@pytest.mark.slow
def test_pushes_and_plain_sends_have_a_rate() -> None:
    layout = BlockLayout(Shard(0, 2, 0, 2), 64, 64, 2)
    rate = pair_rate((CPU, CPU), layout, 64)
    assert rate.pushed > 0
    assert rate.plain > 0


def test_the_line_compares_both_between_two_cards(monkeypatch: pytest.MonkeyPatch) -> None:
    measured: list[tuple[object, ...]] = []

    def found(*arguments: object) -> PairRate:
        measured.append(arguments)
        return PairRate(150e9, 200e9)

    monkeypatch.setattr(nccl_pair_rate, "pair_rate", found)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    sizes = MODEL_TO_SIZES["tiny"]
    assert list(nccl_pair(bench_on("cuda:0"))) == [
        {"figure": "nccl_pair_gb_s", "value": 150.0, "limit": 200.0, "ratio": 0.75, "target": 0.8}
    ]
    cards = torch.device("cuda:0"), torch.device("cuda:1")
    assert measured == [(cards, block_layout(sizes), sizes.num_pushed_blocks)]


@pytest.mark.parametrize(("device", "num_cards"), [("cpu", 2), ("cuda:0", 1)])
def test_without_two_cards_an_error_says_so(
    monkeypatch: pytest.MonkeyPatch, device: str, num_cards: int
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: num_cards)
    with pytest.raises(RuntimeError, match="needs two CUDA devices"):
        list(nccl_pair(bench_on(device)))
