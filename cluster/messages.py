"""What replicas and gateways tell the roster, and what the roster tells everyone."""

from __future__ import annotations

from kvtransfer.messages import CompatibilityRecord, ReplicaIdentity
from kvtransfer.wire import Part


class ReplicaRecord(Part, frozen=True):
    """A replica that serves: where its Links connect and what it is. Registered when it is ready."""

    identity: ReplicaIdentity
    pool: str
    role: str
    """"prefill", "decode" or "both"."""
    address: str
    """host:port of the brain's gRPC server (Links and Peer links)."""
    model: str
    compatibility: CompatibilityRecord
    process_id: int
    rank_process_ids: tuple[int, ...]
    leaving: bool = False
    tp: int = 1
    """Ranks that share every layer."""
    stages: tuple[tuple[int, int], ...] = ()
    """The layers [start, end) of each stage."""


class GatewayRecord(Part, frozen=True):
    """A gateway that accepts clients."""

    gateway_id: str
    epoch: int
    address: str
    process_id: int


class StoreRecord(Part, frozen=True):
    """The store process of a node."""

    node_id: str
    epoch: int
    address: str
    """host:port where other stores and gateways reach it."""
    process_id: int
    host: str
    """The node's name, for people."""

    @property
    def member_id(self) -> str:
        """Under which the roster knows it."""
        return f"store-{self.node_id}"


class RosterView(Part, frozen=True):
    """All that is registered; `version` grows with every change."""

    version: int
    replicas: tuple[ReplicaRecord, ...] = ()
    gateways: tuple[GatewayRecord, ...] = ()
    desired: dict[str, int] = {}
    stores: tuple[StoreRecord, ...] = ()
