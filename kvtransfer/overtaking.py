"""When landings may pass one that stands first in the queue and finds too little room (a function of time).

A landing that needs much of the pool may find room only when nearly all that runs at the replica has ended.
Times in which others pass it alternate with holds in which nobody does, so that room comes together. Every
hold is twice as long as the one before: in the end one is longer than anything runs, so the landing starts;
and the times to pass come again until then, so those behind it do not wait for that.
"""

from __future__ import annotations

PASSING_S = 10.0
"""The time to pass a landing that needs the whole pool; one that needs less is passed for its share of it."""
FIRST_HOLD_S = 10.0
MIN_SHARE = 0.25
"""Nobody passes a landing that needs less of the pool than this: room for it comes soon enough."""


def may_pass(share: float, blocked_s: float) -> bool:
    """Whether others may pass a landing that needs `share` of the pool and has been first for `blocked_s`."""
    if share < MIN_SHARE:
        return False
    passing_s, hold_s = PASSING_S * share, FIRST_HOLD_S
    while blocked_s >= passing_s + hold_s:
        blocked_s -= passing_s + hold_s
        hold_s *= 2
    return blocked_s < passing_s
