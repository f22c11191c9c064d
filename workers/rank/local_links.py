"""Links between the CPU ranks of a replica on one host: shared memory for data, a unix socket for wake-ups.

gloo serves a connection with a thread of its own, which has to wait for a core while the ranks compute: with
two ranks on two cores a sum of 8 KiB cost 0.7 ms in the middle of a step, and a hidden state 4 to 6 ms. Here
the rank's own thread copies into memory that its peer has mapped, and sends one byte.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import secrets
import socket
import threading
from collections import deque
from collections.abc import Iterable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.distributed.distributed_c10d import Store

from kvtransfer.errors import TransferError
from kvtransfer.rpc.handshake import HANDSHAKE_TIMEOUT_S, prove_as_client
from kvtransfer.rpc.listener import ListeningThread
from kvtransfer.rpc.trust import Trust
from workers.errors import RankDiedError
from workers.rank.shown_rows import RowsWindow, ShownRows

SLOT_BYTES = 4 << 20
_NUM_RING_SLOTS = 8
_WAKE = b"\1"
_BACKLOG = 128
_PATIENCE_S = 300.0
_NUM_DIALS = 20
_DIAL_PAUSE_S = 0.1
_pause = threading.Event()
_FAILED = b"\0"


class Switchboard:
    """Connects this rank to others of its replica on its host. All ranks make theirs at the same time.

    Both ends of every connection prove the cluster secret, else the connection is dropped. Two ranks share
    memory exactly if their `hosts` are equal."""

    def __init__(
        self,
        store: Store,
        rank: int,
        num_ranks: int,
        host_id: str,
        trust: Trust,
        patience_s: float = _PATIENCE_S,
    ) -> None:
        """A rank that does not connect within `patience_s` counts as dead."""
        self._rank = rank
        self._trust = trust
        self._patience_s = patience_s
        self._name = secrets.token_hex(16)
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        listener.bind(f"\0tandem-{self._name}")
        listener.listen(_BACKLOG)
        self._changed = threading.Condition()
        self._arrived: dict[str, socket.socket] = {}
        self._listening = ListeningThread(listener, trust, self._take, "ranks")
        store.set(f"local {rank}", f"{host_id} {self._name}")
        published = [store.get(f"local {other}").decode().rpartition(" ") for other in range(num_ranks)]
        self.hosts = [host for host, _, _ in published]
        self._names = [name for _, _, name in published]

    def connect(self, link: str, peers: Iterable[int]) -> dict[int, socket.socket]:
        """Return a socket to each peer; each peer calls this with the same link name for this rank. Raises
        `RankDiedError`, naming the peer that does not answer."""
        peers = sorted(peers)
        found: dict[int, socket.socket] = {}
        for peer in peers:
            if peer < self._rank:
                found[peer] = self._dial(link, peer)
        for peer in peers:
            if peer > self._rank:
                found[peer] = self._accept(link, peer)
        return found

    def close(self) -> None:
        """Take no more connections."""
        self._listening.close()
        for sock in self._arrived.values():
            sock.close()

    def _dial(self, link: str, peer: int) -> socket.socket:
        name = _end_name(link, self._rank)
        for _ in range(_NUM_DIALS):
            with contextlib.ExitStack() as stack:
                sock = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
                sock.settimeout(HANDSHAKE_TIMEOUT_S)
                try:
                    sock.connect(f"\0tandem-{self._names[peer]}")
                    prove_as_client(sock, self._trust, name)
                except (BlockingIOError, TransferError) as error:  # strangers crowd its listener
                    reason = str(error)
                    _pause.wait(_DIAL_PAUSE_S)
                    continue
                stack.pop_all()
                return sock
        raise RankDiedError(f"rank {peer} does not take the link {link!r}: {reason}")

    def _accept(self, link: str, peer: int) -> socket.socket:
        name = _end_name(link, peer)
        with self._changed:
            if not self._changed.wait_for(lambda: name in self._arrived, self._patience_s):
                raise RankDiedError(f"rank {peer} did not connect {link!r} within {self._patience_s:g} s")
            return self._arrived.pop(name)

    def _take(self, sock: socket.socket, name: str) -> None:
        with self._changed:
            earlier = self._arrived.pop(name, None)
            self._arrived[name] = sock
            self._changed.notify_all()
        if earlier is not None:  # given up by its rank, which dialled again
            earlier.close()


class SharedSums:
    """Sums and gathers over the ranks that share a stage's layers. `sockets` lead to the other ranks.

    Every rank has two slots that it alone writes, used in turn. When a rank has heard from all others for
    operation k + 1, they have finished reading operation k, so its slot of k may be written for k + 2.
    """

    def __init__(self, sockets: dict[int, socket.socket], tp_rank: int) -> None:
        self._sockets = [sockets[other] for other in sorted(sockets)]
        self._tp_rank = tp_rank
        own, descriptor = _allocate(2 * SLOT_BYTES)
        slots = {tp_rank: own}
        for other, sock in sorted(sockets.items()):
            socket.send_fds(sock, [_WAKE], [descriptor])
            slots[other] = _receive_memory(sock, 2 * SLOT_BYTES)
        os.close(descriptor)
        self._slots = [slots[rank] for rank in sorted(slots)]
        self._views: dict[tuple[torch.dtype, int], tuple[list[Tensor], list[Tensor]]] = {}
        self._num_done = 0

    def all_reduce(self, tensor: Tensor) -> None:
        """Replace a contiguous CPU tensor by the sum, added in rank order: equal bit for bit on all ranks."""
        for part in _split(tensor.view(-1), SLOT_BYTES // tensor.element_size()):
            parts = self._exchange(part)
            if len(parts) == 2:
                torch.add(parts[0], parts[1], out=part)
            else:
                part.copy_(sum_in_order(parts))

    def exchange(self, parts: Sequence[Tensor], num_rows: Sequence[int] | None) -> list[Tensor]:
        """Send `parts[rank]` to each rank, and return what each sends: `num_rows[rank]` rows, or as many as
        it does. The rank with most to show decides how many slots are shown."""
        shown, received = ShownRows.of(parts, self._tp_rank), list(parts)
        start, end = 0, 1
        while start < end:
            offset = self._num_done % 2 * SLOT_BYTES
            slots = [slot[offset : offset + SLOT_BYTES] for slot in self._slots]
            shown.write(slots[self._tp_rank], start)
            self._meet()
            windows = [RowsWindow.read(slot, start, len(parts)) for slot in slots]
            for rank, window in enumerate(windows):
                if rank == self._tp_rank:
                    continue
                if start == 0:
                    received[rank] = window.empty_part(self._tp_rank, like=parts[self._tp_rank])
                    assert num_rows is None or len(received[rank]) == num_rows[rank]
                window.copy(self._tp_rank, received[rank])
            start, end = windows[0].stop, max(window.end for window in windows)
        return received

    def gather_columns(self, tensor: Tensor, widths: Sequence[int], parts: list[Tensor]) -> None:
        """Fill `parts` at rank 0 with [num_rows, widths[rank]] of the other ranks, whose own `parts` are
        empty."""
        flat = tensor.contiguous().view(-1).view(torch.uint8)
        sizes = [tensor.shape[0] * width * tensor.element_size() for width in widths]
        gathered = [part.view(-1).view(torch.uint8) for part in parts]
        for start in range(0, max(sizes), SLOT_BYTES):
            self._exchange(flat[start : start + SLOT_BYTES])
            for whole, slots in zip(gathered, self._slots[1:], strict=False):
                part = whole[start : start + SLOT_BYTES]
                shown = slots[self._last_slot :]
                part.copy_(shown[: len(part)])

    def agree(self, is_well: bool) -> bool:
        """Return whether `is_well` holds at all ranks."""
        for sock in self._sockets:
            _send(sock, _WAKE if is_well else _FAILED)
        marks = [_receive(sock, 1) for sock in self._sockets]
        return is_well and _FAILED not in marks

    def close(self) -> None:
        """Close the links."""
        for sock in self._sockets:
            sock.close()

    @property
    def _last_slot(self) -> int:
        """Offset of the slot of the last exchange in every rank's memory."""
        return (self._num_done + 1) % 2 * SLOT_BYTES

    def _exchange(self, part: Tensor) -> list[Tensor]:
        """Show `part` to all ranks. Returns what each shows in as many elements of its slot, valid until the
        next exchange but one."""
        views = self._views_of(part.dtype, len(part))[self._num_done % 2]
        views[self._tp_rank].copy_(part)
        self._meet()
        return views

    def _meet(self) -> None:
        """Wait until every rank has written its next slot."""
        self._num_done += 1
        for sock in self._sockets:
            _send(sock, _WAKE)
        for sock in self._sockets:
            _receive(sock, 1)

    def _views_of(self, dtype: torch.dtype, count: int) -> tuple[list[Tensor], list[Tensor]]:
        """Return every rank's two slots as `count` elements. Made once: a step uses few sizes, and making a
        view costs as much as the wake-up that it delays."""
        key = dtype, count
        if key not in self._views:
            size = count * dtype.itemsize
            first, second = (
                [slot[start : start + size].view(dtype) for slot in self._slots] for start in (0, SLOT_BYTES)
            )
            self._views[key] = first, second
        return self._views[key]


