"""The doctor's look at prefill pools that get no prompts."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from doctor_harness import live, said

from cluster.doctor.checks import CheckResult, Severity
from cluster.doctor.prefill_share import prefill_share
from cluster.proto.tandem.v1 import admin_pb2 as admin_pb

Change = Callable[[admin_pb.StatusResponse], None]


def served(num_prefill: int, num_decode: int, change: Change = lambda status: None) -> Change:
    """So many prompts were computed in the two pools, of 2,000 tokens each."""

    def changed(status: admin_pb.StatusResponse) -> None:
        status.pools[0].num_recent_prompts, status.pools[1].num_recent_prompts = num_prefill, num_decode
        status.demand.num_prompts, status.demand.num_computed_tokens = 100, 200_000
        for replica, tok_s in zip(status.replicas, (1000, 100), strict=True):
            replica.load.prefill_tok_s = tok_s
        change(status)

    return changed


def only(change: Change) -> CheckResult:
    (result,) = prefill_share(live(change))
    return result


def test_a_pool_that_computes_prompts_is_told_its_share() -> None:
    assert said(prefill_share, live(served(30, 10))) == [
        (Severity.OK, "pool prefill computed 75% of 40 prompts in the last minute")
    ]
    assert only(served(30, 10)).figures["share"] == 0.75


def test_too_few_prompts_say_nothing() -> None:
    assert said(prefill_share, live(served(0, 9))) == []


def test_a_pool_without_replicas_of_its_role_is_not_asked() -> None:
    def lent(status: admin_pb.StatusResponse) -> None:
        status.pools[0].num_reassigned = status.pools[0].num_ready

    assert said(prefill_share, live(served(0, 40, lent))) == []


def short(status: admin_pb.StatusResponse) -> None:
    status.demand.num_computed_tokens = 5_000


def avoided(status: admin_pb.StatusResponse) -> None:
    status.replicas[0].note = "avoided: it stands still"


def equal(status: admin_pb.StatusResponse) -> None:
    status.replicas[1].load.prefill_tok_s = 900


@pytest.mark.parametrize(
    ("change", "cause", "why"),
    [
        (short, "prompts are short", "50 tokens of a prompt"),
        (avoided, "its replicas are avoided", "p0: avoided: it stands still"),
        (equal, "decode replicas compute prompts as fast", "900 tok/s at decode replicas, 1000 tok/s"),
        (lambda status: None, "computing prompts where they are decoded costs less", "2000 tokens"),
    ],
)
def test_a_pool_that_gets_nothing_is_a_warning_with_the_cause(change: Change, cause: str, why: str) -> None:
    result = only(served(0, 40, change))
    assert result.severity is Severity.WARNING
    assert result.seen.startswith("pool prefill computed none of 40 prompts in the last minute")
    assert str(result.figures["cause"]).startswith(cause)
    assert why in result.why
    assert result.remedy
