"""How fast KV moves between two processes of this machine, beside memcpy block by block, as JSON lines.

256 MiB in blocks of 256 KiB, per transport: the bytes alone (`checksum` false), and through the transfer
agent, which sums every piece while it is in the cache (`checksum` true). Every repetition measures memcpy,
the checksum alone and both ways of each transport one after the other.

    python benchmarks/transfer.py [--mib 256] [--repeat 5] [--transports shm,tcp]
"""

from __future__ import annotations

import argparse
import json
import queue
import statistics
import subprocess
import sys
from collections.abc import Callable

import msgspec
import numpy as np

from kvtransfer.checksum import Checksummer
from kvtransfer.clock import SystemClock
from kvtransfer.faults import Faults
from kvtransfer.layout import BlockLayout
from kvtransfer.memory import KvMemory
from kvtransfer.messages import (
    BlockMove,
    ConnectPeer,
    OpenLanding,
    PeerConnected,
    PushDone,
    PushOrder,
    RankEndpoints,
    ReplicaIdentity,
    Shard,
    TransferReport,
)
from kvtransfer.secret import draw_secret
from kvtransfer.service import TransferAgent
from kvtransfer.transports import TRANSPORTS
from kvtransfer.transports.base import WriterRank

LAYOUT = BlockLayout(Shard(0, 8, 0, 8), head_dim=64, block_tokens=16, item_bytes=2)
WRITER, TARGET = ReplicaIdentity("writer", 1), ReplicaIdentity("target", 1)
LANDING = bytes(range(16))
CLOCK = SystemClock()


class Writer:
    """This process: a pool of random bytes, the target's endpoints, and the ways to move everything."""

    def __init__(self, num_blocks: int, secret: bytes, target: RankEndpoints) -> None:
        self.num_blocks = num_blocks
        self.memory = KvMemory.allocate(num_blocks * LAYOUT.block_bytes)
        self.memory.buffer[:] = np.random.default_rng(0).bytes(self.memory.num_bytes)
        self._copy = KvMemory.allocate(self.memory.num_bytes)
        self._reports: queue.SimpleQueue[TransferReport] = queue.SimpleQueue()
        self._secret = secret
        self._target = target
        self._rank = WriterRank(WRITER, 0, LAYOUT, self.memory, secret)
        self._agent = TransferAgent(
            identity=WRITER,
            rank=0,
            layout=LAYOUT,
            memory=self.memory,
            secret=secret,
            clock=CLOCK,
            faults=Faults(),
            report=self._reports.put,
            transports=(),
            data_host="127.0.0.1",
        )

    def memcpy(self) -> None:
        source = np.frombuffer(self.memory.buffer, dtype=np.uint8)
        target = np.frombuffer(self._copy.buffer, dtype=np.uint8)
        for start in range(0, self.memory.num_bytes, LAYOUT.block_bytes):
            np.copyto(target[start : start + LAYOUT.block_bytes], source[start : start + LAYOUT.block_bytes])

    def checksum(self) -> None:
        checksummer = Checksummer()
        for block in range(self.num_blocks):
            checksummer.sum((self._block(block),))

    def bytes_alone(self, transport: str) -> Callable[[], None]:
        """Moves everything without sums."""
        address = {each.transport: each.address for each in self._target.endpoints}[transport]
        channel = TRANSPORTS[transport].connect(
            self._rank, self._target, address, b"b" * 16, lambda reason: None
        )

        def move() -> None:
            channel.begin(LANDING, lambda: False)
            for block in range(self.num_blocks):
                channel.write(LANDING, block, self._block(block), lambda: None, lambda: False)
            channel.flush(LANDING, lambda: False)

        return move

    def through_the_agent(self, transport: str) -> Callable[[], None]:
        """Moves everything as a brain would order it, sums included."""
        connection_id = transport.encode().ljust(16)
        self._agent.handle(ConnectPeer(connection_id, WRITER, TARGET, (self._target,), (transport,), 0.0))
        report = self._reports.get()
        assert isinstance(report, PeerConnected), report
        moves = tuple(BlockMove(block, block, block) for block in range(self.num_blocks))

        def move() -> None:
            self._agent.handle(PushOrder(1, connection_id, LANDING, moves))
            done = self._reports.get()
            assert isinstance(done, PushDone), done

        return move

    def _block(self, block: int) -> memoryview:
        return self.memory.buffer[block * LAYOUT.block_bytes : (block + 1) * LAYOUT.block_bytes]


def serve(num_blocks: int) -> None:
    """The target process: the secret comes on standard input, the endpoints go to standard output."""
    memory = KvMemory.allocate(num_blocks * LAYOUT.block_bytes)
    memory.buffer[:] = bytes(memory.num_bytes)
    agent = TransferAgent(
        identity=TARGET,
        rank=0,
        layout=LAYOUT,
        memory=memory,
        secret=bytes.fromhex(sys.stdin.readline()),
        clock=CLOCK,
        faults=Faults(),
        report=lambda report: None,
        transports=tuple(TRANSPORTS),
        data_host="127.0.0.1",
    )
    agent.handle(OpenLanding(LANDING, WRITER, tuple(range(num_blocks))))
    print(msgspec.msgpack.encode(agent.endpoints()).hex(), flush=True)
    sys.stdin.read()
    agent.close()


def measure(num_blocks: int, repeat: int, transports: list[str]) -> None:
    secret = draw_secret()
    command = [sys.executable, __file__, "--serve", "--mib", str(num_blocks * LAYOUT.block_bytes >> 20)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdin is not None
    assert process.stdout is not None
    print(secret.hex(), file=process.stdin, flush=True)
    endpoints = msgspec.msgpack.decode(bytes.fromhex(process.stdout.readline()), type=RankEndpoints)
    writer = Writer(num_blocks, secret, endpoints)
    ways: dict[tuple[str, bool], Callable[[], None]] = {("memcpy", False): writer.memcpy}
    ways["checksum alone", True] = writer.checksum
    for transport in transports:
        ways[transport, False] = writer.bytes_alone(transport)
        ways[transport, True] = writer.through_the_agent(transport)
    rates: dict[tuple[str, bool], list[float]] = {way: [] for way in ways}
    for number in range(repeat + 1):
        for way, move in ways.items():
            started = CLOCK.now()
            move()
            if number:  # the first pass takes the pages
                rates[way].append(writer.memory.num_bytes / (CLOCK.now() - started) / 1e9)
    process.stdin.close()
    process.wait()
    limit = statistics.median(rates.pop(("memcpy", False)))
    for (name, has_checksum), values in rates.items():
        median = statistics.median(values)
        line = {
            "benchmark": "transfer",
            "transport": name,
            "checksum": has_checksum,
            "gb_s": round(median, 3),
            "best_gb_s": round(max(values), 3),
            "limit": "memcpy block by block, same run",
            "limit_gb_s": round(limit, 3),
            "ratio": round(median / limit, 3),
            "num_bytes": writer.memory.num_bytes,
            "block_bytes": LAYOUT.block_bytes,
            "repeat": repeat,
        }
        print(json.dumps(line), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mib", type=int, default=256)
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--transports", default="shm,tcp")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    num_blocks = (args.mib << 20) // LAYOUT.block_bytes
    if args.serve:
        serve(num_blocks)
    else:
        measure(num_blocks, args.repeat, args.transports.split(","))


if __name__ == "__main__":
    main()
