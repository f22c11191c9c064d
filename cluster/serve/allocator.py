"""The handling of freed memory by the C library's allocator."""

from __future__ import annotations

import ctypes

# From glibc's malloc.h.
_M_MMAP_THRESHOLD = -3
_LARGE_BYTES = 128 << 10


def return_large_blocks() -> None:
    """Let this process give each large block back to the system when it is freed.

    By default glibc does so up to the largest block that was freed so far, and keeps in its heaps what later
    ones of that size take: a process that has once read large requests stays as large as it was then. Other
    C libraries are left as they are.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, _LARGE_BYTES)
