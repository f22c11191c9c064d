"""Runs the embedded index server and ends it with its starter: `python redis_watchdog.py BINARY`, started by
`kvtransfer.store.index.redis_server` only.

The configuration comes on stdin and ends with an empty line; nothing of it is on a command line, where
everyone could read the password. stdin stays open as long as the starter lives: its end, however it comes,
ends the server. The watchdog exits when the server does, with its status.
"""

from __future__ import annotations

import ctypes
import os
import selectors
import signal
import subprocess
import sys
from contextlib import suppress

_PR_SET_PDEATHSIG = 1


def main(binary: str) -> int:
    config = b""
    while not config.endswith(b"\n\n"):
        piece = os.read(0, 4096)
        if not piece:
            return 1
        config += piece
    # A forked child of a process with one thread may run Python before it becomes the server.
    server = subprocess.Popen([binary, "-"], stdin=subprocess.PIPE, preexec_fn=_end_with_the_watchdog)
    assert server.stdin is not None
    with suppress(BrokenPipeError):  # it has ended already, and said why
        server.stdin.write(config)
        server.stdin.close()
    with selectors.DefaultSelector() as selector:
        selector.register(0, selectors.EVENT_READ)
        selector.register(os.pidfd_open(server.pid), selectors.EVENT_READ)
        while not any(key.fd != 0 or not os.read(0, 4096) for key, _ in selector.select()):
            pass
    server.kill()  # it keeps nothing that an orderly end would save; nothing happens when it has ended
    return server.wait()


def _end_with_the_watchdog() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
