"""How a stage of ranks on GPUs forms its group, without a GPU: what it takes where cards are shared, memory
cannot be mapped, or sums must have one order. NCCL and the buffers are stand-ins; sockets are real."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.distributed.distributed_c10d import Store

from kvtransfer.rpc.trust import Trust
from workers.errors import RankDiedError, WorkerError
from workers.rank import collectives
from workers.rank.collectives import RankGroups, find_store, open_store
from workers.rank.one_shot_group import OneShotGroup
from workers.rank.peer_buffers import PeerBuffers

TRUST = Trust.of(b"the ranks' own secret")
TWO_CARDS = ("0000:18:00.0", "0000:2A:00.0")
ONE_CARD = ("0000:18:00.0",) * 2


class StandInSums:
    """Takes the place of `OneShotSums`, and knows what was done by it."""

    part_bytes = 512 << 10

    def __init__(self, buffers: PeerBuffers, tp_rank: int) -> None:
        self.tp_rank = tp_rank
        self.num_sums = 0
        self.ended: list[int] = []
        self.is_closed = False

    def all_reduce(self, tensor: torch.Tensor) -> None:
        self.num_sums += 1

    def gather(self, tensor: torch.Tensor) -> torch.Tensor:
        return torch.stack([tensor.view(-1) + rank for rank in range(2)])

    def end(self, tp_rank: int) -> None:
        self.ended.append(tp_rank)

    def check(self) -> None:
        if self.ended:
            raise RankDiedError(f"rank {self.ended[0]}")

    def close(self) -> None:
        self.is_closed = True


class Stage:
    """Two ranks on these cards, as threads."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, cards: tuple[str, ...], reason: str = "") -> None:
        """Memory cannot be mapped for this `reason`."""
        self.cards = cards
        self.nccl_groups: list[Any] = []
        self._store, self._address = open_store("127.0.0.1")
        stage, of_gloo = self, collectives._GroupFactory.group

        def group(factory: Any, name: str, rank: int, size: int, on_cuda: bool) -> Any:
            if not on_cuda:
                return of_gloo(factory, name, rank, size, False)
            made = SimpleNamespace(num_sums=0, abort=lambda: None)

            def allreduce(tensors: list[torch.Tensor]) -> Any:
                made.num_sums += 1
                return SimpleNamespace(wait=lambda: None)

            made.allreduce = allreduce
            stage.nccl_groups.append(made)
            return made

        def buffers(groups: RankGroups, sockets: dict[int, Any]) -> PeerBuffers | str:
            assert set(sockets) == {1 - groups.tp_rank}
            return reason or PeerBuffers.__new__(PeerBuffers)

        monkeypatch.setattr(collectives._GroupFactory, "group", group)
        monkeypatch.setattr(collectives, "_card", lambda device: cards[device.index])
        monkeypatch.setattr(collectives, "OneShotSums", StandInSums)
        monkeypatch.setattr(RankGroups, "_buffers", buffers)

    def form(self, rank: int, *, tp: int = 2, hosts: tuple[str, str] = ("here", "here")) -> RankGroups:
        store: Store = find_store(self._address)
        return RankGroups(
            store,
            tp=tp,
            pp=2 // tp,
            rank=rank,
            device=torch.device("cuda", rank),
            host="127.0.0.1",
            host_id=hosts[rank],
            trust=TRUST,
        )

    def together(self, act: Callable[[int], Any]) -> list[Any]:
        with ThreadPoolExecutor(2) as threads:
            return list(threads.map(act, range(2)))


def sums_of(groups: RankGroups) -> StandInSums:
    """What stands for the mapped memory of a rank that has it."""
    group = groups._layer_group
    assert isinstance(group, OneShotGroup)
    sums: Any = group._sums
    assert isinstance(sums, StandInSums)
    return sums


def on_card(num_elements: int) -> torch.Tensor:
    """A tensor that is not of a CPU, without contents."""
    return torch.empty(num_elements, device="meta")


