"""What a gateway measures of its requests, against numpy and sums made by hand."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.metrics.curves import (
    CURVE_S,
    RING_S,
    SecondCounts,
    SecondRing,
    Spread,
    curves_of,
    merged,
    window_of,
)
from cluster.metrics.ended_request import Caller, EndedRequest, RoutedAttempt, SampleResult, Summary
from cluster.metrics.gateway_counters import (
    NOT_PREDICTED,
    GatewayCounters,
    Histogram,
    Predicted,
    cached_by_tier,
)
from cluster.text.preprocess import PreparedRequest, SampleStart
from kvtransfer.request_facts import RequestFacts
from router.messages import Decision
from workers.messages.link import HandOverReport, PrefillReport, StageTimes, TokenDelta
from workers.messages.sampling import SamplingParams

KV_BYTES = 100


class Front:
    """A gateway's counters, given what a request manager reports."""

    def __init__(self) -> None:
        self.pools = {"prefill-a": "prefill", "decode-a": "decode", "decode-b": "decode"}
        self.counters = GatewayCounters(
            lambda replica_id: self.pools.get(replica_id, ""),
            lambda: KV_BYTES,
            ttft_slo_s=1.0,
            itl_slo_s=0.1,
        )

    def arrive(
        self,
        name: str,
        now: float,
        *,
        tenant: str = "t",
        prompt: int = 10,
        samples: int = 1,
        predicted: Predicted = NOT_PREDICTED,
    ) -> None:
        starts = tuple(SampleStart(index, 0) for index in range(samples))
        plan = PreparedRequest(
            name,
            RequestFacts(tenant, tenant),
            bytes(4 * prompt),
            b"",
            (),
            SamplingParams(),
            starts,
            None,
        )
        self.counters.arrived(plan, now, predicted)

    def prefill(
        self,
        name: str,
        now: float,
        *,
        cached: int = 0,
        spent_s: float = 0.0,
        loaded: int = 0,
        source: str = "prefill-a",
    ) -> PrefillReport:
        times = StageTimes(arrived=50.0, scheduled=51.0, prefilled=51.0 + spent_s)
        report = PrefillReport(
            name, 1, 10, cached, times, num_loaded_tokens={"dram": loaded} if loaded else {}
        )
        self.counters.prefilled(report, source, now)
        return report

    def stream(
        self, name: str, now: float, num: int = 1, *, source: str = "decode-a", sample: int = 0
    ) -> None:
        self.counters.streamed(source, TokenDelta(name, 1, sample, 0, bytes(4 * num), (), ""), now)

    def end(self, name: str, now: float, *, code: str = "OK", came_to: Summary | None = None) -> None:
        state = {"OK": "finished", "CANCELLED": "cancelled"}.get(code, "failed")
        routed = RoutedAttempt(1, Decision("", "", "prefill-a", "decode-a", 4, 0, (), ""))
        caller = Caller()
        ended = EndedRequest(name, name, "t", caller, state, code, "", 0.0, now, came_to, (routed,))
        self.counters.ended(ended)

    def refuse(self, code: str, now: float) -> None:
        self.counters.ended(EndedRequest("", "", "t", Caller(), "refused", code, "why", now, now))


def came_to(started_at: float, first_at: float, ended_at: float, num_attempts: int = 1) -> Summary:
    moved_at = StageTimes(transfer_start=7.0, transfer_end=7.125)
    return Summary(
        samples=(SampleResult(0, "length", 5),),
        num_prompt_tokens=10,
        num_attempts=num_attempts,
        started_at=started_at,
        first_token_at=first_at,
        finished_at=ended_at,
        prefill_replica="prefill-a",
        decode_replica="decode-a",
        prefill=PrefillReport("r", 1, 10, 0, StageTimes(arrived=5.0, scheduled=5.5, prefilled=5.75)),
        hand_over=HandOverReport("r", 1, 0, 125_000_000, 0, "shm", 1.0, moved_at),
    )


@given(st.lists(st.floats(2e-6, 1e3), min_size=1, max_size=200), st.sampled_from([0.01, 0.5, 0.9, 0.99, 1.0]))
def test_a_spread_answers_quantiles_to_one_percent(values: list[float], share: float) -> None:
    spread = Spread()
    for value in values:
        spread.add(value)
    expected = np.quantile(values, share, method="inverted_cdf")
    assert spread.quantile(share) == pytest.approx(expected, rel=0.0101)


