"""The collectives between the ranks of one replica: sums and logits inside a stage, hidden states from stage
to stage, sampled ids from the last stage back to the first.

Ranks on the CPUs of one host use shared memory (`local_links`). Those of a stage on GPUs of one host add up
through memory that they have mapped of each other (`one_shot_group`), where that is possible: with NVLink
between the cards, or on one card. Other groups are made for this replica alone, on a store of its own and not
on torch's global default group: NCCL serves CUDA, also for large sums and across PCI Express, gloo all other
pairs, and ranks that share a card, which NCCL refuses, pass hidden states through host memory. Not yet
validated: NCCL, and sums through mapped memory."""

from __future__ import annotations

import importlib.util
import logging
import socket
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from datetime import timedelta
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.distributed import (  # type: ignore[attr-defined]  # the type stubs lack the second
    BroadcastOptions,
    ProcessGroupGloo,
    TCPStore,
)
from torch.distributed.distributed_c10d import PrefixStore, Store

from kvtransfer.errors import PathError
from kvtransfer.rpc.trust import Trust
from kvtransfer.transports.cuda_driver import cuda_driver
from workers.errors import RankDiedError, WorkerError
from workers.rank.local_links import HiddenReceiver, HiddenSender, LocalTokens, SharedSums, Switchboard
from workers.rank.one_shot_group import OneShotGroup, OneShotSums
from workers.rank.peer_buffers import PeerBuffers

# The engine core detects a peer that hangs, and kills every rank. Before that, a wait ends only when a
# connection breaks.
_TIMEOUT = timedelta(hours=1)
# A sum for which a rank sends no more than this is sent directly to all ranks. Between two ranks that
# exchange takes 124 us for 8 KiB where gloo's ring, on a thread of its own, takes 333; at 2 MiB they are
# equal.
_DIRECT_BYTES = 2 << 20
_SUM_TAG, _LOGITS_TAG, _AGREE_TAG, _ROWS_TAG = 0, 1, 2, 3
_HIDDEN_TAG, _MARKS_TAG = 0, 1

_log = logging.getLogger("tandem.rank")


def open_store(host: str) -> tuple[TCPStore, str]:
    """Open a store on a free port of this interface alone; returns it and its address. It lives until the
    object is dropped."""
    listener = socket.create_server((host, 0))
    port = listener.getsockname()[1]
    # From here on the store owns the descriptor.
    store = TCPStore(
        host, port, None, True, wait_for_workers=False, master_listen_fd=listener.detach(), use_libuv=True
    )
    return store, f"{host}:{port}"


def find_store(address: str) -> TCPStore:
    """Connect to the store that rank 0 has opened at `address`."""
    host, _, port = address.rpartition(":")
    return TCPStore(host, int(port), None, False)


