"""Each check of a new request by itself: which requests pass, and which limit and remedy a refusal names."""

from __future__ import annotations

import pytest
from admission_parts import PREFILL_TOK_S, AdmissionParts

from cluster.admission.config import AdmissionConfig
from cluster.admission.flow import Flow
from cluster.admission.ladder import IDLE_RELEASE_S, RELEASE_S, THRESHOLDS, Rung
from cluster.admission.lateness import MARGIN, WAIT_MARGIN
from cluster.errors import DeadlineError, OverloadedError, UnattainableError
from kvtransfer.request_facts import ServiceClass

CONFIG = AdmissionConfig.model_validate({"interactive": {"ttft_s": 10.0}, "max_queue_mb": 1.0})
# Tokens that one replica computes in this many seconds.
SECOND = int(PREFILL_TOK_S)


@pytest.fixture
def parts() -> AdmissionParts:
    return AdmissionParts("b0", config=CONFIG)


def check_lateness(parts: AdmissionParts, num_tokens: int, left_s: float | None = None) -> None:
    """Check a new request at the replicas that the placement decides for."""
    queued, request = parts.new(left_s=left_s), parts.route_request(num_tokens=num_tokens)
    decision = parts.placement.decide(queued, request, parts.now)
    parts.checks.check_lateness(queued, decision, parts.now)


# --------------------------------------------------------------------------------------- check_load


def test_bytes_beyond_the_limit_are_refused_by_the_setting_until_a_part_has_gone(
    parts: AdmissionParts,
) -> None:
    waiting = parts.place("w", num_tokens=2 * SECOND)
    parts.bytes.count(waiting, 800_000)
    parts.checks.check_load(parts.new(), parts.now, 200_000)
    with pytest.raises(
        OverloadedError, match=r"have 1 MB, 1 MB are the most \(admission.max_queue_mb\)"
    ) as error:
        parts.checks.check_load(parts.new(), parts.now, 600_000)
    # Half of what waits has to go, and all of that takes 2 s.
    assert error.value.retry_after_s == pytest.approx(1.0, rel=0.05)
    assert parts.refusals.by_reason("interactive") == {"bytes": 1}


def test_a_request_that_is_too_large_by_itself_is_refused_where_nothing_waits(parts: AdmissionParts) -> None:
    with pytest.raises(OverloadedError, match=r"have 0 MB, .*admission\.max_queue_mb"):
        parts.checks.check_load(parts.new(), parts.now, 1_000_001)


@pytest.mark.parametrize(
    ("service_class", "weight", "is_refused"),
    [("batch", 1.0, True), ("interactive", 0.5, True), ("interactive", 1.0, False), ("standard", 2.0, False)],
)
def test_the_third_rung_refuses_batch_and_low_weights_by_class_and_weight(
    parts: AdmissionParts, service_class: ServiceClass, weight: float, is_refused: bool
) -> None:
    parts.degradation.ladder.update(THRESHOLDS[Rung.LOW_WEIGHT_SHED], parts.now)
    queued = parts.new(service_class=service_class, weight=weight)
    if not is_refused:
        parts.checks.check_load(queued, parts.now)
        return
    with pytest.raises(
        OverloadedError, match=f"the class {service_class} with a weight of {weight:g} "
    ) as error:
        parts.checks.check_load(queued, parts.now)
    assert error.value.retry_after_s == RELEASE_S
    assert parts.refusals.by_reason(service_class) == {"shed": 1}


def test_a_shed_request_comes_back_sooner_where_hardly_anything_waits(parts: AdmissionParts) -> None:
    parts.degradation.ladder.update(THRESHOLDS[Rung.LOW_WEIGHT_SHED], parts.now)
    parts.degradation.ladder.update(0.0, parts.now)
    with pytest.raises(OverloadedError) as error:
        parts.checks.check_load(parts.new(service_class="batch"), parts.now)
    assert error.value.retry_after_s == IDLE_RELEASE_S


# -------------------------------------------------------------------------------------- check_early


def test_a_flow_is_refused_early_for_the_wait_alone(parts: AdmissionParts) -> None:
    limit_s = 10.0 * WAIT_MARGIN
    parts.place("w", num_tokens=int((limit_s - 0.5) * SECOND))
    parts.checks.check_early(parts.new(), 100)
    parts.place("x", num_tokens=SECOND)
    with pytest.raises(
        OverloadedError, match=r"predicted in 7\.5 s, and 10\.0 s are the objective of"
    ) as error:
        parts.checks.check_early(parts.new(), 100)
    assert error.value.retry_after_s == pytest.approx(0.5, rel=0.05)
    assert parts.refusals.by_reason("interactive") == {"late": 1}
    assert parts.degradation.ladder.pressure > 0


def test_a_deadline_that_is_shorter_than_the_objective_is_the_one_that_is_named(
    parts: AdmissionParts,
) -> None:
    parts.place("w", num_tokens=2 * SECOND)
    parts.checks.check_early(parts.new(left_s=5.0), 100)
    with pytest.raises(OverloadedError, match=r"predicted in 2\.0 s, and 2\.5 s are left of the deadline"):
        parts.checks.check_early(parts.new(left_s=2.5), 100)
    with pytest.raises(DeadlineError, match="the deadline passed"):
        parts.checks.check_early(parts.new(left_s=0.0), 100)


