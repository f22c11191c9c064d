"""How fast a rank's store worker copies blocks to and from the store's arena, beside memcpy, as JSON lines.

256 MiB in blocks of 256 KiB, 1 MiB and 7 MiB, through the real path: orders of 16 MiB to `StoreWorker`, its
queue and its thread, between the pool of this process and an arena that another process made and granted.
`checksum`: "fused" is what the store worker does: every record is summed in the pass that copies it; "none"
is a pool that does not sum. The limit, in the same run: memcpy of the same blocks between the same two shared
memories, prefaulted. Every repetition measures every way, and a ratio is the median of those within one
repetition.

    python -m benchmarks.store_dram [--mib 256] [--repeat 9]
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import queue
import socket
import statistics
import subprocess
import sys
from collections.abc import Callable, Sequence
from operator import truediv
from typing import NamedTuple

import numpy as np

from benchmarks.drawn_trust import draw_trust
from kvtransfer.agent.qos import TrafficGovernor
from kvtransfer.blocks.host_memory import KvMemory, map_shared
from kvtransfer.blocks.layout import BlockLayout
from kvtransfer.blocks.pool import HostPool
from kvtransfer.blocks.runs import ByteRegion, copy_runs
from kvtransfer.common.clock import SystemClock
from kvtransfer.common.faults import Faults
from kvtransfer.messages import Shard
from kvtransfer.rpc.handshake import draw_id, prove_as_server, receive_frame, send_frame
from kvtransfer.rpc.trust import Trust, TrustFiles
from kvtransfer.store.dram.arena import Arena
from kvtransfer.store.messages.arena_mapping import ArenaGrant
from kvtransfer.store.messages.owner_codec import FROM_OWNER_CODEC
from kvtransfer.store.messages.records import HEADER_BYTES
from kvtransfer.store.messages.store_orders import (
    AttachStore,
    StoreAttached,
    StoreCopy,
    StoreGet,
    StoreGetDone,
    StorePut,
    StorePutDone,
    StoreRead,
    StoreReport,
)
from kvtransfer.store.worker import StoreWorker
from kvtransfer.transfer_orders import TransferSettings

BLOCK_BYTES = (256 << 10, 1 << 20, 7 << 20)
ORDER_BYTES = 16 << 20
GRANULE_BYTES = 64 << 10
TARGETS = {"none": 0.8, "fused": 0.6}
CLOCK = SystemClock()


class UnsummedPool(HostPool):
    """A pool that returns zeros for sums."""

    def store(
        self,
        block_ids: Sequence[int],
        region: ByteRegion,
        offsets: Sequence[int],
        layers: tuple[int, ...] | None = None,
    ) -> list[int]:
        table = self._table(self.layout.shard)
        copy_runs(self.region, self.offsets(block_ids), region, offsets, table, sums=False, streamed=True)
        return [0] * len(block_ids)

    def load(
        self,
        block_ids: Sequence[int],
        piece: Shard,
        region: ByteRegion,
        offsets: Sequence[int],
        shard: Shard,
        layers: tuple[int, ...] | None = None,
    ) -> list[int]:
        table = self._table(piece).reversed()
        copy_runs(region, offsets, self.region, self.offsets(block_ids), table, sums=False, streamed=True)
        return [0] * len(block_ids)


def layout(block_bytes: int) -> BlockLayout:
    """Return a layout of eight layers of eight heads."""
    return BlockLayout(Shard(0, 8, 0, 8), head_dim=block_bytes // 4096, block_tokens=16, item_bytes=2)


def serve(num_bytes: int, trust: Trust, address: str) -> None:
    """Play the owner: grant an arena whose pages are taken to each rank that comes."""
    arena = Arena.create(num_bytes, GRANULE_BYTES, huge_pages=True)
    np.frombuffer(arena.view, dtype=np.uint8)[GRANULE_BYTES:] = 1
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(f"\0{address}")
    listener.listen()
    print(arena.fd, flush=True)
    sock, _ = listener.accept()
    prove_as_server(sock, trust)
    receive_frame(sock)
    send_frame(sock, FROM_OWNER_CODEC.encode(ArenaGrant(arena.id, arena.num_bytes, False)))
    socket.send_fds(sock, [b"F"], [arena.fd])
    sys.stdin.read()


class Owner:
    """The process of `serve`."""

    def __init__(self, num_bytes: int) -> None:
        files = draw_trust()
        self.trust = Trust.read(files)
        self.address = f"tandem-bench-{draw_id().hex()}"
        command = [sys.executable, "-m", "benchmarks.store_dram", "--serve", self.address]
        command += ["--bytes", str(num_bytes), "--secret-file", files.secret_file]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert self._process.stdout is not None
        fd = os.open(f"/proc/{self._process.pid}/fd/{int(self._process.stdout.readline())}", os.O_RDWR)
        # The arena, mapped here once more.
        self.region = ByteRegion(memoryview(map_shared(fd, num_bytes)))
        os.close(fd)

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


class TimedWorker:
    """A store worker over a pool, attached to an owner of its own, with operations to time."""

    def __init__(self, pool: HostPool) -> None:
        self._pool = pool
        self._size = pool.layout.block_bytes
        slot_bytes = -(-(self._size + HEADER_BYTES) // GRANULE_BYTES) * GRANULE_BYTES
        self._offsets = [GRANULE_BYTES + block * slot_bytes for block in range(pool.num_blocks)]
        self._owner = Owner(GRANULE_BYTES + pool.num_blocks * slot_bytes)
        self._reports: queue.SimpleQueue[StoreReport] = queue.SimpleQueue()
        self._sums = [0] * pool.num_blocks
        governor = TrafficGovernor(TransferSettings("127.0.0.1", ()), CLOCK)
        self._worker = StoreWorker(
            (pool,), 0, governor, self._owner.trust, Faults(), CLOCK, self._reports.put
        )
        self._worker.handle(AttachStore(self._owner.address, b"bench"))
        attached = self._reports.get()
        assert isinstance(attached, StoreAttached)
        assert not attached.error, attached.error
        self._arena = attached.arena
        count = max(1, ORDER_BYTES // self._size)
        starts = range(0, pool.num_blocks, count)
        self._orders = [range(start, min(start + count, pool.num_blocks)) for start in starts]

    def put(self) -> None:
        for number, blocks in enumerate(self._orders):
            copies = tuple(StoreCopy(block, self._offsets[block]) for block in blocks)
            self._worker.handle(StorePut(number, self._arena, copies))
        for blocks in self._orders:
            done = self._reports.get()
            assert isinstance(done, StorePutDone)
            assert not done.error, done.error
            self._sums[blocks.start : blocks.stop] = done.sums

    def get(self) -> None:
        whole = self._pool.layout.shard
        for number, blocks in enumerate(self._orders):
            reads = tuple(
                StoreRead(block, self._offsets[block], whole, whole, self._size, self._sums[block])
                for block in blocks
            )
            self._worker.handle(StoreGet(number, self._arena, reads))
        for _ in self._orders:
            done = self._reports.get()
            assert isinstance(done, StoreGetDone)
            assert not done.error, done.error
            assert not done.bad, "a record has another sum"

    def copies(self) -> tuple[Callable[[], None], Callable[[], None]]:
        """Return the memcpy of every block to its record, and the one back."""
        arena, pool, size = self._owner.region, self._pool.region, self._size
        pairs = [
            (pool.address + block * size, arena.address + offset + HEADER_BYTES)
            for block, offset in enumerate(self._offsets)
        ]

        def there() -> None:
            for block, record in pairs:
                ctypes.memmove(record, block, size)

        def back() -> None:
            for block, record in pairs:
                ctypes.memmove(block, record, size)

        return there, back

    def close(self) -> None:
        self._worker.close()
        self._owner.close()


class Way(NamedTuple):
    """One thing to time."""

    operation: str
    checksum: str
    move: Callable[[], None]


def filled_pool(kind: type[HostPool], block_bytes: int, num_blocks: int) -> HostPool:
    """Return a pool whose pages are taken."""
    memory = KvMemory.allocate(num_blocks * block_bytes)
    np.frombuffer(memory.buffer, dtype=np.uint64)[:] = np.random.default_rng(1).integers(
        0, 1 << 63, memory.num_bytes // 8, dtype=np.uint64
    )
    return kind(layout(block_bytes), memory)


def measure(block_bytes: int, num_bytes: int, repeat: int) -> None:
    num_blocks = num_bytes // block_bytes
    summed = TimedWorker(filled_pool(HostPool, block_bytes, num_blocks))
    unsummed = TimedWorker(filled_pool(UnsummedPool, block_bytes, num_blocks))
    there, back = summed.copies()
    ways = [
        Way("put", "memcpy", there),
        Way("put", "none", unsummed.put),
        Way("put", "fused", summed.put),
        Way("get", "memcpy", back),
        Way("get", "none", unsummed.get),
        Way("get", "fused", summed.get),
    ]
    rates: dict[tuple[str, str], list[float]] = {(way.operation, way.checksum): [] for way in ways}
    for number in range(repeat + 1):
        for way in ways:
            started = CLOCK.now()
            way.move()
            if number:  # the first pass maps the pages
                rate = num_blocks * block_bytes / (CLOCK.now() - started) / 1e9
                rates[way.operation, way.checksum].append(rate)
    summed.close()
    unsummed.close()
    for (operation, checksum), values in rates.items():
        limit = rates[operation, "memcpy"]
        line = {
            "benchmark": "store_dram",
            "operation": operation,
            "checksum": checksum,
            "block_bytes": block_bytes,
            "gb_s": round(statistics.median(values), 3),
            "best_gb_s": round(max(values), 3),
            "limit": "memcpy",
            "limit_gb_s": round(statistics.median(limit), 3),
            "ratio": round(statistics.median(map(truediv, values, limit)), 3),
            "target": TARGETS.get(checksum, 1.0),
            "num_bytes": num_blocks * block_bytes,
            "repeat": repeat,
        }
        print(json.dumps(line), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--mib", type=int, default=256)
    parser.add_argument("--repeat", type=int, default=9)
    parser.add_argument("--serve", default="", help=argparse.SUPPRESS)
    parser.add_argument("--bytes", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--secret-file", default="", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        serve(args.bytes, Trust.read(TrustFiles(args.secret_file)), args.serve)
        return
    for block_bytes in BLOCK_BYTES:
        measure(block_bytes, args.mib << 20, args.repeat)


if __name__ == "__main__":
    main()
