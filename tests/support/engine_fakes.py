"""Fakes of what the parts of an engine core are given: ranks, the engine core itself, the store's two
ends, and a link's stream without a network."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from kvtransfer.messages import Shard
from kvtransfer.rpc.stream import FrameStream
from kvtransfer.store.messages.store_orders import StoreGet, StorePut
from workers.scheduler.sequence import HeldBack
from workers.scheduler.step import LoadNeed

HALVES = (Shard(0, 2, 0, 1), Shard(0, 2, 1, 2))
KEYS = tuple(bytes([index]) * 16 for index in range(1, 9))
BLOCK_TOKENS = 16


@dataclass
class FakeRanks:
    """Keeps what is sent to every rank, and what is sent to one."""

    orders: list[Any] = field(default_factory=list)
    orders_to: list[tuple[int, Any]] = field(default_factory=list)

    def send(self, message: object) -> None:
        self.orders.append(message)

    def send_to(self, rank: int, message: object) -> None:
        self.orders_to.append((rank, message))


@dataclass
class FakeControl:
    """Keeps errors; nobody may kill ranks."""

    errors: list[BaseException] = field(default_factory=list)

    def wake(self) -> None:
        pass

    def kill_ranks(self, reason: str) -> None:
        raise AssertionError(reason)

    def fail(self, error: BaseException) -> None:
        self.errors.append(error)


@dataclass
class FakeCounts:
    """The counts of sequences that a test sets."""

    num_running: int = 0
    # The blocks of waiting sequences.
    num_awaited: int = 0

    def num_running_of(self, group: str) -> int:
        return self.num_running

    def num_blocks_awaited(self, group: str | None) -> int:
        return self.num_awaited


@dataclass
class Wires:
    """Store, ranks and scheduler in one. All that was sent, in order; `is_up` False: nothing can be."""

    is_up: bool = True
    sent: list[object] = field(default_factory=list)
    orders: list[tuple[int, StoreGet | StorePut]] = field(default_factory=list)
    # Blocks by tier of every load that has ended.
    ended: list[tuple[LoadNeed, dict[str, int]]] = field(default_factory=list)
    held: list[HeldBack] = field(default_factory=list)
    counts: FakeCounts = field(default_factory=FakeCounts)

    def send(self, message: object) -> bool:
        if self.is_up:
            self.sent.append(message)
        return self.is_up

    find = fetch = release = put = commit = send

    def send_to(self, rank: int, order: StoreGet | StorePut) -> None:
        self.orders.append((rank, order))

    def hold_back(self, need: LoadNeed, whom: HeldBack) -> None:
        self.held.append(whom)

    def end_load(self, need: LoadNeed, num_loaded_tokens: dict[str, int]) -> None:
        num_blocks = {tier: count // BLOCK_TOKENS for tier, count in num_loaded_tokens.items()}
        self.ended.append((need, num_blocks))

    def take(self, kind: type) -> object:
        found = next(message for message in self.sent if isinstance(message, kind))
        self.sent.remove(found)
        return found


class LinkEnd(asyncio.Transport):
    """The transport of `stream`, which believes that it is connected."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self._written = bytearray()
        self._is_closing = False
        self.stream = FrameStream(name, has_heartbeat=True)
        self.stream.connection_made(self)

    def feed(self, frame: bytes | None) -> None:
        """Let a frame arrive; None: the other side ends."""
        if frame is None:
            self.stream.eof_received()
        else:
            self.arrive(len(frame).to_bytes(4, "little") + frame, [1 << 16])

    def arrive(self, data: bytes, cuts: Sequence[int]) -> None:
        """Let bytes arrive in parts of at most these sizes, in turn."""
        for cut in itertools.cycle(cuts):
            if not data:
                return
            space = self.stream.get_buffer(-1)
            size = min(len(space), cut, len(data))
            space[:size] = data[:size]
            data = data[size:]
            self.stream.buffer_updated(size)

    def sent(self) -> list[bytes]:
        """Return the frames sent since the last call, without the empty ones of an idle link."""
        frames = []
        while self._written:
            end = 4 + int.from_bytes(self._written[:4], "little")
            frames.append(bytes(self._written[4:end]))
            del self._written[:end]
        return [frame for frame in frames if frame]

    # what the stream calls

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self._written += data

    def write_eof(self) -> None:
        pass

    def pause_reading(self) -> None:
        pass

    def resume_reading(self) -> None:
        pass

    def get_write_buffer_size(self) -> int:
        return 0

    def is_closing(self) -> bool:
        return self._is_closing

    def close(self) -> None:
        self.abort()

    def abort(self) -> None:
        if not self._is_closing:
            self._is_closing = True
            self.stream.connection_lost(None)