class RankGroups:
    """The collectives of `rank` = stage * tp + tp_rank with the other ranks of its replica.

    All ranks make theirs at the same time, on one `store`; a replica of one rank needs none and forms
    nothing. `host` is the address of this rank's interface that the other ranks can reach. Ranks of equal
    `host_id` share memory ("" with nobody) and prove the secret of `trust` to each other. Every method
    raises RankDiedError for a broken connection."""

    def __init__(
        self,
        store: Store | None,
        *,
        tp: int,
        pp: int,
        rank: int,
        device: torch.device,
        host: str,
        host_id: str = "",
        trust: Trust | None = None,
        is_deterministic: bool = False,
    ) -> None:
        """`is_deterministic`: sums are added in the order of ranks, whatever their size, where that is
        possible; see `adds_in_order`."""
        self.tp, self.pp, self.rank = tp, pp, rank
        self.stage, self.tp_rank = divmod(rank, tp)
        self.is_first_stage = self.stage == 0
        self.is_last_stage = self.stage == pp - 1
        self.is_sampler = self.is_last_stage and self.tp_rank == 0
        # The bytes of rows that this rank has sent by `exchange`.
        self.num_exchanged_bytes = 0
        self._store = store
        self._nccl_groups: list[Any] = []
        self._is_deterministic = is_deterministic
        self._device = device
        self._layer_group: SharedSums | OneShotGroup | _LayerGroup | None = None
        self._previous: HiddenReceiver | _HiddenPair | None = None
        self._next: HiddenSender | _HiddenPair | None = None
        self._tokens: LocalTokens | _TokenGroup | None = None
        if tp * pp > 1:
            assert store is not None, "ranks find each other in a store"
            assert trust is not None, "ranks prove the cluster secret to each other"
            with _broken_connections("forming the replica's groups"):
                factory = _GroupFactory(store, device, host)
                board_id = host_id or f"rank {rank}"
                with closing(Switchboard(store, rank, tp * pp, board_id, trust)) as board:
                    self._form(factory, board)
                self._nccl_groups = factory.nccl_groups

    def _form(self, factory: _GroupFactory, board: Switchboard) -> None:
        devices = factory.exchange_devices(self.rank, self.tp * self.pp)
        kinds = [device.partition(" ")[0] for device in devices]
        places = list(zip(board.hosts, devices, strict=True))
        own = kinds[self.rank]
        first = self.stage * self.tp
        stage = range(first, first + self.tp)
        if {kinds[rank] for rank in stage} != {own}:
            raise WorkerError(f"the ranks of stage {self.stage} are on unlike devices: {kinds}")

        def are_local(ranks: Iterable[int]) -> bool:
            return {(board.hosts[rank], kinds[rank]) for rank in ranks} == {(board.hosts[self.rank], "cpu")}

        if self.tp > 1 and are_local(stage):
            sockets = board.connect("sum", (rank for rank in stage if rank != self.rank))
            self._layer_group = SharedSums(
                {rank - first: sock for rank, sock in sockets.items()}, self.tp_rank
            )
        elif self.tp > 1:
            self._layer_group = self._stage_group(factory, board, [places[rank] for rank in stage])
        if not self.is_first_stage:
            peer = self.rank - self.tp
            if are_local((peer, self.rank)):
                self._previous = HiddenReceiver(board.connect("hidden", [peer])[peer])
            else:
                on_cuda = own == kinds[peer] == "cuda" and places[peer] != places[self.rank]
                self._previous = _HiddenPair(factory, peer, 1, on_cuda, self.pp)
        if not self.is_last_stage:
            peer = self.rank + self.tp
            if are_local((peer, self.rank)):
                self._next = HiddenSender(board.connect("hidden", [peer])[peer])
            else:
                on_cuda = own == kinds[peer] == "cuda" and places[peer] != places[self.rank]
                self._next = _HiddenPair(factory, self.rank, 0, on_cuda, self.pp)
        sampler = (self.pp - 1) * self.tp
        receivers = [rank for rank in range(self.tp) if rank != sampler]
        if not (self.is_first_stage or self.is_sampler) or not receivers:
            return
        if len({board.hosts[rank] for rank in (*receivers, sampler)}) > 1:
            self._tokens = _TokenGroup(factory, self.tp, self.pp, self.rank)
        elif self.is_sampler:
            self._tokens = LocalTokens(board.connect("tokens", receivers).values())
        else:
            self._tokens = LocalTokens(board.connect("tokens", [sampler]).values())

    def _stage_group(
        self, factory: _GroupFactory, board: Switchboard, places: list[tuple[str, str]]
    ) -> OneShotGroup | _LayerGroup:
        """Form the group of a stage whose ranks are at these `places`, (host, device), and not all on CPUs of
        one host."""
        name = f"stage {self.stage}"
        if self._device.type != "cuda":
            group = factory.group(name, self.tp_rank, self.tp, False)
            return _LayerGroup(group, group, self.tp, self.tp_rank)
        marks = factory.group(f"{name} marks", self.tp_rank, self.tp, False)
        large: _LayerGroup | None = None
        if len(set(places)) == self.tp:  # NCCL refuses ranks that share a card
            group = factory.group(name, self.tp_rank, self.tp, True)
            large = _LayerGroup(group, marks, self.tp, self.tp_rank)
        reason = "its ranks are on several hosts"
        if len({host for host, _ in places}) == 1:
            first = self.stage * self.tp
            others = [first + it for it in range(self.tp) if it != self.tp_rank]
            sockets = {rank - first: sock for rank, sock in board.connect("sums", others).items()}
            buffers = self._buffers(sockets)
            if isinstance(buffers, PeerBuffers):
                return OneShotGroup(
                    OneShotSums(buffers, self.tp_rank),
                    large,
                    _LayerGroup(marks, marks, self.tp, self.tp_rank),
                    sockets,
                    is_ordered=self._is_deterministic and self.tp > 2,
                )
            reason = buffers
            for sock in sockets.values():
                sock.close()
        if large is None:
            raise WorkerError(
                f"the ranks of stage {self.stage} share a card, where NCCL does not serve, and cannot map "
                f"each other's memory ({reason}): give each rank a card, or set tp: 1"
            )
        _log.info("stage %d adds up by NCCL alone: %s", self.stage, reason)
        return large

    def _buffers(self, sockets: dict[int, socket.socket]) -> PeerBuffers | str:
        """Form the buffers for sums with the stage's other ranks; the reason where that is not possible."""
        if importlib.util.find_spec("triton") is None:
            return "triton is not installed"
        from workers.model.cuda.one_shot_sums import buffer_bytes  # imports triton

        own = torch.zeros(buffer_bytes(self.tp), dtype=torch.uint8, device=self._device)
        return PeerBuffers.form(cuda_driver(self._device.index), sockets, own, self.tp_rank)

    @property
    def adds_in_order(self) -> bool:
        """Whether the bits of a sum over the stage depend on nothing but what is added: two addends have one
        order, more are added in the order of ranks."""
        group = self._layer_group
        if self.tp <= 2 or isinstance(group, SharedSums):
            return True
        return isinstance(group, OneShotGroup) and group.is_ordered

    def check(self) -> None:
        """Raise `RankDiedError` if a sum that the device has done was given up because a rank ended."""
        if isinstance(self._layer_group, OneShotGroup):
            self._layer_group.check()

    def smallest(self, value: int) -> int:
        """Return the least of what all ranks of the replica pass, which call this once, at the same point of
        their start."""
        if self.tp * self.pp == 1:
            return value
        assert self._store is not None
        with _broken_connections("agreeing on a size"):
            keys = [f"size {rank}" for rank in range(self.tp * self.pp)]
            self._store.set(keys[self.rank], str(value))
            self._store.wait(keys, _TIMEOUT)
            return min(int(self._store.get(key)) for key in keys)

    # -------------------------------------------------------------------------------- inside a stage

    @property
    def shares_memory(self) -> bool:
        """Whether the stage's ranks exchange rows through memory that they share."""
        return isinstance(self._layer_group, SharedSums)

    def all_reduce(self, tensor: Tensor) -> None:
        """Replace a contiguous tensor by the sum over the stage's ranks, equal bit for bit on all."""
        assert self._layer_group is not None, "one rank has nothing to add up"
        with _broken_connections("summing over a stage's ranks"):
            self._layer_group.all_reduce(tensor)

    def exchange(self, parts: Sequence[Tensor], num_rows: Sequence[int] | None = None) -> list[Tensor]:
        """Send `parts[rank]` [any, num_columns], contiguous and of one dtype, to each rank of the stage.
        Returns what each sends: `num_rows[rank]` rows, or, without these, as many as it does; the own part as
        it is."""
        assert self._layer_group is not None, "one rank has nothing to exchange"
        self.num_exchanged_bytes += sum(it.nbytes for it in parts) - parts[self.tp_rank].nbytes
        with _broken_connections("exchanging rows"):
            return self._layer_group.exchange(parts, num_rows)

    def all_gather(self, own: Tensor, num_rows: Sequence[int]) -> list[Tensor]:
        """Send `own` [num_rows[tp_rank], num_columns], contiguous, to each rank of the stage. Returns what
        each sends, the own part as it is."""
        assert self._layer_group is not None, "one rank has nothing to gather"
        with _broken_connections("giving blocks on"):
            return self._layer_group.exchange([own] * self.tp, num_rows)

    def gather_columns(self, tensor: Tensor, widths: Sequence[int]) -> Tensor | None:
        """Gather the stage's parts [num_rows, widths[rank]] side by side at its first rank; None at the
        others."""
        assert self._layer_group is not None, "one rank has nothing to gather"
        assert tensor.shape[1] == widths[self.tp_rank]
        num_rows = tensor.shape[0]
        parts: list[Tensor] = []
        whole: Tensor | None = None
        if self.tp_rank == 0:  # before anything is sent, so that lack of memory looks like no lost rank
            parts = [tensor.new_empty((num_rows, width)) for width in widths[1:]]
            whole = tensor.new_empty((num_rows, sum(widths)))
        with _broken_connections("gathering logits"):
            self._layer_group.gather_columns(tensor, widths, parts)
        return None if whole is None else torch.cat([tensor, *parts], 1, out=whole)

    def broadcast(self, tensor: Tensor) -> None:
        """Replace a contiguous tensor by that of the stage's first rank, in order with the device's work. Not
        for ranks that share memory."""
        assert isinstance(self._layer_group, OneShotGroup | _LayerGroup)
        with _broken_connections("sending sampled tokens to the stage's ranks"):
            self._layer_group.broadcast(tensor)

    def agree(self, is_well: bool) -> bool:
        """Return whether `is_well` holds at all ranks of the stage, which call this at the same points of a
        step. Does not wait for queued kernels."""
        if self._layer_group is None:
            return is_well
        with _broken_connections("agreeing on a step"):
            return self._layer_group.agree(is_well)

    # ------------------------------------------------------------------------- from stage to stage

    def send_marks(self, marks: NDArray[np.uint8]) -> None:
        """Send a mark for each entry of the plan: 1 if the next `send_hidden` holds it, else 0. If all are 0,
        none follows."""
        assert self._next is not None, "the last stage has no next"
        with _broken_connections("sending the marks of hidden states"):
            self._next.send_marks(marks)

    def receive_marks(self, num_entries: int) -> NDArray[np.uint8]:
        """Wait for the marks of the previous stage's next hidden states."""
        assert self._previous is not None, "the first stage has no previous"
        with _broken_connections("receiving the marks of hidden states"):
            return self._previous.receive_marks(num_entries)

    def send_hidden(self, hidden: Tensor) -> None:
        """Send [num_tokens, hidden_size] to the next stage and return. `hidden` must not change
        afterwards."""
        assert self._next is not None, "the last stage has no next"
        with _broken_connections("sending hidden states"):
            self._next.send(hidden)

    def receive_hidden(self, into: Tensor) -> None:
        """Wait for the previous stage's next hidden states and fill the contiguous `into`."""
        assert self._previous is not None, "the first stage has no previous"
        with _broken_connections("receiving hidden states"):
            self._previous.receive(into)

    def send_tokens(self, step: int, tokens: NDArray[np.int64]) -> None:
        """Send the sampler's ids of `step` to every rank of the first stage but itself. Returns at once."""
        assert self._tokens is not None, "no rank waits for tokens"
        assert self.is_sampler
        with _broken_connections("sending sampled tokens"):
            self._tokens.send(step, tokens)

    def expect_tokens(self, step: int, num_tokens: int) -> None:
        """Expect `num_tokens` > 0 ids of `step`, on a rank of the first stage that is not the sampler. Must
        be called for every plan that samples, in order and before its computation."""
        assert self._tokens is not None, "only the first stage waits for tokens"
        assert not self.is_sampler
        with _broken_connections("receiving sampled tokens"):
            self._tokens.expect(step, num_tokens)

    def receive_tokens(self) -> tuple[int, NDArray[np.int64]]:
        """Wait for the oldest expected step. Returns (step, ids in the order they were sent)."""
        assert self._tokens is not None, "only the first stage waits for tokens"
        assert not self.is_sampler
        with _broken_connections("receiving sampled tokens"):
            return self._tokens.receive()

    def close(self) -> None:
        """Leave all groups at once; what was sent and not yet received is lost. Call it from the thread that
        uses the groups: a thread that waits in gloo for a rank that hangs cannot be woken, only killed."""
        if isinstance(self._layer_group, OneShotGroup):
            self._layer_group.close()
        for group in self._nccl_groups:
            group.abort()  # else its end waits for what is under way; gloo's does not
        self._nccl_groups = []
        for link in (self._layer_group, self._previous, self._next, self._tokens):
            if isinstance(link, SharedSums | HiddenSender | HiddenReceiver | LocalTokens):
                link.close()
        self._layer_group = self._previous = self._next = self._tokens = None


