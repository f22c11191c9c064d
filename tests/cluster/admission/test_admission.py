"""Which requests a gateway takes and when they go: with the real router, before replicas that compute one
prompt after the other, under a virtual clock."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
from admission_world import CONFIG, TOK_S, AdmissionWorld
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError
from slow_cases import examples

from cluster.admission.config import AdmissionConfig
from cluster.admission.flow import Flow
from cluster.admission.ladder import IDLE_RELEASE_S, Rung
from cluster.admission.lateness import MARGIN, WAIT_MARGIN
from cluster.admission.queued_load import QueuedLoad
from cluster.admission.queued_request import QueuedRequest
from cluster.errors import DeadlineError, OverloadedError, RetryableError, UnattainableError
from kvtransfer.common.health import JITTER
from kvtransfer.request_facts import SERVICE_CLASSES, RequestFacts, ServiceClass
from router.errors import NoReplicaError
from router.messages import RouteRequest


@pytest.fixture
def world() -> Iterator[AdmissionWorld]:
    world = AdmissionWorld()
    yield world
    world.run()
    assert len(world.admission.waiting) == 0
    assert world.admission.bytes.num_bytes == 0
    assert world.admission.waiting.queues.waiting_s() == 0
    assert world.router.num_placements == 0


def test_what_a_class_is_given_leaves_the_rest_of_it_as_it_is() -> None:
    config = AdmissionConfig.model_validate({"interactive": {"ttft_s": 2.0}, "batch": {"weight": 0.5}})
    default = AdmissionConfig()
    assert config.interactive == default.interactive.model_copy(
        update={"ttft_s": 2.0, "refuses_unattainable": True}
    )
    assert config.batch == default.batch.model_copy(update={"weight": 0.5})
    assert config.standard == default.standard
    with pytest.raises(ValidationError, match=r"interactive\.aging_s: after 5 s"):
        AdmissionConfig.model_validate({"interactive": {"max_wait_s": 4.0}})
    with pytest.raises(ValidationError, match="ttft"):
        AdmissionConfig.model_validate({"interactive": {"ttft": 4.0}})


# ------------------------------------------------------------------------------------- what is taken


def test_a_replica_is_sent_some_steps_of_work_and_the_rest_is_queued(world: AdmissionWorld) -> None:
    for index in range(8):
        world.arrive(str(index), num_tokens=100)
    # While less than 2.5 steps of 100 tokens are there, the next is sent.
    assert list(world.released) == ["0", "1", "2"]
    assert world.admission.waiting.queues.num_waiting() == {"interactive": 5, "standard": 0, "batch": 0}
    assert world.admission.waiting.queues.waiting_s() == pytest.approx(0.5)
    world.run(0.1)
    assert list(world.released) == ["0", "1", "2", "3"]
    world.run()
    assert list(world.first_token_at) == [str(index) for index in range(8)]
    assert world.admission.num_released == {"interactive": 8}


def test_what_waits_is_told_by_the_replica_that_it_waits_for() -> None:
    world = AdmissionWorld(names=("p0", "d0"))
    for index in range(8):
        world.arrive(str(index), num_tokens=100)
    # d0 computes two by itself.
    assert world.admission.queued_loads() == {"p0": QueuedLoad(num_prompts=3, num_tokens=300)}
    # As soon as no sequence has a place at d0, they wait for that, and p0 would not help them.
    decode = world.servers["d0"]
    decode.num_running = 1000
    world.router.loads.on_load(decode.load())
    assert world.admission.queued_loads() == {"d0": QueuedLoad(num_sequences=3)}
    world.run(1.0)
    assert len(world.released) == 5
    decode.num_running = 0
    world.router.loads.on_load(decode.load())
    world.admission.pump()
    world.run()
    assert world.admission.queued_loads() == {}
    assert len(world.released) == 8


def test_what_would_miss_its_objective_is_refused_at_once_and_told_when_to_come_back(
    world: AdmissionWorld,
) -> None:
    num_taken = 0
    while world.arrive(str(num_taken)) is not None:
        num_taken += 1
    assert num_taken == int(WAIT_MARGIN * 10.0) + 1
    error = world.ended_early[str(num_taken)]
    assert "objective of the class interactive" in str(error)
    late_s = num_taken - WAIT_MARGIN * 10.0
    assert (1 - JITTER) * late_s <= error.retry_after_s <= (1 + JITTER) * late_s
    assert world.admission.refusals.num_by_load == 1
    # Another class has more time.
    assert world.arrive("standard", service_class="standard") is not None
    world.run()
    assert all(world.ttft_s(str(index)) <= 10.0 for index in range(num_taken))
    assert world.admission.refusals.counts == {("late", "interactive"): 1}


def test_a_prompt_that_no_wait_would_help_is_not_told_to_come_back(world: AdmissionWorld) -> None:
    alone_s = MARGIN * 10.0
    assert world.arrive("long", num_tokens=int(TOK_S * alone_s) - 1) is not None
    world.run()
    assert world.arrive("too long", num_tokens=int(TOK_S * alone_s) + 1) is None
    assert isinstance(world.unattainable["too long"], UnattainableError)
    assert "the prompt alone takes 8.5 s to compute" in str(world.unattainable["too long"])
    assert "coming back does not help" in str(world.unattainable["too long"])
    assert not isinstance(world.unattainable["too long"], RetryableError)
    assert world.admission.refusals.counts == {("unattainable", "interactive"): 1}
    # A deadline of its own counts as well, and another class has more time.
    with pytest.raises(DeadlineError, match="the deadline passed"):
        world.admission.checks.check_early(world.new("past", deadline_s=-0.1), 100)
    assert world.arrive("hurried", num_tokens=1000, deadline_s=1.0) is None
    assert isinstance(world.unattainable["hurried"], DeadlineError)
    assert "1.0 s are left of the deadline: allow more time" in str(world.unattainable["hurried"])
    assert world.arrive("standard", num_tokens=9000, service_class="standard") is not None
    # Behind others it may come back, although it takes most of its objective.
    assert world.arrive("behind", num_tokens=8000) is None
    assert "behind" in world.ended_early


def test_a_prompt_is_not_refused_for_an_objective_that_nobody_has_set() -> None:
    """It waits as any other request of its class does, and counts for those behind it."""
    world = AdmissionWorld(config=AdmissionConfig())
    objective_s = 30.0
    num_tokens = int(2 * objective_s * TOK_S)
    arrive = partial(world.arrive, service_class="standard")
    assert arrive("long", num_tokens=num_tokens) is not None
    world.run(1.0)
    assert arrive("behind", num_tokens=num_tokens) is None
    assert "30.0 s are the objective of the class standard" in str(world.ended_early["behind"])
    assert arrive("short") is None, "59 s are more than the objective, by default too"
    assert world.admission.refusals.counts == {("late", "standard"): 2}
    world.run()
    assert world.ttft_s("long") == pytest.approx(2 * objective_s)
    # A short wait is no obstacle.
    assert arrive("first", num_tokens=int(10 * TOK_S)) is not None
    assert arrive("second", num_tokens=num_tokens) is not None
    world.run()
    assert world.ttft_s("second") == pytest.approx(10.0 + 2 * objective_s)
    # A deadline is the client's.
    assert arrive("hurried", num_tokens=num_tokens, deadline_s=20.0) is None
    assert "60.0 s to compute, and 20.0 s are left of the deadline" in str(world.unattainable["hurried"])


def test_a_class_without_an_objective_takes_prompts_of_any_length() -> None:
    world = AdmissionWorld()
    assert world.arrive("long", num_tokens=int(200.0 * TOK_S), service_class="batch") is not None
    world.run()
    assert world.ttft_s("long") == pytest.approx(200.0)


@pytest.mark.parametrize(
    ("settings", "refuses"),
    [
        ({}, False),
        ({"standard": {"weight": 2.0}}, False),
        ({"standard": {"ttft_s": 30.0}}, True),
        ({"standard": {"ttft_s": None}}, False),
        ({"standard": {"ttft_s": 30.0, "refuses_unattainable": False}}, False),
        ({"standard": {"refuses_unattainable": True}}, True),
    ],
)
def test_an_objective_that_is_given_is_kept(settings: dict[str, Any], refuses: bool) -> None:
    config = AdmissionConfig.model_validate(settings)
    assert config.standard.refuses_unattainable is refuses
    assert not config.interactive.refuses_unattainable
    # As processes give it to each other.
    assert AdmissionConfig.model_validate_json(config.model_dump_json()) == config


def test_retries_are_spread(world: AdmissionWorld) -> None:
    for index in range(40):
        world.arrive(str(index))
    waits = {error.retry_after_s for error in world.ended_early.values()}
    assert len(world.ended_early) > 25
    assert max(waits) > 1.2 * min(waits)


def test_a_deadline_counts_where_it_is_before_the_objective(world: AdmissionWorld) -> None:
    world.arrive("a", num_tokens=2000)
    world.arrive("b", num_tokens=2000)
    assert world.arrive("hurried", deadline_s=3.0) is None
    assert "deadline" in str(world.ended_early["hurried"])
    assert world.arrive("patient", deadline_s=9.0) is not None


def test_the_time_that_passed_counts_against_the_objective_and_not_against_the_deadline(
    world: AdmissionWorld,
) -> None:
    """What is left of a deadline is less by it already."""
    world.clock.advance(4.0)
    for deadline_s, is_taken in ((2.4, True), (2.3, False)):
        queued = world.new(f"left {deadline_s}", deadline_s=deadline_s)
        queued.arrived_at = 0.0
        request = RouteRequest(queued.request_id, RequestFacts("a"), (), 2000, 16)
        if is_taken:
            world.admission.place(queued, request)
            queued.close()
            continue
        with pytest.raises(DeadlineError, match=r"2.3 s are left of the deadline"):
            world.admission.place(queued, request)
    for num_tokens, is_taken in ((4499, True), (4501, False)):  # of 10 s, 0.85 are 8.5
        queued = world.new(f"long {num_tokens}")
        queued.arrived_at = 0.0
        request = RouteRequest(queued.request_id, RequestFacts("a"), (), num_tokens, 16)
        if is_taken:
            world.admission.place(queued, request)
            queued.close()
            continue
        with pytest.raises(OverloadedError, match=r"predicted in 8.5 s, and 10.0 s are the objective"):
            world.admission.place(queued, request)


def test_nobody_waits_until_its_deadline_is_out_of_reach(world: AdmissionWorld) -> None:
    world.servers["r0"].slowness = 4.0
    world.arrive("first", num_tokens=3000)
    queued = world.arrive("queued", num_tokens=2000, deadline_s=8.0)
    assert queued is not None
    assert queued.waits_until == pytest.approx(6.0)
    world.run()
    assert world.refused["queued"] == pytest.approx(6.0)
    assert "after which it would miss its deadline" in str(world.errors[0])


def test_a_request_that_would_be_late_where_it_costs_least_goes_where_it_is_in_time() -> None:
    world = AdmissionWorld(names=("p0", "d0"))
    decode = world.servers["d0"]
    decode.num_running = 100  # streams that a prompt there would delay by 10 s, all together
    world.router.loads.on_load(decode.load())
    for index in range(30):
        world.arrive(str(index), num_tokens=100, service_class="batch")
    assert {it.compute_id for it in map(world.router.explain, world.requests) if it} == {"p0"}
    queued = world.arrive("hurried", num_tokens=100, deadline_s=0.2)
    assert queued is not None
    assert queued.decision.compute_id == "d0"
    # It stays there, though the other costs less.
    world.clock.advance(0.01)
    world.admission.pump()
    assert queued.decision.compute_id == "d0"
    # Under pressure it would take more from others than it is worth.
    world.admission.degradation.ladder.rung = Rung.BATCH_PAUSED
    assert world.arrive("late", num_tokens=100, deadline_s=0.2) is None
    assert "0.2 s are left of the deadline" in str(world.ended_early["late"])
    world.run()


def test_what_was_accepted_before_waits_and_is_not_judged(world: AdmissionWorld) -> None:
    while world.arrive(str(len(world.requests))) is not None:
        pass
    world.admission.degradation.ladder.rung = Rung.REFUSING
    queued = world.new("resumed", service_class="batch", weight=0.5)
    queued.arrived_at, queued.is_judged = -1.0, True
    world.admission.place(queued, RouteRequest("resumed", RequestFacts("a"), (), 1000, 16))
    assert world.admission.waiting.queues.num_waiting()["batch"] == 1
    queued.close()
    assert world.admission.waiting.queues.num_waiting()["batch"] == 0


def test_the_queues_alone_refuse_before_a_prompt_is_read(world: AdmissionWorld) -> None:
    for index in range(9):
        world.arrive(str(index), service_class="batch")
    world.admission.checks.check_early(world.new("b", "b"), 100)
    with pytest.raises(OverloadedError, match="predicted in"):
        world.admission.checks.check_early(world.new("a", "a", "batch", deadline_s=5.0), 100)


def test_a_refusal_is_told_from_what_was_predicted_while_nothing_changes(world: AdmissionWorld) -> None:
    """And when something does, or a moment has passed, the waits are predicted anew."""
    asked = Counter[str]()
    placement = world.admission._placement
    predict = placement.least_wait_s

    def counted(of: Flow, weight: float, now: float) -> float:
        asked[of.tenant] += 1
        return predict(of, weight, now)

    placement.least_wait_s = counted  # type: ignore[assignment, method-assign]
    while world.arrive(f"{world.admission.refusals.counts}{len(world.requests)}") is not None:
        pass
    before = asked["a"]
    for _ in range(100):
        with pytest.raises(OverloadedError):
            world.admission.checks.check_early(world.new("again", deadline_s=0.5 - world.clock.now()), 100)
    assert asked["a"] <= before + 1
    world.run(1.0)  # one is done
    with pytest.raises(OverloadedError):
        world.admission.checks.check_early(world.new("again", deadline_s=0.5), 100)
    assert asked["a"] > before


def test_the_bytes_of_what_waits_are_bounded(world: AdmissionWorld) -> None:
    for index in range(3):
        assert world.arrive(str(index), num_bytes=400_000, service_class="batch") is not None
    assert list(world.released) == ["0"]  # it is more than some steps, and the others wait
    assert world.arrive("more", num_bytes=400_000, service_class="batch") is None
    assert "admission.max_queue_mb" in str(world.ended_early["more"])
    assert world.ended_early["more"].retry_after_s > 0
    assert world.arrive("small", num_bytes=100_000, service_class="batch") is not None


def test_more_replicas_take_what_waits_sooner() -> None:
    retry_s = {}
    for num_replicas in (1, 4):
        world = AdmissionWorld(num_replicas)
        for index in range(9 * num_replicas):  # eight seconds of work wait for each
            num_bytes = 1_000_000 // (8 * num_replicas)
            assert world.arrive(str(index), num_bytes=num_bytes, service_class="batch") is not None
        assert world.arrive("more", num_bytes=1_000_000, service_class="batch") is None
        retry_s[num_replicas] = world.ended_early["more"].retry_after_s
    for each in retry_s.values():
        assert (1 - JITTER) * 8.0 <= each <= (1 + JITTER) * 8.0


def test_what_is_refused_has_computed_nothing(world: AdmissionWorld) -> None:
    """A prompt that is refused and comes again is not taken for cached."""
    keys = tuple(f"k{index}".encode() for index in range(500))
    world.arrive("before")
    for number in range(3):
        assert world.arrive(f"long{number}", num_tokens=8000, keys=keys) is None
    request = RouteRequest("again", RequestFacts("a"), keys, 8000, 16)
    assert world.router.decide(request).prefill_cached_tokens == 0
    world.router.check()


def test_without_a_replica_the_router_says_so(world: AdmissionWorld) -> None:
    world.router.remove_replica("r0")
    with pytest.raises(NoReplicaError):
        world.arrive("a")
    assert len(world.admission.waiting) == 0


# ----------------------------------------------------------------------------------- what waits


def test_who_ends_while_it_waits_makes_way(world: AdmissionWorld) -> None:
    requests = [world.arrive(str(index)) for index in range(4)]
    assert list(world.released) == ["0"]
    assert requests[1] is not None
    requests[1].close()
    requests[1].close()  # it is gone already
    assert requests[0] is not None
    requests[0].close()  # it was released, and its attempt is its own matter
    world.run()
    assert list(world.released) == ["0", "2", "3"]


def test_nobody_waits_longer_than_its_class_allows_when_a_replica_becomes_slow(world: AdmissionWorld) -> None:
    for index in range(7):
        world.arrive(str(index), tenant=str(index % 3))
    world.run(0.5)
    world.servers["r0"].slowness = 20.0
    world.run(60.0)
    assert world.refused
    assert all("admission.interactive.ttft_s" in str(error) for error in world.errors)
    waits = list(world.refused.values())
    assert waits == pytest.approx([9.0] * len(waits)), "with the second of its prefill they would be late"
    assert world.admission.refusals.counts["aged", "interactive"] == len(world.refused)
    assert {*world.released} | {*world.refused} == {str(index) for index in range(7)}


def test_who_waits_as_long_as_its_class_allows_is_told_so() -> None:
    world = AdmissionWorld(
        config=AdmissionConfig.model_validate({"batch": {"aging_s": 1.0, "max_wait_s": 5.0}})
    )
    for index in range(4):
        world.arrive(str(index), service_class="batch")
    world.servers["r0"].slowness = 20.0
    world.run(10.0)
    assert world.errors
    assert all("admission.batch.max_wait_s" in str(error) for error in world.errors)


def test_a_replica_that_takes_less_than_predicted_is_sent_less() -> None:
    """Where something else is the bottleneck, the rate at which it takes work is measured, and waits are
    predicted by it."""
    world = AdmissionWorld()
    world.servers["r0"].slowness = 5.0
    numbers = itertools.count()

    def arrive() -> None:
        world.arrive(str(next(numbers)), num_tokens=500)
        world.events.after(0.25, arrive)

    arrive()
    world.run(120.0)
    late = [name for name in world.first_token_at if world.ttft_s(name) > 10.0]
    settled = [name for name in late if world.requests[name].arrived_at > 30.0]
    served = [name for name in world.first_token_at if world.requests[name].arrived_at > 30.0]
    assert len(served) > 25
    assert len(settled) <= 0.05 * len(served)
    assert world.ended_early


def test_the_pressure_climbs_the_ladder_and_calm_descends_it(world: AdmissionWorld) -> None:
    numbers = itertools.count()
    while world.arrive(f"i{next(numbers)}", num_tokens=500) is not None:
        world.clock.advance(0.11)
    for _ in range(30):  # more of them than are taken, for two times what the pressure is averaged over
        world.clock.advance(0.11)
        world.arrive(f"i{next(numbers)}", num_tokens=500)
    assert Rung.REFUSING not in world.rungs or world.rungs.index(Rung.BATCH_PAUSED) == 0
    assert world.admission.degradation.ladder.rung >= Rung.LOW_WEIGHT_SHED
    assert world.arrive("low", tenant="b", weight=0.5, service_class="standard") is None
    assert "weight of 0.5" in str(world.ended_early["low"])
    assert world.arrive("batch", tenant="b", service_class="batch") is None
    assert world.admission.degradation.max_tokens("standard", 1000) == 64
    assert world.admission.degradation.max_tokens("standard", 10) == 10
    assert world.admission.degradation.max_tokens("interactive", 1000) == 1000
    assert world.ended_early["low"].retry_after_s >= (1 - JITTER) * IDLE_RELEASE_S, "no sooner than the rung"
    world.run()
    assert world.admission.degradation.ladder.rung is Rung.NORMAL, "its looks come without any news"
    assert world.rungs[-1] is Rung.NORMAL
    assert world.admission.degradation.max_tokens("standard", 1000) == 1000


def test_batch_waits_while_it_is_paused_and_goes_at_last() -> None:
    world = AdmissionWorld()
    for index in range(4):
        world.arrive(f"b{index}", tenant="b", service_class="batch")
    # Enough of the others to keep the pressure up for a while.
    numbers = itertools.count()

    def arrive() -> None:
        world.arrive(f"i{next(numbers)}", num_tokens=500)
        if world.clock.now() < 90.0:
            world.events.after(0.3, arrive)

    arrive()
    world.run(59.0)
    assert Rung.BATCH_PAUSED in world.rungs
    assert len([name for name in world.released if name.startswith("b")]) < 4
    world.run(100.0)
    assert {f"b{index}" for index in range(4)} <= {*world.released}, "aging lets them go while others wait"


# ------------------------------------------------------------------------------ shares and promises


def test_a_greedy_tenant_has_its_share_and_the_others_keep_their_objectives() -> None:
    """Four tenants of one weight: the capacity is 4 prompts a second, the greedy one sends 10, the others 0.8
    each."""
    world = AdmissionWorld(num_replicas=4)
    numbers = itertools.count()
    period_s = {"greedy": 0.1, "b": 1.25, "c": 1.25, "d": 1.25}

    def arrive(tenant: str) -> None:
        world.arrive(f"{tenant}-{next(numbers)}", tenant=tenant)
        world.events.after(period_s[tenant], lambda: arrive(tenant))

    for tenant in period_s:
        arrive(tenant)
    world.run(80.0)
    served = Counter(name.split("-")[0] for name, released_at in world.released.items() if released_at > 20.0)
    total = sum(served.values())
    assert total >= 0.95 * 4 * 60
    # Its share is what the others leave.
    assert served["greedy"] <= total - 3 * 0.8 * 60 + 0.1 * total / 4
    for tenant in "bcd":
        assert served[tenant] >= 0.95 * 0.8 * 60
    others = [
        name for name, it in world.requests.items() if it.flow.tenant != "greedy" and it.arrived_at < 65.0
    ]
    assert [name for name in others if name not in world.first_token_at or world.ttft_s(name) > 10.0] == []
    assert not [name for name in world.ended_early if not name.startswith("greedy")]


def test_shares_are_those_of_the_weights_where_all_want_more() -> None:
    world = AdmissionWorld()
    numbers = itertools.count()
    weights = {"light": 1.0, "heavy": 3.0}

    def arrive(tenant: str) -> None:
        world.arrive(f"{tenant}-{next(numbers)}", num_tokens=500, tenant=tenant, weight=weights[tenant])
        world.events.after(0.2, lambda: arrive(tenant))

    for tenant in weights:
        arrive(tenant)
    world.run(200.0)
    flows = world.admission.stats().flows
    assert [(it.tenant, it.service_class) for it in flows] == [
        ("heavy", "interactive"),
        ("light", "interactive"),
    ]
    served_s = {it.tenant: it.served_s for it in flows}
    assert served_s["light"] / sum(served_s.values()) == pytest.approx(0.25, abs=0.02)
    assert sum(served_s.values()) == pytest.approx(60.0, rel=0.1), "a minute of the one replica"


def test_goodput_holds_at_five_times_the_capacity() -> None:
    def goodput(load: float) -> float:
        world = AdmissionWorld(num_replicas=2)
        numbers = itertools.count()

        def arrive() -> None:
            world.arrive(str(next(numbers)), num_tokens=500, tenant=str(next(numbers) % 5))
            world.events.after(0.25 / load, arrive)

        arrive()
        world.run(60.0)
        return sum(world.ttft_s(name) <= 10.0 for name in world.first_token_at) / (60.0 / 0.25)

    at_capacity = goodput(1.0)
    assert at_capacity > 0.9
    assert goodput(5.0) >= 0.95 * at_capacity


arrivals = st.lists(
    st.tuples(
        st.floats(0.0, 3.0),  # since the one before
        st.sampled_from(SERVICE_CLASSES),
        st.integers(0, 4),  # tenant
        st.sampled_from([50, 500, 2000]),
        st.integers(0, 3),  # priority
        st.sampled_from(["", "", "", "", "slow", "fast", "drop"]),
    ),
    max_size=60,
)


def test_few_wake_ups_are_due_however_many_requests_come_and_go() -> None:
    world = AdmissionWorld()
    world.servers["r0"].slowness = 1000.0
    for number in range(3):  # the first fills the replica, and the others wait for long
        world.arrive(f"b{number}", 2000, service_class="batch")
    for number in range(8):
        queued = world.new(f"i{number}")
        queued.is_judged, queued.report = True, lambda outcome: None
        world.admission.place(queued, RouteRequest(queued.request_id, RequestFacts("a"), (), 50, 16))
        world.admission.wait(queued)
        queued.close()
        world.run(world.clock.now() + 10.0)
    assert len(world.admission.waiting) == 2
    assert len(world.events._due) <= 3, "a wake-up for each class, and the end of what is computed"


@settings(deadline=None, max_examples=examples(60))
@given(arrivals)
def test_no_request_of_any_class_waits_longer_than_its_bound(
    given_arrivals: list[tuple[float, ServiceClass, int, int, int, str]],
) -> None:
    """Whatever comes, and however fast the replicas are: every request that was taken is released, refused or
    dropped, once, within its bound."""
    world = AdmissionWorld(num_replicas=2)
    dropped: set[str] = set()
    requests: list[QueuedRequest] = []
    for number, (gap_s, service_class, tenant, num_tokens, priority, event) in enumerate(given_arrivals):
        world.run(world.clock.now() + gap_s)
        if event in ("slow", "fast"):
            for server in world.servers.values():
                server.slowness = 10.0 if event == "slow" else 0.5
        if event == "drop" and requests and (last := requests[-1].request_id) not in world.released:
            requests[-1].close()
            dropped.add(last)
        taken = world.arrive(
            str(number), num_tokens, str(tenant), service_class, weight=1.0 + tenant, priority=priority
        )
        if taken is not None:
            requests.append(taken)
    world.run()
    assert len(world.admission.waiting) == 0
    for queued in requests:
        request_id = queued.request_id
        bound_s = CONFIG.of(queued.flow.service_class).max_wait_s
        ended_at = world.released.get(request_id, world.refused.get(request_id))
        if request_id in dropped:
            assert request_id not in world.released
            continue
        assert ended_at is not None
        assert ended_at - queued.arrived_at <= bound_s + 0.01
    assert world.router.num_placements == 0
    assert {*world.first_token_at} == {*world.released}
