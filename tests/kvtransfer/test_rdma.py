"""What only the rdma transport has: its fence against a writer that is cut off, packing, its reasons."""

from __future__ import annotations

import contextlib
import importlib.util
import signal
import socket
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np
import pytest
from agent_process import HOLD
from patience import WAIT_S
from transfer_harness import SHARD, Rank, TransferHarness, eventually, lane, settings

from kvtransfer.blocks.layout import Run
from kvtransfer.common.faults import FaultRule
from kvtransfer.errors import PathError
from kvtransfer.messages import Endpoint, Shard
from kvtransfer.transfer_orders import Lane, StopPush, TransferSettings
from kvtransfer.transfer_reports import PeerConnected, PushDone, PushFailed, PushStopped, WriterGone
from kvtransfer.transports.nixl import Region, load_nixl, network_devices
from kvtransfer.transports.registered_memory import Runs

FILL = 0xA5
needs_nixl = pytest.mark.skipif(
    not any(map(importlib.util.find_spec, ("nixl_cu13", "nixl_cu12"))),
    reason="needs NIXL: pip install '.[rdma]'",
)


@pytest.fixture(scope="module")
def processes() -> Iterator[TransferHarness]:
    harness = TransferHarness("rdma")
    yield harness
    harness.close()


@pytest.fixture
def harness(processes: TransferHarness) -> Iterator[TransferHarness]:
    with processes.one_test():
        yield processes


class Wire:
    """A relay before a rank's listener, which can cut the target's side and leave the writer's open."""

    def __init__(self, target: Rank) -> None:
        (endpoint,) = target.endpoints.endpoints
        host, _, port = endpoint.address.rpartition(":")
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._target = socket.create_connection((host, int(port)))
        self._writer: socket.socket | None = None
        self.writer_gave_up = threading.Event()
        self._threads = [threading.Thread(target=self._serve)]
        self._threads[0].start()
        relayed = Endpoint("rdma", f"127.0.0.1:{self._listener.getsockname()[1]}")
        self.lane = Lane(msgspec.structs.replace(target.endpoints, endpoints=(relayed,)), SHARD)

    def cut(self) -> None:
        """To the target the writer is gone; the writer notices nothing."""
        self._target.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        for sock in (self._target, self._writer):
            if sock is not None:
                with contextlib.suppress(OSError):
                    sock.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join(WAIT_S)
        for sock in (self._target, self._writer, self._listener):
            if sock is not None:
                sock.close()

    def _serve(self) -> None:
        self._writer, _ = self._listener.accept()
        back = threading.Thread(target=self._relay, args=(self._target, self._writer))
        self._threads.append(back)
        back.start()
        self._relay(self._writer, self._target)
        self.writer_gave_up.set()

    def _relay(self, source: socket.socket, sink: socket.socket) -> None:
        """Bytes, but not their end."""
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                sink.sendall(data)


@needs_nixl
def test_a_writer_that_is_cut_off_cannot_write_once_it_counts_as_gone(
    harness: TransferHarness, tmp_path: Path
) -> None:
    """It is alive, holds an open agent of its own, and goes on in the middle of a block."""
    target = harness.target()
    writer = harness.writer(faults=[FaultRule("push.half", HOLD, str(tmp_path / "marker"))])
    wire = Wire(target)
    try:
        connection_id = writer.connect([wire.lane], "rdma")
        writer.reports.take(PeerConnected)
        landing_id = target.open(writer, 1, 2)
        writer.push(1, connection_id, landing_id, [(1, 1), (2, 2)])
        eventually((tmp_path / "marker").exists, "the middle of the first block")
        np.testing.assert_array_equal(target.pool[1, :100], writer.pool[1, :100])
        wire.cut()
        assert target.reports.take(WriterGone).writer == writer.identity
        target.pool[:] = FILL
        (tmp_path / "marker.go").touch()
        eventually(
            lambda: wire.writer_gave_up.is_set() or not bool((target.pool == FILL).all()),
            "the writer's giving up",
        )
        assert not writer.reports.has(PushFailed)  # it has no proof yet that nothing it sent arrives later
    finally:
        wire.close()
    writer.reports.take(PushFailed)
    assert (target.pool == FILL).all()


@needs_nixl
def test_a_stop_is_not_answered_while_written_bytes_lie_in_a_stopped_targets_socket(
    harness: TransferHarness, tmp_path: Path
) -> None:
    process = harness.victim()
    target = harness.target(process)
    writer = harness.writer(faults=[FaultRule("push.half", HOLD, str(tmp_path / "marker"))])
    connection_id = writer.connected(target, "rdma")
    landing_id = target.open(writer, 1, 2)
    writer.push(1, connection_id, landing_id, [(1, 1), (2, 2)])
    eventually((tmp_path / "marker").exists, "the middle of the first block")
    process.signal(signal.SIGSTOP)
    process.await_state("T")
    writer.handle(StopPush(landing_id))
    (tmp_path / "marker.go").touch()
    # Another connection of the same rank goes on meanwhile, and shows that time has passed for the first.
    other = harness.target()
    writer.move(other, other_connection(writer, other), 2, [(5, 5)])
    assert not writer.reports.has(PushStopped)
    process.signal(signal.SIGCONT)
    writer.reports.take(PushStopped)
    target.pool[:] = FILL
    writer.move(target, connection_id, 3, [(7, 7)])
    assert (np.delete(target.pool, 7, axis=0) == FILL).all()