def test_ranks_with_a_card_each_use_nccl_for_large_sums_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    stage = Stage(monkeypatch, TWO_CARDS)
    first, second = stage.together(stage.form)
    sums = sums_of(first)
    assert len(stage.nccl_groups) == 2
    for num_bytes, expected in ((8, (1, 0)), (512 << 10, (2, 0)), ((512 << 10) + 4, (2, 1))):
        first.all_reduce(on_card(num_bytes // 4))
        assert (sums.num_sums, sum(each.num_sums for each in stage.nccl_groups)) == expected
    assert first.adds_in_order
    for groups in (first, second):
        groups.close()
    assert sums.is_closed


def test_ranks_that_share_a_card_have_no_nccl(monkeypatch: pytest.MonkeyPatch) -> None:
    stage = Stage(monkeypatch, ONE_CARD)
    groups = stage.together(stage.form)
    assert stage.nccl_groups == []
    for each in groups:
        each.all_reduce(torch.zeros(1 << 20))
        assert sums_of(each).num_sums == 1
    tokens = [torch.tensor([3, 4], dtype=torch.int32) for _ in groups]
    for each, its in zip(groups, tokens, strict=True):
        each.broadcast(its)
    assert [its.tolist() for its in tokens] == [[3, 4], [0, 0]], "to which the first rank's are added"
    gathered = groups[0].gather_columns(torch.zeros(2, 3), [3, 2])
    assert gathered.tolist() == [[0, 0, 0, 1, 1]] * 2
    rows = stage.together(
        lambda rank: groups[rank].exchange([torch.full((1, 2), 10 * rank + to) for to in (0, 1)], [1, 1])
    )
    assert [[row.tolist() for row in of_rank] for of_rank in rows] == [
        [[[0, 0]], [[10, 10]]],
        [[[1, 1]], [[11, 11]]],
    ]
    assert stage.together(lambda rank: groups[rank].agree(rank == 0)) == [False, False]
    groups[0].close()
    groups[1].close()


def test_a_rank_that_leaves_is_found_by_the_check(monkeypatch: pytest.MonkeyPatch) -> None:
    from channel_process import eventually

    stage = Stage(monkeypatch, ONE_CARD)
    first, second = stage.together(stage.form)
    second.check()
    first.close()
    sums = sums_of(second)
    eventually(lambda: sums.ended == [0], "the end of rank 0")
    with pytest.raises(RankDiedError, match="rank 0"):
        second.check()
    second.close()


def test_without_mapped_memory_nccl_adds_up_everything(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "tandem.rank")
    stage = Stage(monkeypatch, TWO_CARDS, "no native atomics")
    groups = stage.together(stage.form)
    groups[0].all_reduce(on_card(4))
    assert sum(each.num_sums for each in stage.nccl_groups) == 1
    assert "stage 0 adds up by NCCL alone: no native atomics" in caplog.messages
    for each in groups:
        each.check()
        each.close()


def test_ranks_that_share_a_card_and_cannot_map_memory_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    stage = Stage(monkeypatch, ONE_CARD, "cuIpcGetMemHandle: CUDA_ERROR_NOT_SUPPORTED")

    def refused(rank: int) -> None:
        with pytest.raises(WorkerError, match=r"share a card.*NOT_SUPPORTED.*give each rank"):
            stage.form(rank)

    stage.together(refused)


def test_stages_that_share_a_card_pass_hidden_states_through_host_memory(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for cards, num_nccl in ((ONE_CARD, 0), (TWO_CARDS, 2)):
        stage = Stage(monkeypatch, cards)
        groups = stage.together(functools.partial(stage.form, tp=1))
        assert len(stage.nccl_groups) == num_nccl
        for each in groups:
            each.close()


@pytest.mark.parametrize(("tp", "is_ordered"), [(2, True), (3, False)])
def test_more_than_two_addends_need_one_order(tp: int, is_ordered: bool) -> None:
    groups = RankGroups(None, tp=1, pp=1, rank=0, device=torch.device("cpu"), host="")
    assert groups.adds_in_order
    groups.tp = tp
    assert groups.adds_in_order == is_ordered
