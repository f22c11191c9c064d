"""The collectives between ranks: sums, logits, hidden states and tokens, and what a dead rank does to them.

Groups belong to no process, so that the ranks of most tests are threads.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from child_processes import killed_on_error
from parallel_ranks import CPU, HOST
from torch import Tensor
from torch.distributed.distributed_c10d import PrefixStore, Store

from kvtransfer.blocks.layout import layers_of_copy
from kvtransfer.rpc.trust import Trust
from workers.errors import RankDiedError
from workers.rank import given_blocks
from workers.rank.collectives import RankGroups, find_store, open_store
from workers.rank.device_queue import CpuQueue
from workers.rank.given_blocks import BlockGiver
from workers.rank.progress import Progress

# Forms the given groups one after another, then does nothing until its input ends.
IDLE_RANKS = """
import json, sys, torch
from torch.distributed.distributed_c10d import PrefixStore
from kvtransfer.rpc.trust import Trust
from workers.rank.collectives import RankGroups
from workers.rank.collectives import find_store
store, cpu = find_store(sys.argv[1]), torch.device("cpu")
made = [
    RankGroups(PrefixStore(name, store), tp=tp, pp=pp, rank=rank, device=cpu, host="127.0.0.1",
               host_id=sys.argv[3], trust=Trust.of(b"the ranks' own secret"))
    for name, tp, pp, rank in json.loads(sys.argv[2])
]
print("formed", flush=True)
sys.stdin.read()
"""


class _Links:
    """Whether the ranks share memory ("here") or speak through gloo ("")."""

    host_id = ""


@pytest.fixture(scope="module", params=["", "here"], ids=["gloo", "local"], autouse=True)
def links(request: pytest.FixtureRequest) -> str:
    _Links.host_id = request.param
    return _Links.host_id


@pytest.fixture
def address() -> Iterator[str]:
    store, address = open_store(HOST)
    yield address
    del store


def _groups(store: Store, tp: int, pp: int, rank: int) -> RankGroups:
    return RankGroups(
        store,
        tp=tp,
        pp=pp,
        rank=rank,
        device=CPU,
        host=HOST,
        host_id=_Links.host_id,
        trust=Trust.of(b"the ranks' own secret"),
    )


def _together(address: str, tp: int, pp: int, act: Callable[[RankGroups], Any]) -> list[Any]:
    """Run `act` on every rank's groups, each in a thread; the results in rank order. Who fails closes his
    groups, which ends the others; else all close when all are done: what was sent last may be under way."""
    all_done = threading.Barrier(tp * pp)

    def live(rank: int) -> Any:
        groups = _groups(find_store(address), tp, pp, rank)
        try:
            result = act(groups)
            all_done.wait()
        except BaseException:
            all_done.abort()
            raise
        finally:
            groups.close()
        return result

    with ThreadPoolExecutor(tp * pp) as threads:
        return list(threads.map(live, range(tp * pp)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tp", [2, 3, 4])
def test_a_sum_is_equal_on_all_ranks_whatever_its_size(address: str, tp: int, dtype: torch.dtype) -> None:
    """Below and above the size at which the way changes."""
    shapes = [(1, 7), (3, 33), (16, 512), (1200, 1000)]
    generator = torch.Generator().manual_seed(1)
    parts = [[torch.randn(shape, generator=generator).to(dtype) for shape in shapes] for _ in range(tp)]
    exact = [torch.stack([part[i].double() for part in parts]).sum(0) for i in range(len(shapes))]

    def add_up(groups: RankGroups) -> list[Tensor]:
        for tensor in parts[groups.tp_rank]:
            groups.all_reduce(tensor)
        return parts[groups.tp_rank]

    ranks = _together(address, tp, 1, add_up)
    rounding = 2.0 ** (-7 if dtype == torch.bfloat16 else -22)
    for i, expected in enumerate(exact):
        assert all(torch.equal(sums[i], ranks[0][i]) for sums in ranks)
        torch.testing.assert_close(ranks[0][i].double(), expected, rtol=rounding, atol=4 * rounding)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_is_added_up_in_the_order_of_ranks_alone_or_among_others(
    address: str, links: str, dtype: torch.dtype
) -> None:
    """Where ranks share memory, as `engine.deterministic` needs it of more than two."""
    tp, width = 4, 96
    scales = [1.0, 1e4, -1e4, 1e-2]
    generator = torch.Generator().manual_seed(2)
    rows = [(torch.randn(30_000, width, generator=generator) * scale).to(dtype) for scale in scales]
    expected = (((rows[0].float() + rows[1].float()) + rows[2].float()) + rows[3].float()).to(dtype)

    def add_up(groups: RankGroups) -> tuple[Tensor, Tensor, bool]:
        alone, together = rows[groups.tp_rank][7:8].clone(), rows[groups.tp_rank].clone()
        for tensor in (alone, together):
            groups.all_reduce(tensor)
        return alone, together, groups.adds_in_order

    for alone, together, is_ordered in _together(address, tp, 1, add_up):
        assert is_ordered == (links == "here")
        if is_ordered:
            assert torch.equal(together, expected)
            assert torch.equal(alone, expected[7:8])


@pytest.mark.parametrize("tp", [2, 3])
def test_sums_of_a_few_float32_values_may_lie_between_those_of_the_model(address: str, tp: int) -> None:
    """As norms over all heads of a token need them: squares [num_rows, 2], of a model in bfloat16."""

    def add_up(groups: RankGroups) -> tuple[Tensor, Tensor]:
        first = torch.full((5, 64), 1.0 + groups.tp_rank, dtype=torch.bfloat16)
        # Above 2 ** 8 bfloat16 would round the units away.
        squares = torch.full((5, 2), 4096.0 + groups.tp_rank)
        for tensor in (first, squares):
            groups.all_reduce(tensor)
        return first, squares

    num_below = tp * (tp - 1) // 2
    for first, squares in _together(address, tp, 1, add_up):
        assert torch.equal(first, torch.full((5, 64), float(tp + num_below), dtype=torch.bfloat16))
        assert torch.equal(squares, torch.full((5, 2), 4096.0 * tp + num_below))


# Rows that each rank sends to each, among three: none, few, as many as fill no slot of shared memory and as
# fill several.
SENT = {
    "few": [[0, 3, 0], [1, 0, 7], [0, 0, 0]],
    "nothing": [[0] * 3] * 3,
    "many": [[0, 2100, 5], [300, 0, 1], [4500, 2, 0]],
}


@pytest.mark.parametrize("are_known", [True, False])
@pytest.mark.parametrize("sent", SENT)
def test_rows_go_to_the_ranks_that_they_are_for(address: str, sent: str, are_known: bool) -> None:
    counts, num_columns = SENT[sent], 1001

    def rows(rank: int, other: int) -> Tensor:
        generator = torch.Generator().manual_seed(10 * rank + other)
        return torch.randn(counts[rank][other], num_columns, generator=generator)

    def exchange(groups: RankGroups) -> tuple[list[Tensor], int, Tensor]:
        rank = groups.tp_rank
        received = [of_rank[rank] for of_rank in counts] if are_known else None
        found = groups.exchange([rows(rank, other) for other in range(3)], received)
        num_bytes = groups.num_exchanged_bytes
        ones = torch.ones(4, 4)
        groups.all_reduce(ones)
        own = torch.full((2 + rank, 5), float(rank), dtype=torch.bfloat16)
        found += groups.exchange([own] * 3, [2, 3, 4])
        return found, num_bytes, ones

    for rank, (found, num_bytes, ones) in enumerate(_together(address, 3, 1, exchange)):
        for other in range(3):
            assert torch.equal(found[other], rows(other, rank))
            assert torch.equal(found[3 + other], torch.full((2 + other, 5), other).bfloat16())
        assert num_bytes == 4 * num_columns * sum(counts[rank])
        assert torch.equal(ones, torch.full((4, 4), 3.0)), "a sum may follow"


@pytest.mark.parametrize(("tp", "num_layers"), [(2, 5), (4, 6), (3, 2)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_blocks_that_landed_in_parts_are_whole_at_all_ranks(
    address: str, tp: int, num_layers: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also with more ranks than layers, and in several exchanges; other blocks stay."""
    generator = torch.Generator().manual_seed(2)
    whole = torch.randn(9, num_layers, 1, 1, 16, 6, generator=generator).to(dtype)
    given = [7, 0, 3]
    monkeypatch.setattr(given_blocks, "_PIECE_BYTES", 2 * whole[0].nbytes)

    def give(groups: RankGroups) -> Tensor:
        own = layers_of_copy(num_layers, groups.tp_rank, tp)
        kv = torch.full_like(whole, groups.tp_rank)
        kv[given, own.start : own.stop] = whole[given, own.start : own.stop]
        BlockGiver(kv, groups, Progress(CpuQueue())).give(given)
        return kv

    for rank, kv in enumerate(_together(address, tp, 1, give)):
        assert torch.equal(kv[given], whole[given])
        assert bool((kv[[1, 2, 4, 5, 6, 8]] == rank).all())


