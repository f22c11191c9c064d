"""Kill the process that starts Ray when that takes too long.

Run as a script next to that process, without any package: `start_watch.py PROCESS START_S INTERRUPTED_S`.
Standard input has a byte for each signal that the process has received, and ends when the start has, or the
process.
"""

import contextlib
import os
import signal
import sys
from types import FrameType

STOPS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def is_stopped(process_id: int) -> bool:
    """Whether somebody has stopped the process."""
    with contextlib.suppress(FileNotFoundError), open(f"/proc/{process_id}/stat") as file:
        return file.read().rpartition(")")[2].split()[0] == "T"
    return False


def main() -> None:
    """Wait for the end of standard input, or kill the process with the reason on standard error."""
    process_id, start_s, interrupted_s = int(sys.argv[1]), float(sys.argv[2]), float(sys.argv[3])
    reason = (
        f"Ray did not answer within {start_s:g} s: this host is too busy, or one of Ray's processes hangs. "
        "Try again when it has less to do"
    )

    def end(number: int, frame: FrameType | None) -> None:
        if is_stopped(process_id):  # by Ctrl-Z: its time begins anew
            signal.setitimer(signal.ITIMER_REAL, start_s)
            return
        print(f"tandem: {reason}", file=sys.stderr, flush=True)
        with contextlib.suppress(ProcessLookupError):
            os.kill(process_id, signal.SIGKILL)
        os._exit(0)

    for number in STOPS:
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGALRM, end)
    signal.setitimer(signal.ITIMER_REAL, start_s)
    is_interrupted = False
    while received := os.read(sys.stdin.fileno(), 64):
        if not is_interrupted and any(number in received for number in STOPS):
            is_interrupted, reason = True, "interrupted while waiting for Ray"
            left_s, _ = signal.getitimer(signal.ITIMER_REAL)
            signal.setitimer(signal.ITIMER_REAL, min(left_s, interrupted_s))


if __name__ == "__main__":
    main()
