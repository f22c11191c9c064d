"""The state of a gateway's admission, as metrics, `status` and the other gateways read it."""

from __future__ import annotations

from kvtransfer.codec import Part


class ClassStats(Part, frozen=True):
    """Requests of one class at one gateway; totals since its start."""

    num_waiting: int = 0
    # How long a new request would wait there now, of a tenant that has none waiting.
    wait_s: float = 0.0
    num_released: int = 0
    # Refusals by reason: "late", "unattainable", "bytes", "shed", "aged", "requests".
    num_refused: dict[str, int] = {}


class FlowStats(Part, frozen=True):
    """The recent share of a tenant's requests of one class: seconds of the replicas' time."""

    # "other": the tenants that have no place of their own here.
    tenant: str
    service_class: str
    served_s: float


class RungChange(Part, frozen=True):
    """A change of the ladder's rung. `at` is unix time; new requests then waited for `pressure` of their
    objectives."""

    at: float
    before: str
    after: str
    pressure: float


class AdmissionStats(Part, frozen=True):
    """The ladder, and the requests that wait in a gateway."""

    rung: int = 0
    # "normal", "batch_paused", "tokens_capped", "low_weight_shed" or "refusing".
    rung_name: str = "normal"
    pressure: float = 0.0
    # The requests that wait: their size, and how long the replicas will compute them.
    num_waiting_bytes: int = 0
    waiting_s: float = 0.0
    num_capped: int = 0
    # Statistics by class.
    classes: dict[str, ClassStats] = {}
    # Changes by the rung that was taken.
    num_rung_changes: dict[str, int] = {}
    # The latest changes, oldest first.
    changes: tuple[RungChange, ...] = ()
    # The tenants that were given most in about the last minute, and the others together.
    flows: tuple[FlowStats, ...] = ()