class _GroupFactory:
    """Forms the groups of one rank. All gloo groups share one device, that is, one listening interface."""

    def __init__(self, store: Store, device: torch.device, host: str) -> None:
        self._store = store
        self._device = device
        self.nccl_groups: list[Any] = []
        self._gloo_device = ProcessGroupGloo.create_device(hostname=host, lazy_init=False)

    def exchange_devices(self, rank: int, num_ranks: int) -> list[str]:
        """Publish this rank's device, "cpu", or "cuda" and its card's place on the bus, and return those of
        all ranks."""
        name = self._device.type
        if name == "cuda":
            name = f"cuda {_card(self._device)}"
        self._store.set(f"device {rank}", name)
        return [self._store.get(f"device {other}").decode() for other in range(num_ranks)]

    def group(self, name: str, rank: int, size: int, on_cuda: bool) -> Any:
        """Form a group; returns when all `size` members have called it with this name."""
        store = PrefixStore(name, self._store)
        if on_cuda:
            from torch.distributed import ProcessGroupNCCL  # absent from builds without CUDA

            nccl = ProcessGroupNCCL.Options()
            nccl._timeout = _TIMEOUT
            group = ProcessGroupNCCL(store, rank, size, nccl)
            group.eager_connect_single_device(self._device)
            self.nccl_groups.append(group)
            return group
        options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]  # the type stubs lack it
        options._timeout = _TIMEOUT
        options._devices = [self._gloo_device]
        options._threads = 1
        return ProcessGroupGloo(store, rank, size, options)


