"""The engine of a running replica, as a simulation takes it from the status."""

from __future__ import annotations

import pytest

from cluster.bench.live_engines import _engine_of
from cluster.proto.tandem.v1 import admin_pb2 as admin_pb


@pytest.mark.parametrize(("reported", "expected"), [(0.05, 0.05), (0.0, None)])
def test_a_simulated_engine_keeps_the_objective_of_the_replica(
    reported: float, expected: float | None
) -> None:
    load = admin_pb.Load(
        decode_base_s=0.01,
        decode_sequence_s=0.001,
        num_total_blocks=100,
        max_sequences=8,
        max_batch_tokens=512,
        tpot_objective_s=reported,
    )
    replica = admin_pb.Replica(replica_id="d0", role=admin_pb.REPLICA_ROLE_DECODE, load=load)
    assert _engine_of(replica, 16).tpot_objective_s == expected