def test_columns_of_unlike_widths_are_joined_at_the_first_rank(address: str) -> None:
    whole = torch.arange(5 * 11.0).view(5, 11)
    columns = [whole[:, :3], whole[:, 3:4], whole[:, 4:]]

    def gather(groups: RankGroups) -> Tensor | None:
        return groups.gather_columns(columns[groups.tp_rank], [3, 1, 7])

    joined, *others = _together(address, 3, 1, gather)
    assert torch.equal(joined, whole)
    assert others == [None, None]


@pytest.mark.parametrize(("tp", "pp"), [(1, 2), (2, 2), (1, 3), (2, 1)])
def test_hidden_states_and_tokens_arrive_in_order(address: str, tp: int, pp: int) -> None:
    """Many more steps than may be under way; a rank's first and last stages run steps apart."""
    num_steps = 40

    def hidden(step: int, tp_rank: int, stage: int) -> Tensor:
        return torch.full((1 + step % 5, 8), 100.0 * step + 10 * tp_rank + stage)

    def live(groups: RankGroups) -> list[list[int]]:
        for step in range(num_steps):
            if groups.is_first_stage and not groups.is_sampler:
                groups.expect_tokens(step, 1 + step % 3)
            if not groups.is_first_stage:
                into = torch.empty(1 + step % 5, 8)
                groups.receive_hidden(into)
                assert torch.equal(into, hidden(step, groups.tp_rank, groups.stage - 1))
            if not groups.is_last_stage:
                groups.send_hidden(hidden(step, groups.tp_rank, groups.stage))
            if groups.is_sampler:
                groups.send_tokens(step, np.arange(step, step + 1 + step % 3))
        if not groups.is_first_stage or groups.is_sampler:
            return []
        received = [groups.receive_tokens() for _ in range(num_steps)]
        assert [step for step, _ in received] == list(range(num_steps))
        return [tokens.tolist() for _, tokens in received]

    expected = [list(range(step, step + 1 + step % 3)) for step in range(num_steps)]
    ranks = _together(address, tp, pp, live)
    sampler = tp * (pp - 1)
    for rank, tokens in enumerate(ranks):
        assert tokens == (expected if rank < tp and rank != sampler else [])


