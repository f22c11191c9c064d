"""The one-shot exchange: its arithmetic for drawn shapes with the ranks in turn, every way in which it may
wait, and two processes that run it at once, on one card or two, or over files and interpreted."""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
from import_path import import_path
from shared_buffers import FileDriver
from torch import Tensor

pytest.importorskip("triton", reason="triton is not installed (the extra gpu-tests)")

from one_shot_rank import form, parts

from benchmarks.rank_cards import own_card
from workers.errors import RankDiedError
from workers.model.cuda.one_shot_sums import (
    ENDED,
    MOST_PROGRAMS,
    PART_BYTES,
    PEER_ENDED,
    PEER_SILENT,
    REASON,
    buffer_bytes,
    exchange,
)
from workers.rank.peer_buffers import PeerBuffers

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
SCRIPT = ROOT / "tests" / "support" / "one_shot_rank.py"
FEW_POLLS = 3


class LockStep:
    """The ranks of a stage on one thread: all write, then all read."""

    def __init__(self, tp: int, device: torch.device) -> None:
        self.tp = tp
        size = buffer_bytes(tp)
        self.buffers = [torch.zeros(size, dtype=torch.uint8, device=device) for _ in range(tp)]
        self.bases = torch.tensor([each.data_ptr() for each in self.buffers]).to(device)
        self.controls = [torch.zeros(2, dtype=torch.int32).to(device) for _ in range(tp)]
        self.results: list[Tensor] = []

    def sums(self, given: list[Tensor], *, gathers: bool = False) -> list[Tensor]:
        """Exchange what is given at each rank; the results of each."""
        self.results = [each.new_empty((self.tp, len(each)) if gathers else len(each)) for each in given]
        for rank in range(self.tp):
            self.step(given, rank, gathers=gathers, reads=False)
        for rank in range(self.tp):
            self.step(given, rank, gathers=gathers, writes=False)
        return self.results

    def step(self, given: list[Tensor], rank: int, *, gathers: bool = False, **half: bool) -> None:
        exchange(
            given[rank], self.results[rank], self.bases, rank, self.controls[rank], FEW_POLLS,
            gathers=gathers, **half,
        )  # fmt: skip

    def words(self, rank: int) -> Tensor:
        """Counts, `broken` and flags of a rank."""
        return self.buffers[rank].view(torch.int32)

    def reason(self, rank: int) -> int:
        return int(self.controls[rank][REASON])


def drawn(seed: int, tp: int, num_elements: int, dtype: torch.dtype, device: torch.device) -> list[Tensor]:
    """Values of unlike sizes, whose sum depends on the order."""
    draw = torch.Generator().manual_seed(seed)
    if not dtype.is_floating_point:
        return [
            torch.randint(-999, 999, (num_elements,), generator=draw).to(device, dtype) for _ in range(tp)
        ]
    scales = [10.0 ** (rank % 3) for rank in range(tp)]
    return [(torch.randn(num_elements, generator=draw) * scale).to(dtype).to(device) for scale in scales]


def in_order(given: list[Tensor]) -> Tensor:
    """The sum in the order of ranks, in float32, rounded once. The interpreter cuts bfloat16 off instead."""
    if not given[0].is_floating_point():
        return torch.stack(given).sum(0).to(given[0].dtype)
    total = given[0].float()
    for each in given[1:]:
        total = total + each.float()
    if given[0].dtype == torch.bfloat16 and total.device.type == "cpu":
        total = (total.view(torch.int32) & -65536).view(torch.float32)
    return total.to(given[0].dtype)


# ------------------------------------------------------------------------------------------ arithmetic


@pytest.mark.parametrize("seed", range(8))
def test_every_rank_has_the_sum_in_the_order_of_ranks(device: torch.device, seed: int) -> None:
    """Over exchanges of several sizes and dtypes, whose programs count apart."""
    draw = np.random.default_rng(seed)
    ranks = LockStep(int(draw.integers(2, 9)), device)
    for number in range(4):
        dtype = (torch.float32, torch.bfloat16, torch.float16, torch.int32)[int(draw.integers(4))]
        most = PART_BYTES // dtype.itemsize if number == 2 and seed == 0 else 3000
        given = drawn(seed + number, ranks.tp, int(draw.integers(1, most + 1)), dtype, device)
        before = [each.clone() for each in given]
        gathers = bool(draw.integers(3) == 0)
        for result in ranks.sums(given, gathers=gathers):
            assert torch.equal(result, torch.stack(before) if gathers else in_order(before))
        assert [ranks.reason(rank) for rank in range(ranks.tp)] == [0] * ranks.tp


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_a_row_has_the_same_bits_alone_and_among_others(device: torch.device, dtype: torch.dtype) -> None:
    ranks, width = LockStep(3, device), 96
    rows = drawn(5, ranks.tp, 33 * width, dtype, device)
    together = ranks.sums(rows)[0].view(33, width)
    for row in (0, 7, 32):
        alone = ranks.sums([each.view(33, width)[row].contiguous() for each in rows])
        assert torch.equal(alone[1], together[row])


