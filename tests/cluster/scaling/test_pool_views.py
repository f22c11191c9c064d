"""How many sequences a step of a pool's replicas may hold, as the policy sees it."""

from __future__ import annotations

from typing import Any

import pytest
from scaling_harness import NOTHING, NOW, config, decoding, history_of

from cluster.config import ClusterConfig
from cluster.roster.messages import RosterView
from cluster.scaling.gateway_reports import pool_views
from cluster.scaling.roles import RoleTable
from cluster.scaling.samples import History, ReplicaSample, ScalingSample


def max_sequences(history: History, **pool: Any) -> int:
    """Return that of a decode pool, whose model is on no host that is asked."""
    pools = [{"name": "decode", "role": "decode", **pool}]
    settings = ClusterConfig.model_validate({"model": "nowhere/model", "pools": pools})
    roster = RosterView(version=1)
    (view,) = pool_views(settings, roster, {"decode": 1}, RoleTable(roster, NOW), history)
    return view.max_sequences


def reported(*numbers: int) -> History:
    """Return a history of decode replicas with these numbers."""
    replicas = tuple(decoding(index, max_sequences=number) for index, number in enumerate(numbers))
    return history_of(config(), lambda at: (replicas, NOTHING))


def test_a_number_is_taken_as_configured() -> None:
    assert max_sequences(reported(256), engine={"max_sequences": 7}) == 7


@pytest.mark.parametrize(("device", "expected"), [("cpu", 64), ("cuda", 256)])
def test_until_a_replica_has_reported_it_is_the_most_on_these_devices(device: str, expected: int) -> None:
    assert max_sequences(History(60.0), device=device) == expected
    # Replicas of an earlier version do not report it.
    assert max_sequences(reported(0), device=device) == expected


def test_auto_is_what_replicas_report() -> None:
    assert max_sequences(reported(64), device="cuda") == 64
    assert max_sequences(reported(256, 64, 0), device="cuda") == 64


def test_others_and_replicas_that_left_change_nothing() -> None:
    history = reported(64)
    others = (ReplicaSample(replica_id="p", pool="prefill", role="decode", max_sequences=32),)
    for replicas in ((), others):
        history.add(ScalingSample(NOW + 2 + len(replicas), {"decode": 1}, replicas, NOTHING))
        assert max_sequences(history, device="cuda") == 64