def test_the_load_is_checked_before_the_wait(parts: AdmissionParts) -> None:
    parts.place("w", num_tokens=20 * SECOND)
    with pytest.raises(OverloadedError, match="max_queue_mb"):
        parts.checks.check_early(parts.new(), 1_000_001)


def test_the_wait_of_a_flow_is_computed_once_while_nothing_comes_or_goes(
    parts: AdmissionParts, monkeypatch: pytest.MonkeyPatch
) -> None:
    computed: list[Flow] = []
    least_wait_s = parts.placement.least_wait_s

    def counted(flow: Flow, weight: float, now: float) -> float:
        computed.append(flow)
        return least_wait_s(flow, weight, now)

    monkeypatch.setattr(parts.placement, "least_wait_s", counted)
    for _ in range(3):
        parts.checks.check_early(parts.new(), 100)
    assert len(computed) == 1
    parts.checks.check_early(parts.new(tenant="other"), 100)
    assert len(computed) == 2
    parts.place("w")
    parts.checks.check_early(parts.new(), 100)
    assert len(computed) == 3
    parts.clock.advance(0.03)
    parts.checks.check_early(parts.new(), 100)
    assert len(computed) == 4


# ----------------------------------------------------------------------------------- check_lateness


def test_a_request_is_refused_for_its_wait_and_its_prompt_together(parts: AdmissionParts) -> None:
    parts.harness.load("b0", backlog=6 * SECOND)
    check_lateness(parts, 2 * SECOND)
    with pytest.raises(
        OverloadedError, match=r"predicted in 9\.0 s, and 10\.0 s are the objective of"
    ) as error:
        check_lateness(parts, 3 * SECOND)
    assert error.value.retry_after_s == pytest.approx(9.0 - 10.0 * MARGIN)
    assert parts.refusals.by_reason("interactive") == {"late": 1}


def test_one_request_tests_a_price_that_nothing_has_measured_for_long(parts: AdmissionParts) -> None:
    """A replica that was disturbed while it measured would never be sent a long prompt again."""
    parts.harness.load("b0")
    parts.clock.advance(29.0)
    parts.harness.load("b0")
    with pytest.raises(UnattainableError, match=r"prompt alone takes 9\.0 s"):
        check_lateness(parts, 9 * SECOND)
    parts.clock.advance(2.0)
    queued, request = parts.new("q"), parts.route_request("q", 9 * SECOND)
    decision = parts.placement.decide(queued, request, parts.now)
    parts.checks.check_lateness(queued, decision, parts.now)
    queued.route_request = request
    parts.placement.place(queued, decision, parts.now)
    assert queued.waits_until == parts.now + 10.0, "it waits as long as one with a short prompt"
    parts.router.on_submitted("q")
    with pytest.raises(UnattainableError):
        check_lateness(parts, 9 * SECOND)
    parts.router.on_finished("q")
    parts.clock.advance(29.0)
    with pytest.raises(UnattainableError):
        check_lateness(parts, 9 * SECOND)


def test_a_price_is_tested_by_no_request_that_waits_for_too_long_or_whose_deadline_has_passed(
    parts: AdmissionParts,
) -> None:
    parts.harness.load("b0")
    waiting = parts.place("w", num_tokens=8 * SECOND)
    parts.clock.advance(31.0)
    with pytest.raises(UnattainableError):
        check_lateness(parts, 9 * SECOND)
    parts.waiting.take_out(waiting, parts.now)
    parts.router.on_finished("w")
    with pytest.raises(DeadlineError, match="the deadline passed"):
        check_lateness(parts, 9 * SECOND, left_s=0.0)
    check_lateness(parts, 9 * SECOND, left_s=5.0)


def test_a_prompt_that_takes_too_long_by_itself_is_sent_to_another_class(parts: AdmissionParts) -> None:
    remedy = (
        "prompt alone takes 9.0 s .* the class interactive: .* send it in a class with a longer objective"
    )
    with pytest.raises(UnattainableError, match=remedy):
        check_lateness(parts, 9 * SECOND)
    assert parts.refusals.by_reason("interactive") == {"unattainable": 1}
    assert parts.refusals.num_by_load == 0


def test_a_prompt_that_takes_too_long_beside_others_may_come_again(parts: AdmissionParts) -> None:
    """Six seconds by itself, and twelve beside sequences that take half of each step."""
    parts.harness.load(
        "b0",
        running=20,
        prefill_token_s=1e-4,
        decode_base_s=0.01,
        decode_sequence_s=0.001,
        tpot_objective_s=0.04,
    )
    with pytest.raises(OverloadedError, match=r"predicted in 12\.0 s"):
        check_lateness(parts, 6 * SECOND)


def test_a_prompt_that_takes_longer_than_the_deadline_allows_needs_more_time(parts: AdmissionParts) -> None:
    with pytest.raises(
        DeadlineError, match=r"takes 4\.0 s .* 4\.0 s are left of the deadline: allow more time"
    ):
        check_lateness(parts, 4 * SECOND, left_s=4.0)


def test_an_objective_that_nobody_set_excuses_a_long_prompt_but_not_a_long_wait() -> None:
    parts = AdmissionParts("b0")
    check_lateness(parts, 30 * SECOND)
    parts.harness.load("b0", backlog=8 * SECOND)
    with pytest.raises(
        OverloadedError, match=r"its prompt would wait for 8\.0 s, and 10\.0 s are the objective"
    ):
        check_lateness(parts, 30 * SECOND)
