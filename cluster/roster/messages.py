"""Messages of the roster: records of its members, orders, and the view that it shows to everyone."""

from __future__ import annotations

from kvtransfer.codec import Message, Part
from kvtransfer.messages import CompatibilityRecord, ReplicaIdentity


class ReplicaRecord(Message, frozen=True):
    """A replica that serves: the address of its Links, and its properties. Registered when it is ready."""

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
    # The epoch of the lease that `role` follows; 0: none yet.
    role_epoch: int = 0
    # The parts into which the experts of a layer are divided.
    ep: int = 1

    @property
    def member_id(self) -> str:
        """The id under which the roster lists the replica."""
        return self.identity.replica_id

    @property
    def epoch(self) -> int:
        """Orders the lives of the replica."""
        return self.identity.epoch


class StartingReplica(Message, frozen=True):
    """A replica that cannot serve yet, and the state of its slowest rank. Not registered, and known for a few
    seconds only: it is reported again and again."""

    replica_id: str
    pool: str
    phase: str


class GatewayRecord(Message, frozen=True):
    """A gateway that accepts clients."""

    gateway_id: str
    epoch: int
    address: str
    process_id: int
    # host:port of its console; "": none.
    console: str = ""
    # host:port where it answers operators.
    admin: str = ""
    # PEM chain that it shows to clients; "": it speaks no TLS. Other gateways trust this chain alone.
    certificate: str = ""
    # host:port where the other gateways ask it (`cluster.gateway.fleet.gateway_port`).
    fleet: str = ""
    # host:port where it answers over HTTP; "": nowhere.
    http: str = ""

    @property
    def member_id(self) -> str:
        """The id under which the roster lists the gateway."""
        return self.gateway_id


class StoreRecord(Message, frozen=True):
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
        """The id under which the roster lists the store."""
        return f"store-{self.node_id}"


MemberRecord = ReplicaRecord | GatewayRecord | StoreRecord


class RoleLease(Message, frozen=True):
    """The role that a replica shall play now. Each change has a higher epoch; the highest holds, in this life
    of the roster or another."""

    replica: ReplicaIdentity
    role: str
    epoch: int
    reason: str


class ScalingChange(Message, frozen=True):
    """A change of a desired count or of a role, as it was decided."""

    # Unix time.
    at: float
    pool: str
    before: int
    after: int
    # The name of who ordered it; "operator": somebody who called Ray Serve himself; "autoscaler"; "deploy": a
    # config deploy had reset the count, which was restored.
    by: str
    reason: str


class SetDesired(Message, frozen=True):
    """Sets the desired count of a pool; `pinned`: an operator wants it, so the autoscaler leaves it alone."""

    pool: str
    num_replicas: int
    pinned: bool


class ReleasePool(Message, frozen=True):
    """Unpins a pool: the autoscaler may move it again. Its count stays until somebody changes it."""

    pool: str


class ForgetPool(Message, frozen=True):
    """Drops the desired count of a pool: the configuration's count is right."""

    pool: str


class DropLease(Message, frozen=True):
    """Drops the lease of this life of a replica, or of an earlier one."""

    replica: ReplicaIdentity


class SetTraffic(Message, frozen=True):
    """Sets the share of this application's requests that each application gets; empty: all stay."""

    shares: dict[str, float]


class Observed(Message, frozen=True):
    """Records the scaler's view of Ray Serve, for its next life."""

    deploy_mark: str
    targets: dict[str, int]
    declared: dict[str, int]


# What the roster remembers when it is ordered to; a lease and a move are orders themselves.
RosterOrder = (
    SetDesired | ReleasePool | ForgetPool | RoleLease | DropLease | ScalingChange | SetTraffic | Observed
)


class RosterView(Part, frozen=True):
    """All that is registered; `version` grows with every change."""

    version: int
    replicas: tuple[ReplicaRecord, ...] = ()
    gateways: tuple[GatewayRecord, ...] = ()
    # The ordered number of replicas by pool; absent where nobody ordered any.
    desired: dict[str, int] = {}
    stores: tuple[StoreRecord, ...] = ()
    # Pools whose count an operator chose: the autoscaler leaves them alone until they are released.
    pinned: tuple[str, ...] = ()
    leases: tuple[RoleLease, ...] = ()
    # The latest changes, oldest first.
    moves: tuple[ScalingChange, ...] = ()
    # The share of this application's requests that each application gets; empty: all stay here.
    traffic: dict[str, float] = {}
    # Ray Serve's target by pool, as the scaler last saw it.
    targets: dict[str, int] = {}
    # The count by pool in the configuration of the deploy that the scaler last saw.
    declared: dict[str, int] = {}
    # The mark of the deploy whose targets those are; "": the scaler has not looked yet.
    deploy_mark: str = ""
    # Another one is another life of the roster, which knows only later orders.
    incarnation: int = 0
