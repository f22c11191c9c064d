"""What a simulated gateway reports to the scaler: its demand, and the replicas as it knows them.

It counts as `cluster.metrics.gateway_counters.GatewayCounters` does. Tokens of steps that were passed over
count at the times at which they would have arrived.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, replace

from msgspec.structs import replace as with_fields

from cluster.admission.admission import RequestAdmission
from cluster.api.status_thread import ReplicaLook, held_message, replica_message
from cluster.gateway.replica_connections import ReplicaState
from cluster.metrics.demand import Demand, demand_message
from cluster.proto.tandem.v1 import admin_pb2 as admin_pb
from cluster.roster.messages import ReplicaRecord
from cluster.simulation.gateway_end import PassedSteps
from kvtransfer.blocks.keys import TOKEN_BYTES
from workers.messages.link import LoadReport, PrefillReport, ReplicaHello, RoleChanged, TokenDelta


@dataclass(slots=True)
class _OpenRequest:
    started_at: float
    num_tokens: int = 0
    last_at: float = 0.0


@dataclass(slots=True)
class _KnownReplica:
    hello: ReplicaHello
    load: LoadReport
    load_at: float
    state: ReplicaState = ReplicaState.READY


class GatewayFigures:
    """The figures of one gateway. A request or gap that is slower than its objective counts as late; without
    objectives none is."""

    def __init__(self) -> None:
        self.ttft_slo_s = self.itl_slo_s = math.inf
        self._demand = Demand()
        self._open: dict[str, _OpenRequest] = {}
        self._replicas: dict[str, _KnownReplica] = {}

    # ------------------------------------------------------------------------------------- requests

    def arrived(self, request_id: str, now: float) -> None:
        """Count a request that was accepted."""
        self._open[request_id] = _OpenRequest(now)
        self._demand.num_arrived += 1
        self._demand.num_sequences += 1

    def prefilled(self, report: PrefillReport) -> None:
        """Count a prompt that was computed."""
        self._demand.prompt(max(0, report.num_prompt_tokens - report.num_cached_tokens))

    def streamed(self, delta: TokenDelta, at: float, passed: PassedSteps | None) -> None:
        """Count new tokens of a request that arrive from a replica then (`TokenObserver`)."""
        request, num_tokens = self._open.get(delta.request_id), len(delta.tokens) // TOKEN_BYTES
        if request is None or not num_tokens:
            return
        if not request.num_tokens:
            self._demand.first_token(at - request.started_at > self.ttft_slo_s)
        elif passed is None or not passed.has(delta):
            is_late = (at - request.last_at) / num_tokens > self.itl_slo_s
            self._demand.gaps(num_tokens, is_late)
        else:
            at = passed.arrivals[-1]
            is_late = passed.arrivals[0] - request.last_at > self.itl_slo_s
            num_late = int(is_late) + self._num_late_steps(passed)
            self._demand.gaps(num_late, are_late=True)
            self._demand.gaps(num_tokens - num_late, are_late=False)
        request.num_tokens += num_tokens
        request.last_at = at

    def _num_late_steps(self, passed: PassedSteps) -> int:
        if self.itl_slo_s == math.inf:
            return 0
        return sum(end - begin > self.itl_slo_s for begin, end in itertools.pairwise(passed.arrivals))

    def ended(self, request_id: str) -> None:
        """Count a request that ended in any way."""
        request = self._open.pop(request_id, None)
        if request is not None:
            self._demand.ended([request.num_tokens] if request.num_tokens else [])

    # ------------------------------------------------------------------------------------- replicas

    def joined(self, hello: ReplicaHello, now: float) -> None:
        """Note a replica whose link is open."""
        self._replicas[hello.identity.replica_id] = _KnownReplica(hello, hello.load, now)

    def loaded(self, load: LoadReport, now: float) -> None:
        """Note the load of a replica."""
        known = self._replicas[load.identity.replica_id]
        known.load, known.load_at = load, now

    def leaving(self, replica_id: str) -> None:
        """Note that a replica leaves."""
        self._replicas[replica_id].state = ReplicaState.LEAVING

    def changed_role(self, replica_id: str, changed: RoleChanged) -> None:
        """Note the role that a replica plays now."""
        known = self._replicas[replica_id]
        known.hello = with_fields(known.hello, role=changed.role, role_epoch=changed.epoch)

    def lost(self, replica_id: str) -> None:
        """Forget a replica whose link has ended."""
        del self._replicas[replica_id]

    # --------------------------------------------------------------------------------------- status

    def status(self, admission: RequestAdmission, now: float) -> admin_pb.StatusResponse:
        """Return what the scaler reads of the gateway's status."""
        demand = replace(self._demand, num_refused=admission.refusals.num_by_load)
        status, held = admin_pb.StatusResponse(demand=demand_message(demand)), admission.queued_loads()
        for replica_id, known in self._replicas.items():
            hello = known.hello
            look = ReplicaLook(
                record_of(hello), str(known.state), "", hello.role, hello.role_epoch, known.load
            )
            message = replica_message(look)
            message.load.age_s = now - known.load_at
            if (waiting := held.get(replica_id)) is not None:
                message.held.CopyFrom(held_message(waiting))
            status.replicas.append(message)
        return status


def record_of(hello: ReplicaHello, *, is_leaving: bool = False) -> ReplicaRecord:
    """Return the record of a simulated replica, whose pool has the name of its role."""
    return ReplicaRecord(
        identity=hello.identity,
        pool=hello.pool,
        role=hello.role,
        address="",
        model="",
        compatibility=hello.compatibility,
        process_id=0,
        rank_process_ids=(),
        leaving=is_leaving,
        home_role=hello.pool,
        role_epoch=hello.role_epoch,
    )
