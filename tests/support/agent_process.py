"""A rank's transfer agent in a process of its own: orders come in on standard input, reports go out on
standard output, both as length-prefixed frames. The first frame is the setup."""

from __future__ import annotations

import struct
import sys
from typing import IO

import numpy as np

from kvtransfer.clock import SystemClock
from kvtransfer.faults import FaultRule, Faults
from kvtransfer.layout import BlockLayout
from kvtransfer.memory import KvMemory
from kvtransfer.messages import ReplicaIdentity, Shard, TransferOrder, TransferReport
from kvtransfer.service import TransferAgent
from kvtransfer.wire import Codec, Message

LENGTH = struct.Struct("<I")


class AgentSetup(Message, frozen=True):
    """What the process is: its pool is filled from `seed`."""

    identity: ReplicaIdentity
    shard: Shard
    head_dim: int
    block_tokens: int
    item_bytes: int
    num_blocks: int
    secret: bytes
    seed: int
    faults: tuple[FaultRule, ...]


SETUP_CODEC: Codec[AgentSetup] = Codec(AgentSetup)
ORDER_CODEC: Codec[TransferOrder] = Codec(TransferOrder)
REPORT_CODEC: Codec[TransferReport] = Codec(TransferReport)


def read(stream: IO[bytes]) -> bytes | None:
    header = stream.read(LENGTH.size)
    return stream.read(*LENGTH.unpack(header)) if header else None


def write(stream: IO[bytes], frame: bytes) -> None:
    stream.write(LENGTH.pack(len(frame)) + frame)
    stream.flush()


def main() -> None:
    setup = SETUP_CODEC.decode(read(sys.stdin.buffer) or b"")
    layout = BlockLayout(setup.shard, setup.head_dim, setup.block_tokens, setup.item_bytes)
    memory = KvMemory.allocate(setup.num_blocks * layout.block_bytes)
    memory.buffer[:] = np.random.default_rng(setup.seed).bytes(memory.num_bytes)
    agent = TransferAgent(
        identity=setup.identity,
        rank=0,
        layout=layout,
        memory=memory,
        secret=setup.secret,
        clock=SystemClock(),
        faults=Faults(setup.faults),
        report=lambda report: write(sys.stdout.buffer, REPORT_CODEC.encode(report)),
        transports=(),
        data_host="127.0.0.1",
    )
    while (frame := read(sys.stdin.buffer)) is not None:
        agent.handle(ORDER_CODEC.decode(frame))
    agent.close()


if __name__ == "__main__":
    main()