def test_a_result_may_replace_what_is_given(device: torch.device) -> None:
    ranks = LockStep(2, device)
    given = drawn(1, 2, 3000, torch.float32, device)
    expected = in_order(given)
    ranks.results = given
    for rank in (0, 1):
        ranks.step(given, rank, reads=False)
    for rank in (0, 1):
        ranks.step(given, rank, writes=False)
    assert torch.equal(given[0], expected)
    assert torch.equal(given[1], expected)


# -------------------------------------------------------------------------------------------- protocol


@pytest.mark.parametrize("start", [0, 2**31 - 2, -2])
def test_counts_may_wrap(device: torch.device, start: int) -> None:
    """As a graph does that is replayed for weeks."""
    ranks = LockStep(2, device)
    for rank in (0, 1):
        ranks.words(rank)[:MOST_PROGRAMS] = start
        flags = ranks.words(rank)[MOST_PROGRAMS + 32 :][: 2 * MOST_PROGRAMS]
        flags.fill_(start)
    for number in range(5):
        given = drawn(number, 2, 2000, torch.float32, device)
        assert torch.equal(ranks.sums(given)[number % 2], in_order(given))
    assert ranks.reason(0) == ranks.reason(1) == 0


def test_a_rank_may_be_one_exchange_ahead(device: torch.device) -> None:
    """It raises the flag of the next before the other has looked for the one before."""
    ranks = LockStep(2, device)
    first, second = (drawn(number, 2, 2000, torch.float32, device) for number in (1, 2))
    ranks.results = [torch.empty_like(each) for each in first]
    ranks.step(first, 0, reads=False)
    ranks.step(first, 1)
    ranks.step(second, 1, reads=False)
    ranks.step(first, 0, writes=False)
    assert torch.equal(ranks.results[0], in_order(first))
    ranks.step(second, 0)
    ranks.step(second, 1, writes=False)
    assert torch.equal(ranks.results[0], in_order(second))
    assert torch.equal(ranks.results[1], in_order(second))
    assert ranks.reason(0) == ranks.reason(1) == 0


def test_a_silent_rank_is_given_up_and_nothing_is_awaited_or_written_after(device: torch.device) -> None:
    ranks = LockStep(3, device)
    given = drawn(1, 3, 2000, torch.float32, device)
    ranks.results = [torch.empty_like(each) for each in given]
    ranks.step(given, 1, reads=False)
    ranks.step(given, 0)
    assert ranks.reason(0) == PEER_SILENT
    assert ranks.reason(1) == 0
    others = [ranks.buffers[rank].clone() for rank in (1, 2)]
    ranks.controls[0][REASON] = 0
    ranks.step(given, 0)
    assert ranks.reason(0) == PEER_SILENT, "it says so again"
    assert all(map(torch.equal, others, ranks.buffers[1:]))


