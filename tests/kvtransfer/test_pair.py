"""Pairs across processes, on the CPU through gloo: the code that NCCL uses where there is CUDA."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from channel_process import (
    LAYOUT,
    SETTINGS,
    BeTarget,
    BeWriter,
    RankProcess,
    RankProcesses,
    RemoteError,
    Setup,
    TargetEnd,
    WriterEnd,
    eventually,
    landed,
    piece_of,
)
from channel_process import WRITER as REPLICA
from trust_files import FILES, TRUST

from benchmarks.drawn_trust import draw_trust
from kvtransfer.blocks.checksum import checksum
from kvtransfer.blocks.pool import HostPool
from kvtransfer.common.faults import FaultRule, Faults
from kvtransfer.errors import PathError, PeerGoneError, PushStoppedError, TransferError
from kvtransfer.messages import RankEndpoints, Shard
from kvtransfer.protocol.gate import OpenedLanding
from kvtransfer.transfer_orders import BlockMove, Lane
from kvtransfer.transports import gloo, nccl
from kvtransfer.transports.base import TargetRank, WriterRank
from kvtransfer.transports.pair_group import TARGET, WRITER, form_pair, open_store

SHARD = LAYOUT.shard
NUM_BLOCKS = 40
MOVES = [(3, 7), (0, 5), (1, 6), (9, 0), (8, 33)]


def setup(shard: Shard = SHARD, seed: int = 0, device: str = "cpu", **settings: object) -> Setup:
    return Setup("gloo", shard, NUM_BLOCKS, seed, device, FILES, **settings)  # type: ignore[arg-type]


class Ends(ExitStack):
    """Closes what a test opens, the last opened first."""

    def __init__(self, processes: RankProcesses) -> None:
        super().__init__()
        self.processes = processes


@pytest.fixture(scope="module")
def processes() -> Iterator[RankProcesses]:
    with closing(RankProcesses()) as processes:
        yield processes


@pytest.fixture
def ends(processes: RankProcesses) -> Iterator[Ends]:
    with Ends(processes) as ends:
        yield ends


def target_here(ends: Ends, be: Setup | None = None) -> TargetEnd:
    return ends.enter_context(closing(TargetEnd(be or setup())))


def target_process(ends: Ends, be: Setup | None = None) -> RankProcess:
    return ends.enter_context(ends.processes.take(BeTarget(be or setup())))


def writer_process(ends: Ends, be: Setup | None = None) -> RankProcess:
    return ends.enter_context(ends.processes.take(BeWriter(be or setup(seed=1))))


def writer_here(ends: Ends, be: Setup | None = None) -> WriterEnd:
    return ends.enter_context(closing(WriterEnd(be or setup(seed=1))))


def gloo_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("gloo-")]


# ------------------------------------------------------------------------------------------- bytes


@pytest.mark.parametrize("device", ["cpu", "host"])
@pytest.mark.parametrize(
    ("target_shard", "writer_shard", "piece"),
    [
        (SHARD, SHARD, SHARD),
        (Shard(0, 4, 0, 2), Shard(2, 4, 0, 4), Shard(2, 4, 0, 2)),
        (Shard(1, 3, 1, 4), Shard(0, 4, 2, 3), Shard(1, 3, 2, 3)),
    ],
)
def test_the_piece_lands_and_nothing_else(
    ends: Ends, target_shard: Shard, writer_shard: Shard, piece: Shard, device: str
) -> None:
    target = target_here(ends, setup(target_shard, seed=2, device=device))
    writer = writer_process(ends, setup(writer_shard, seed=1, device=device))
    connected = writer.connect(target.address, target_shard, piece)
    assert connected.device == "lo"
    assert connected.gb_s > 0
    landing_id = target.open(*(dst for _, dst in MOVES))
    sums = writer.push(landing_id, MOVES)
    assert np.array_equal(target.data(), landed(target.setup, writer.setup, piece, MOVES))
    sources = piece_of(writer.setup.content(), writer_shard, piece)
    assert list(sums) == [checksum(sources[src].tobytes()) for src, _ in MOVES]


def test_many_messages_keep_their_order(ends: Ends, monkeypatch: pytest.MonkeyPatch) -> None:
    """More messages than there are staging areas, of different sizes; a block written twice holds the later
    piece. The target unpacks so slowly that the next message has long arrived."""
    scatter = HostPool.scatter

    def scatter_late(*arguments: Any) -> None:
        threading.Event().wait(0.01)
        scatter(*arguments)

    monkeypatch.setattr(HostPool, "scatter", scatter_late)
    monkeypatch.setattr("kvtransfer.transports.pair.staging_bytes", lambda num_bytes, _: 3 * num_bytes)
    monkeypatch.setattr("kvtransfer.transports.base.SCRATCH_BYTES", 100)
    target, writer = target_here(ends, setup(device="host")), writer_here(ends)
    writer.connect(target.address, SHARD, SHARD)
    landing_id = target.open(*range(NUM_BLOCKS))
    generator = np.random.default_rng(4)
    moves = [(int(src), int(dst)) for src, dst in generator.integers(0, NUM_BLOCKS, (200, 2))]
    for start, end in ((0, 7), (7, 107), (107, 200)):
        writer.push(landing_id, moves[start:end])
    assert np.array_equal(target.data(), landed(target.setup, writer.setup, SHARD, moves))


def test_two_pairs_at_once_do_not_mix(ends: Ends) -> None:
    target = target_here(ends)
    low, high = Shard(0, 2, 0, 4), Shard(2, 4, 0, 4)
    writers = [writer_process(ends, setup(shard, seed)) for shard, seed in ((low, 1), (high, 2))]
    for writer in writers:
        writer.connect(target.address, SHARD, writer.setup.shard)
    landing_id = target.open(*range(NUM_BLOCKS))
    moves = [(number, NUM_BLOCKS - 1 - number) for number in range(NUM_BLOCKS)]
    for _ in range(5):
        for writer in writers:
            writer.start_push(landing_id, moves)
        for writer in writers:
            writer.end_push()
    expected = landed(target.setup, writers[0].setup, low, moves)
    piece_of(expected, SHARD, high)[:] = piece_of(
        landed(target.setup, writers[1].setup, high, moves), SHARD, high
    )
    assert np.array_equal(target.data(), expected)


# --------------------------------------------------------------------------------- landings, aborts


def test_a_closed_landing_takes_nothing_and_the_pair_goes_on(ends: Ends) -> None:
    target, writer = target_here(ends), writer_process(ends)
    writer.connect(target.address, SHARD, SHARD)
    closed, partial = target.open(1), target.open(2)
    target.gate.close(closed)
    for landing_id, moves in ((closed, [(1, 1)]), (partial, [(1, 2), (1, 3)])):
        with pytest.raises(RemoteError, match=r"PushStoppedError: .*does not accept"):
            writer.push(landing_id, moves)
    assert not target.data().any()
    assert writer.push(target.open(4), [(2, 4)])
    assert np.array_equal(target.data(), landed(target.setup, writer.setup, SHARD, [(2, 4)]))


def test_a_landing_that_closes_while_its_bytes_come_takes_none(
    ends: Ends, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Closed after the target has looked it up, before it puts the bytes into the pool."""
    target, writer = target_here(ends), writer_here(ends)
    writer.connect(target.address, SHARD, SHARD)
    landing_id = target.open(1)
    find = target.gate.find

    def find_and_close(*arguments: Any) -> OpenedLanding | None:
        landing = find(*arguments)
        target.gate.close(landing_id)
        return landing

    monkeypatch.setattr(target.gate, "find", find_and_close)
    with pytest.raises(PushStoppedError, match="does not accept"):
        writer.push(landing_id, [(1, 1)])
    assert not target.data().any()