@pytest.mark.parametrize(("tp", "pp"), [(2, 1), (1, 3), (2, 2)])
def test_all_ranks_agree_on_the_smallest_size(address: str, tp: int, pp: int) -> None:
    assert _together(address, tp, pp, lambda groups: groups.smallest(100 - 7 * groups.rank)) == [
        100 - 7 * (tp * pp - 1)
    ] * (tp * pp)


def test_one_rank_alone_forms_nothing() -> None:
    groups = RankGroups(None, tp=1, pp=1, rank=0, device=CPU, host="no such host")
    assert groups.is_first_stage
    assert groups.is_last_stage
    assert groups.is_sampler
    groups.close()


def test_nothing_listens_on_other_interfaces(address: str, links: str) -> None:
    before = _listening()
    all_formed = threading.Barrier(4)  # what listens while groups form has ended

    def listing(groups: RankGroups) -> set[tuple[Any, ...]]:
        all_formed.wait()
        return _listening()

    ours = set().union(*_together(address, 2, 2, listing)) - before
    if links:  # a listing while other sockets come and go may miss some that were there all the time
        ours -= _listening()
    assert bool(ours) == (not links), "gloo listens, ranks that share memory do not"
    assert {ip for ip, _ in ours} <= {HOST}


def _listening() -> set[tuple[Any, ...]]:
    """Where this process listens."""
    ends = psutil.Process().net_connections("tcp")
    return {(*end.laddr,) for end in ends if end.status == "LISTEN"}


