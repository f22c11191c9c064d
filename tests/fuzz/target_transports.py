"""What a rank receives as the target of a KV transfer over TCP: frames of blocks, for blocks of its pool."""

from __future__ import annotations

import socket
import struct
from contextlib import ExitStack
from pathlib import Path
from random import Random

import numpy as np

from kvtransfer.blocks.host_memory import KvMemory
from kvtransfer.blocks.layout import BlockLayout
from kvtransfer.blocks.pool import HostPool
from kvtransfer.errors import PeerGoneError, WireError
from kvtransfer.messages import ReplicaIdentity, Shard
from kvtransfer.protocol.gate import Gate
from kvtransfer.transfer_orders import OpenLanding
from kvtransfer.transfer_reports import TransferReport
from kvtransfer.transports.tcp_stream import StreamReceiver
from tests.fuzz.mutation import EDGE_INTS, mutate_bytes
from tests.fuzz.target import FindingError, Target, outcome

WHOLE = Shard(0, 1, 0, 1)
# Blocks of long runs, which are received where they belong, and of short ones, which are unpacked first.
LAYOUTS = {
    "in place": BlockLayout(WHOLE, head_dim=128, block_tokens=16, item_bytes=4),
    "packed": BlockLayout(Shard(0, 2, 0, 2), head_dim=8, block_tokens=4, item_bytes=4),
}
NUM_BLOCKS = 8
WRITER, STRANGER = ReplicaIdentity("writer", 1), ReplicaIdentity("stranger", 1)
OPEN, OTHERS, UNKNOWN = bytes([1]) * 16, bytes([2]) * 16, bytes([3]) * 16
OPEN_BLOCKS = (1, 2)
_HEADER = struct.Struct("<B16sIQ")


def open_targets(stack: ExitStack, folder: Path) -> list[Target]:
    """Return a target for each layout."""
    targets: list[Target] = []
    for name, layout in LAYOUTS.items():
        pool = HostPool(layout, KvMemory.allocate(NUM_BLOCKS * layout.block_bytes))
        stack.callback(pool.close)
        targets.append(Target(f"tcp data, {name}", _Receiver(pool).run, 300))
    return targets


class _Receiver:
    """One rank whose gate has a landing open for the writer and one for somebody else."""

    def __init__(self, pool: HostPool) -> None:
        self._pool = pool
        self._reports: list[TransferReport] = []
        self._gate = Gate(self._reports.append)
        self._gate.open(OpenLanding(OPEN, WRITER, OPEN_BLOCKS))
        self._gate.open(OpenLanding(OTHERS, STRANGER, (3, 4)))
        self._gate.shut()  # nobody waits for an order that opens an unknown landing
        blocks = np.frombuffer(pool.memory.buffer, dtype=np.uint8).reshape(NUM_BLOCKS, -1)
        # Those that nobody may write, which hold zeros.
        self._others = blocks[: OPEN_BLOCKS[0]], blocks[OPEN_BLOCKS[-1] + 1 :]

    def run(self, rng: Random) -> str:
        """Nothing is written outside the blocks of the writer's landing."""
        data = b"".join(self._frame(rng) for _ in range(rng.randint(1, 4)))
        if rng.random() < 0.4:
            data = mutate_bytes(rng, data)
        ours, theirs = socket.socketpair()
        with ours, theirs:
            ours.setblocking(False)
            sent = ours.send(data)
            ours.shutdown(socket.SHUT_WR)
            receiver = StreamReceiver(self._pool, self._gate, theirs, WRITER, self._pool.layout.shard)
            ended = outcome(receiver.run, PeerGoneError, WireError)
        if any(blocks.any() for blocks in self._others):
            raise FindingError(f"written outside the landing: {data[:sent]!r}")
        return ended

    def _frame(self, rng: Random) -> bytes:
        landing_id = rng.choice((OPEN, OPEN, OPEN, OTHERS, UNKNOWN, bytes(16)))
        kind = rng.choice((1,) * 10 + (2,) * 4 + (3,) * 4 + (0, 255))
        if kind != 1:
            num_bytes = rng.choice((0, 1, 100, 5000) if rng.random() < 0.8 else EDGE_INTS) % (1 << 64)
            payload = b"\xff" * min(num_bytes, 5000)
            return _HEADER.pack(kind, landing_id, 0, num_bytes) + payload
        blocks = [
            rng.choice((1, 1, 2, 2, 3, 0, NUM_BLOCKS - 1, NUM_BLOCKS, 1 << 31, (1 << 32) - 1))
            for _ in range(rng.randrange(4))
        ]
        if rng.random() < 0.8:
            blocks = [block for block in blocks if block in OPEN_BLOCKS]
        blocks = blocks or [OPEN_BLOCKS[0]]
        num_blocks = len(blocks) if rng.random() < 0.95 else rng.choice(EDGE_INTS) % (1 << 32)
        num_bytes = num_blocks * self._pool.layout.block_bytes
        if rng.random() < 0.05:
            num_bytes = rng.choice(EDGE_INTS)
        payload = b"\xff" * (len(blocks) * self._pool.layout.block_bytes)
        header = _HEADER.pack(kind, landing_id, num_blocks, num_bytes % (1 << 64))
        return header + struct.pack(f"<{len(blocks)}I", *blocks) + payload