def sum_in_order(parts: Sequence[Tensor]) -> Tensor:
    """Add up parts in this order, those of 16 bits in float32, whose sum is rounded once by who takes it."""
    first = parts[0]
    wide = torch.promote_types(first.dtype, torch.float32) if first.is_floating_point() else first.dtype
    total = first.to(wide, copy=True)
    for part in parts[1:]:
        total += part
    return total


class HiddenSender:
    """Sends hidden states to the counterpart in the next stage. Waits only when the ring is full."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._ring, descriptor = _allocate(_NUM_RING_SLOTS * SLOT_BYTES)
        socket.send_fds(sock, [_WAKE], [descriptor])
        os.close(descriptor)
        self._num_sent = self._num_taken = 0

    def send_marks(self, marks: NDArray[np.uint8]) -> None:
        """Send which entries the next hidden states hold."""
        _send(self._sock, marks.tobytes())

    def send(self, hidden: Tensor) -> None:
        """Copy the tensor into the ring; it may change afterwards."""
        flat = hidden.contiguous().view(-1).view(torch.uint8)
        for part in _split(flat, SLOT_BYTES):
            if self._num_sent - self._num_taken == _NUM_RING_SLOTS:
                self._num_taken += len(_receive_some(self._sock, _NUM_RING_SLOTS))
            start = self._num_sent % _NUM_RING_SLOTS * SLOT_BYTES
            self._ring[start : start + len(part)].copy_(part)
            self._num_sent += 1
            _send(self._sock, _WAKE)

    def close(self) -> None:
        """Close the link."""
        self._sock.close()


class HiddenReceiver:
    """Receives hidden states from the counterpart in the previous stage, in order."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._ring = _receive_memory(sock, _NUM_RING_SLOTS * SLOT_BYTES)
        self._num_taken = 0

    def receive_marks(self, count: int) -> NDArray[np.uint8]:
        """Receive which entries the next hidden states hold."""
        return np.frombuffer(_receive(self._sock, count), dtype=np.uint8)

    def receive(self, into: Tensor) -> None:
        """Fill the contiguous `into` with the next hidden states."""
        flat = into.view(-1).view(torch.uint8)
        for part in _split(flat, SLOT_BYTES):
            _receive(self._sock, 1)
            start = self._num_taken % _NUM_RING_SLOTS * SLOT_BYTES
            part.copy_(self._ring[start : start + len(part)])
            self._num_taken += 1
            _send(self._sock, _WAKE)

    def close(self) -> None:
        """Close the link."""
        self._sock.close()


