"""Messages of the roster: records of its members, orders, and the view that it shows to everyone."""

from __future__ import annotations

from kvtransfer.codec import Part
from kvtransfer.messages import CompatibilityRecord, ReplicaIdentity


class ReplicaRecord(Part, frozen=True):
    """A replica that serves: where its Links connect and what it is. Registered when it is ready."""

    identity: ReplicaIdentity
    pool: str
    # "prefill", "decode" or "both": the one that is in effect (see `RoleLease`).
    role: str
    # host:port of the engine core's gRPC server (Links and Peer links).
    address: str
    model: str
    compatibility: CompatibilityRecord
    process_id: int
    rank_process_ids: tuple[int, ...]
    leaving: bool = False
    # Ranks that share every layer.
    tp: int = 1
    # The layers [start, end) of each stage.
    stages: tuple[tuple[int, int], ...] = ()
    # Its pool's role; differs from `role` while the replica plays another one.
    home_role: str = ""
    # Of the lease that `role` follows; 0: none yet.
    role_epoch: int = 0


class GatewayRecord(Part, frozen=True):
    """A gateway that accepts clients."""

    gateway_id: str
    epoch: int
    address: str
    process_id: int
    # host:port of its console; "": none.
    console: str = ""


class StoreRecord(Part, frozen=True):
    """The store process of a node."""

    node_id: str
    epoch: int
    # host:port where other stores and gateways reach it.
    address: str
    process_id: int
    # The node's name, for people.
    host: str

    @property
    def member_id(self) -> str:
        """Under which the roster knows it."""
        return f"store-{self.node_id}"


class RoleLease(Part, frozen=True):
    """The role that a replica shall play now. Each change has a higher epoch; the highest holds."""

    replica: ReplicaIdentity
    role: str
    epoch: int
    reason: str


class ScalingMove(Part, frozen=True):
    """One change of a desired count or of a role, as it was decided."""

    # Unix time.
    at: float
    pool: str
    before: int
    after: int
    # "operator", "autoscaler" or "deploy" (a config deploy had reset the count, which was restored).
    by: str
    reason: str


class RosterView(Part, frozen=True):
    """All that is registered; `version` grows with every change."""

    version: int
    replicas: tuple[ReplicaRecord, ...] = ()
    gateways: tuple[GatewayRecord, ...] = ()
    # By pool: how many replicas somebody asked for; absent while nobody did.
    desired: dict[str, int] = {}
    stores: tuple[StoreRecord, ...] = ()
    # Pools whose count an operator chose: the autoscaler leaves them alone until they are released.
    pinned: tuple[str, ...] = ()
    leases: tuple[RoleLease, ...] = ()
    # The latest, oldest first.
    moves: tuple[ScalingMove, ...] = ()
    # By application: the share of this application's requests that it gets; empty: all stay here.
    traffic: dict[str, float] = {}
    # By pool: Ray Serve's target as the scaler last saw it.
    targets: dict[str, int] = {}
    # By pool: the count in the configuration of the deploy that the scaler last saw.
    declared: dict[str, int] = {}
    # Of the deploy whose targets those are; "": the scaler has not looked yet.
    deploy_mark: str = ""
    # Another one is another life of the roster, which knows only later orders.
    incarnation: int = 0