def _card(device: torch.device) -> str:
    """Return the place of a card on the bus; its index where the driver does not name that."""
    try:
        return cuda_driver(device.index).bus_id
    except PathError:
        return str(device.index)


class _LayerGroup:
    """Sums and gathers over the ranks of one stage, by gloo or NCCL."""

    def __init__(self, group: Any, marks: Any, tp: int, tp_rank: int) -> None:
        """`marks` is a group of the same ranks for tensors in host memory."""
        self._group = group
        self._marks = marks
        self._tp = tp
        self._tp_rank = tp_rank

    def all_reduce(self, tensor: Tensor) -> None:
        if tensor.device.type == "cpu" and tensor.nbytes * (self._tp - 1) <= _DIRECT_BYTES:
            self._sum_directly(tensor)
        else:
            self._group.allreduce([tensor]).wait()

    def broadcast(self, tensor: Tensor) -> None:
        self._group.broadcast([tensor], BroadcastOptions()).wait()  # rank 0 is the source

    def _sum_directly(self, tensor: Tensor) -> None:
        parts = tensor.new_empty((self._tp, *tensor.shape))
        self._exchange(self._group, tensor, parts, _SUM_TAG)
        torch.sum(parts, 0, out=tensor)

    def agree(self, is_well: bool) -> bool:
        own = torch.tensor([int(is_well)], dtype=torch.uint8)
        marks = own.new_empty((self._tp, 1))
        self._exchange(self._marks, own, marks, _AGREE_TAG)
        return bool(marks.all())

    def _exchange(self, group: Any, own: Tensor, parts: Tensor, tag: int) -> None:
        """Send `own` to every other rank of the stage; `parts` receives every rank's tensor."""
        others = [rank for rank in range(self._tp) if rank != self._tp_rank]
        works = [group.recv([parts[rank]], rank, tag) for rank in others]
        works += [group.send([own], rank, tag) for rank in others]
        parts[self._tp_rank] = own
        for work in works:
            work.wait()

    def exchange(self, parts: Sequence[Tensor], num_rows: Sequence[int] | None) -> list[Tensor]:
        own, others = parts[self._tp_rank], [rank for rank in range(self._tp) if rank != self._tp_rank]
        counts = self._counts(parts) if num_rows is None else num_rows
        received = [own.new_empty((count, own.shape[1])) for count in counts]
        received[self._tp_rank] = own
        works = [
            self._group.recv([received[rank]], rank, _ROWS_TAG) for rank in others if len(received[rank])
        ]
        works += [self._group.send([parts[rank]], rank, _ROWS_TAG) for rank in others if len(parts[rank])]
        for work in works:
            work.wait()
        return received

    def _counts(self, parts: Sequence[Tensor]) -> list[int]:
        """Return how many rows each rank sends to this one, which sends `parts`."""
        own = torch.tensor([len(part) for part in parts])
        counts = own.new_empty((self._tp, self._tp))
        self._exchange(self._marks, own, counts, _AGREE_TAG)
        return [int(count) for count in counts[:, self._tp_rank]]

    def gather_columns(self, tensor: Tensor, widths: Sequence[int], parts: list[Tensor]) -> None:
        if self._tp_rank > 0:
            self._group.send([tensor.contiguous()], 0, _LOGITS_TAG).wait()
            return
        works = [self._group.recv([part], rank, _LOGITS_TAG) for rank, part in enumerate(parts, start=1)]
        for work in works:
            work.wait()


