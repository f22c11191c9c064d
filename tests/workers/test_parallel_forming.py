"""Ranks that form their groups when one of them is gone, or when strangers are about."""

from __future__ import annotations

import secrets
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path

import pytest
import torch
from torch.distributed import HashStore  # type: ignore[attr-defined]  # the type stubs leave it out

from kvtransfer.rpc.handshake import ClientHandshake, send_frame
from kvtransfer.rpc.listener import MAX_UNPROVEN
from kvtransfer.rpc.trust import Trust
from workers.errors import RankDiedError
from workers.rank.collectives import RankGroups
from workers.rank.local_links import Switchboard

TRUST = Trust.draw()
WAIT_S = 30.0


def test_a_rank_that_died_before_its_links_were_made_is_an_error_of_that_kind() -> None:
    """A peer that has published its address and no longer listens."""
    store = HashStore()
    store.set("device 0", "cpu")
    store.set("local 0", f"here {secrets.token_hex(16)}")
    with pytest.raises(RankDiedError, match="forming the replica's groups"):
        RankGroups(
            store,
            tp=2,
            pp=1,
            rank=1,
            device=torch.device("cpu"),
            host="127.0.0.1",
            host_id="here",
            trust=TRUST,
        )


class Strangers:
    """Processes of this host that have found the ranks' sockets in /proc/net/unix."""

    def __init__(self, store: HashStore) -> None:
        self._store = store
        self.names: list[str] = []

    def look(self, num_ranks: int) -> None:
        """The store tells which of all sockets are those of this test: others run beside it."""
        for rank in range(num_ranks):
            name = self._store.get(f"local {rank}").decode().rpartition(" ")[2]
            self.names.append(f"tandem-{name}")
        assert set(self.names) <= visible()

    @contextmanager
    def holding(self, num_each: int, first_bytes: bytes = b"") -> Iterator[None]:
        """So many connections to every rank, which say `first_bytes` and no more."""
        with ExitStack() as stack:
            for name in self.names * num_each:
                sock = stack.enter_context(socket.socket(socket.AF_UNIX))
                sock.connect(f"\0{name}")
                sock.sendall(first_bytes)
            yield


def visible() -> set[str]:
    lines = Path("/proc/net/unix").read_text().splitlines()
    return {line.split("@", 1)[1] for line in lines if "@tandem-" in line}


@pytest.mark.parametrize("num_each", [1, MAX_UNPROVEN + 10])
@pytest.mark.parametrize("first_bytes", [b"", b"sum 1".ljust(32), (60 << 20).to_bytes(4, "little")])
def test_strangers_are_dropped_and_the_ranks_meet(num_each: int, first_bytes: bytes) -> None:
    """Each holds its connection open; the frame of a rank without its proof is not believed either."""
    store, ready = HashStore(), threading.Event()
    strangers = Strangers(store)

    def meet(rank: int) -> bytes:
        with closing(Switchboard(store, rank, 2, "host", TRUST, WAIT_S)) as board:
            assert ready.wait(WAIT_S)
            (sock,) = board.connect("sum", [1 - rank]).values()
            with sock:
                sock.sendall(b"%d" % rank)
                return sock.recv(1)

    with ThreadPoolExecutor(2) as pool:
        met = [pool.submit(meet, rank) for rank in range(2)]
        strangers.look(2)
        with strangers.holding(num_each, first_bytes):
            ready.set()
            assert [each.result(WAIT_S) for each in met] == [b"1", b"0"]


def test_a_rank_that_never_connects_is_named() -> None:
    store = HashStore()
    store.set("local 1", "host nobody")
    with (
        closing(Switchboard(store, 0, 2, "host", TRUST, patience_s=0.2)) as board,
        pytest.raises(RankDiedError, match=r"rank 1 did not connect 'sum' within 0\.2 s"),
    ):
        board.connect("sum", [1])


def test_a_rank_of_another_cluster_is_not_let_in() -> None:
    """It listens where rank 0 should, and its proof is wrong."""
    store = HashStore()
    with closing(Switchboard(store, 0, 1, "host", Trust.draw())):
        store.set("local 1", "host unused")
        board = Switchboard(store, 1, 2, "host", TRUST)
        with closing(board), pytest.raises(RankDiedError, match="rank 0 does not take the link 'sum'"):
            board.connect("sum", [0])


def test_a_proof_that_is_played_back_is_refused() -> None:
    """What a stranger recorded of a rank's proof belongs to other nonces."""
    store = HashStore()
    strangers = Strangers(store)
    with closing(Switchboard(store, 0, 1, "host", TRUST)) as board:
        strangers.look(1)
        with socket.socket(socket.AF_UNIX) as sock:
            sock.settimeout(WAIT_S)
            sock.connect(f"\0{strangers.names[0]}")
            send_frame(sock, ClientHandshake(Trust.draw(), "sum of rank 1").hello())
            send_frame(sock, b"\x92\xa5Proof\xc4\x20" + bytes(32))
            while sock.recv(1 << 12):
                pass
        assert board._arrived == {}
