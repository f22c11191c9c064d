"""Both ends of a engine_core's wires to the store, played by a test."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvtransfer.messages import Shard
from kvtransfer.store.messages import StoreGet, StorePut
from workers.scheduler.step import LoadNeed

HALVES = (Shard(0, 2, 0, 1), Shard(0, 2, 1, 2))
KEYS = tuple(bytes([index]) * 16 for index in range(1, 9))


@dataclass
class Wires:
    """All that was sent, in order; `is_up` False: nothing can be."""

    is_up: bool = True
    sent: list[object] = field(default_factory=list)
    orders: list[tuple[int, StoreGet | StorePut]] = field(default_factory=list)
    ended: list[tuple[LoadNeed, dict[str, int]]] = field(default_factory=list)

    def send(self, message: object) -> bool:
        if self.is_up:
            self.sent.append(message)
        return self.is_up

    def order(self, rank: int, order: StoreGet | StorePut) -> None:
        self.orders.append((rank, order))

    def take(self, kind: type) -> object:
        found = next(message for message in self.sent if isinstance(message, kind))
        self.sent.remove(found)
        return found
