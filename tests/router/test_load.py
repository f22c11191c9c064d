"""Reports plus deltas: nothing is counted twice, nothing is forgotten, nothing stays for ever."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from msgspec.structs import replace

from kvtransfer.common.clock import ManualClock
from kvtransfer.messages import ReplicaIdentity
from router.load import STALE_REQUEST_S, LoadTracker
from router.messages import ReplicaLoad
from router.placements import Placement
from router.tracked_replica import REPORT_LAG_S


@dataclass
class Bench:
    clock: ManualClock = field(default_factory=ManualClock)

    def __post_init__(self) -> None:
        self.tracker = LoadTracker(self.clock)
        self.tracker.add_replica(ReplicaIdentity("p", 1), "prefill")
        self.tracker.add_replica(ReplicaIdentity("d", 1), "decode")

    def report(
        self, replica_id: str, backlog: int = 0, running: int = 0, landings: int = 0, epoch: int = 1
    ) -> None:
        self.tracker.on_load(
            ReplicaLoad(
                identity=ReplicaIdentity(replica_id, epoch),
                received_at=self.clock.now(),
                num_running=running,
                num_waiting=0,
                num_landings=landings,
                num_backlog_tokens=backlog,
                num_free_blocks=100,
                num_total_blocks=100,
                prefill_tok_s=1000.0,
                decode_step_s=0.01,
                transfer_tok_s=1e5,
            )
        )

    def route(
        self,
        request_id: str,
        compute_id: str,
        decode_id: str,
        *,
        is_queued: bool = False,
        prefill_s: float = 0.0,
    ) -> None:
        now = self.clock.now()
        self.tracker.on_routed(
            Placement(
                request_id,
                compute_id,
                decode_id,
                (),
                500,
                10,
                1,
                routed_at=now,
                is_queued=is_queued,
                prefill_s=prefill_s,
            )
        )


@pytest.fixture
def bench() -> Bench:
    return Bench()


def test_tokens_count_until_the_first_token(bench: Bench) -> None:
    bench.report("p", backlog=100)
    bench.route("a", "p", "d")
    assert bench.tracker.state("p").backlog_tokens == 600
    bench.tracker.on_prefilled("a")
    assert bench.tracker.state("p").backlog_tokens == 100
    bench.tracker.check()


def test_tokens_count_until_a_report_shows_them(bench: Bench) -> None:
    bench.route("a", "p", "d")
    bench.clock.advance(REPORT_LAG_S / 2)
    bench.report("p", backlog=0)
    assert bench.tracker.state("p").backlog_tokens == 500, "this report left before the request arrived"
    bench.clock.advance(REPORT_LAG_S)
    bench.report("p", backlog=400)
    assert bench.tracker.state("p").backlog_tokens == 400
    bench.tracker.on_prefilled("a")
    assert bench.tracker.state("p").backlog_tokens == 400
    bench.tracker.check()


def test_a_sequence_counts_at_the_decode_side_until_reported_there(bench: Bench) -> None:
    bench.report("d", running=3)
    bench.route("a", "p", "d")
    assert bench.tracker.state("d").num_sequences == 4
    assert bench.tracker.state("d").num_free_blocks == 90
    bench.clock.advance(1.0)
    bench.report("d", running=3, landings=1)
    assert bench.tracker.state("d").num_sequences == 4, "the landing is the expected request"
    assert bench.tracker.state("d").num_free_blocks == 100, "whose blocks the report has already taken off"
    bench.tracker.on_prefilled("a")
    bench.clock.advance(1.0)
    bench.report("d", running=4)
    assert bench.tracker.state("d").num_sequences == 4
    bench.tracker.on_finished("a")
    assert bench.tracker.state("d").num_sequences == 4
    bench.report("d", running=3)
    assert bench.tracker.state("d").num_sequences == 3
    assert bench.tracker.num_placements == 0


def test_a_request_served_alone_counts_once(bench: Bench) -> None:
    bench.report("d")
    bench.route("a", "d", "")
    state = bench.tracker.state("d")
    assert (state.backlog_tokens, state.num_sequences, state.num_free_blocks) == (500, 1, 90)
    bench.tracker.on_prefilled("a")
    state = bench.tracker.state("d")
    assert (state.backlog_tokens, state.num_sequences, state.num_free_blocks) == (0, 1, 90)
    bench.clock.advance(1.0)
    bench.report("d", running=1)
    assert bench.tracker.state("d").num_sequences == 1
    bench.tracker.check()


def test_the_end_of_a_request_takes_everything_back(bench: Bench) -> None:
    bench.report("p")
    bench.report("d")
    before = bench.tracker.state("p"), bench.tracker.state("d")
    for number in range(20):
        bench.route(str(number), "p" if number % 2 else "d", "d" if number % 2 else "")
    bench.route("7", "d", "")
    for number in range(20):
        bench.tracker.on_prefilled(str(number))
        bench.tracker.on_finished(str(number))
        bench.tracker.on_finished(str(number))
    assert (bench.tracker.state("p"), bench.tracker.state("d")) == before
    bench.tracker.check()


def test_sequences_have_the_context_of_those_before_them_where_none_runs(bench: Bench) -> None:
    def step_s(num_running: int, num_context_tokens: int) -> float:
        bench.report("d")
        report = bench.tracker.state("d").report
        changed = {"decode_base_s": 0.01, "decode_sequence_s": 0.0, "decode_context_s": 1e-6}
        bench.tracker.on_load(
            replace(report, num_running=num_running, num_context_tokens=num_context_tokens, **changed)
        )
        return bench.tracker.state("d").rates.step_s

    assert step_s(0, 0) == pytest.approx(0.01), "none has run"
    assert step_s(4, 4000) == pytest.approx(0.01 + 5 * 1000 * 1e-6)
    assert step_s(0, 0) == pytest.approx(0.01 + 1000 * 1e-6)
    bench.route("r", "p", "d")
    assert bench.tracker.state("d").rates.step_s == pytest.approx(0.01 + 2 * 1000 * 1e-6)


def test_idle_replicas_cost_the_same_whatever_they_decoded_last(bench: Bench) -> None:
    """Or the one with the shortest sequence would get all, and they would not take turns."""
    changed = {"decode_base_s": 0.01, "decode_context_s": 1e-6}
    for name in ("a", "b"):
        bench.tracker.add_replica(ReplicaIdentity(name, 1), "both")
    for index in range(100):
        for name, num_tokens in (("a", 1000), ("b", 1200 + 10 * index)):
            bench.report(name)
            report = bench.tracker.state(name).report
            bench.tracker.on_load(replace(report, num_running=1, num_context_tokens=num_tokens, **changed))
            bench.tracker.on_load(replace(report, num_running=0, num_context_tokens=0, **changed))
        steps_s = [bench.tracker.state(name).rates.step_s for name in ("a", "b")]
        assert steps_s[0] == steps_s[1]
    assert 1e6 * (steps_s[0] - 0.01) == pytest.approx(1500, rel=0.5)


def test_reports_of_another_epoch_or_time_are_ignored(bench: Bench) -> None:
    bench.clock.advance(10.0)
    bench.report("p", backlog=5)
    bench.report("p", backlog=6, epoch=2)
    bench.report("unknown", backlog=7)
    bench.clock.advance(-1.0)
    bench.report("p", backlog=8)
    assert bench.tracker.state("p").backlog_tokens == 5


def test_a_new_epoch_starts_empty(bench: Bench) -> None:
    bench.report("p", backlog=50)
    bench.route("a", "p", "d")
    bench.tracker.add_replica(ReplicaIdentity("p", 2), "prefill")
    assert bench.tracker.state("p").backlog_tokens == 0
    bench.tracker.on_prefilled("a")
    bench.tracker.on_finished("a")
    bench.tracker.check()


def test_stale_requests_no_longer_count(bench: Bench) -> None:
    bench.route("lost", "p", "d")
    bench.clock.advance(STALE_REQUEST_S + 1.0)
    bench.route("next", "p", "d")
    assert bench.tracker.num_placements == 1
    assert bench.tracker.state("p").backlog_tokens == 500
    bench.tracker.check()


def test_what_is_held_takes_no_blocks_until_it_is_sent(bench: Bench) -> None:
    bench.report("p")
    bench.report("d")
    for number in range(30):
        bench.route(f"pair{number}", "p", "d", is_queued=True)
        bench.route(f"alone{number}", "d", "", is_queued=True)
    state = bench.tracker.state("d")
    assert state.num_free_blocks == 100
    assert (state.num_sequences, state.num_sent_sequences) == (60, 0)
    bench.tracker.on_submitted("pair0")
    bench.tracker.on_submitted("alone0")
    state = bench.tracker.state("d")
    assert state.num_free_blocks == 80
    assert (state.num_sequences, state.num_sent_sequences) == (60, 2)
    bench.tracker.check()


# ---------------------------------------------------------------------- what replicas take beside predictions


def correction(bench: Bench) -> float:
    return bench.tracker.state("p").rates.correction


def serve(bench: Bench, took_s: float, num_requests: int, backlog: int = 0, steps_s: float = 0.0) -> None:
    """Requests whose own second of prefill is behind that backlog, at 1,000 tokens a second. The replica's
    steps until the first token should have taken `steps_s`; 0: it does not say."""
    for number in range(num_requests):
        bench.report("p", backlog=backlog)
        bench.route(str(number), "p", "d", prefill_s=1.0)
        bench.clock.advance(took_s)
        bench.tracker.on_prefilled(str(number), steps_s=steps_s)
        bench.tracker.on_finished(str(number))


def test_prefills_that_take_longer_are_corrected_by_as_much(bench: Bench) -> None:
    serve(bench, 2.5, 60)
    assert 1.5 < correction(bench) <= 2.5
    assert bench.tracker.state("p").rates.token_s == 1e-3
    serve(bench, 100.0, 60)
    assert correction(bench) <= 4.0


def test_what_waited_is_no_measure_of_the_prefill(bench: Bench) -> None:
    """The queue is predicted by the replica's rate: that a request came after it does not count again."""
    serve(bench, 5.5, 100, backlog=4500)
    assert correction(bench) == pytest.approx(1.0, abs=0.01)