class LocalTokens:
    """Carries sampled ids from the sampler to the ranks of the first stage, as messages [step, *ids] of
    int64.

    The sampler has a socket to each receiver, a receiver one to the sampler.
    """

    def __init__(self, sockets: Iterable[socket.socket]) -> None:
        self._sockets = list(sockets)
        self._expected: deque[tuple[int, int]] = deque()

    def send(self, step: int, tokens: NDArray[np.int64]) -> None:
        """Send the ids of a step to all receivers."""
        message = np.concatenate((np.array([step]), tokens)).tobytes()
        for sock in self._sockets:
            _send(sock, message)

    def expect(self, step: int, num_tokens: int) -> None:
        """Expect `num_tokens` ids of a step, after those expected before."""
        self._expected.append((step, num_tokens))

    def receive(self) -> tuple[int, NDArray[np.int64]]:
        """Wait for the oldest expected step. Returns (step, ids)."""
        step, num_tokens = self._expected.popleft()
        received = np.frombuffer(_receive(self._sockets[0], 8 * (1 + num_tokens)), dtype=np.int64)
        assert received[0] == step, f"the tokens of step {received[0]} came for step {step}"
        return step, received[1:]

    def close(self) -> None:
        """Close the links."""
        for sock in self._sockets:
            sock.close()


def _split(flat: Tensor, size: int) -> list[Tensor]:
    return [flat[start : start + size] for start in range(0, len(flat), size)]


def _allocate(num_bytes: int) -> tuple[Tensor, int]:
    """Allocate shared memory, whose pages are taken when touched. Returns its bytes and its descriptor."""
    descriptor = os.memfd_create("tandem-ranks", os.MFD_CLOEXEC)
    os.ftruncate(descriptor, num_bytes)
    return _map(descriptor, num_bytes), descriptor


def _map(descriptor: int, num_bytes: int) -> Tensor:
    mapping = mmap.mmap(descriptor, num_bytes, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ | mmap.PROT_WRITE)
    return torch.frombuffer(mapping, dtype=torch.uint8)


def _receive_memory(sock: socket.socket, num_bytes: int) -> Tensor:
    _, descriptors, _, _ = socket.recv_fds(sock, 1, 1, socket.MSG_CMSG_CLOEXEC)
    if not descriptors:
        raise RankDiedError("a rank of this replica left while its links were made")
    try:
        return _map(descriptors[0], num_bytes)
    finally:
        os.close(descriptors[0])


def _end_name(link: str, rank: int) -> str:
    """Return the connecting rank's name in its proof, so that no rank can claim to be another one."""
    return f"{link} of rank {rank}"


def _send(sock: socket.socket, data: bytes) -> None:
    try:
        sock.sendall(data)
    except OSError as error:
        raise RankDiedError(f"a rank of this replica is gone: {error}") from error


def _receive(sock: socket.socket, num_bytes: int) -> bytes:
    data = _receive_some(sock, num_bytes)
    while len(data) < num_bytes:
        data += _receive_some(sock, num_bytes - len(data))
    return data


def _receive_some(sock: socket.socket, num_bytes: int) -> bytes:
    try:
        data = sock.recv(num_bytes)
    except OSError as error:
        raise RankDiedError(f"a rank of this replica is gone: {error}") from error
    if not data:
        raise RankDiedError("a rank of this replica is gone: its link closed")
    return data