def test_spreads_of_seconds_add_up_to_that_of_the_minute() -> None:
    rng = np.random.default_rng(1)
    parts = [rng.lognormal(-3, 1, size) for size in (1, 40, 300)]
    spreads = []
    for part in parts:
        spreads.append(Spread())
        for value in part:
            spreads[-1].add(float(value))
    whole = Spread().merge(spreads)
    every = np.concatenate(parts)
    assert whole.num_values == len(every)
    assert whole.quantile(0.9) == pytest.approx(np.quantile(every, 0.9, method="inverted_cdf"), rel=0.011)
    assert Spread().quantile(0.5) == 0.0


@given(st.lists(st.tuples(st.floats(0, 10), st.integers(1, 5)), max_size=60))
def test_a_histogram_counts_as_prometheus_does(observed: list[tuple[float, int]]) -> None:
    histogram = Histogram((0.5, 1.0, 2.5))
    for value, count in observed:
        histogram.observe(value, count)
    every = [value for value, count in observed for _ in range(count)]
    expected = [("0.5", 0.5), ("1", 1.0), ("2.5", 2.5), ("+Inf", np.inf)]
    assert histogram.cumulative() == [(name, sum(v <= bound for v in every)) for name, bound in expected]
    assert histogram.total == pytest.approx(sum(every))
    assert histogram.num_values == len(every)


def test_a_finished_request_is_in_every_figure() -> None:
    front = Front()
    front.arrive("r", 100.0)
    front.prefill("r", 100.5, cached=4, spent_s=0.25)
    front.stream("r", 100.75, source="prefill-a")
    front.stream("r", 101.0)
    front.stream("r", 101.5, 2)
    front.end("r", 102.0, came_to=came_to(100.0, 100.75, 102.0, num_attempts=2))
    counters = front.counters
    prefill, decode = counters.replicas["prefill-a"], counters.replicas["decode-a"]
    assert (prefill.pool, decode.pool) == ("prefill", "decode")
    sums = {
        name: (histogram.num_values, histogram.total)
        for replica in (prefill, decode)
        for name, histogram in replica.histograms.items()
        if histogram.num_values
    }
    assert sums == {
        "ttft_seconds": (1, 0.75),
        "itl_seconds": (3, pytest.approx(0.25 + 0.5)),
        "tpot_seconds": (1, pytest.approx(1.25 / 3)),
        "e2e_seconds": (1, 2.0),
        "queue_seconds": (1, 0.5),
        "prefill_seconds": (1, 0.25),
        "hand_over_seconds": (1, 0.125),
    }
    assert decode.histograms["itl_seconds"].num_values == 3
    assert counters.num_requests == {("finished", "ok"): 1}
    assert (counters.num_retried, counters.num_running) == (1, 0)
    assert (counters.num_prompt_tokens, counters.num_output_tokens) == (10, 4)
    assert counters.num_cached_tokens == {"device": 4}
    assert counters.num_expected_cached_tokens == 4
    assert counters.num_hand_overs == {"shm": 1}
    assert counters.num_hand_over_bytes == {"shm": 125_000_000}
    assert (prefill.num_routed, decode.num_routed) == ({"prefill": 1}, {"decode": 1})


def test_what_was_predicted_is_compared_with_what_came() -> None:
    front = Front()
    for name, predicted in (("r", Predicted(1.5, 0.25)), ("not predicted", NOT_PREDICTED)):
        front.arrive(name, 100.0, predicted=predicted)
        front.stream(name, 100.75, source="prefill-a")
        front.stream(name, 101.5, 4)
        front.end(name, 102.0, came_to=came_to(100.0, 100.75, 102.0))
    prefill, decode = (front.counters.replicas[name].histograms for name in ("prefill-a", "decode-a"))
    ttft, tpot = prefill["ttft_prediction_ratio"], decode["tpot_prediction_ratio"]
    assert (ttft.num_values, ttft.total) == (1, 0.5)
    assert (tpot.num_values, tpot.total) == (1, 1.25 / 4 / 0.25)