class _IdleRanks:
    """A process that holds the counterparts of `made`: rank `other` of each (name, tp, pp, other)."""

    def __init__(self, store: Store, address: str, places: list[tuple[str, int, int, int]]) -> None:
        command = [sys.executable, "-c", IDLE_RANKS, address, json.dumps(places), _Links.host_id]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=Path(__file__).parents[2]
        )
        assert self.process.stdout is not None
        with killed_on_error(self.process):
            self.made = {
                name: _groups(PrefixStore(name, store), tp, pp, 1 - other) for name, tp, pp, other in places
            }
            assert self.process.stdout.readline() == b"formed\n"

    def end(self) -> None:
        self.process.kill()
        self.process.communicate()
        for groups in self.made.values():
            groups.close()


def _send_hidden(groups: RankGroups) -> None:
    for _ in range(10):
        groups.send_hidden(torch.ones(100_000, 8))


def _send_tokens(groups: RankGroups) -> None:
    for step in range(10):
        groups.send_tokens(step, np.arange(3))


def _receive_tokens(groups: RankGroups) -> None:
    groups.expect_tokens(0, 1)
    groups.receive_tokens()


# What rank 1 - other waits for, of a process that never does its part: (tp, pp, other) and how.
WAITS: dict[str, tuple[int, int, int, Callable[[RankGroups], object]]] = {
    "summing": (2, 1, 1, lambda groups: groups.all_reduce(torch.ones(100))),
    "summing much": (2, 1, 1, lambda groups: groups.all_reduce(torch.ones(1 << 20))),
    "gathering": (2, 1, 1, lambda groups: groups.gather_columns(torch.ones(3, 4), [4, 4])),
    "giving columns": (2, 1, 0, lambda groups: groups.gather_columns(torch.ones(3, 4), [4, 4])),
    "receiving hidden": (1, 2, 0, lambda groups: groups.receive_hidden(torch.ones(3, 4))),
    "sending hidden": (1, 2, 1, _send_hidden),
    "receiving tokens": (1, 2, 1, _receive_tokens),
    "sending tokens": (1, 2, 0, _send_tokens),
}


@pytest.fixture(scope="module")
def idle(links: str) -> Iterator[_IdleRanks]:
    store, address = open_store(HOST)
    places = [(name, *place[:3]) for name, place in WAITS.items()] + [("closing", 1, 2, 1)]
    ranks = _IdleRanks(store, address, places)
    yield ranks
    ranks.end()


def test_a_rank_that_stops_keeps_nobody_from_closing(idle: _IdleRanks) -> None:
    idle.process.send_signal(signal.SIGSTOP)
    groups = idle.made["closing"]
    groups.send_hidden(torch.ones(1_000_000, 8))
    groups.expect_tokens(0, 1)
    groups.close()


def test_a_rank_that_dies_is_an_error_wherever_it_is_waited_for(idle: _IdleRanks, links: str) -> None:
    # Between ranks of one host the kernel holds ids that nobody reads.
    acts = {name: act for name, (*_, act) in WAITS.items() if not (links and name == "sending tokens")}
    with ThreadPoolExecutor(len(WAITS)) as threads:
        waits = {name: threads.submit(act, idle.made[name]) for name, act in acts.items()}
        assert not any(wait.done() for wait in waits.values())
        idle.process.kill()
        for name, wait in waits.items():
            with pytest.raises(RankDiedError):
                wait.result()
            idle.made[name].close()
