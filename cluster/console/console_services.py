"""The parts of a gateway that its console reads and orders from."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import NamedTuple

from cluster.api.replies import StatusService
from cluster.api.store_admin import StoreAdmin
from cluster.gateway.fleet.fleet import Fleet
from cluster.gateway.replica_connections import ReplicaConnections
from cluster.identity.access_control import AccessControl
from cluster.metrics.exporters import GatewayMetrics
from cluster.scaling.orders import Operations

Export = Callable[[GatewayMetrics], Awaitable[None]]


class ConsoleServices(NamedTuple):
    """The parts of its gateway that the console needs."""

    status: StatusService
    fleet: Fleet
    connections: ReplicaConnections
    stores: StoreAdmin
    operations: Operations | None
    access: AccessControl
    export: Export
