"""Shared memory of one host: the writer maps the target's pool and copies pieces straight into place.

The target listens on a unix socket of the abstract namespace (no file) under a random name. A writer that
has proven the secret gets the pool's memfd over it and maps it; the socket then stays open for as long as
the mapping lives, and that is the fence. When the target sees the socket's end, the writer cannot write:

- An orderly writer unmaps first and closes the socket after.
- For a killed one the kernel does: every thread of a dying process gives up its memory (`exit_mm`) before
  its files (`exit_files`), and the socket is a file, closed when the last thread has given it up.

A stopped (SIGSTOP) or hung writer still has its mapping: its socket stays open, and the gate counts it. A
child that a writer forks inherits mapping and socket together, so it only delays the proof; `exec` ends both.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from kvtransfer.blocks.host_memory import map_shared, mapping_bytes, scratch_offset
from kvtransfer.blocks.layout import Run, plan_runs, split_runs
from kvtransfer.blocks.pool import HostPool
from kvtransfer.blocks.runs import ByteRegion, RunTable, copy_runs
from kvtransfer.errors import PathError, WireError
from kvtransfer.transfer_orders import BlockMove, Lane
from kvtransfer.transports.base import TargetRank, WriterRank
from kvtransfer.transports.onesided import OneSidedChannel, OneSidedListener, connect_unix
from kvtransfer.transports.stream_sockets import (
    ChannelHello,
    ChannelWelcome,
    Connection,
    Stopped,
    greet,
    opening,
)

_FD_MARK = b"F"
# Copied between two looks at `stopped`: about two milliseconds.
_BATCH_BYTES = 16 << 20


class ShmListener(OneSidedListener):
    """Sends the descriptor of a pool to proven writers."""

    transport = "shm"

    def __init__(self, target: TargetRank, group_to_fd: Mapping[int, int]) -> None:
        """Take the descriptor of each pool."""
        self._group_to_fd = group_to_fd
        super().__init__(target)

    def _offer(self, sock: socket.socket, hello: ChannelHello) -> None:
        socket.send_fds(sock, [_FD_MARK], [self._group_to_fd[hello.group]])


class ShmChannel(OneSidedChannel):
    """The target's pool, mapped here."""

    transport = "shm"
    batch_bytes = _BATCH_BYTES

    def __init__(
        self,
        rank: WriterRank,
        lane: Lane,
        connection: Connection,
        welcome: ChannelWelcome,
        mapping: mmap.mmap,
        on_lost: Callable[[str], None],
    ) -> None:
        super().__init__(rank, lane, connection, welcome.num_blocks, "memory", on_lost)
        self._source = _host_pool(rank)
        self._mapping = mapping
        self._region = ByteRegion(memoryview(mapping))
        target = replace(rank.pool.layout, shard=lane.target.shard)
        runs = plan_runs(rank.pool.layout, target, lane.piece)
        self._table = RunTable(runs)
        self._halves: tuple[list[Run], list[Run]] = split_runs(runs, self.piece_bytes // 2)
        self._block_bytes = target.block_bytes
        self._scratch = scratch_offset(welcome.num_blocks * target.block_bytes)

    def flush(self, landing_id: bytes, stopped: Stopped) -> None:
        """Check that the target still lives; there is nothing to wait for, as stores are visible when
        made."""
        self._connection.check_other_end()

    def close(self) -> None:
        """Unmap, then close the socket: its end proves to the target that nothing can be written."""
        self.interrupt()
        self._region = ByteRegion(memoryview(bytearray()))
        self._mapping.close()
        super().close()

    def _begin_batch(self, moves: Sequence[BlockMove], stopped: Stopped) -> Callable[[], list[int]]:
        sums = self._copy(moves, self._table)
        return lambda: sums

    def _write_block(self, landing_id: bytes, move: BlockMove, corrupt: bool, stopped: Stopped) -> int:
        assert landing_id in self._begun
        first, second = self._halves
        self._copy([move], RunTable(first))
        self._faults.at("push.half")
        self._copy([move], RunTable(second))
        if corrupt:
            self._region.bytes[move.dst_block * self._block_bytes + self._table.runs[0].dst_offset] ^= 1
        return self._source.sums([move.src_block], self._piece)[0]

    def _copy(self, moves: Sequence[BlockMove], table: RunTable) -> list[int]:
        targets = [move.dst_block * self._block_bytes for move in moves]
        sources = self._source.offsets([move.src_block for move in moves])
        return copy_runs(self._source.region, sources, self._region, targets, table, streamed=True)

    def _write_scratch(self, num_bytes: int, stopped: Stopped) -> None:
        memory = self._source.memory
        table = RunTable([Run(scratch_offset(memory.num_bytes), self._scratch, num_bytes)])
        copy_runs(ByteRegion(memory.whole), [0], self._region, [0], table, sums=False)


def listen(target: TargetRank) -> ShmListener | None:
    """Return a listener, or None where the memory of a pool cannot be shared."""
    pools = target.group_to_pool
    fds = {
        group: pool.memory.fd
        for group, pool in pools.items()
        if isinstance(pool, HostPool) and pool.memory.fd >= 0
    }
    return ShmListener(target, fds) if len(fds) == len(pools) else None


def connect(
    rank: WriterRank, lane: Lane, address: str, connection_id: bytes, on_lost: Callable[[str], None]
) -> ShmChannel:
    """Open a channel; the text of `TransferError` gives the reason of a failure."""
    _host_pool(rank)
    with opening("shm", address) as undo:
        hello = rank.hello(lane, connection_id)
        sock, welcome = greet(undo, connect_unix(address), rank.trust, hello)
        block_bytes = replace(rank.pool.layout, shard=lane.target.shard).block_bytes
        mapping = _receive_mapping(sock, welcome.num_blocks * block_bytes)
        channel = ShmChannel(rank, lane, Connection(sock, "shm"), welcome, mapping, on_lost)
    channel.start()
    return channel


def _host_pool(rank: WriterRank) -> HostPool:
    if not isinstance(rank.pool, HostPool):
        raise PathError(f"this rank's blocks lie on {rank.pool.device}, not in host memory")
    return rank.pool


def _receive_mapping(sock: socket.socket, num_bytes: int) -> mmap.mmap:
    """Map the pool of `num_bytes` whose descriptor comes next; the descriptor itself is closed again."""
    mark, descriptors, _, _ = socket.recv_fds(sock, len(_FD_MARK), 1, socket.MSG_CMSG_CLOEXEC)
    if not descriptors:
        raise WireError("the target sent no descriptor")
    try:
        total_bytes = mapping_bytes(num_bytes)
        if mark != _FD_MARK or os.fstat(descriptors[0]).st_size != total_bytes:
            raise WireError(f"the descriptor is not a pool of {num_bytes} bytes")
        if not fcntl.fcntl(descriptors[0], fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK:
            raise WireError("the target could shrink the memory: a write to it would end this process")
        return map_shared(descriptors[0], total_bytes)
    finally:
        os.close(descriptors[0])