def test_a_rank_that_has_ended_is_not_awaited(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = LockStep(2, device)
    given = drawn(1, 2, 100, torch.float32, device)
    ranks.results = [torch.empty_like(each) for each in given]
    ranks.controls[0][ENDED] = 1
    ranks.step(given, 1, reads=False)
    ranks.step(given, 0)
    assert ranks.reason(0) == 0, "it had written before it ended"
    monkeypatch.setattr(sys.modules[__name__], "FEW_POLLS", 1 << 20)
    ranks.step(given, 0)
    assert ranks.reason(0) == PEER_ENDED


Join = Callable[[int], list[dict[int, socket.socket]]]


@pytest.fixture
def join() -> Iterator[Join]:
    """What returns the sockets of each of so many ranks to each other."""
    with contextlib.ExitStack() as ends:

        def join(tp: int) -> list[dict[int, socket.socket]]:
            ranks: list[dict[int, socket.socket]] = [{} for _ in range(tp)]
            for rank, other in itertools.combinations(range(tp), 2):
                ranks[rank][other], ranks[other][rank] = map(ends.enter_context, socket.socketpair())
            return ranks

        yield join


@pytest.mark.parametrize("fails", ["", "export", "map", "check_atomics"])
@pytest.mark.parametrize("failing_rank", [0, 2])
def test_all_ranks_have_buffers_or_none(join: Join, tmp_path: Path, fails: str, failing_rank: int) -> None:
    """Whoever fails, and although it is late."""
    tp, late = 3, threading.Event()
    sockets = join(tp)
    drivers = [FileDriver(tmp_path, fails if rank == failing_rank else "") for rank in range(tp)]

    def form_rank(rank: int) -> PeerBuffers | str:
        if rank == failing_rank:
            late.wait()
        own = drivers[rank].allocate(str(rank), 64)
        own.fill_(rank)
        return PeerBuffers.form(drivers[rank], sockets[rank], own, rank)

    with ThreadPoolExecutor(tp) as threads:
        forming = [threads.submit(form_rank, rank) for rank in range(tp)]
        late.set()
        formed = [each.result() for each in forming]
    if fails:
        reason = f"rank {failing_rank} of the stage: {fails}: CUDA_ERROR_NOT_SUPPORTED"
        assert formed == [reason] * tp
        assert [driver.mapped for driver in drivers] == [[]] * tp
        return
    for each, driver in zip(formed, drivers, strict=True):
        assert isinstance(each, PeerBuffers)
        addresses = each.bases.tolist()
        assert [ctypes.string_at(address, 1) for address in addresses] == [b"\0", b"\1", b"\2"]
        assert len(driver.mapped) == tp - 1
        each.close()
        each.close()
        assert driver.mapped == []


def test_a_rank_that_ends_while_memory_is_shared_is_an_error(join: Join, tmp_path: Path) -> None:
    sockets = join(2)
    sockets[1][0].close()
    driver = FileDriver(tmp_path)
    with pytest.raises(RankDiedError, match="sharing memory with the stage's ranks"):
        PeerBuffers.form(driver, sockets[0], driver.allocate("0", 64), 0)


# ----------------------------------------------------------------------------------------- two processes


class OtherRank:
    """Rank 1, in a process of its own."""

    def __init__(self, folder: Path, device: torch.device, environment: Mapping[str, str]) -> None:
        env = {**os.environ, **environment, "PYTHONPATH": import_path(ROOT, ROOT / "tests" / "support")}
        self.process = subprocess.Popen(
            [
                sys.executable,
                str(ROOT / "tests" / "support" / "one_shot_rank.py"),
                str(folder),
                "1",
                str(device),
            ],
            env=env,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def start(self, num_elements: int) -> None:
        assert self.process.stdin is not None
        print(num_elements, file=self.process.stdin, flush=True)

    def await_line(self, line: str) -> None:
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == f"{line}\n"

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGCONT)
        self.process.communicate()


@pytest.fixture(params=["all cards", pytest.param("its own card", marks=pytest.mark.gpu)])
def other(request: pytest.FixtureRequest, tmp_path: Path, device: torch.device) -> Iterator[OtherRank]:
    """The rank sees all cards, or its own alone, as under Ray."""
    environment: dict[str, str] = {}
    if request.param == "its own card":
        if torch.cuda.device_count() < 2:
            pytest.skip("there is only one card")
        environment = own_card(1)
    other = OtherRank(tmp_path, device, environment)
    yield other
    other.close()


def test_two_processes_have_the_same_sums_until_one_is_killed(
    other: OtherRank, device: torch.device, tmp_path: Path
) -> None:
    group = form(tmp_path, 0, device)
    other.await_line("ready")
    for num_elements in (3, 5000, 1024, 300_000 if device.type == "cuda" else 9000):
        other.start(num_elements)
        for given in parts(num_elements, device):
            expected = in_order(given)
            group.all_reduce(given[0])
            assert torch.equal(given[0], expected)
        group.check()
        other.await_line("done")
    other.process.kill()
    given, _, _ = parts(5000, device)
    group.all_reduce(given[0])  # waits until the watch has seen the end
    if device.type == "cuda":
        torch.cuda.synchronize()
    with pytest.raises(RankDiedError, match="rank 1 of the stage has ended"):
        group.check()
    group.all_reduce(given[0])
    group.close()


@pytest.mark.gpu
def test_a_graph_of_sums_counts_on_with_each_replay(
    other: OtherRank, device: torch.device, tmp_path: Path
) -> None:
    group = form(tmp_path, 0, device)
    other.await_line("ready")
    other.start(4096)
    fixed = [[each.clone() for each in given] for given in parts(4096, device)]
    for given in fixed:
        group.all_reduce(given[0].clone())  # compiles
    other.await_line("done")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = [given[0].clone() for given in fixed]
        for result in results:
            group.all_reduce(result)
    for _ in range(20):
        other.start(4096)
        for result in results:
            result.zero_()
        graph.replay()
        torch.cuda.synchronize()
        for given, result in zip(fixed, results, strict=True):
            assert torch.equal(result, in_order(given))
        other.await_line("done")
    group.check()
    group.close()


def test_as_compiled_for_hopper_nothing_is_spilled(tmp_path: Path, device: torch.device) -> None:
    from hopper_compiler import compile_by_script

    kernels = compile_by_script(HERE / "compile_one_shot_sums.py", tmp_path)
    assert len(kernels) == 4
    for kernel in kernels:
        assert kernel["name"] == "_exchange_kernel"
        assert kernel["stack_bytes"] == 0
        assert kernel["programs"] >= 2, "all programs of two ranks are on the device at a time"
