"""How fast KV moves between two processes of this machine, beside what the machine gives, as JSON lines.

256 MiB in blocks of 256 KiB. Ways: each transport of `--transports`, through its channel, in pushes of 128
blocks with a flush each. `checksum`: "writer" is what a channel does by itself, it sums each piece when it
moves it; "both" lets the target sum it again in its own process, push by push, before the clock stops; "none"
is TCP from a pool that does not sum (elsewhere the sum is part of the copy).
Limits, in the same run: for shared memory a memcpy of the blocks between two prefaulted shared mappings; for
TCP a plain loop of sendmsg and recvmsg_into between the same two processes, with as many connections and
threads. Shapes: "equal"; "1 to 4": one rank writes to four that hold a quarter of its heads each (runs of
4 KiB at the source); "4 to 1": such a quarter to a rank that holds all. Every repetition measures every way,
and a ratio is the median of those within one repetition. Each process has one half of the cores.

`--tls` encrypts the channels of `tcp` with the certificate tls.crt, the key tls.key and the authority ca.crt
of a folder; the limit stays a plain loop.

    python -m benchmarks.transfer [--mib 256] [--repeat 7] [--transports shm,tcp] [--streams 2] [--tls FOLDER]
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from operator import truediv
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np

from benchmarks.drawn_trust import draw_trust
from kvtransfer.blocks.host_memory import KvMemory
from kvtransfer.blocks.layout import BlockLayout, intersect
from kvtransfer.blocks.pool import HostPool
from kvtransfer.common.clock import SystemClock
from kvtransfer.common.faults import Faults
from kvtransfer.messages import RankEndpoints, ReplicaIdentity, Shard
from kvtransfer.protocol.gate import Gate
from kvtransfer.rpc.mutual_tls import TlsFiles
from kvtransfer.rpc.trust import Trust, TrustFiles
from kvtransfer.transfer_orders import BlockMove, Lane, OpenLanding, TransferSettings
from kvtransfer.transports import TRANSPORTS
from kvtransfer.transports.base import Channel, TargetRank, WriterRank

ALL_HEADS = Shard(0, 8, 0, 8)
QUARTERS = [Shard(0, 8, first, first + 2) for first in (0, 2, 4, 6)]
SHAPES = {
    "equal": (ALL_HEADS, [ALL_HEADS]),
    "1 to 4": (ALL_HEADS, QUARTERS),
    "4 to 1": (QUARTERS[1], [ALL_HEADS]),
}
WRITER = ReplicaIdentity("writer", 1)
LANDING = bytes(range(16))
PUSH_BLOCKS = 128
CLOCK = SystemClock()


def never() -> bool:
    return False


def layout(shard: Shard) -> BlockLayout:
    return BlockLayout(shard, head_dim=64, block_tokens=16, item_bytes=2)


def filled_pool(shard: Shard, num_blocks: int, seed: int) -> HostPool:
    """Return a pool whose pages are taken."""
    memory = KvMemory.allocate(num_blocks * layout(shard).block_bytes)
    np.frombuffer(memory.buffer, dtype=np.uint64)[:] = np.random.default_rng(seed).integers(
        0, 1 << 63, memory.num_bytes // 8, dtype=np.uint64
    )
    return HostPool(layout(shard), memory)


class UnsummedPool(HostPool):
    """A pool that returns zeros for sums."""

    def sums(self, block_ids: Sequence[int], piece: Shard) -> list[int]:
        return [0] * len(block_ids)


class Way(NamedTuple):
    """One thing to time: `move` moves `num_bytes`."""

    name: str
    shape: str
    checksum: str
    limit: str
    num_bytes: int
    move: Callable[[], None]


# ------------------------------------------------------------------------------------------------ target


class Target:
    """The target process: ranks of every shape on one gate each, and a plain socket loop."""

    def __init__(self, num_blocks: int, settings: TransferSettings, trust: Trust) -> None:
        self._pools: dict[str, HostPool] = {}
        self._ranks: dict[str, RankEndpoints] = {}
        for shape, (_, shards) in SHAPES.items():
            for rank, shard in enumerate(shards):
                self._serve(f"{shape}/{rank}", rank, filled_pool(shard, num_blocks, rank), settings, trust)
        self._plain = socket.create_server(("127.0.0.1", 0))
        threading.Thread(target=self._accept_plain, daemon=True).start()

    def _serve(self, key: str, rank: int, pool: HostPool, settings: TransferSettings, trust: Trust) -> None:
        gate = Gate(lambda report: None)
        gate.open(OpenLanding(LANDING, WRITER, tuple(range(pool.num_blocks))))
        target = TargetRank(rank, (pool,), gate, trust, settings)
        endpoints = tuple(TRANSPORTS[name].listen(target).endpoint for name in settings.transports)
        self._pools[key] = pool
        self._ranks[key] = RankEndpoints(rank, pool.layout.shard, "here", endpoints)

    def run(self) -> None:
        """Answer lines of standard input: ranks, port, and [key, block ids, piece, sums] to verify."""
        ranks = {key: msgspec.msgpack.encode(rank).hex() for key, rank in self._ranks.items()}
        print(json.dumps([ranks, self._plain.getsockname()[1]]), flush=True)
        for line in sys.stdin:
            key, ids, piece, sums = msgspec.json.decode(line)
            print(str(self._pools[key].sums(ids, Shard(*piece)) == sums).lower(), flush=True)

    def _accept_plain(self) -> None:
        while True:
            sock, _ = self._plain.accept()
            threading.Thread(target=self._receive_plain, args=(sock,), daemon=True).start()

    def _receive_plain(self, sock: socket.socket) -> None:
        """Take [first, last) blocks, answer with a byte, and again."""
        pool = self._pools["equal/0"]
        size = pool.layout.block_bytes
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        while header := sock.recv(16):
            first, last = np.frombuffer(header, dtype=np.int64).tolist()
            for block in range(first, last):
                view = pool.memory.buffer[block * size : (block + 1) * size]
                while view:
                    view = view[sock.recvmsg_into([view])[0] :]
            sock.send(b"k")


# ------------------------------------------------------------------------------------------------ writer


class Writer:
    """This process: source pools, and the ways to move all their blocks to the target."""

    def __init__(self, num_blocks: int, settings: TransferSettings, tls: TlsFiles | None = None) -> None:
        self._num_blocks = num_blocks
        self._settings = settings
        files = msgspec.structs.replace(draw_trust(), tls=tls)
        self._trust = Trust.read(files)
        cores = sorted(os.sched_getaffinity(0))
        theirs = cores[len(cores) // 2 :]
        command = [
            sys.executable,
            "-m",
            "benchmarks.transfer",
            "--serve",
            msgspec.json.encode(files).decode(),
        ]
        command += ["--blocks", str(num_blocks), "--transports", ",".join(settings.transports)]
        command += ["--cores", ",".join(map(str, theirs))]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        ranks, self._plain_port = self._read()
        os.sched_setaffinity(0, set(cores) - set(theirs) or set(cores))
        self._ranks = {
            key: msgspec.msgpack.decode(bytes.fromhex(text), type=RankEndpoints)
            for key, text in ranks.items()
        }
        self._pools = {
            shard: filled_pool(shard, num_blocks, 7) for shard in {shard for shard, _ in SHAPES.values()}
        }
        self._copy = filled_pool(ALL_HEADS, num_blocks, 8)

    def ways(self) -> list[Way]:
        pool = self._pools[ALL_HEADS]
        num_bytes, streams = pool.memory.num_bytes, self._settings.tcp_streams
        ways = [
            Way("memcpy", "equal", "none", "memcpy", num_bytes, self._memcpy),
            Way("plain socket", "equal", "none", "plain socket", num_bytes, self._plain_way(streams)),
        ]
        for name in self._settings.transports:
            limit = "plain socket" if name == "tcp" else "memcpy"
            for shape, (source, targets) in SHAPES.items():
                for checksum in ("none", "writer", "both") if name == "tcp" else ("writer", "both"):
                    moved = sum(layout(intersect(source, each) or each).block_bytes for each in targets)
                    move = self._way(name, shape, checksum)
                    ways.append(Way(name, shape, checksum, limit, moved * self._num_blocks, move))
        return ways

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.kill()
        self._process.wait()

    def _memcpy(self) -> None:
        source, target = self._pools[ALL_HEADS].region.bytes, self._copy.region.bytes
        size = layout(ALL_HEADS).block_bytes
        for start in range(0, len(source), size):
            np.copyto(target[start : start + size], source[start : start + size])

    def _plain_way(self, streams: int) -> Callable[[], None]:
        size = layout(ALL_HEADS).block_bytes
        buffer = self._pools[ALL_HEADS].memory.buffer
        edges = [self._num_blocks * number // streams for number in range(streams + 1)]

        def send(sock: socket.socket, first: int, last: int) -> None:
            sock.sendmsg([np.array([first, last], dtype=np.int64).data])
            for block in range(first, last):
                view = buffer[block * size : (block + 1) * size]
                while view:
                    view = view[sock.sendmsg([view]) :]
            sock.recv(1)

        sockets = [socket.create_connection(("127.0.0.1", self._plain_port)) for _ in range(streams)]
        for sock in sockets:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

        def move() -> None:
            threads = [
                threading.Thread(target=send, args=each)
                for each in zip(sockets, edges[:-1], edges[1:], strict=True)
            ]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()

        return move

    def _way(self, name: str, shape: str, checksum: str) -> Callable[[], None]:
        source, targets = SHAPES[shape]
        pool = self._pools[source]
        if checksum == "none":
            pool = UnsummedPool(pool.layout, pool.memory)
        lanes = []
        for rank, shard in enumerate(targets):
            key, piece = f"{shape}/{rank}", intersect(source, shard)
            assert piece is not None
            lanes.append((key, piece, self._connect(name, pool, Lane(self._ranks[key], piece))))
        starts = range(0, self._num_blocks, PUSH_BLOCKS)
        pushes = [range(start, min(start + PUSH_BLOCKS, self._num_blocks)) for start in starts]

        def move() -> None:
            for blocks in pushes:
                moves = [BlockMove(block, block, block) for block in blocks]
                for key, piece, channel in lanes:
                    channel.begin(LANDING, never)
                    sums = channel.write(LANDING, moves, never)
                    channel.flush(LANDING, never)
                    if checksum == "both":
                        self._write([key, list(blocks), msgspec.to_builtins(piece), sums])
            answers = [self._read() for _ in pushes for _ in lanes if checksum == "both"]
            assert all(answers), "what landed is not what was sent"

        return move

    def _connect(self, name: str, pool: HostPool, lane: Lane) -> Channel:
        rank = WriterRank(WRITER, 0, pool, self._trust, Faults(), self._settings)
        address = {each.transport: each.address for each in lane.target.endpoints}[name]
        return TRANSPORTS[name].connect(rank, lane, address, b"c" * 16, lambda reason: None)

    def _write(self, request: list[Any]) -> None:
        assert self._process.stdin is not None
        print(msgspec.json.encode(request).decode(), file=self._process.stdin, flush=True)

    def _read(self) -> Any:
        assert self._process.stdout is not None
        return msgspec.json.decode(self._process.stdout.readline())


def measure(num_blocks: int, repeat: int, settings: TransferSettings, tls: TlsFiles | None = None) -> None:
    writer = Writer(num_blocks, settings, tls)
    ways = writer.ways()
    rates: dict[Way, list[float]] = {way: [] for way in ways}
    for number in range(repeat + 1):
        for way in ways:
            started = CLOCK.now()
            way.move()
            if number:  # the first pass takes the pages
                rates[way].append(way.num_bytes / (CLOCK.now() - started) / 1e9)
    writer.close()
    limits = {way.name: values for way, values in rates.items() if way.name == way.limit}
    for way, values in rates.items():
        line = {
            "benchmark": "transfer",
            "transport": way.name,
            "shape": way.shape,
            "checksum": way.checksum,
            "gb_s": round(statistics.median(values), 3),
            "best_gb_s": round(max(values), 3),
            "limit": way.limit,
            "limit_gb_s": round(statistics.median(limits[way.limit]), 3),
            "ratio": round(statistics.median(map(truediv, values, limits[way.limit])), 3),
            "num_bytes": way.num_bytes,
            "tls": tls is not None and way.name == "tcp",
            "repeat": repeat,
        }
        print(json.dumps(line), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--mib", type=int, default=256)
    parser.add_argument("--repeat", type=int, default=7)
    parser.add_argument("--transports", default="shm,tcp")
    parser.add_argument("--streams", type=int, default=2)
    parser.add_argument("--tls", type=Path, help="folder with tls.crt, tls.key and ca.crt")
    parser.add_argument("--serve", default="", help=argparse.SUPPRESS)
    parser.add_argument("--cores", help=argparse.SUPPRESS)
    parser.add_argument("--blocks", type=int, default=0, help=argparse.SUPPRESS)
    args = parser.parse_args()
    settings = TransferSettings("127.0.0.1", tuple(args.transports.split(",")), tcp_streams=args.streams)
    if args.serve:
        os.sched_setaffinity(0, {int(core) for core in args.cores.split(",")})
        Target(args.blocks, settings, Trust.read(msgspec.json.decode(args.serve, type=TrustFiles))).run()
    else:
        names = ("tls.crt", "tls.key", "ca.crt")
        tls = None if args.tls is None else TlsFiles(*(str(args.tls / name) for name in names))
        measure((args.mib << 20) // layout(ALL_HEADS).block_bytes, args.repeat, settings, tls)


if __name__ == "__main__":
    main()
