"""NCCL pairs on a simulated device in host memory. It packs, reads what is sent and fills what receives only
when a thread looks whether something is done, and in an order that the test chooses: what is read, written or
used again too early then shows in the bytes."""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import ClassVar, Literal

import pytest
import torch
from torch.distributed.distributed_c10d import Store

from kvtransfer.blocks.device_pool import DevicePool, PendingSums, Staging
from kvtransfer.blocks.layout import BlockLayout
from kvtransfer.messages import Shard
from kvtransfer.transports.nccl import NcclPair
from kvtransfer.transports.pair_group import TARGET, WRITER

Step = Literal["pack", "read", "fill"]
# What fails: the call that queues a message, the look at one, or the wait of a stream. "sent" and "received"
# are messages that are done, with an error, before their bytes have moved.
Failure = Literal["send", "receive", "look at send", "look at receive", "wait for event", "sent", "received"]
LINK_ERROR = "NCCL error: remote process exited"
DEVICE_ERROR = "CUDA error: an illegal memory access was encountered"


class SimulatedEvent:
    """The end of one packing; stands in for `torch.cuda.Event`."""

    def __init__(self, device: SimulatedDevice) -> None:
        self.is_passed = False
        self._device = device

    @property
    def event(self) -> SimulatedEvent:
        return self

    def wait(self) -> None:
        self._device.pack_until(self)


class SimulatedStream:
    """Stands in for `torch.cuda.Stream`. What is queued on it begins when all these events are passed."""

    fails = False

    def __init__(self, *_: object) -> None:
        self.events: list[SimulatedEvent] = []

    def wait_event(self, event: SimulatedEvent) -> None:
        if SimulatedStream.fails:
            raise RuntimeError(DEVICE_ERROR)
        self.events.append(event)


_local = threading.local()


@contextlib.contextmanager
def on_stream(stream: SimulatedStream) -> Iterator[None]:
    """Stand in for `torch.cuda.stream`."""
    before = getattr(_local, "stream", None)
    _local.stream = stream
    try:
        yield
    finally:
        _local.stream = before


class SimulatedWork:
    """A message under way at one side. As NCCL's, it counts as done when it has failed, too."""

    def __init__(self, group: SimulatedGroup, data: torch.Tensor, failure: Failure | None) -> None:
        stream: SimulatedStream | None = getattr(_local, "stream", None)
        self.data = data
        self.events = [] if stream is None else list(stream.events)
        self.is_done = failure in ("sent", "received")
        self._fails = failure in ("look at send", "look at receive")
        self._group = group

    def is_completed(self) -> bool:
        self._group.device.look()
        if self._fails:
            raise RuntimeError(DEVICE_ERROR)
        return self.is_done or self._group.is_aborted

    def wait(self, timeout: timedelta = timedelta()) -> bool:
        raise AssertionError("lets a stream wait, not a thread")


class SimulatedGroup:
    """One side's process group."""

    def __init__(self, device: SimulatedDevice) -> None:
        self.device = device
        self.is_aborted = False
        self.works: list[SimulatedWork] = []

    def send(self, tensors: list[torch.Tensor], peer: int, tag: int, /) -> SimulatedWork:
        return self._add(tensors, ("send", "look at send", "sent"))

    def recv(self, tensors: list[torch.Tensor], peer: int, tag: int, /) -> SimulatedWork:
        return self._add(tensors, ("receive", "look at receive", "received"))

    def abort(self) -> None:
        """End what is queued, as the end of a kernel does."""
        if self.device.abort_returns.wait():
            self.is_aborted = True

    def _add(self, tensors: list[torch.Tensor], failures: Sequence[Failure]) -> SimulatedWork:
        if self.is_aborted:
            raise RuntimeError(LINK_ERROR)
        failure = self.device.failure if self.device.failure in failures else None
        if failure == failures[0]:
            raise RuntimeError(LINK_ERROR)
        with self.device.lock:
            (data,) = tensors
            work = SimulatedWork(self, data, failure)
            self.works.append(work)
        return work


