"""Who is noticed to have ended, over plain sockets."""

from __future__ import annotations

import queue
import socket

from patience import WAIT_S

from workers.rank.peer_watch import PeerWatch


def test_each_end_is_noticed_once_and_none_after_close() -> None:
    pairs = {rank: socket.socketpair() for rank in (0, 2, 3)}
    ended: queue.SimpleQueue[int] = queue.SimpleQueue()
    watch = PeerWatch({rank: own for rank, (own, _) in pairs.items()}, ended.put)
    pairs[2][1].close()
    assert ended.get(timeout=WAIT_S) == 2
    pairs[3][1].close()
    assert ended.get(timeout=WAIT_S) == 3
    watch.close()
    assert ended.empty()
    assert pairs[0][1].recv(1) == b"", "the others notice that this rank has left"
    pairs[0][1].close()