class _HiddenPair:
    """Carries hidden states between a rank and its counterpart in the next stage, in order, through host
    memory between unlike devices."""

    def __init__(self, factory: _GroupFactory, sender: int, member: int, on_cuda: bool, pp: int) -> None:
        """`member` is 0 at the rank `sender` and 1 at its counterpart; `on_cuda` if both devices are."""
        self._group = factory.group(f"hidden {sender}", member, 2, on_cuda)
        self._marks = factory.group(f"marks {sender}", member, 2, False) if on_cuda else self._group
        self._on_cuda = on_cuda
        # The most sends under way, as many as there are plans in flight: the tensor of the oldest has been
        # received by then.
        self._most_sends = 2 * (pp + 1)
        self._sends: deque[tuple[Any, Tensor]] = deque()

    def send_marks(self, marks: NDArray[np.uint8]) -> None:
        sent = torch.from_numpy(marks)
        self._sent(self._marks.send([sent], 1, _MARKS_TAG), sent)

    def receive_marks(self, count: int) -> NDArray[np.uint8]:
        received = torch.empty(count, dtype=torch.uint8)
        self._marks.recv([received], 0, _MARKS_TAG).wait()
        marks: NDArray[np.uint8] = received.numpy()
        return marks

    def send(self, hidden: Tensor) -> None:
        sent = (hidden if self._on_cuda else hidden.cpu()).contiguous()
        self._sent(self._group.send([sent], 1, _HIDDEN_TAG), sent)

    def _sent(self, work: Any, sent: Tensor) -> None:
        self._sends.append((work, sent))
        if len(self._sends) > self._most_sends:
            self._sends.popleft()[0].wait()

    def receive(self, into: Tensor) -> None:
        if self._on_cuda or into.device.type == "cpu":
            self._group.recv([into], 0, _HIDDEN_TAG).wait()
        else:
            received = torch.empty(into.shape, dtype=into.dtype, pin_memory=True)
            self._group.recv([received], 0, _HIDDEN_TAG).wait()
            into.copy_(received)


