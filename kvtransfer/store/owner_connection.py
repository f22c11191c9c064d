"""The connection to the node's owner, and the arena that is mapped from it.

The connection stays open for as long as the rank may write into the arena: its end proves to the owner that
nothing more is written. When the owner ends first, the mapping is kept and offered to the next owner.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import socket

import numpy as np

from kvtransfer.blocks.host_memory import map_shared, populate_read
from kvtransfer.blocks.runs import ByteRegion
from kvtransfer.common.os_errors import os_reason
from kvtransfer.errors import PeerGoneError, StoreError, TransferError, WireError
from kvtransfer.rpc.handshake import HANDSHAKE_TIMEOUT_S, prove_as_client, receive_frame, send_frame
from kvtransfer.rpc.trust import Trust
from kvtransfer.store.messages.arena_mapping import ArenaGrant, RankHello
from kvtransfer.store.messages.owner_codec import FROM_OWNER_CODEC, STORE_PROTOCOL, TO_OWNER_CODEC, expect
from kvtransfer.store.messages.store_orders import AttachStore

_FD_MARK = b"F"
# The mapping remembers in units of this size what it has mapped; records start at multiples of it.
_MAPPED_BYTES = 64 << 10


class MappedArena:
    """An owner's arena, mapped here. `region` is its bytes, `fd` the descriptor, kept for another owner."""

    def __init__(self, arena: bytes, num_bytes: int, fd: int) -> None:
        """Takes over the descriptor. `StoreError` when it is not such an arena, or cannot be mapped."""
        self.id = arena
        self.num_bytes = num_bytes
        self.fd = fd
        try:
            if not 0 < num_bytes <= os.fstat(fd).st_size:
                raise StoreError(f"the descriptor is not an arena of {num_bytes} bytes")
            if not fcntl.fcntl(fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK:
                raise StoreError("the arena could shrink: a write to it would end this process")
            self._mapping: mmap.mmap = map_shared(fd, num_bytes)
        except OSError as error:
            os.close(fd)
            raise StoreError(f"the arena cannot be mapped: {os_reason(error)}") from error
        except StoreError:
            os.close(fd)
            raise
        self.region = ByteRegion(memoryview(self._mapping))
        # Whether this process has the pages of each unit of `_MAPPED_BYTES` mapped.
        self._is_mapped = np.zeros(-(-num_bytes // _MAPPED_BYTES), dtype=np.bool_)

    def expect(self, offset: int, num_bytes: int) -> None:
        """Map the pages of this range, which will be read now, unless that was done before: where pages are
        small, the kernel takes longer to find them mapped than a copy takes."""
        is_mapped = self._is_mapped[offset // _MAPPED_BYTES : -(-(offset + num_bytes) // _MAPPED_BYTES)]
        if not is_mapped.all():
            populate_read(self._mapping, offset, num_bytes)
            is_mapped[:] = True

    def close(self) -> None:
        """Unmap the arena; `region` must not be used any more."""
        self.region = ByteRegion(memoryview(bytearray()))
        self._mapping.close()
        os.close(self.fd)


def attach(
    order: AttachStore, rank: int, trust: Trust, earlier: MappedArena | None
) -> tuple[socket.socket, MappedArena]:
    """Connect to the owner; return the open connection and its arena, which is `earlier` if the owner adopted
    that one. The text of `TransferError` gives the reason of a failure; then `earlier` is unchanged."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.settimeout(HANDSHAKE_TIMEOUT_S)
        sock.connect(f"\0{order.address}")
        arena = _map_arena(sock, order, rank, trust, earlier)
        sock.settimeout(None)
    except OSError as error:
        sock.close()
        raise PeerGoneError(f"the owner at {order.address} cannot be reached: {error}") from error
    except TransferError:
        sock.close()
        raise
    return sock, arena


def _map_arena(
    sock: socket.socket, order: AttachStore, rank: int, trust: Trust, earlier: MappedArena | None
) -> MappedArena:
    prove_as_client(sock, trust, f"rank {rank} of {order.session.hex()[:8]}")
    sock.settimeout(HANDSHAKE_TIMEOUT_S)
    hello = RankHello(STORE_PROTOCOL, order.session, rank, earlier.id if earlier else b"")
    send_frame(sock, TO_OWNER_CODEC.encode(hello))
    if earlier is not None:
        socket.send_fds(sock, [_FD_MARK], [earlier.fd])
    grant = expect(FROM_OWNER_CODEC.decode(receive_frame(sock)), ArenaGrant)
    if grant.is_yours:
        if earlier is None or (grant.arena, grant.num_bytes) != (earlier.id, earlier.num_bytes):
            raise WireError("the owner names an arena that was not offered")
        return earlier
    return MappedArena(grant.arena, grant.num_bytes, _receive_descriptor(sock))


def _receive_descriptor(sock: socket.socket) -> int:
    _, descriptors, _, _ = socket.recv_fds(sock, len(_FD_MARK), 1, socket.MSG_CMSG_CLOEXEC)
    if not descriptors:
        raise WireError("the owner sent no descriptor")
    return descriptors[0]
