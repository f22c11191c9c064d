"""Kill the rest of a local Ray cluster when the process that owns it is gone, however it ended.

Run as a script next to that process, without any package. Standard input holds the sessions, a line each, and
ends when the owner does. The line `ended` means that nothing is left to kill.
"""

import os
import signal
import sys
from collections.abc import Iterator

ENDED = "ended"


def members(sessions: set[int]) -> Iterator[int]:
    """Yield the processes of these sessions."""
    for name in os.listdir("/proc"):
        if name.isdecimal():
            try:
                if os.getsid(int(name)) in sessions:
                    yield int(name)
            except (ProcessLookupError, PermissionError):
                continue


def main() -> None:
    """Wait for the end of standard input, then kill the sessions."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    lines = sys.stdin.read().split()
    if ENDED in lines:
        return
    sessions, killed = {int(line) for line in lines}, set[int]()
    while found := set(members(sessions)) - killed:  # processes that start in the meantime, too
        for process_id in found:
            try:
                os.kill(process_id, signal.SIGKILL)
            except ProcessLookupError:
                continue
        killed |= found


if __name__ == "__main__":
    main()
