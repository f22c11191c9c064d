"""A bound for starting and joining Ray, which nothing in this process can interrupt.

`ray.init` has to run in the main thread, because the kernel ends Ray's processes with the thread that started
them. On a host that is too busy to start Ray's agents within their time, it never returns: Ray's code waits
for an answer that does not come, may hold the interpreter's lock all the while, and then neither a thread nor
a signal handler of Python runs. So another process (`start_watch`) kills this one. It hears of signals
through the wake-up descriptor, to which the C part of Python's handlers writes. Ray's processes end with this
one (`ray_watchdog`).
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

from cluster.serve import start_watch

# A start takes 5 to 15 s on a quiet host.
START_S = 180.0
# How long the start may still take when somebody has interrupted it.
INTERRUPTED_S = 15.0


@contextlib.contextmanager
def bounded_start(
    interrupted: threading.Event, *, start_s: float = START_S, interrupted_s: float = INTERRUPTED_S
) -> Iterator[None]:
    """Have this process killed, with the reason on standard error, where the work within takes longer than it
    may, in seconds. Call it in the main thread."""
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    command = [sys.executable, "-I", "-S", str(Path(start_watch.__file__))]
    with contextlib.ExitStack() as closing:
        watched = closing.enter_context(contextlib.ExitStack())  # left after all else: it waits for the watch
        with open(reader, "rb"):
            closing.callback(os.close, writer)
            closing.callback(signal.set_wakeup_fd, signal.set_wakeup_fd(writer, warn_on_full_buffer=False))
            watch = subprocess.Popen(
                [*command, str(os.getpid()), str(start_s), str(interrupted_s)],
                stdin=reader,
                start_new_session=True,
            )
        watched.callback(watch.wait)
        if interrupted.is_set():
            os.write(writer, bytes([signal.SIGINT]))
        yield
