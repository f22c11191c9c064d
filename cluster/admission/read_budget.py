"""The bytes of bodies and messages that are read, or wait to be judged: bounded for all callers together and
for each, before the first byte is read.

    call --> ReadBudget.open(party) --> ReadReservation.take(num_bytes) --> read, decoded --> pass_on:
                                                                       admission counts what it queues itself

A reservation takes the length that a body announces, or grows with what arrives; a gRPC message, whose length
nobody knows before it is read, takes the largest that is allowed, and gives back what it did not need.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import Iterator
from contextvars import ContextVar

from cluster.errors import OverloadedError

# How long a call waits for others to be read. Most are read within milliseconds.
WAIT_S = 1.0
# When a refused caller may try again: bodies that do not arrive are given up by then, or later.
_RETRY_AFTER_S = 2.0

_current: ContextVar[ReadReservation | None] = ContextVar("read_reservation", default=None)


class ReadBudget:
    """The limit of the bytes that all callers of a gateway, and each of them, may have read at once. A party
    is one caller: a tenant with all its keys, or an identity without a tenant."""

    def __init__(self, max_bytes: int, max_party_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.max_party_bytes = min(max_party_bytes, max_bytes)
        self.num_bytes = 0
        # Calls that ended because there was no room for them.
        self.num_refused = 0
        self._party_to_bytes: Counter[str] = Counter()
        self._waiting: dict[asyncio.Future[None], tuple[str, int]] = {}

    @contextlib.contextmanager
    def open(self, party: str) -> Iterator[ReadReservation]:
        """Yield the bytes that a call of this party reserves, until the block ends; `pass_on` finds it in
        between."""
        reservation = ReadReservation(self, party)
        token = _current.set(reservation)
        try:
            yield reservation
        finally:
            _current.reset(token)
            reservation.release()

    def num_party_bytes(self, party: str) -> int:
        """Return the bytes that this party has reserved now."""
        return self._party_to_bytes[party]

    async def take(self, party: str, num_bytes: int) -> None:
        """Count this many bytes more, once there is room; raise `OverloadedError` where there is none within
        `WAIT_S`."""
        if self._fits(party, num_bytes):
            self._count(party, num_bytes)
            return
        granted = asyncio.get_running_loop().create_future()
        self._waiting[granted] = party, num_bytes
        try:
            async with asyncio.timeout(WAIT_S):
                await granted
        except TimeoutError:
            if not _is_granted(granted):
                self.num_refused += 1
                raise self._refusal(party, num_bytes) from None
        except asyncio.CancelledError:
            if _is_granted(granted):
                self.give_back(party, num_bytes)
            raise
        finally:
            del self._waiting[granted]

    def give_back(self, party: str, num_bytes: int) -> None:
        """Stop counting this many bytes, and let the waiting calls that fit now go on, in their order."""
        self.num_bytes -= num_bytes
        self._party_to_bytes[party] -= num_bytes
        if not self._party_to_bytes[party]:
            del self._party_to_bytes[party]
        for granted, (waiting, wanted) in list(self._waiting.items()):
            if not granted.done() and self._fits(waiting, wanted):
                self._count(waiting, wanted)
                granted.set_result(None)

    def _fits(self, party: str, num_bytes: int) -> bool:
        return (
            self.num_bytes + num_bytes <= self.max_bytes
            and self._party_to_bytes[party] + num_bytes <= self.max_party_bytes
        )

    def _count(self, party: str, num_bytes: int) -> None:
        self.num_bytes += num_bytes
        self._party_to_bytes[party] += num_bytes

    def _refusal(self, party: str, num_bytes: int) -> OverloadedError:
        most, whose, setting = self.max_bytes, "all callers'", "admission.max_reading_mb"
        if self._party_to_bytes[party] + num_bytes > self.max_party_bytes:
            most, whose, setting = self.max_party_bytes, "one caller's", "admission.max_caller_reading_mb"
        return OverloadedError(
            f"there is no room to read {num_bytes} bytes now: {most} bytes of {whose} requests are the most "
            f"that this gateway reads at once ({setting}); finish those that you have begun, or send fewer "
            "at once",
            _RETRY_AFTER_S,
        )


class ReadReservation:
    """The part of the budget that one call has reserved."""

    __slots__ = ("_budget", "_num_parts", "_party", "is_paid", "num_bytes")

    def __init__(self, budget: ReadBudget, party: str) -> None:
        self._budget = budget
        self._party = party
        self._num_parts = 1
        self.num_bytes = 0
        # A request was taken from the tenant's bucket when reading began, and no call has used it yet.
        self.is_paid = False

    async def take(self, num_bytes: int) -> None:
        """Reserve this many bytes more; raise `OverloadedError` where the budget has not so many."""
        await self._budget.take(self._party, num_bytes)
        self.num_bytes += num_bytes

    def shrink(self, num_bytes: int) -> None:
        """Keep no more than this many bytes."""
        excess = self.num_bytes - num_bytes
        if excess > 0:
            self.num_bytes = num_bytes
            self._budget.give_back(self._party, excess)

    def divide(self, num_parts: int) -> None:
        """Expect this many requests to be passed on, of which each releases its part."""
        self._num_parts = num_parts

    def pass_on(self) -> None:
        """Release the part of one request, which admission counts from now on, or which has ended."""
        self.shrink(self.num_bytes - self.num_bytes // max(self._num_parts, 1))
        self._num_parts -= 1

    def release(self) -> None:
        """Keep nothing any more."""
        self.shrink(0)


def pass_on() -> None:
    """Release the reserved part of the budget of this task's request, where it came through one."""
    if (reservation := _current.get()) is not None:
        reservation.pass_on()


def divide(num_parts: int) -> None:
    """Note how many requests the call of this task consists of."""
    if (reservation := _current.get()) is not None:
        reservation.divide(num_parts)


def use_paid() -> bool:
    """Return whether a request was taken from the tenant's bucket when the reading of this task's call began:
    once, for the first of its requests."""
    reservation = _current.get()
    is_paid = reservation is not None and reservation.is_paid
    if reservation is not None:
        reservation.is_paid = False
    return is_paid


def _is_granted(granted: asyncio.Future[None]) -> bool:
    return granted.done() and not granted.cancelled()