def test_a_stopped_push_ends_and_the_pair_is_used_again(ends: Ends) -> None:
    target, writer = target_here(ends), writer_here(ends)
    writer.connect(target.address, SHARD, SHARD)
    landing_id = target.open(1)
    with pytest.raises(PushStoppedError):
        writer.channel.write(landing_id, [BlockMove(1, 1, 1)], lambda: True)
    writer.channel.drain()
    target.gate.close(landing_id)
    writer.push(target.open(2), [(2, 2)])
    assert np.array_equal(target.data(), landed(target.setup, writer.setup, SHARD, [(2, 2)]))


def test_a_flipped_bit_shows_in_the_sum(ends: Ends, tmp_path: Path) -> None:
    rule = FaultRule("push.corrupt", "corrupt", str(tmp_path / "marker"))
    target, writer = target_here(ends), writer_process(ends, setup(seed=1, faults=(rule,)))
    writer.connect(target.address, SHARD, SHARD)
    first, second = writer.push(target.open(1, 2), [(1, 1), (2, 2)])
    assert target.pool.sums([2], SHARD) == [second]
    assert target.pool.sums([1], SHARD) != [first] == [checksum(writer.setup.content()[1].tobytes())]


# ------------------------------------------------------------------------------------------- deaths


@pytest.mark.parametrize("after", [1, 3])
def test_a_writer_killed_in_the_middle_leaves_a_target_that_serves_the_next(
    ends: Ends, tmp_path: Path, after: int
) -> None:
    rule = FaultRule("push.half", "kill", str(tmp_path / "marker"), after)
    target = target_here(ends)
    writer = writer_process(ends, setup(seed=1, faults=(rule,)))
    writer.connect(target.address, SHARD, SHARD)
    writer.start_push(target.open(*(dst for _, dst in MOVES)), MOVES)
    writer.await_state("Z")
    eventually(lambda: gloo_threads() == ["gloo-listen"], "the end of its threads")
    done = MOVES[: after - 1]
    assert np.array_equal(target.data(), landed(target.setup, writer.setup, SHARD, done))
    following = writer_process(ends)
    following.connect(target.address, SHARD, SHARD)
    following.push(target.open(11), [(4, 11)])
    assert np.array_equal(target.data(), landed(target.setup, writer.setup, SHARD, [*done, (4, 11)]))


