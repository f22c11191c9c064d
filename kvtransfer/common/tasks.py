"""Background tasks with one owner, who starts them, learns of their errors, and ends them."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine

# (work, name) -> the task: `SupervisedTasks.spawn` of the owner that answers for its errors.
Spawn = Callable[[Coroutine[None, None, None], str], "asyncio.Task[None]"]


class SupervisedTasks:
    """The tasks that one owner starts during its life; `on_error` receives what one of them raises.

    `asyncio.TaskGroup` does not fit: a group lives inside one `async with` and ends all its tasks at the
    first error. These tasks are started from callbacks, end one by one, and their owner decides what an error
    ends.
    """

    def __init__(self, on_error: Callable[[BaseException], None] | None = None) -> None:
        """Without `on_error`, errors go to the event loop's exception handler, which logs them."""
        self._on_error = on_error
        self._running: set[asyncio.Task[None]] = set()

    def spawn(self, work: Coroutine[None, None, None], name: str) -> asyncio.Task[None]:
        """Start a task on the running loop."""
        task = asyncio.create_task(work, name=name)
        self._running.add(task)
        task.add_done_callback(self._ended)
        return task

    def cancel(self) -> None:
        """Cancel all tasks, except the one that calls this, without waiting for their ends."""
        for task in self._running:
            if task is not asyncio.current_task():
                task.cancel()

    async def wait(self, timeout_s: float | None = None) -> None:
        """Return when the tasks that run now have ended, or after `timeout_s`."""
        if self._running:
            await asyncio.wait(self._running, timeout=timeout_s)

    async def close(self, again_s: float | None = None) -> None:
        """Cancel all tasks and wait for their ends. A task that may swallow a cancellation is cancelled again
        every `again_s` seconds."""
        while self._running:
            for task in self._running:
                task.cancel()
            await asyncio.wait(self._running, timeout=again_s)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._running.discard(task)
        if task.cancelled() or (error := task.exception()) is None:
            return
        if self._on_error is not None:
            self._on_error(error)
        else:
            context = {"message": f"task {task.get_name()!r} failed", "exception": error, "task": task}
            task.get_loop().call_exception_handler(context)


async def wait_first(*awaitables: Awaitable[object]) -> None:
    """Return when one of them is done, and cancel the others, except futures and tasks that were passed."""
    tasks = [asyncio.ensure_future(each) for each in awaitables]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task, awaitable in zip(tasks, awaitables, strict=True):
            if task is not awaitable:
                task.cancel()
