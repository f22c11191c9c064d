"""A node's exchange over a real arena, with a stand-in for the owner's books; also as a process of its own
(`python exchange_harness.py`: settings on standard input, its address on standard output)."""

from __future__ import annotations

import asyncio
import socket
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np
from child_processes import killed_on_error
from patience import WAIT_S

from kvtransfer.blocks.checksum import checksum
from kvtransfer.codec import Codec, Message, framed, read_frame
from kvtransfer.common.clock import Clock, SystemClock
from kvtransfer.common.faults import FaultRule, Faults
from kvtransfer.config import StoreSettings
from kvtransfer.messages import ReplicaIdentity, Shard
from kvtransfer.rpc.listener import ProvenListener
from kvtransfer.rpc.stream import frame_stream
from kvtransfer.rpc.trust import Trust
from kvtransfer.store.dram.arena import Arena
from kvtransfer.store.messages.owner_codec import TO_OWNER_CODEC
from kvtransfer.store.messages.record_exchange import OwnerHello
from kvtransfer.store.messages.records import RecordId, RecordInfo
from kvtransfer.store.record import decode_header
from kvtransfer.store.remote.exchange import Exchange, arena_pool
from kvtransfer.store.remote.owner_link import Wanted
from kvtransfer.store.remote.serve import LeasedRecord

TRUST = Trust.of(bytes(range(32)))
SHARD = Shard(0, 2, 0, 2)
GRANULE_BYTES = 16 << 10
ARENA_BYTES = 4 << 20


def record_id(number: int) -> RecordId:
    return RecordId(b"thespace", number.to_bytes(16, "little"), SHARD)


def payload(number: int, num_bytes: int) -> bytes:
    """Return the payload of the record of that number, on any node."""
    return np.random.default_rng(number).bytes(num_bytes)


def settings(
    node_id: str,
    *,
    transports: Sequence[str] = ("shm", "tcp"),
    granule_bytes: int = GRANULE_BYTES,
    dram_bytes: int = ARENA_BYTES,
    remote_min_gb_s: float = 0.0,
) -> StoreSettings:
    return StoreSettings(
        node_id=node_id,
        epoch=1,
        name=f"tandem-test-{node_id}",
        host="127.0.0.1",
        dram_bytes=dram_bytes,
        granule_bytes=granule_bytes,
        transports=tuple(transports),
        remote_min_gb_s=remote_min_gb_s,
    )


async def eventually(condition: Callable[[], bool], what: str) -> None:
    clock = SystemClock()
    for _ in range(int(WAIT_S / 0.01)):
        if condition():
            return
        await clock.sleep(0.01)
    raise AssertionError(f"not within {WAIT_S} s: {what}")


