"""Show what goes on while a command waits."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Protocol

from rich.console import Console
from rich.markup import escape

from kvtransfer.common.clock import Clock, SystemClock

if TYPE_CHECKING:  # its module imports Ray, which takes seconds
    from cluster.serve.launcher import StartProgress

_DETAIL_S = 10.0
_SYSTEM_CLOCK = SystemClock()


def progress_line(stage: str, ready: dict[str, tuple[int, int]]) -> str:
    """Return `loading: prefill 1 of 1, decode 0 of 1`; `ready` is pool name to (replicas ready, wanted)."""
    pools = ", ".join(f"{name} {num} of {wanted}" for name, (num, wanted) in ready.items())
    return f"{stage}: {pools}" if pools else stage


class Report(Protocol):
    """Shows what goes on; `detail` changes more often than the stage."""

    def __call__(self, stage: str, detail: str = "") -> None: ...


@contextlib.contextmanager
def stages(console: Console, first: str, clock: Clock = _SYSTEM_CLOCK) -> Iterator[Report]:
    """Show the stage: by a spinner on a terminal, otherwise by a line whenever the stage changes, and with
    the detail every `_DETAIL_S`."""
    if console.is_terminal:
        with console.status(first) as status:
            yield lambda stage, detail="": status.update(f"{stage}; {escape(detail)}" if detail else stage)
        return
    last, said_at = "", clock.now()

    def report(stage: str, detail: str = "") -> None:
        nonlocal last, said_at
        is_due = bool(detail) and clock.now() >= said_at + _DETAIL_S
        if stage != last or is_due:
            last, said_at = stage, clock.now()
            text = f"{stage}; {detail}" if is_due else stage
            console.print(text, soft_wrap=True, highlight=False, markup=False)

    report(first)
    yield report


def progress_to(report: Report) -> Callable[[StartProgress], None]:
    """Return what shows the progress of a start or an update."""
    return lambda it: report(progress_line(it.stage, it.ready), it.detail)
