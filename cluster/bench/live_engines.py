"""A running cluster as the beginning of a simulation: what it has recorded, and what its replicas have
measured of themselves."""

from __future__ import annotations

from typing import NamedTuple

from cluster.api.admin_client import AdminClient
from cluster.bench.recorded_trace import RecordedTrace, recorded_trace
from cluster.cli.gateway_options import CallerOptions
from cluster.errors import BenchError
from cluster.proto.enums import name_of
from cluster.proto.tandem.v1 import admin_pb2 as admin_pb
from cluster.simulation.simulated_replica import SimulatedEngine
from cluster.simulation.step_model import StepModel

# The rate of hand-overs where none was measured, in bytes a second, and what a push takes beside.
_LINK_BYTES_S, _PUSH_S = 1e9, 0.002


class LiveCluster(NamedTuple):
    """What a cluster has recorded of its latest requests, and its replicas by role, one engine for each."""

    trace: RecordedTrace
    replicas: dict[str, list[SimulatedEngine]]

    def engine(self, role: str) -> SimulatedEngine:
        """Return the engine of a replica of this role: that of the first one, or of any other role."""
        every = [engine for engines in self.replicas.values() for engine in engines]
        return next(iter(self.replicas.get(role, ())), every[0])


async def read_live(address: str, last_s: float, to: CallerOptions) -> LiveCluster:
    """Read both from the admin port at this address. Raises `BenchError` where nothing was recorded, or where
    replicas have not served enough to know what their steps take."""
    async with AdminClient(address, credentials=to.credentials()) as client:
        trace = await recorded_trace(client, last_s)
        status = await client.status()
    if trace.block_tokens is None:
        raise BenchError(f"--from {address}: no request was recorded in the last {last_s:g} s; see --last")
    replicas: dict[str, list[SimulatedEngine]] = {}
    for replica in status.replicas:
        if replica.load.num_total_blocks:
            engine = _engine_of(replica, trace.block_tokens)
            replicas.setdefault(name_of(admin_pb.ReplicaRole, replica.role), []).append(engine)
    if not replicas:
        raise BenchError(f"--from {address}: no replica has reported its load yet")
    return LiveCluster(trace, replicas)


def _engine_of(replica: admin_pb.Replica, block_tokens: int) -> SimulatedEngine:
    load, role = replica.load, name_of(admin_pb.ReplicaRole, replica.role)
    prompts, decodes = load.prefill_token_s > 0, load.decode_base_s > 0
    if not (prompts if role == "prefill" else decodes):
        raise BenchError(
            f"replica {replica.replica_id} has not measured its steps yet: a role needs some dozen steps of "
            "its kind; send it requests first"
        )
    link = 1e9 * load.transfer_gb_s or _LINK_BYTES_S
    steps = StepModel(
        load.decode_base_s,
        load.decode_sequence_s,
        load.decode_context_s,
        # One that has computed no prompts alone is never given a long one.
        load.prefill_token_s or load.decode_base_s,
        load.attention_token_s,
        link,
        _PUSH_S,
    )
    return SimulatedEngine(
        steps,
        num_blocks=load.num_total_blocks,
        block_tokens=block_tokens,
        max_batch_tokens=load.max_batch_tokens,
        chunk_tokens=load.max_batch_tokens,
        max_sequences=load.max_sequences,
        token_bytes=max(4, sum(load.layers_token_bytes.values())),
        max_context_tokens=load.num_total_blocks * block_tokens,
        tpot_objective_s=load.tpot_objective_s or None,
    )
