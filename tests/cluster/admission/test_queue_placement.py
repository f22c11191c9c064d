"""Where a new request waits, and when it moves, by the placement itself."""

from __future__ import annotations

import pytest
from admission_parts import PREFILL_TOK_S, AdmissionParts
from router_harness import BLOCK_TOKENS, keys_of

from cluster.admission.config import AdmissionConfig
from cluster.admission.flow import Flow
from cluster.admission.ladder import THRESHOLDS, Rung
from router.errors import NoReplicaError

SECOND = int(PREFILL_TOK_S)


def test_a_decision_counts_nothing_until_it_is_placed() -> None:
    parts = AdmissionParts("b0")
    queued, request = parts.new(), parts.route_request()
    decision = parts.placement.decide(queued, request, parts.now)
    assert (decision.prefill, decision.decode) == ("", "b0")
    assert not parts.waiting
    parts.check()
    queued.route_request = request
    parts.placement.place(queued, decision, parts.now)
    assert queued in parts.waiting
    parts.check()


def test_a_placed_request_knows_its_cost_and_how_long_it_may_wait() -> None:
    parts = AdmissionParts("b0")
    arrived_at = parts.now
    queued = parts.place("q", num_tokens=2 * SECOND)
    settings = parts.config.interactive
    assert settings.ttft_s is not None
    assert queued.cost_s == pytest.approx(2.0)
    assert queued.num_tokens == 2 * SECOND
    assert queued.predicted.ttft_s == pytest.approx(2.0)
    assert queued.routed_at == arrived_at
    assert queued.due_at == arrived_at + settings.aging_s
    # Later than that, the prompt would be computed after the objective.
    assert queued.waits_until == pytest.approx(arrived_at + settings.ttft_s - 2.0)
    assert "admission.interactive.ttft_s" in queued.bound
    assert parts.waiting.first_bound() == (queued.waits_until, queued)


def test_cached_tokens_are_no_work() -> None:
    parts = AdmissionParts("b0")
    keys = keys_of("prompt", 50)
    parts.harness.store("b0", keys)
    queued = parts.place(keys=keys)
    assert queued.num_tokens == 200
    assert queued.cost_s == pytest.approx(200 / SECOND)


def test_requests_of_a_flow_spread_over_the_replicas() -> None:
    parts = AdmissionParts("b0", "b1")
    for index in range(4):
        parts.place(str(index))
    assert [len(parts.queued_at(name)) for name in ("b0", "b1")] == [2, 2]
    parts.check()


def test_a_retried_request_waits_for_a_replica_that_has_not_failed() -> None:
    parts = AdmissionParts("b0", "b1")
    parts.harness.load("b1", backlog=5 * SECOND)
    assert parts.place("first").decision.decode == "b0"
    assert parts.place("again", excluded=("b0",)).decision.decode == "b1"
    with pytest.raises(NoReplicaError):
        parts.place("third", excluded=("b0", "b1"))
    assert {it.request_id for it in parts.waiting} == {"first", "again"}
    parts.check()


def test_without_a_replica_nothing_is_placed() -> None:
    parts = AdmissionParts()
    with pytest.raises(NoReplicaError):
        parts.place("q")
    assert not parts.waiting
    assert parts.router.num_placements == 0
    assert parts.placement.least_wait_s(Flow("a", "interactive"), 1.0, parts.now) == 0.0


def test_a_request_stays_where_no_other_replica_is_better() -> None:
    parts = AdmissionParts("b0", "b1")
    queued = parts.place("q")
    name = queued.decision.decode
    parts.clock.advance(0.5)
    assert not parts.placement.move(queued, parts.now)
    assert parts.queued_at(name) == ["q"]
    assert queued.routed_at == parts.now
    parts.check()