def test_a_writer_stopped_in_the_middle_holds_nobody(ends: Ends, tmp_path: Path) -> None:
    """Its landing closes, others move, and what it sends when it runs again is dropped."""
    rule = FaultRule("push.half", "stop", str(tmp_path / "marker"))
    target = target_here(ends)
    stopped = writer_process(ends, setup(seed=1, faults=(rule,)))
    stopped.connect(target.address, SHARD, SHARD)
    landing_id = target.open(1)
    stopped.start_push(landing_id, [(1, 1)])
    stopped.await_state("T")
    target.gate.close(landing_id)
    other = writer_process(ends, setup(seed=5))
    other.connect(target.address, SHARD, SHARD)
    other.push(target.open(1), [(1, 1)])
    stopped.signal(signal.SIGCONT)
    with pytest.raises(RemoteError, match=r"PushStoppedError: .*does not accept"):
        stopped.end_push()
    assert np.array_equal(target.data(), landed(target.setup, other.setup, SHARD, [(1, 1)]))
    stopped.push(target.open(2), [(2, 2)])


def test_a_target_closes_while_its_writer_is_stopped_in_the_middle(ends: Ends, tmp_path: Path) -> None:
    rule = FaultRule("push.half", "stop", str(tmp_path / "marker"))
    target = TargetEnd(setup())
    writer = writer_process(ends, setup(seed=1, faults=(rule,)))
    writer.connect(target.address, SHARD, SHARD)
    writer.start_push(target.open(1), [(1, 1)])
    writer.await_state("T")
    target.close()
    assert "gloo-receive" not in gloo_threads()
    writer.signal(signal.SIGCONT)
    with pytest.raises(RemoteError, match="PeerGoneError"):
        writer.end_push()


def test_a_killed_target_ends_a_push_and_a_new_one_takes_its_place(ends: Ends) -> None:
    target, writer = target_process(ends), writer_here(ends)
    writer.connect(target.address, SHARD, SHARD)
    landing_id = target.open(1)
    target.signal(signal.SIGKILL)
    target.await_state("Z")
    eventually(lambda: writer.lost, "the loss")
    with pytest.raises(PeerGoneError):
        writer.push(landing_id, [(1, 1)])
    writer.close()
    following = target_process(ends)
    writer.connect(following.address, SHARD, SHARD)
    writer.push(following.open(1), [(1, 1)])
    assert np.array_equal(following.data(), landed(following.setup, writer.setup, SHARD, [(1, 1)]))


