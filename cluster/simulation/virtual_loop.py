"""An event loop in virtual time: tasks of code that is written for asyncio run as events of a simulation."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Coroutine, Generator, Iterator
from contextlib import contextmanager
from contextvars import Context
from typing import Any, TypeVar, cast

from cluster.simulation.virtual_time import EventQueue

R = TypeVar("R")


class WorkTime:
    """The time inside blocking work: as much later than that of the simulation as the work has taken so far.
    `kvtransfer.common.clock.Clock` of what blocks."""

    def __init__(self, events: EventQueue) -> None:
        self._events = events
        self._at = 0.0

    def now(self) -> float:
        return max(self._at, self._events.clock.now())

    def wall(self) -> float:
        return self.now()

    async def sleep(self, delay_s: float) -> None:
        raise AssertionError("blocking work does not sleep")

    def begin(self) -> None:
        """Begin work now."""
        self._at = self._events.clock.now()

    def pass_to(self, at: float) -> None:
        """Let the work come to this time."""
        self._at = max(self._at, at)


class VirtualLoop:
    """What asyncio needs of an event loop to run tasks, futures and timers. Runs callbacks in the order in
    which they were added, all those of one moment as one event. What would run on a thread is done at once,
    and is over when its `work` is."""

    def __init__(self, events: EventQueue) -> None:
        self._events = events
        self._ready: deque[asyncio.Handle] = deque()
        self._is_scheduled = False
        self.work = WorkTime(events)
        self._as_loop = cast("asyncio.AbstractEventLoop", self)

    # ------------------------------------------------------------------------------- as asyncio uses it

    def time(self) -> float:
        return self._events.clock.now()

    def get_debug(self) -> bool:
        return False

    def is_running(self) -> bool:
        return True

    def is_closed(self) -> bool:
        return False

    def call_soon(
        self, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> asyncio.Handle:
        handle = asyncio.Handle(callback, args, self._as_loop, context)
        self._add(handle)
        return handle

    def call_later(
        self, delay: float, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> asyncio.TimerHandle:
        return self.call_at(self.time() + delay, callback, *args, context=context)

    def call_at(
        self, when: float, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> asyncio.TimerHandle:
        handle = asyncio.TimerHandle(when, callback, args, self._as_loop, context)
        self._events.at(when, lambda: self._add(handle))
        return handle

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        """A cancelled call is passed over when it is due."""

    def create_future(self) -> asyncio.Future[Any]:
        return asyncio.Future(loop=self._as_loop)

    def create_task(
        self,
        coro: Coroutine[Any, Any, R] | Generator[Any, None, R],
        *,
        name: str | None = None,
        context: Context | None = None,
    ) -> asyncio.Task[R]:
        return asyncio.Task(
            cast("Coroutine[Any, Any, R]", coro), loop=self._as_loop, name=name, context=context
        )

    def run_in_executor(self, executor: object, func: Callable[..., R], *args: Any) -> asyncio.Future[R]:
        self.work.begin()
        result = func(*args)
        future: asyncio.Future[R] = self.create_future()

        def end() -> None:
            with self.entered():
                if not future.done():
                    future.set_result(result)

        self._events.at(self.work.now(), end)
        return future

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        """Stop the simulation: an error here is one of the code that serves, or of the simulator."""
        if (error := context.get("exception")) is not None:
            raise error

    # ---------------------------------------------------------------------------- as the simulator uses it

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Let this be the running loop of the code inside."""
        before = asyncio._get_running_loop()
        asyncio._set_running_loop(self._as_loop)
        try:
            yield
        finally:
            asyncio._set_running_loop(before)

    def _add(self, handle: asyncio.Handle) -> None:
        self._ready.append(handle)
        if not self._is_scheduled:
            self._is_scheduled = True
            self._events.after(0.0, self._run)

    def _run(self) -> None:
        ready = self._ready
        with self.entered():
            while ready:
                handle = ready.popleft()
                if not handle.cancelled():
                    handle._run()
        self._is_scheduled = False


class LoopClock:
    """The clock of tasks on such a loop (`kvtransfer.common.clock.Clock`)."""

    def __init__(self, loop: VirtualLoop) -> None:
        self._loop = loop

    def now(self) -> float:
        return self._loop.time()

    def wall(self) -> float:
        return self._loop.time()

    async def sleep(self, delay_s: float) -> None:
        future: asyncio.Future[None] = self._loop.create_future()
        self._loop.call_later(delay_s, _wake, future)
        await future


def _wake(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)
