"""Orders of operators on their way from a gateway to the scaler, which alone talks to Ray Serve.

    console, Admin.Scale --> ScalerOrders --frame, by Ray's handle of the actor--> Scaler.obey --> Serve

The frames are typed messages; the scaler answers each with what it has done, or why not. No gateway needs a
Ray token for this, and the order says who gave it.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Literal, NamedTuple, NoReturn

from cluster.errors import (
    DashboardAwayError,
    DashboardError,
    FieldViolation,
    InvalidRequestError,
    OrderError,
    RequestError,
    RosterAwayError,
    UnavailableError,
    UnknownPoolError,
)
from cluster.scaling.headroom import Headroom, read_headroom
from cluster.scaling.serve_client import AppTargets, ServeClient
from kvtransfer.codec import Codec, Message, Part

# The largest number of replicas that one pool may have by order.
MAX_REPLICAS = 1000


class ScaleOrder(Message, frozen=True):
    """Sets how many replicas each of these pools has, until it is released; a dry run changes nothing.
    Without pools a dry run answers for all."""

    counts: dict[str, int]
    # The name of the sender.
    by: str
    is_dry_run: bool = False


class ReleaseOrder(Message, frozen=True):
    """Lets the autoscaler change these pools again. Their counts stay until somebody changes them."""

    pools: tuple[str, ...]
    by: str


class PoolChange(Part, frozen=True):
    """The effect of an order on one pool."""

    pool: str
    # Serve's target before the order.
    before: int
    after: int
    num_running: int
    # Replicas by Serve's state, such as STARTING, RUNNING, STOPPING.
    states: dict[str, int]
    # The resources that the added replicas request from Ray, by name; empty when they are not known.
    needed: dict[str, float] = {}

    @property
    def num_added(self) -> int:
        return max(0, self.after - self.before)

    @property
    def is_pin(self) -> bool:
        """Whether Serve has this target already, so that only the roster can keep it."""
        return self.before == self.after


class OrderDone(Message, frozen=True):
    """The answer to an order that was carried out, or would be."""

    changes: tuple[PoolChange, ...] = ()
    # The free resources of the Ray cluster, by name; None: not known.
    free: dict[str, float] | None = None
    # The reasons why added replicas cannot be placed now.
    shortages: tuple[str, ...] = ()
    # Ordered pools that have no replica now, so that the resources of one are not known.
    unsized: tuple[str, ...] = ()


class OrderRefused(Message, frozen=True):
    """The answer to an order of which nothing, or not all, was done."""

    # "invalid": another order may be possible; "away": the same may be, later; "unable": it is not.
    kind: Literal["invalid", "away", "unable"]
    reason: str


Order = ScaleOrder | ReleaseOrder
ORDER_CODEC: Codec[Order] = Codec(Order)
ORDER_ANSWER_CODEC: Codec[OrderDone | OrderRefused] = Codec(OrderDone | OrderRefused)


class Operations(NamedTuple):
    """The orders that the process around a gateway can carry out for an operator."""

    # A URL such as `http://127.0.0.1:8265`; "" when the Ray cluster has none; `DashboardAwayError`.
    dashboard_url: Callable[[], Awaitable[str]]
    # Take the frame of an order to the scaler and return its answer; `UnavailableError`.
    order: Callable[[bytes], Awaitable[bytes]]


class ScalerOrders:
    """Gives orders to the scaler. Raises the `RequestError` that says why one was not carried out."""

    def __init__(self, operations: Operations | None) -> None:
        """`operations` None: this gateway runs without Ray, and nobody can scale."""
        self._operations = operations

    async def scale(self, counts: Mapping[str, int], *, by: str, is_dry_run: bool = False) -> OrderDone:
        """Set, or only plan, the number of replicas of each pool."""
        for pool, count in counts.items():
            if not 0 <= count <= MAX_REPLICAS:
                problem = f"pool {pool[:100]!r} can have 0 to {MAX_REPLICAS} replicas, not {count}"
                raise InvalidRequestError(FieldViolation("replicas", problem))
        return await self._give(ScaleOrder(dict(counts), by, is_dry_run))

    async def release(self, pools: Sequence[str], *, by: str) -> OrderDone:
        """Unpin the pools."""
        return await self._give(ReleaseOrder(tuple(pools), by))

    async def _give(self, order: Order) -> OrderDone:
        if self._operations is None:
            raise OrderError("this gateway runs without Ray: there is nobody who could scale pools")
        answer = ORDER_ANSWER_CODEC.decode(await self._operations.order(ORDER_CODEC.encode(order)))
        if isinstance(answer, OrderRefused):
            _raise(answer)
        return answer


def refusal_of(error: RequestError | DashboardError | RosterAwayError) -> OrderRefused:
    """Return the answer to an order that ended with this error."""
    match error:
        case InvalidRequestError():
            return OrderRefused("invalid", "; ".join(problem for _, problem in error.violations))
        case UnknownPoolError():
            return OrderRefused("invalid", str(error))
        case DashboardAwayError() | RosterAwayError():
            return OrderRefused("away", str(error))
        case _:
            return OrderRefused("unable", str(error))


def _raise(refused: OrderRefused) -> NoReturn:
    match refused.kind:
        case "invalid":
            raise InvalidRequestError(FieldViolation("pool", refused.reason))
        case "away":
            raise UnavailableError(refused.reason)
        case "unable":
            raise OrderError(refused.reason)


async def plan_order(client: ServeClient, app: str, seen: AppTargets, counts: Mapping[str, int]) -> OrderDone:
    """Return the changes of the order to Serve's present targets; with no counts, these targets.

    `UnknownPoolError` names a pool that Serve does not run.
    """
    for pool in counts:
        if pool not in seen.pools:
            raise UnknownPoolError(f"there is no pool {pool[:100]!r}, but {', '.join(sorted(seen.pools))}")
    wanted = counts or {pool: target.target for pool, target in seen.pools.items()}
    headroom = await read_headroom(client, app) if counts else None
    changes = tuple(_change(pool, after, seen, headroom) for pool, after in sorted(wanted.items()))
    added = {change.pool: change.num_added for change in changes if change.num_added}
    return OrderDone(
        changes=changes,
        free=None if headroom is None else headroom.free_amounts(),
        shortages=tuple(headroom.shortages(added)) if headroom else (),
        unsized=tuple(pool for pool in added if headroom and pool not in headroom.bundles),
    )


def _change(pool: str, after: int, seen: AppTargets, headroom: Headroom | None) -> PoolChange:
    target = seen.pools[pool]
    needed = headroom.needed(pool, max(0, after - target.target)) if headroom else {}
    return PoolChange(pool, target.target, after, target.num_running, dict(target.states), needed)