@pytest.mark.parametrize("end", ["interrupt", "stop", "kill"])
def test_a_stopped_target_is_left_by_whoever_may_leave(ends: Ends, end: str) -> None:
    """A push that hangs at a stopped target ends by an interrupt, by its stop, or by the target's death."""
    target, writer = target_process(ends), writer_here(ends)
    writer.connect(target.address, SHARD, SHARD)
    landing_id = target.open(*range(NUM_BLOCKS))
    target.signal(signal.SIGSTOP)
    target.await_state("T")
    is_stopped, failed = threading.Event(), []
    moves = [BlockMove(number % NUM_BLOCKS, number % NUM_BLOCKS, 0) for number in range(1000)]

    def push() -> None:
        try:
            writer.channel.write(landing_id, moves, is_stopped.is_set)
        except TransferError as error:
            failed.append(error)

    pushing = threading.Thread(target=push)
    pushing.start()
    pushing.join(0.3)
    assert pushing.is_alive()
    if end == "interrupt":
        writer.channel.interrupt("for the test")
    elif end == "stop":
        is_stopped.set()
    else:
        target.signal(signal.SIGKILL)
    pushing.join(30)
    assert isinstance(failed[0], PeerGoneError | PushStoppedError)
    writer.close()
    assert "gloo-send" not in gloo_threads()
    assert len(writer.lost) == (end == "kill")


def test_interrupting_twice_and_closing_leaves_no_thread(ends: Ends) -> None:
    target, writer = TargetEnd(setup()), writer_here(ends)
    writer.connect(target.address, SHARD, SHARD)
    writer.push(target.open(1), [(1, 1)])
    for _ in range(2):
        writer.channel.interrupt()
    with pytest.raises(PeerGoneError):
        writer.push(target.open(2), [(2, 2)])
    writer.close()
    target.close()
    eventually(lambda: gloo_threads() == [], "the end of all threads")
    assert writer.lost == []


def test_a_process_that_ends_its_pair_exits_in_good_order(ends: Ends) -> None:
    """Whichever side is first: an abort that still ran would end the process by a signal."""
    target, writer = RankProcess(), RankProcess()
    target.be(BeTarget(setup()))
    writer.be(BeWriter(setup(seed=1)))
    writer.connect(target.address, SHARD, SHARD)
    assert target.close() == 0
    writer.leave()
    writer.connect(target_here(ends).address, SHARD, SHARD)
    assert writer.close() == 0


# ------------------------------------------------------------------------------------------ opening


def test_pairs_are_for_memory_of_their_kind(ends: Ends) -> None:
    target = target_here(ends)
    pool = setup().pool()
    lane = Lane(RankEndpoints(0, SHARD, "here", ()), SHARD)
    rank = TargetRank(0, (pool,), target.gate, TRUST, SETTINGS)
    writer = WriterRank(REPLICA, 0, pool, TRUST, Faults(), SETTINGS)
    assert nccl.listen(rank) is None
    with pytest.raises(PathError, match="not for KV on cpu"):
        nccl.connect(writer, lane, target.address, bytes(16), lambda _: None)
    pool.device = "cuda:0"
    assert gloo.listen(rank) is None
    with pytest.raises(PathError, match="not for KV on cuda:0"):
        gloo.connect(writer, lane, target.address, bytes(16), lambda _: None)


def test_the_wrong_secret_or_piece_is_refused(ends: Ends) -> None:
    target = target_here(ends)
    stranger = writer_here(ends, Setup("gloo", SHARD, NUM_BLOCKS, 1, "cpu", draw_trust()))
    with pytest.raises(TransferError, match="secret"):
        stranger.connect(target.address, SHARD, SHARD)
    with pytest.raises(PathError, match="refused by the target"):
        writer_here(ends).connect(target.address, SHARD, Shard(0, 5, 0, 4))
    with pytest.raises(PathError, match="refused"):
        writer_here(ends).connect("127.0.0.1:9", SHARD, SHARD)


def test_a_pair_of_which_one_does_not_come_fails_with_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvtransfer.transports.pair_group.FORM_TIMEOUT_S", 0.2)
    store, address = open_store("127.0.0.1")
    with pytest.raises(PathError, match="no pair within"):
        form_pair(gloo.GlooPair, store, TARGET, "cpu", "127.0.0.1")
    with pytest.raises(PathError, match="gloo: "):
        form_pair(gloo.GlooPair, "127.0.0.1:9", WRITER, "cpu", "127.0.0.1")
    with pytest.raises(PathError, match="no store on"):
        open_store("203.0.113.7")
    assert address.startswith("127.0.0.1:")
