"""Orders of an operator, given with the operator's Ray token: the console itself may change nothing.

page --POST + token--> gateway --the same token--> Ray's dashboard (`cluster.scaling.serve_client`)
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection
from typing import Annotated, NamedTuple

import msgspec

from cluster.errors import (
    DashboardAwayError,
    DashboardError,
    RosterAwayError,
    ScalerDisabledError,
    TokenRefusedError,
    UnknownPoolError,
)
from cluster.roster.messages import ReleasePool, RosterOrder, SetDesired
from cluster.scaling.serve_client import ServeClient

MAX_REPLICAS = 1000


class Order(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Base of what the page sends: JSON objects with these fields and no other."""


class ScaleOrder(Order, frozen=True):
    """Sets a pool's number of replicas until the pool is released."""

    pool: str
    replicas: Annotated[int, msgspec.Meta(ge=1, le=MAX_REPLICAS)]


class ReleaseOrder(Order, frozen=True):
    """Lets the autoscaler change the pool again."""

    pool: str


class Answer(NamedTuple):
    """Represents the answer to an order: an HTTP status and a text for the operator."""

    status: int
    text: str


class Operations(NamedTuple):
    """Represents what the process around the gateway can do for an operator."""

    # Such as `http://127.0.0.1:8265`; "" when the Ray cluster has none; `DashboardAwayError`.
    dashboard_url: Callable[[], Awaitable[str]]
    # Pin or release a pool in the roster; `RosterAwayError` when that could not be recorded.
    record: Callable[[RosterOrder], Awaitable[None]]


class Orders:
    """Carries out orders; without `operations`, as in a gateway without Ray, none."""

    def __init__(self, app: str, pools: Collection[str], operations: Operations | None) -> None:
        self._app = app
        self._pools = sorted(pools)
        self._operations = operations

    async def scale(self, order: ScaleOrder, token: str) -> Answer:
        """Set Serve's target of the pool; `token` "": none was given."""

        async def order_count(client: ServeClient, operations: Operations) -> str:
            seen = await client.application()
            noun = "replica" if order.replicas == 1 else "replicas"
            pool = seen.pools.get(order.pool) if seen is not None else None
            if pool is not None and pool.target == order.replicas:  # Serve would not notify the scaler
                await operations.record(SetDesired(order.pool, order.replicas, pinned=True))
                return f"pool {order.pool} keeps its {order.replicas} {noun}: it is pinned"
            await client.scale(order.pool, order.replicas)
            return f"pool {order.pool} will have {order.replicas} {noun}"

        return await self._obey(order.pool, token, order_count)

    async def release(self, order: ReleaseOrder, token: str) -> Answer:
        """Unpin the pool. The dashboard knows no pins; a request that needs the token checks the
        operator's."""

        async def unpin(client: ServeClient, operations: Operations) -> str:
            await client.application()
            await operations.record(ReleasePool(order.pool))
            return f"pool {order.pool} is released"

        return await self._obey(order.pool, token, unpin)

    async def _obey(
        self, pool: str, token: str, obey: Callable[[ServeClient, Operations], Awaitable[str]]
    ) -> Answer:
        if pool not in self._pools:
            return Answer(404, f"there is no pool {pool[:100]!r}, but {', '.join(self._pools)}")
        if self._operations is None:
            return Answer(503, "this gateway runs without Ray: there is no dashboard that could scale pools")
        try:
            url = await self._operations.dashboard_url()
            if not url:
                return Answer(503, "this Ray cluster has no dashboard for orders: start its head with one")
            async with ServeClient(url, self._app, token) as client:
                return Answer(200, await obey(client, self._operations))
        except TokenRefusedError as error:
            return Answer(403 if token else 401, str(error))
        except UnknownPoolError as error:
            return Answer(404, str(error))
        except ScalerDisabledError as error:
            return Answer(412, str(error))
        except (DashboardAwayError, RosterAwayError) as error:
            return Answer(503, str(error))
        except DashboardError as error:
            return Answer(502, str(error))