class _TokenGroup:
    """Carries sampled ids from the sampler to the ranks of the first stage, as messages [step, *ids] of
    int64."""

    def __init__(self, factory: _GroupFactory, tp: int, pp: int, rank: int) -> None:
        self._sampler = 0 if pp == 1 else tp
        member = rank if rank < tp else self._sampler
        self._group = factory.group("tokens", member, tp if pp == 1 else tp + 1, on_cuda=False)
        self._receivers = [other for other in range(tp) if other != self._sampler]
        self._most_sends = pp + 1
        self._sends: deque[tuple[list[Any], Tensor]] = deque()
        self._expected: deque[tuple[int, Any, Tensor]] = deque()

    def send(self, step: int, tokens: NDArray[np.int64]) -> None:
        message = torch.from_numpy(np.concatenate((np.array([step]), tokens)))
        self._sends.append(([self._group.send([message], to, 0) for to in self._receivers], message))
        if len(self._sends) > self._most_sends:
            for work in self._sends.popleft()[0]:
                work.wait()

    def expect(self, step: int, num_tokens: int) -> None:
        message = torch.empty(1 + num_tokens, dtype=torch.int64)
        self._expected.append((step, self._group.recv([message], self._sampler, 0), message))

    def receive(self) -> tuple[int, NDArray[np.int64]]:
        step, work, message = self._expected.popleft()
        work.wait()
        sent_step, *_ = received = message.numpy()
        assert sent_step == step, f"the tokens of step {sent_step} came for step {step}"
        return step, received[1:]


@contextmanager
def _broken_connections(doing: str) -> Iterator[None]:
    """Translate broken connections, which torch reports as RuntimeError and a socket as OSError."""
    try:
        yield
    except (RuntimeError, OSError) as error:
        raise RankDiedError(f"{doing}: {str(error).splitlines()[0]}") from error