class StoreNode:
    """One node: `put` records, let others `fetch` them."""

    def __init__(
        self,
        settings: StoreSettings,
        *,
        trust: Trust = TRUST,
        faults: Faults | None = None,
        clock: Clock | None = None,
    ) -> None:
        self.settings = settings
        self._trust = trust
        self.identity = ReplicaIdentity(settings.node_id, settings.epoch)
        self.arena = Arena.create(settings.dram_bytes, settings.granule_bytes, False)
        self.records: dict[RecordId, LeasedRecord] = {}
        self.leases: Counter[RecordId] = Counter()
        self.num_leased = 0
        self.freed: list[int] = []
        self.on_lease: Callable[[RecordId], Coroutine[None, None, None]] | None = None
        self.errors: list[BaseException] = []
        self._faults = faults or Faults()
        self._clock = clock or SystemClock()
        self._tasks: set[asyncio.Task[None]] = set()
        self._sequence = 0

    async def __aenter__(self) -> Self:
        pool = arena_pool(self.arena.fd, self.arena.num_bytes, self.arena.granule_bytes)
        self.exchange = Exchange(
            self.settings, self._trust, pool, self, self.spawn, self._clock, self._faults
        )
        sock = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{sock.getsockname()[1]}"
        clock = SystemClock()
        self._listener = ProvenListener(sock, self._trust, self._serve, self.spawn, clock, "exchange")
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._listener.close()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self.exchange.close()
        self.arena.close()
        assert not self.errors, self.errors

    def spawn(self, work: Coroutine[None, None, None], name: str) -> asyncio.Task[None]:
        task = asyncio.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self.errors.append(error)

    async def _serve(self, sock: socket.socket, name: str) -> None:
        stream = await frame_stream(sock, name, self._trust.server_tls(sock))
        try:
            hello = TO_OWNER_CODEC.decode(await stream.next_frame())
            assert isinstance(hello, OwnerHello)
            await self.exchange.sender.serve(stream, hello)
        finally:
            stream.abort()

    # ------------------------------------------------------------------------------- the owner's part

    async def lease_record(self, record: RecordId) -> LeasedRecord | None:
        if self.on_lease is not None:
            await self.on_lease(record)
        leased = self.records.get(record)
        if leased is not None:
            self.leases[record] += 1
            self.num_leased += 1
        return leased

    def release_record(self, leased: LeasedRecord) -> None:
        record = next(each for each, other in self.records.items() if other is leased)
        self.leases[record] -= 1
        assert self.leases[record] >= 0

    def end_links(self) -> None:
        """As when the connections to the others break."""
        for task in self._tasks:
            if task.get_name() == "store-link":
                task.cancel()

    def slot_free(self, offset: int) -> None:
        self.freed.append(offset)
        self.arena.free(offset)

    @property
    def num_leases(self) -> int:
        return sum(self.leases.values())

    # -------------------------------------------------------------------------------------- the test's

    def put(self, number: int, num_bytes: int) -> LeasedRecord:
        """Put a committed record."""
        offset = self.arena.allocate(num_bytes)
        assert offset is not None
        data = payload(number, num_bytes)
        info = RecordInfo(
            record_id(number), b"", record_id(0).key, "group", b"model", num_bytes, checksum(data)
        )
        self._sequence += 1
        self.arena.write_header(offset, info, "committed", self._sequence)
        self.arena.payload(offset, num_bytes)[:] = data
        leased = self.records[info.id] = LeasedRecord(offset, num_bytes, info.checksum)
        return leased

    def want(self, number: int, num_bytes: int) -> Wanted:
        """Allocate a slot for a record of another node."""
        offset = self.arena.allocate(num_bytes)
        assert offset is not None
        return Wanted(record_id(number), offset, num_bytes)

    def check(self, wanted: Wanted, total: int) -> None:
        """Check that the record is here, whole."""
        number = int.from_bytes(wanted.record.key, "little")
        data = payload(number, wanted.num_bytes)
        header = decode_header(self.arena.view[wanted.offset :])
        assert header.info.id == wanted.record
        assert header.info.checksum == total == checksum(data)
        assert self.arena.payload(wanted.offset, wanted.num_bytes) == data


# ------------------------------------------------------------------------------- a node as a process


class StartNode(Message, frozen=True):
    """To the process: a node with records of these numbers and sizes."""

    settings: StoreSettings
    records: tuple[tuple[int, int], ...]
    faults: tuple[FaultRule, ...]


_CODEC: Codec[StartNode] = Codec(StartNode)


class NodeProcess:
    """A node that only serves, in a process that ends with this one."""

    def __init__(
        self, settings: StoreSettings, records: Sequence[tuple[int, int]], faults: Sequence[FaultRule] = ()
    ) -> None:
        self.identity = ReplicaIdentity(settings.node_id, settings.epoch)
        self._process = subprocess.Popen(
            [sys.executable, __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=Path(__file__).parents[2],
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        frame = _CODEC.encode(StartNode(settings, tuple(records), tuple(faults)))
        with killed_on_error(self._process):
            self._process.stdin.write(framed(frame))
            self._process.stdin.flush()
            self.address = self._process.stdout.readline().decode().strip()
            assert self.address, "the node did not start"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with killed_on_error(self._process):
            self._process.stdin.close()
            self._process.wait(WAIT_S)
        self._process.stdout.close()

    @property
    def pid(self) -> int:
        return self._process.pid

    def kill(self) -> None:
        self._process.kill()
        self._process.wait(WAIT_S)


async def _run(start: StartNode) -> None:
    async with StoreNode(start.settings, faults=Faults(start.faults)) as node:
        for number, num_bytes in start.records:
            node.put(number, num_bytes)
        sys.stdout.write(f"{node.address}\n")
        sys.stdout.flush()
        ended = asyncio.get_running_loop().run_in_executor(None, sys.stdin.buffer.read)
        await ended


def main() -> None:
    frame = read_frame(sys.stdin.buffer)
    assert frame is not None
    asyncio.run(_run(_CODEC.decode(frame)))


if __name__ == "__main__":
    main()