def test_a_prompt_that_shared_its_steps_makes_no_replica_slow(bench: Bench) -> None:
    """Nothing was known of the others when it was placed, but the replica says what it did meanwhile."""
    serve(bench, 4.0, 100, steps_s=4.0)
    assert correction(bench) == 1.0
    serve(bench, 4.0, 100)
    assert correction(bench) > 1.5, "without that the replica looks slow"


@pytest.mark.parametrize("num_others", [0, 1, 4])
def test_a_slow_replica_is_found_whatever_it_did_meanwhile(bench: Bench, num_others: int) -> None:
    """It does everything in twice the time that it measures itself; the others are not in its reports. What
    was measured long ago is forgotten, so that the correction is less than that."""
    steps_s = 1.0 + num_others
    serve(bench, 2 * steps_s, 100, steps_s=steps_s)
    assert 1.2 < correction(bench) <= 2.0 + 1e-6


def test_a_correction_does_not_outlast_its_measurements(bench: Bench) -> None:
    serve(bench, 3.0, 60)
    before = correction(bench)
    assert before > 1.5
    bench.clock.advance(60.0)
    bench.report("p")
    assert 1.0 <= correction(bench) < 1 + 0.25 * (before - 1)


def test_requests_that_were_predicted_before_the_correction_do_not_add_to_it(bench: Bench) -> None:
    """All were routed at once, and each takes twice its prefill: that teaches 2, not more with each."""
    for number in range(200):
        bench.route(str(number), "p", "d", is_queued=True, prefill_s=1.0)
    for number in range(200):
        bench.report("p")
        bench.tracker.on_submitted(str(number))
        bench.clock.advance(2.0 + bench.tracker.state("p").queue(0.0))
        bench.tracker.on_prefilled(str(number))
        bench.tracker.on_finished(str(number))
        assert correction(bench) <= 2.0 + 1e-6