def test_a_request_moves_to_a_replica_where_it_waits_less_and_counts_there_alone() -> None:
    parts = AdmissionParts("b0")
    parts.harness.load("b0", backlog=2 * SECOND)
    keys = keys_of("prompt", SECOND // 2 // BLOCK_TOKENS)
    queued = parts.place("q", num_tokens=SECOND, keys=keys)
    waits_until = queued.waits_until
    parts.harness.join("b1")
    parts.harness.store("b1", keys)
    assert parts.placement.move(queued, parts.now)
    assert (parts.queued_at("b0"), parts.queued_at("b1")) == ([], ["q"])
    assert parts.router.loads.state("b0").num_queued_tokens == 0
    assert parts.router.loads.state("b1").num_queued_tokens == SECOND - len(keys) * BLOCK_TOKENS
    # Half of the prompt is cached there, so the request may wait longer.
    assert queued.waits_until == pytest.approx(waits_until + 0.5, abs=0.001)
    assert parts.waiting.first_bound() == (queued.waits_until, queued)
    parts.check()


def test_a_request_whose_replica_is_gone_moves_to_another_one() -> None:
    parts = AdmissionParts("b0", "b1")
    parts.harness.load("b1", backlog=2 * SECOND)
    queued = parts.place("q")
    assert queued.decision.decode == "b0"
    parts.router.remove_replica("b0")
    assert parts.placement.move(queued, parts.now)
    assert parts.queued_at("b1") == ["q"]
    parts.check()


def test_a_request_that_no_replica_is_left_for_stays_to_be_taken_out() -> None:
    parts = AdmissionParts("b0")
    queued = parts.place("q")
    parts.router.remove_replica("b0")
    with pytest.raises(NoReplicaError):
        parts.placement.move(queued, parts.now)
    assert queued in parts.waiting
    assert parts.queued_at("b0") == ["q"]
    parts.waiting.check()
    assert parts.waiting.take_out(queued, parts.now)
    assert not parts.waiting


@pytest.mark.parametrize(("names", "part"), [(("b0",), 1.0), (("p0", "d0"), 1.0), (("p0", "p1", "d0"), 2.0)])
def test_a_place_that_lasts_longer_than_the_prompt_is_the_cost(names: tuple[str, ...], part: float) -> None:
    """The places of a decode replica are those of all queues before it, each of which gets its part."""
    parts = AdmissionParts(*names)
    decodes = names[-1]
    parts.harness.load(decodes, running=1, max_sequences=1)
    place_s = parts.router.loads.state(decodes).place_s
    assert place_s > 1.0
    queued = parts.place(num_tokens=SECOND)
    assert queued.decision.decode == decodes
    assert queued.cost_s == pytest.approx(part * place_s)


def test_the_least_wait_is_that_of_the_idlest_replica_and_grows_with_the_flow() -> None:
    parts = AdmissionParts("b0", "b1")
    flow = Flow("a", "interactive")
    parts.harness.load("b0", backlog=SECOND)
    assert parts.placement.least_wait_s(flow, 1.0, parts.now) == 0.0
    parts.harness.load("b1", backlog=3 * SECOND)
    assert parts.placement.least_wait_s(flow, 1.0, parts.now) == pytest.approx(1.0)
    parts.place("w", num_tokens=SECOND)
    assert parts.queued_at("b0") == ["w"]
    assert parts.placement.least_wait_s(flow, 1.0, parts.now) == pytest.approx(2.0)


# ----------------------------------------------------------------- where it is in time, and costs least


@pytest.fixture
def late_prefill() -> AdmissionParts:
    """A prefill replica where a request is late, and a decode replica where it disturbs the streams."""
    config = AdmissionConfig.model_validate({"interactive": {"ttft_s": 2.0, "aging_s": 1.0}})
    parts = AdmissionParts("p0", "d0", config=config)
    parts.harness.load("p0", backlog=2 * SECOND)
    parts.harness.load("d0", running=20)
    return parts


def test_without_pressure_a_request_goes_where_it_is_in_time(late_prefill: AdmissionParts) -> None:
    decision = late_prefill.place(num_tokens=3000).decision
    assert (decision.prefill, decision.decode) == ("", "d0")
    assert decision.limit is not None


def test_under_pressure_a_request_goes_where_it_costs_least(late_prefill: AdmissionParts) -> None:
    late_prefill.degradation.ladder.update(THRESHOLDS[Rung.BATCH_PAUSED], late_prefill.now)
    decision = late_prefill.place(num_tokens=3000).decision
    assert (decision.prefill, decision.decode) == ("p0", "d0")


def test_under_pressure_a_request_does_not_leave_a_place_where_it_is_in_time(
    late_prefill: AdmissionParts,
) -> None:
    queued = late_prefill.place(num_tokens=3000)
    late_prefill.degradation.ladder.update(THRESHOLDS[Rung.BATCH_PAUSED], late_prefill.now)
    assert not late_prefill.placement.move(queued, late_prefill.now)
    assert late_prefill.queued_at("d0") == ["q"]
    late_prefill.harness.load("p0", backlog=SECOND // 2)
    assert late_prefill.placement.move(queued, late_prefill.now)
    assert late_prefill.queued_at("p0") == ["q"]
    late_prefill.check()