def test_what_fails_is_counted_by_state_and_code_and_not_timed() -> None:
    front = Front()
    for name, code in (("a", "UNAVAILABLE"), ("b", "CANCELLED"), ("c", "RESOURCE_EXHAUSTED")):
        front.arrive(name, 10.0)
        front.end(name, 11.0, code=code, came_to=came_to(10.0, 11.0, 11.0))
    front.refuse("INVALID_ARGUMENT", 12.0)
    front.refuse("RESOURCE_EXHAUSTED", 12.0)
    front.counters.attempt_failed("decode-a", "refused", 12.0)
    front.counters.lost("decode")
    assert front.counters.num_requests == {
        ("failed", "unavailable"): 1,
        ("cancelled", "cancelled"): 1,
        ("failed", "resource_exhausted"): 1,
        ("refused", "invalid_argument"): 1,
        ("refused", "resource_exhausted"): 1,
    }
    window = front.counters.window(12.0)
    assert (window.num_arrived, window.num_failed, window.num_refused) == (3, 4, 2)
    decode = front.counters.replicas["decode-a"]
    assert decode.num_attempt_failures == {"refused": 1}
    assert not any(histogram.num_values for histogram in decode.histograms.values())
    assert front.counters.num_losses == {"decode": 1}


def test_news_of_requests_that_are_over_change_nothing() -> None:
    front = Front()
    front.stream("gone", 5.0)
    front.prefill("gone", 5.0)
    front.end("gone", 5.0)
    assert front.counters.num_output_tokens == 0
    assert front.counters.demand.num_prompts == 0
    assert front.counters.demand.num_ended == 0


def test_curves_and_the_window_are_of_the_last_minutes() -> None:
    front, rng = Front(), np.random.default_rng(2)
    second_to_gaps: dict[int, list[float]] = {}
    now = 1000.0
    front.arrive("r", now)
    front.stream("r", now + 0.5)
    at = now + 0.5
    while at < now + 400:
        gap = float(rng.uniform(0.05, 3.0))
        at += gap
        front.stream("r", at)
        second_to_gaps.setdefault(int(at), []).append(gap)
    curves = front.counters.curves(at, wall=at + 5000.0)
    assert not curves.ttft, "the only first token is older"
    wanted = {second: gaps for second, gaps in second_to_gaps.items() if second >= at - CURVE_S}
    assert [round(point.at - 5000.0) for point in curves.itl] == sorted(wanted)
    for point, second in zip(curves.itl, sorted(wanted), strict=True):
        for value, share in ((point.p50, 0.5), (point.p90, 0.9)):
            expected = np.quantile(wanted[second], share, method="inverted_cdf")
            assert value == pytest.approx(expected, rel=0.011)
    window = front.counters.window(at, 60.0)
    last = [gap for second, gaps in second_to_gaps.items() if second > at - 61 for gap in gaps]
    assert window.num_output_tokens == len(last)
    assert window.itl_p90_s == pytest.approx(np.quantile(last, 0.9, method="inverted_cdf"), rel=0.011)
    assert window.ttft_p50_s == 0.0
    everything = front.counters.window(at, 1e6)
    assert everything.num_output_tokens == sum(
        len(gaps) for second, gaps in second_to_gaps.items() if second >= int(at) - RING_S
    )


def test_percentiles_of_several_gateways_are_those_of_all_their_values() -> None:
    """One gateway is fast and one slow: the mean of their percentiles would be neither's."""
    fast, slow, rng = SecondRing(), SecondRing(), np.random.default_rng(3)
    values = {5: rng.uniform(0.01, 0.02, 300), 9: rng.uniform(1.0, 2.0, 100)}
    for value in values[5]:
        fast.second(5.25).ttft.add(float(value))
    for value in values[9]:
        second = slow.second(9.5)
        second.ttft.add(float(value))
        second.counts["num_arrived"] += 1
    # At unix time 1005 both: the clocks began at other times.
    seconds = merged([(1000.0, fast.counts_since(0)), (996.0, slow.counts_since(0))])
    assert [second.at for second in seconds] == [1005]
    every = np.concatenate(list(values.values()))
    (point,) = curves_of(seconds, 1006.0, 1006.0).ttft
    assert point.at == 1005.0
    assert point.p50 == pytest.approx(np.median(every), rel=0.011)
    assert point.p90 == pytest.approx(np.quantile(every, 0.9, method="inverted_cdf"), rel=0.011)
    assert window_of(seconds, 1006.0).num_arrived == 100
    assert merged([(0.0, (SecondCounts(1, {"num_new": 7}, {}, {}),))])[0].counts["num_new"] == 0
    assert slow.counts_since(10) == ()


def test_prompts_are_counted_for_the_pool_that_computed_them() -> None:
    front = Front()
    for number, source in enumerate(("prefill-a", "decode-a", "decode-b")):
        front.arrive(f"r{number}", 10.0)
        front.prefill(f"r{number}", 10.5 + number, source=source)
    seconds = front.counters.seconds
    both = merged([(0.0, seconds.counts_since(0)), (0.0, seconds.counts_since(11))])
    assert window_of(both, 13.0).pool_to_prompts == {"prefill": 1, "decode": 4}
    assert window_of(both, 13.0, window_s=1.0).pool_to_prompts == {"decode": 2}


