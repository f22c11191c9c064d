"""The times at which landings may pass one that is first in the queue and finds too few free blocks.

A landing that needs much of the pool may find enough free blocks only after nearly everything that runs at
the replica has ended. So periods in which others pass it alternate with holds in which none does, and free
blocks accumulate. Each hold is twice as long as the one before: at last one is longer than anything runs, and
the landing starts. Until then periods of passing return, so that those behind it need not wait for that.
"""

from __future__ import annotations

# The time to pass a landing that needs the whole pool; one that needs less is passed for its share of it.
PASSING_S = 10.0
FIRST_HOLD_S = 10.0
# A landing that needs less of the pool than this is not passed: enough blocks become free soon.
MIN_SHARE = 0.25


def may_pass(share: float, blocked_s: float) -> bool:
    """Whether others may pass a landing that needs `share` of the pool and has been first for `blocked_s`."""
    if share < MIN_SHARE:
        return False
    passing_s, hold_s = PASSING_S * share, FIRST_HOLD_S
    while blocked_s >= passing_s + hold_s:
        blocked_s -= passing_s + hold_s
        hold_s *= 2
    return blocked_s < passing_s
