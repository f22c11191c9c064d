"""A bound for starting and joining Ray, which nothing can interrupt.

`ray.init` has to run in the main thread, because the kernel ends Ray's processes with the thread that started
them. On a host that is too busy to start Ray's agents within their time, it never returns: Ray's code waits
for an answer that does not come, and no signal handler of Python runs. Only the end of this process
ends that. Ray's processes end with it (`ray_watchdog`).
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Callable, Iterator

# A start takes 5 to 15 s on a quiet host.
START_S = 180.0
# How long the start may still take when somebody has interrupted it.
INTERRUPTED_S = 15.0
_LOOK_S = 0.2


def end_process(message: str) -> None:
    """Print the message and end this process, whatever its main thread waits for."""
    print(f"tandem: {message}", file=sys.stderr, flush=True)
    os._exit(1)


@contextlib.contextmanager
def bounded_start(
    interrupted: threading.Event,
    *,
    end: Callable[[str], None] = end_process,
    start_s: float = START_S,
    interrupted_s: float = INTERRUPTED_S,
) -> Iterator[None]:
    """Call `end` with the reason where the work within takes longer than it may, in seconds."""
    returned = threading.Event()
    watch = threading.Thread(
        target=_watch, args=(returned, interrupted, end, start_s, interrupted_s), daemon=True
    )
    watch.start()
    try:
        yield
    finally:
        returned.set()
        watch.join()


def _watch(
    returned: threading.Event,
    interrupted: threading.Event,
    end: Callable[[str], None],
    start_s: float,
    interrupted_s: float,
) -> None:
    left_s, left_interrupted_s = start_s, interrupted_s
    while not returned.wait(_LOOK_S):
        left_s -= _LOOK_S
        if interrupted.is_set():
            left_interrupted_s -= _LOOK_S
        if left_interrupted_s <= 0:
            end("interrupted while waiting for Ray")
            return
        if left_s <= 0:
            end(
                f"Ray did not answer within {start_s:g} s: this host is too busy, or one of Ray's processes "
                "hangs. Try again when it has less to do"
            )
            return
