"""The copies of a simulated replica's ranks to and from the node's store: they take time, and no bytes."""

from __future__ import annotations

from cluster.simulation.simulated_media import CopyLane
from cluster.simulation.simulated_owner import ARENA
from kvtransfer.common.clock import Clock
from kvtransfer.store.messages.store_orders import (
    AttachStore,
    StoreAttached,
    StoreGet,
    StoreGetDone,
    StoreOrder,
    StorePut,
    StorePutDone,
    StoreReport,
)


class StoreCopies:
    """The copies of one replica. As in a rank (`kvtransfer.store.worker`), gets do not wait for puts, and
    puts wait for gets."""

    def __init__(self, bytes_s: float, clock: Clock) -> None:
        self._gets, self._puts = CopyLane(bytes_s), CopyLane(bytes_s)
        self._clock = clock

    def carry_out(self, order: StoreOrder, block_bytes: int) -> tuple[float, StoreReport]:
        """Return when the order is done, and its report then."""
        now = self._clock.now()
        match order:
            case AttachStore():
                return now, StoreAttached(ARENA)
            case StorePut(number, _, copies):
                num_bytes = block_bytes * len(copies)
                at = self._puts.take(max(now, self._gets.free_at), num_bytes)
                return at, StorePutDone(number, (0,) * len(copies), num_bytes, at - now)
            case StoreGet(number, _, reads):
                num_bytes = block_bytes * len(reads)
                at = self._gets.take(now, num_bytes)
                return at, StoreGetDone(number, (), num_bytes, at - now)
