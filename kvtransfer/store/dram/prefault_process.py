"""The process that populates the memory of a part of an arena, on idle cores only unless AT_ONCE:
`python prefault_process.py FD START END OWNER_PID AT_ONCE`, started by `kvtransfer.store.dram.arena` only.

The kernel zeroes each page, which takes many times as long as a copy of its bytes. In the owner's process
that would hold the interpreter, and at the owner's priority it would delay the threads of a rank, which wait
for each other at every product. This process therefore runs when a core idles, and ends with its owner.
"""

from __future__ import annotations

import mmap
import os
import sys

# The advice of Linux's madvise; the mmap module has no name for it.
_POPULATE_WRITE = 23
_STEP_BYTES = 2 << 20


def main(fd: int, start: int, end: int, owner_pid: int, at_once: int) -> None:
    """Populate the bytes [start, end) of the arena behind `fd`, step by step."""
    if not at_once:
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    with mmap.mmap(fd, end - start, offset=start) as mapping:
        for offset in range(0, end - start, _STEP_BYTES):
            if os.getppid() != owner_pid:
                return
            mapping.madvise(_POPULATE_WRITE, offset, min(_STEP_BYTES, end - start - offset))


if __name__ == "__main__":
    try:
        main(*map(int, sys.argv[1:]))
    except OSError as error:
        sys.exit(str(error))
