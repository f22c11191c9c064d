"""The takers of scaling orders: a gateway, or Ray Serve itself."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from cluster.api.admin_client import AdminClient
from cluster.api.replies import scale_reply
from cluster.errors import (
    DashboardError,
    PinError,
    UnknownPoolError,
)
from cluster.proto.tandem.v1 import admin_pb2 as admin_pb
from cluster.scaling.orders import plan_order
from cluster.scaling.serve_client import ServeClient


class ScaleTarget(Protocol):
    """Takes orders for the pools of one application."""

    async def scale(self, counts: Mapping[str, int], *, dry_run: bool) -> admin_pb.ScaleResponse:
        """Order the counts, or only say what that would change; of all pools where none is named."""

    async def release(self, pools: Sequence[str]) -> None:
        """Let the autoscaler change these pools again."""

    async def status(self) -> admin_pb.StatusResponse | None:
        """Return what runs on the replicas; None: not known."""


class GatewayTarget:
    """A gateway, which passes the orders on under the name of who gives them."""

    def __init__(self, client: AdminClient) -> None:
        self._client = client

    async def scale(self, counts: Mapping[str, int], *, dry_run: bool) -> admin_pb.ScaleResponse:
        return await self._client.scale(counts, dry_run=dry_run)

    async def release(self, pools: Sequence[str]) -> None:
        await self._client.release(pools)

    async def status(self) -> admin_pb.StatusResponse | None:
        return await self._client.status()


class DashboardTarget:
    """Ray Serve itself. The scaler, if one runs, takes its targets for orders of an unnamed operator."""

    def __init__(self, client: ServeClient, app: str) -> None:
        self._client = client
        self._app = app

    async def scale(self, counts: Mapping[str, int], *, dry_run: bool) -> admin_pb.ScaleResponse:
        seen = await self._client.application()
        if seen is None:
            problem = f"has no application {self._app!r}; --app names another"
            raise UnknownPoolError(f"Ray Serve at {self._client.url} {problem}")
        done = await plan_order(self._client, self._app, seen, counts)
        ordered: list[str] = []
        for change in () if dry_run else done.changes:
            if change.is_pin:
                continue
            try:
                await self._client.scale(change.pool, change.after)
            except DashboardError as error:
                if not ordered:
                    raise
                names = ", ".join(ordered)
                raise DashboardError(f"{names} was ordered, {change.pool} not: {error}") from error
            ordered.append(f"{change.pool}={change.after}")
        return scale_reply(done)

    async def release(self, pools: Sequence[str]) -> None:
        raise PinError("Ray Serve knows no pins: pools are released through a gateway, without --dashboard")

    async def status(self) -> admin_pb.StatusResponse | None:
        return None
