"""Wait until the gateways that serve know a new replica."""

from __future__ import annotations

from collections.abc import Callable, Collection

from cluster.roster.state import EXPIRE_S, RosterClient
from kvtransfer.common.clock import Clock

# A gateway that died is out of the roster by then.
INTRODUCTION_S = EXPIRE_S
_LOOK_S = 0.05


async def meet_gateways(
    roster: RosterClient,
    connected: Callable[[], Collection[tuple[str, int]]],
    clock: Clock,
    most_s: float = INTRODUCTION_S,
) -> list[str]:
    """Return when all gateways of the roster are among the (id, epoch) that have `connected` to a registered
    replica, or after `most_s`; the ids of those that have not.

    Whoever starts a replica in place of another ends the other one as soon as this one is said to run: were
    that before gateways know it, they would know none in between."""
    deadline = clock.now() + most_s
    while missing := await _missing(roster, connected()):
        if clock.now() >= deadline:
            break
        await clock.sleep(_LOOK_S)
    return missing


async def _missing(roster: RosterClient, connected: Collection[tuple[str, int]]) -> list[str]:
    view = await roster.view(0, 0.0)
    return [it.gateway_id for it in view.gateways if (it.gateway_id, it.epoch) not in connected]
