"""The transports by name; each module offers `listen(target)` and `connect(rank, target, ...)`."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from kvtransfer.messages import RankEndpoints
from kvtransfer.transports import shm, tcp
from kvtransfer.transports.base import Channel, Listener, TargetRank, WriterRank

Connect = Callable[[WriterRank, RankEndpoints, str, bytes, Callable[[str], None]], Channel]


class Transport(NamedTuple):
    """How to listen (None: not possible here) and connect; `same_host`: only where host ids are equal."""

    listen: Callable[[TargetRank], Listener | None]
    connect: Connect
    same_host: bool


TRANSPORTS: dict[str, Transport] = {
    "shm": Transport(shm.listen, shm.connect, same_host=True),
    "tcp": Transport(tcp.listen, tcp.connect, same_host=False),
}
