"""Values that cost something, made a few times a second at most for all who ask."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

from kvtransfer.clock import Clock

T = TypeVar("T")


class Fresh(Generic[T]):
    """A value that is made again when it is older than `max_age_s`; who asks meanwhile waits for the same.

    It is made once at a time, also when whoever asked for it has gone.
    """

    def __init__(self, make: Callable[[], Awaitable[T]], max_age_s: float, clock: Clock) -> None:
        self._make = make
        self._max_age_s = max_age_s
        self._clock = clock
        self._made_at: float | None = None
        self._making: asyncio.Task[T] | None = None

    async def get(self) -> T:
        """The value, or what making it raised."""
        if self._making is None or (self._making.done() and self._is_old()):
            self._making = asyncio.create_task(self._make_it())
        return await asyncio.shield(self._making)

    def _is_old(self) -> bool:
        return self._made_at is None or self._clock.now() - self._made_at >= self._max_age_s

    async def _make_it(self) -> T:
        self._made_at = None
        asked_at = self._clock.now()
        value = await self._make()
        self._made_at = asked_at
        return value