def test_late_is_what_exceeds_the_objective() -> None:
    front = Front()
    for number, ttft_s in enumerate((0.9, 1.1, 5.0)):
        front.arrive(f"r{number}", 10.0)
        front.stream(f"r{number}", 10.0 + ttft_s)
    front.stream("r0", 10.9 + 0.05)
    front.stream("r0", 10.95 + 0.4, 2)
    front.stream("r0", 11.35 + 0.06)
    demand = front.counters.demand
    assert (demand.num_first_tokens, demand.num_late_first_tokens) == (3, 2)
    assert (demand.num_gaps, demand.num_late_gaps) == (4, 2), "two tokens at once are 0.2 s apart"


def test_demand_has_sums_and_squares_per_prompt_and_continuation() -> None:
    front = Front()
    front.arrive("r", 0.0, samples=2)
    front.prefill("r", 1.0, cached=3)
    front.stream("r", 1.0, 1, sample=0)
    front.stream("r", 1.0, 1, sample=1)
    front.stream("r", 2.0, 4, sample=1)
    front.end("r", 3.0, code="CANCELLED")
    front.arrive("s", 3.0)
    front.prefill("s", 3.0)
    front.end("s", 3.0, code="UNAVAILABLE")
    demand = front.counters.demand
    assert (demand.num_arrived, demand.num_sequences) == (2, 3)
    assert (demand.num_prompts, demand.num_computed_tokens) == (2, 7 + 10)
    assert demand.computed_tokens_squared == 7**2 + 10**2
    assert (demand.num_ended, demand.num_output_tokens) == (2, 1 + 5)
    assert demand.output_tokens_squared == 1 + 5**2
    assert demand.num_gaps == 4, "the first token of a second continuation is no gap"


def test_kv_is_held_from_scheduling_to_the_end_and_grows_with_the_output() -> None:
    front = Front()
    front.arrive("r", 0.0, tenant="a", prompt=10)
    front.prefill("r", 5.0, spent_s=2.0)
    front.stream("r", 5.0)
    front.stream("r", 8.0, 3)
    front.counters.advance(9.0)
    front.counters.advance(9.5)
    held = [(3.0, 5.0, 10), (5.0, 8.0, 11), (8.0, 12.0, 14)]
    so_far = [*held[:2], (8.0, 9.5, 14)]
    use = front.counters.tenants.use("a")
    assert use.kv_byte_s == pytest.approx(sum((end - start) * num * KV_BYTES for start, end, num in so_far))
    front.end("r", 12.0)
    assert use.kv_byte_s == pytest.approx(sum((end - start) * num * KV_BYTES for start, end, num in held))
    front.counters.advance(99.0)
    assert use.kv_byte_s == pytest.approx(sum((end - start) * num * KV_BYTES for start, end, num in held))
    assert (use.num_computed_tokens, use.num_output_tokens, use.num_requests) == (10, 4, 1)


def test_tenants_are_told_apart() -> None:
    front = Front()
    for name, tenant, cached in (("x", "a", 4), ("y", "b", 0), ("z", "", 10)):
        front.arrive(name, 0.0, tenant=tenant)
        front.prefill(name, 0.0, cached=cached)
        front.stream(name, 1.0, 2)
    series = front.counters.tenants.series()
    assert {name: (use.num_computed_tokens, use.num_cached_tokens) for name, use in series.items()} == {
        "a": (6, 4),
        "b": (10, 0),
        "default": (0, 10),
        "other": (0, 0),
    }


def test_cached_tokens_are_told_by_where_they_came_from() -> None:
    front = Front()
    front.arrive("r", 0.0)
    report = front.prefill("r", 1.0, cached=8, loaded=3)
    assert cached_by_tier(report) == {"device": 5, "dram": 3}
    assert front.counters.num_cached_tokens == {"device": 5, "dram": 3}


def test_a_replica_that_is_long_gone_is_forgotten() -> None:
    front = Front()
    for number, replica in itertools.product(range(2), ("decode-a", "decode-b")):
        front.arrive(f"{replica}{number}", 0.0)
        front.stream(f"{replica}{number}", 1.0, source=replica)
    del front.pools["decode-b"]
    front.counters.advance(300.0)
    assert set(front.counters.replicas) == {"decode-a", "decode-b"}
    front.counters.advance(900.0)
    assert set(front.counters.replicas) == {"decode-a"}