class SimulatedDevice:
    """Does one step in so many looks: the first kind of `order` of which one is ready, and of these the
    oldest, or the newest. 0 looks: only packings that are awaited are done."""

    def __init__(self, order: Sequence[Step], looks: int = 2, *, newest_first: bool = False) -> None:
        self.lock = threading.RLock()
        self.order = order
        self.looks = looks
        self.newest_first = newest_first
        self.failure: Failure | None = None
        self.abort_returns = threading.Event()
        self.abort_returns.set()
        self.groups: dict[int, SimulatedGroup] = {}
        # By message; None: filled.
        self._read: dict[int, torch.Tensor | None] = {}
        self._packings: deque[tuple[SimulatedEvent, Callable[[], None]]] = deque()
        self._num_looks = 0

    def install(self, monkeypatch: pytest.MonkeyPatch) -> type[SimulatedPair]:
        """Take CUDA's place. Returns the pairs on this device."""
        monkeypatch.setattr(torch.cuda, "Stream", SimulatedStream)
        monkeypatch.setattr(torch.cuda, "stream", on_stream)
        return type("PairOfDevice", (SimulatedPair,), {"device": self})

    def join(self, rank: int) -> SimulatedGroup:
        with self.lock:
            if rank in self.groups:  # of a pair that has ended
                self.groups, self._read = {}, {}
            self.groups[rank] = SimulatedGroup(self)
            return self.groups[rank]

    @property
    def num_packings(self) -> int:
        """How many are queued and not done."""
        return len(self._packings)

    def num_works(self, rank: int) -> int:
        """How many messages a side has queued."""
        return len(self.groups[rank].works)

    def queue_packing(self, work: Callable[[], None]) -> SimulatedEvent:
        event = SimulatedEvent(self)
        with self.lock:
            self._packings.append((event, work))
        return event

    def pack_until(self, event: SimulatedEvent) -> None:
        with self.lock:
            while not event.is_passed:
                self._pack()

    def look(self) -> None:
        with self.lock:
            self._num_looks += 1
            if self.looks and self._num_looks % self.looks == 0:
                self._step()

    def _step(self) -> None:
        for kind in self.order:
            if kind == "pack" and self._packings:
                self._pack()
                return
            ready = [] if kind == "pack" else self._ready(kind)
            if ready:
                self._move(ready[-1 if self.newest_first else 0], kind)
                return

    def _ready(self, kind: Step) -> list[int]:
        if len(self.groups) < 2 or any(group.is_aborted for group in self.groups.values()):
            return []
        sends, receipts = self.groups[WRITER].works, self.groups[TARGET].works
        if kind == "fill":
            return [number for number, data in sorted(self._read.items())
                    if data is not None and number < len(receipts)]  # fmt: skip
        return [number for number, work in enumerate(sends)
                if number not in self._read and all(event.is_passed for event in work.events)]  # fmt: skip

    def _move(self, number: int, kind: Step) -> None:
        if kind == "read":
            work = self.groups[WRITER].works[number]
            self._read[number] = work.data.clone()
        else:
            work, data = self.groups[TARGET].works[number], self._read[number]
            assert data is not None
            work.data.copy_(data)
            self._read[number] = None
        work.is_done = True

    def _pack(self) -> None:
        event, work = self._packings.popleft()
        work()
        event.is_passed = True


class SimulatedPair(NcclPair):
    """What `NcclPair` does with its streams, its process group and its works."""

    device: ClassVar[SimulatedDevice]

    @classmethod
    def is_possible(cls, device: str) -> bool:
        return True

    @classmethod
    def form(cls, store: Store, rank: int, device: str, address: str) -> SimulatedPair:
        return cls(cls.device.join(rank), rank, torch.device(device))


class SimulatedPool(DevicePool):
    """A pool whose blocks the simulated device packs."""

    def __init__(self, device: SimulatedDevice, layout: BlockLayout, tensor: torch.Tensor) -> None:
        super().__init__(layout, tensor)
        self._simulated = device

    def start_gather(self, block_ids: Sequence[int], piece: Shard, staging: Staging) -> PendingSums:
        ids, sums = list(block_ids), list[int]()
        start = super().start_gather
        event = self._simulated.queue_packing(lambda: sums.extend(start(ids, piece, staging).result()))
        return _LatePacking(event, sums)


class _LatePacking(PendingSums):
    def __init__(self, event: SimulatedEvent, sums: list[int]) -> None:
        self.mark = event  # type: ignore[assignment]  # with an event of its own kind
        self._late = sums

    def result(self) -> list[int]:
        self.mark.wait()
        return self._late
