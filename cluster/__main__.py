"""Where the command `tandem` begins: a Ctrl-C or SIGTERM during the first seconds ends it without a word."""

from __future__ import annotations

import os
import signal
from types import FrameType


def main() -> None:
    """The console script. The command line itself takes a second or more to import, and a signal in that time
    has nothing to clean up."""
    numbers = signal.SIGINT, signal.SIGTERM
    before = {number: signal.getsignal(number) for number in numbers}
    for number, handler in before.items():
        if handler is not signal.SIG_IGN:
            signal.signal(number, _leave)
    from cluster.cli.main import main as command_line

    for number, handler in before.items():
        signal.signal(number, handler)
    command_line()


def _leave(number: int, frame: FrameType | None) -> None:
    os._exit(128 + number)


if __name__ == "__main__":
    main()