def other_connection(writer: Rank, target: Rank) -> bytes:
    connection_id = writer.connect([lane(target)], "rdma")
    writer.reports.take(PeerConnected)
    return connection_id


@needs_nixl
@pytest.mark.parametrize("is_device", [False, True])
def test_short_runs_are_packed_and_land_the_same(harness: TransferHarness, is_device: bool) -> None:
    """Heads 1 to 3 of all layers are runs of 4 KiB at the source, one run at a target that holds just them;
    and the reverse. Blocks enough for several batches under way, which take turns in the packing memory."""
    num_blocks = 600
    narrow = Shard(0, 4, 1, 3)
    for source, held in ((SHARD, narrow), (narrow, SHARD)):
        writer = harness.writer(shard=source, num_blocks=num_blocks, is_device=is_device)
        target = harness.target(shard=held, num_blocks=num_blocks, is_device=is_device)
        connection_id = writer.connect([lane(target, narrow)], "rdma")
        (path,) = writer.reports.take(PeerConnected).paths
        assert path.device == "lo"
        moves = [(block, num_blocks - 1 - block) for block in range(num_blocks)]
        done = writer.move(target, connection_id, 1, moves)
        for src, dst in moves:
            assert target.piece(dst, narrow) == writer.piece(src, narrow)
        assert target.verify(bytes(16), done.pieces, dict(moves)).bad_block_indices == ()


@needs_nixl
def test_packing_memory_is_not_reused_while_it_is_read(harness: TransferHarness) -> None:
    """The target is stopped, so that batches lie half sent in their packing memory when the next are due."""
    num_blocks = 1200
    narrow = Shard(0, 4, 1, 3)
    process = harness.victim()
    target = harness.target(process, shard=narrow, num_blocks=num_blocks)
    writer, other = harness.writer(num_blocks=num_blocks), harness.target()
    connection_id = writer.connect([lane(target, narrow)], "rdma")
    writer.reports.take(PeerConnected)
    landing_id = target.open(writer, *range(num_blocks))
    writer.push(1, connection_id, landing_id, [(0, 0)])
    writer.reports.take(PushDone)
    process.signal(signal.SIGSTOP)
    process.await_state("T")
    writer.push(2, connection_id, landing_id, [(block, block) for block in range(num_blocks)])
    writer.move(other, other_connection(writer, other), 3, [(5, 5)])
    process.signal(signal.SIGCONT)
    assert writer.reports.take(PushDone).push_id == 2
    for block in range(num_blocks):
        assert target.piece(block, narrow) == writer.piece(block, narrow)


# ---------------------------------------------------------------------------------------------- reasons


def test_spans_follow_the_runs_and_stay_in_their_regions() -> None:
    runs = Runs([Run(0, 30, 10), Run(20, 50, 5)], 100, 200)
    source, target = Region(10_000, 400, "DRAM", 0), Region(50_000, 800, "VRAM", 3)
    ours, theirs = runs.spans(source, [3, 0], target, [1, 2])
    assert ours.tolist() == [[10_300, 10, 0], [10_320, 5, 0], [10_000, 10, 0], [10_020, 5, 0]]
    assert theirs.tolist() == [[50_230, 10, 3], [50_250, 5, 3], [50_430, 10, 3], [50_450, 5, 3]]
    with pytest.raises(PathError, match="leaves a region"):
        runs.spans(source, [4], target, [0])
    with pytest.raises(PathError, match="leaves a region"):
        runs.spans(source, [0], target, [4])


def test_devices_are_those_of_the_settings_if_they_exist(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("kvtransfer.transports.nixl._INFINIBAND", tmp_path)
    none = TransferSettings("127.0.0.1", ("rdma",))
    assert network_devices(settings("rdma")) == ("lo",)
    with pytest.raises(PathError, match="no network device 'bogus'"):
        network_devices(msgspec.structs.replace(none, rdma_devices=("lo", "bogus")))
    with pytest.raises(PathError, match="no active InfiniBand device"):
        network_devices(none)
    for name, state in (("mlx5_0", "4: ACTIVE\n"), ("mlx5_1", "1: DOWN\n")):
        port = tmp_path / name / "ports" / "1"
        port.mkdir(parents=True)
        (port / "state").write_text(state)
    assert network_devices(none) == ("mlx5_0:1",)
    assert network_devices(msgspec.structs.replace(none, rdma_devices=("mlx5_1:1",))) == ("mlx5_1:1",)


def test_a_missing_package_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    for package in ("nixl_cu12", "nixl_cu13"):
        monkeypatch.setitem(sys.modules, f"{package}._api", None)
    with pytest.raises(PathError, match=r"pip install '\.\[rdma\]'"):
        load_nixl.__wrapped__()
