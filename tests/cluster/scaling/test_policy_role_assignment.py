"""Single decisions: who plays the other role, and who goes home."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from scaling_harness import (
    BUSY,
    NOW,
    PAIR,
    config,
    counts,
    decided,
    decoding,
    demand,
    pool,
    prefilling,
    queueing,
)

from cluster.scaling.policy import RoleAssignment, RoleReturn
from cluster.scaling.samples import PoolView, ReplicaSample

# -------------------------------------------------------------------------------------------- lending

LENDING = config(change_roles=True, autoscale=False)
FULL = {"num_running": 30, "num_landings": 4, "num_waiting_landings": 4, "num_free_blocks": 20}
IDLE_PAIR = (prefilling(0), prefilling(1), decoding(0, **FULL))
TWO_ONE = (pool("prefill", 2), pool("decode"))


def test_an_idle_prefill_replica_decodes_where_decode_is_short() -> None:
    plan = decided(IDLE_PAIR, TWO_ONE, settings=LENDING)
    (lend,) = plan.role_changes
    assert isinstance(lend, RoleAssignment)
    assert (lend.replica_id, lend.pool, lend.role) == ("prefill-0", "prefill", "decode")
    assert "idle for 20 s, while decode is short: 4 prompts wait for free KV blocks" in lend.reason
    assert plan.moves == ()


def test_an_idle_decode_replica_computes_prompts_where_prefill_is_short() -> None:
    replicas = (queueing(100_000), decoding(0), decoding(1))
    (lend,) = decided(replicas, (pool("prefill"), pool("decode", 2)), settings=LENDING).role_changes
    assert isinstance(lend, RoleAssignment)
    assert (lend.replica_id, lend.role) == ("decode-0", "prefill")


def test_a_decode_replica_that_can_be_spared_computes_prompts_where_prefill_is_short() -> None:
    """Prompts that wait have blocks at every decode replica, so none is ever idle."""
    landing = {"num_landings": 3, "num_free_blocks": 900}
    replicas = (queueing(100_000), decoding(0, num_running=2, **landing), decoding(1, **landing))
    (lend,) = decided(replicas, (pool("prefill"), pool("decode", 2)), settings=LENDING).role_changes
    assert isinstance(lend, RoleAssignment)
    assert (lend.replica_id, lend.role) == ("decode-1", "prefill")
    assert lend.reason.startswith("decode could do with one replica less for 20 s, while prefill is short")


def test_a_prefill_replica_that_can_be_spared_decodes_where_decode_is_short() -> None:
    replicas = (
        prefilling(0, num_running=1, num_backlog_tokens=900),
        prefilling(1, num_running=1),
        IDLE_PAIR[2],
    )
    (lend,) = decided(replicas, TWO_ONE, settings=LENDING).role_changes
    assert isinstance(lend, RoleAssignment)
    assert (lend.replica_id, lend.role) == ("prefill-1", "decode")
    assert lend.reason.startswith("prefill could do with one replica less for 20 s, while decode is short")
    busy = tuple(prefilling(number, num_running=4, num_backlog_tokens=9000) for number in range(2))
    assert decided((*busy, IDLE_PAIR[2]), TWO_ONE, settings=LENDING).role_changes == ()


def test_a_decode_replica_whose_blocks_are_needed_is_not_lent() -> None:
    replicas = (
        queueing(100_000),
        *(decoding(number, num_running=9, num_free_blocks=500) for number in (0, 1)),
    )
    assert decided(replicas, (pool("prefill"), pool("decode", 2)), settings=LENDING).role_changes == ()


def test_the_last_replica_of_a_role_is_not_lent() -> None:
    assert decided((prefilling(0), decoding(0, **FULL)), PAIR, settings=LENDING).role_changes == ()


def test_nobody_is_lent_without_leave() -> None:
    assert decided(IDLE_PAIR, TWO_ONE, settings=config(autoscale=False)).role_changes == ()
    pinned = (pool("prefill", 2, is_pinned=True), pool("decode"))
    assert decided(IDLE_PAIR, pinned, settings=LENDING).role_changes == ()


def test_who_worked_a_moment_ago_is_not_idle_and_may_be_spared() -> None:
    def replicas(at: float) -> Sequence[ReplicaSample]:
        busy = {"num_running": int(at == NOW - 18)}
        return prefilling(0, **busy), prefilling(1, **busy), decoding(0, **FULL)

    (lend,) = decided(replicas, TWO_ONE, settings=LENDING).role_changes
    assert lend.reason.startswith("prefill could do with one replica less")


def test_a_moment_of_shortage_lends_nobody() -> None:
    def replicas(at: float) -> Sequence[ReplicaSample]:
        return prefilling(0), prefilling(1), decoding(0, **(FULL if at >= NOW - 16 else {}))

    assert decided(replicas, TWO_ONE, settings=LENDING).role_changes == ()


def test_whom_the_demand_at_home_needs_is_not_lent() -> None:
    # 5 requests/s of 2000 tokens keep two busy over 60 %, even if they were idle at each look.
    assert decided(IDLE_PAIR, TWO_ONE, demand(10, output_tokens=1), LENDING).role_changes == ()


def test_one_is_lent_at_a_time() -> None:
    replicas = (prefilling(0, role="decode", **FULL), prefilling(1), prefilling(2), decoding(0, **FULL))
    for ago_s, role_changes in ((19.0, 0), (20.0, 1)):
        views = (pool("prefill", 3, assigned=(("prefill-0", NOW - ago_s),)), pool("decode"))
        plan = decided(replicas, views, settings=LENDING)
        assert [type(each) for each in plan.role_changes] == [RoleAssignment] * role_changes


LENT = (pool("prefill", 2, assigned=(("prefill-0", 100.0),)), pool("decode"))


def recalled(replicas: Sequence[ReplicaSample], views: Sequence[PoolView] = LENT, **settings: Any) -> str:
    """Why prefill-0 is called back; "": it is not."""
    plan = decided(replicas, views, settings=LENDING.model_copy(update=settings))
    assert all(isinstance(each, RoleReturn) for each in plan.role_changes)
    assert {each.replica_id for each in plan.role_changes} <= {"prefill-0"}
    return plan.role_changes[0].reason if plan.role_changes else ""


BORROWED = prefilling(0, role="decode", **BUSY)


def test_who_is_lent_stays_while_it_is_needed_there() -> None:
    assert recalled((BORROWED, prefilling(1), decoding(0, **BUSY))) == ""


def test_a_queue_at_home_calls_it_back() -> None:
    assert recalled((BORROWED, queueing(100_000), decoding(0, **BUSY))).startswith("prefill needs it: 100000")


def test_who_is_idle_there_goes_home() -> None:
    idle = prefilling(0, role="decode")
    assert recalled((idle, prefilling(1), decoding(0, **BUSY))) == "idle for 20 s as decode"
    for ago_s, reason in ((19.0, ""), (20.0, "idle for 20 s as decode")):
        views = (pool("prefill", 2, assigned=(("prefill-0", NOW - ago_s),)), pool("decode"))
        assert recalled((idle, prefilling(1), decoding(0, **BUSY)), views) == reason


def test_who_can_be_spared_there_goes_home() -> None:
    light = {"num_running": 1, "num_free_blocks": 950}
    replicas = (prefilling(0, role="decode", **light), prefilling(1), decoding(0, **light))
    assert "could do with one replica less" in recalled(replicas)


def test_whom_the_demand_there_needs_stays() -> None:
    # 2 requests/s of 200 tokens are more than the 140 tok/s of one, however few are seen at a moment.
    light = {"num_running": 1, "num_free_blocks": 950}
    replicas = (prefilling(0, role="decode", **light), prefilling(1), decoding(0, **light))
    plan = decided(replicas, LENT, demand(4, prompt_tokens=1), LENDING)
    assert plan.role_changes == ()


def test_operators_and_settings_call_it_back() -> None:
    there = (BORROWED, prefilling(1), decoding(0, **BUSY))
    assert recalled(there, change_roles=False) == "role changes are switched off"
    pinned = (LENT[0]._replace(is_pinned=True), LENT[1])
    assert recalled(there, pinned) == "an operator chose the pool's count"


def test_a_lent_replica_counts_where_it_works() -> None:
    """Decode has the borrowed one, so it needs no other; prefill grows only beyond those it can call back."""
    settings = config(change_roles=True)
    replicas = (BORROWED, queueing(100_000), decoding(0, **BUSY))
    plan = decided(replicas, LENT, demand(1), settings)
    assert [each.replica_id for each in plan.role_changes] == ["prefill-0"]
    assert plan.moves == ()


def test_what_decode_has_borrowed_it_need_not_grow_by() -> None:
    # 3 * 134 sequences on two replicas, one of them borrowed: batches of 64 need 5, and 4 of them at home.
    crowd = {"num_running": 64, "num_waiting": 40, "num_landings": 30, "num_free_blocks": 700}
    replicas = (prefilling(0, role="decode", **crowd), prefilling(1), decoding(0, **crowd))
    plan = decided(replicas, LENT, settings=config(change_roles=True))
    assert counts(plan) == {"decode": (1, 4)}
