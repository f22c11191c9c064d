"""The entry point of `tandem` and `python -m cluster`; a signal during its imports ends it silently."""

from __future__ import annotations

import os
import signal
from types import FrameType


def main() -> None:
    """Run the command line. Its imports take a second or more, and leave nothing to clean up on a signal."""
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
