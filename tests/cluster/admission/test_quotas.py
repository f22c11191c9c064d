"""Quotas of tenants under a virtual clock: what is taken, refused and given back, at one gateway and at
several that read each other's records. The file is over 600 lines because both have one model, which counts
what was taken."""

from __future__ import annotations

import contextlib
import itertools
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from slow_cases import examples

from cluster.admission import quotas as quotas_module
from cluster.admission.quotas import (
    GRACE_S,
    MAX_SHOWN,
    MovedRequest,
    QuotaRecord,
    Quotas,
    QuotaUse,
    merged_uses,
)
from cluster.errors import InvalidRequestError, QuotaError
from cluster.identity.config import AuthConfig

PERIOD_S = 0.2


def quotas_of(**limits: Any) -> Quotas:
    return Quotas(AuthConfig.model_validate({"tenants": {"a": limits}}))


def refusal(quotas: Quotas, now: float, tenant: str = "a") -> QuotaError:
    with pytest.raises(QuotaError) as refused:
        quotas.admit(tenant, now)
    return refused.value


def test_requests_are_taken_up_to_the_burst_and_the_refusal_says_when_there_is_one_more() -> None:
    quotas = quotas_of(requests_per_s=2.0, burst_s=1.5)
    for _ in range(3):
        quotas.admit("a", 10.0)
    refused = refusal(quotas, 10.1)
    assert refused.retry_after_s == pytest.approx(0.4)
    assert refused.limit == "requests_per_s"
    assert str(refused) == (
        "tenant 'a' may use 2 requests a second (auth.tenants.a.requests_per_s) and has used them up; "
        "try again in 0.4 s"
    )
    quotas.admit("a", 10.1 + refused.retry_after_s)
    refusal(quotas, 10.1 + refused.retry_after_s)


def test_a_request_that_is_given_back_was_never_taken() -> None:
    quotas = quotas_of(requests_per_s=1.0, burst_s=2.0)
    quotas.withdraw("a", 0, 0.0)  # of a full bucket nothing is missing
    quotas.withdraw("nobody", 0, 0.0)
    for _ in range(10):
        quotas.admit("a", 0.0)
        quotas.withdraw("a", 0, 0.0)
    assert take_all(quotas, 0.0) == 2
    quotas.withdraw("a", 0, 0.0)
    assert take_all(quotas, 0.0) == 1


def test_the_prompt_of_a_request_that_is_given_back_was_never_taken() -> None:
    fleet = SharedRecords(2, prompt_tokens_per_s=10.0, burst_s=10.0)
    for _ in range(2):
        fleet.sync_all(0.0)
    one, other = fleet.gateways.values()
    one.end("a", one.take_prompt("a", 80, 1, 0.0))
    one.withdraw("a", 80, 0.0)
    one.end("a", one.take_prompt("a", 90, 1, 0.0))
    fleet.sync_all(0.0)
    assert other.rates("a", 0.0)["prompt_tokens_per_s"].level == 10.0
    with pytest.raises(QuotaError):
        other.take_prompt("a", 11, 1, 0.0)


def test_tenants_without_limits_use_what_they_like_and_the_others_have_buckets_of_their_own() -> None:
    auth = AuthConfig.model_validate({"tenants": {"free": {}, "*": {"requests_per_s": 1.0, "burst_s": 1.0}}})
    quotas = Quotas(auth)
    for _ in range(100):
        quotas.admit("free", 0.0)
    for tenant in ("b", "c"):
        quotas.admit(tenant, 0.0)
        assert "auth.tenants.*.requests_per_s" in str(refusal(quotas, 0.0, tenant))


def test_a_prompt_is_refused_until_its_tokens_are_there_and_one_beyond_the_burst_until_it_is_full() -> None:
    quotas = quotas_of(prompt_tokens_per_s=100.0, burst_s=1.0)
    quotas.take_prompt("a", 80, 1, 0.0)
    with pytest.raises(QuotaError, match="prompt tokens a second") as refused:
        quotas.take_prompt("a", 40, 1, 0.0)
    assert refused.value.retry_after_s == pytest.approx(0.2)
    with pytest.raises(QuotaError) as refused:
        quotas.take_prompt("a", 300, 1, 0.0)
    assert refused.value.retry_after_s == pytest.approx(0.8)
    quotas.take_prompt("a", 300, 1, 0.8)
    with pytest.raises(QuotaError) as refused:  # what it took beyond the burst is missing afterwards
        quotas.take_prompt("a", 10, 1, 0.8)
    assert refused.value.retry_after_s == pytest.approx(2.1)


def test_clients_of_a_tenant_come_back_one_after_the_other_and_none_too_soon() -> None:
    draws = itertools.count(step=97)
    auth = AuthConfig.model_validate({"tenants": {"a": {"requests_per_s": 0.5, "burst_s": 2.0}}})
    quotas = Quotas(auth, lambda: next(draws))
    quotas.admit("a", 0.0)
    waits = [refusal(quotas, 0.0).retry_after_s for _ in range(40)]
    assert min(waits) >= 2.0
    assert max(waits) <= 2.5
    assert len({round(wait_s, 2) for wait_s in waits}) > 20


def test_output_beyond_its_limit_refuses_new_requests_until_the_bucket_has_recovered() -> None:
    quotas = quotas_of(output_tokens_per_s=10.0, burst_s=1.0)
    quotas.admit("a", 0.0)
    quotas.produced("a", 25, 0.0)
    quotas.produced("a", 5, 0.0)
    refused = refusal(quotas, 0.0)
    assert refused.limit == "output_tokens_per_s"
    assert refused.retry_after_s == pytest.approx(2.0)
    quotas.admit("a", refused.retry_after_s)


def test_concurrent_tokens_come_back_once() -> None:
    quotas = quotas_of(concurrent_tokens=100)
    first = quotas.take_prompt("a", 30, 30, 0.0)
    quotas.take_prompt("a", 20, 20, 0.0)
    with pytest.raises(QuotaError, match=r"auth\.tenants\.a\.concurrent_tokens.*has 100; .* needs 2 more"):
        quotas.take_prompt("a", 1, 1, 0.0)
    quotas.end("a", first)
    quotas.take_prompt("a", 30, 30, 0.0)
    with pytest.raises(QuotaError):
        quotas.take_prompt("a", 1, 1, 0.0)
    with pytest.raises(InvalidRequestError, match="max_tokens: prompt and max_tokens are 101 tokens"):
        quotas.take_prompt("a", 100, 1, 0.0)


def test_the_prompt_of_a_free_request_is_not_taken_and_its_tokens_are_reserved_or_refused() -> None:
    quotas = quotas_of(prompt_tokens_per_s=1.0, burst_s=1.0, concurrent_tokens=100)
    reserved = quotas.take_prompt("a", 50, 40, 0.0, is_free=True)
    with pytest.raises(QuotaError, match="has 90") as refused:
        quotas.take_prompt("a", 10, 1, 0.0, is_free=True)
    assert refused.value.retry_after_s > 0
    quotas.end("a", reserved)
    quotas.take_prompt("a", 10, 1, 0.0, is_free=True)
    quotas.take_prompt("a", 1, 1, 0.0)


def test_requests_of_a_list_are_taken_together_or_not_at_all() -> None:
    quotas = quotas_of(requests_per_s=1.0, burst_s=10.0)
    quotas.admit("a", 0.0, 8)
    with pytest.raises(QuotaError, match="3 requests at once: tenant 'a' may use 1 requests") as refused:
        quotas.admit("a", 0.0, 3)
    assert refused.value.retry_after_s == pytest.approx(1.0)
    quotas.admit("a", 0.0, 2)
    with pytest.raises(QuotaError) as refused:  # more than there ever are: when the bucket is full
        quotas.admit("a", 0.0, 25)
    assert refused.value.retry_after_s == pytest.approx(10.0)
    quotas.admit("a", 10.0, 25)
    assert refusal(quotas, 10.0).retry_after_s == pytest.approx(16.0)


def test_many_tenants_are_kept_in_a_bounded_table_but_none_that_reserves_tokens(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(quotas_module, "MAX_TENANTS", 4)
    quotas = Quotas(AuthConfig.model_validate({"tenants": {"*": {"concurrent_tokens": 10}}}))
    reserved = quotas.take_prompt("first", 5, 5, 0.0)
    for number in range(100):
        quotas.end(f"t{number}", quotas.take_prompt(f"t{number}", 5, 5, float(number)))
    assert len(quotas.record(100.0).tenants) <= 4
    with pytest.raises(QuotaError):
        quotas.take_prompt("first", 1, 1, 100.0)
    quotas.end("first", reserved)
    quotas.take_prompt("first", 1, 1, 100.0)


def test_a_tenant_that_has_long_been_idle_is_in_no_record() -> None:
    quotas = quotas_of(requests_per_s=1.0, burst_s=5.0)
    quotas.merge({}, 0.0)
    quotas.admit("a", 0.0)
    assert [it.num_requests for it in quotas.record(1.0).tenants] == [1]
    assert quotas.record(30.0).tenants == ()


def test_operators_see_what_is_used_and_refused_until_the_tenant_is_idle() -> None:
    quotas = quotas_of(requests_per_s=1.0, burst_s=4.0, concurrent_tokens=100)
    assert quotas.uses(0.0) == ()
    for _ in range(4):
        quotas.admit("a", 0.0)
    reserved = quotas.take_prompt("a", 20, 30, 0.0)
    for _ in range(3):
        refusal(quotas, 0.0)
    (use,) = quotas.uses(1.0)
    assert use.used == {"requests_per_s": pytest.approx(0.75), "concurrent_tokens": 0.5}
    assert use.num_refused == {"requests_per_s": 3}
    quotas.end("a", reserved)
    quotas.divide(0, 60.0)
    assert quotas.uses(60.0) == ()


def test_what_several_gateways_say_of_a_tenant_is_one_line() -> None:
    tenants = [QuotaUse(f"t{number}", {"requests_per_s": 0.1 * number}, {}) for number in range(MAX_SHOWN)]
    one = QuotaUse("a", {"requests_per_s": 0.5, "concurrent_tokens": 0.2}, {"requests_per_s": 2})
    other = QuotaUse(
        "a", {"requests_per_s": 0.4, "concurrent_tokens": 0.3}, {"requests_per_s": 1, "concurrent_tokens": 1}
    )
    merged = merged_uses([*tenants, one, other])
    assert merged[0] == QuotaUse(
        "a", {"requests_per_s": 0.5, "concurrent_tokens": 0.3}, {"requests_per_s": 3, "concurrent_tokens": 1}
    )
    assert [it.tenant for it in merged[1:]] == [f"t{number}" for number in range(MAX_SHOWN - 1, 0, -1)]


# ------------------------------------------------------------------------------------- one gateway


@dataclass
class Window:
    """Everything that was let through, against every window."""

    taken: list[tuple[float, float]] = field(default_factory=list)

    def most(self, rate: float) -> float:
        """Return the largest sum of a window less `rate` times its length."""
        best = 0.0
        for start in range(len(self.taken)):
            total = 0.0
            for at, amount in self.taken[start:]:
                total += amount
                best = max(best, total - rate * (at - self.taken[start][0]))
        return best


# Times to wait, tokens of a prompt, and prompts of a call.
STEPS = st.lists(
    st.tuples(st.sampled_from([0.0, 0.01, 0.2, 1.0, 7.0]), st.integers(1, 60)), min_size=1, max_size=60
)
LISTS = st.lists(st.sampled_from([1, 1, 1, 2, 7, 40]), min_size=60, max_size=60)


@given(STEPS, LISTS, st.floats(0.5, 100.0), st.floats(0.1, 10.0))
def test_no_window_has_more_than_its_rate_and_the_burst(
    steps: list[tuple[float, int]], lists: list[int], rate: float, burst_s: float
) -> None:
    """Against a model that adds up, and knows nothing of levels."""
    quotas = quotas_of(requests_per_s=rate, prompt_tokens_per_s=10 * rate, burst_s=burst_s)
    requests, prompts, now, longest, longest_list = Window(), Window(), 5.0, 1, 1
    waits_s: list[float] = []
    for (wait_s, num_tokens), count in zip(steps, lists, strict=False):
        now += wait_s
        try:
            quotas.admit("a", now, count)
            requests.taken.append((now, count))
            longest_list = max(longest_list, count)
            quotas.take_prompt("a", num_tokens, 1, now)
            prompts.taken.append((now, num_tokens))
            longest = max(longest, num_tokens)
        except QuotaError as refused:
            waits_s.append(refused.retry_after_s)
    assert all(wait_s > 0 for wait_s in waits_s)
    slack = 1e-3 * rate
    assert requests.most(rate) <= max(rate * burst_s, longest_list) + slack
    assert prompts.most(10 * rate) <= max(10 * rate * burst_s, longest) + slack


@given(STEPS, st.floats(0.5, 100.0), st.floats(0.1, 10.0))
def test_whoever_waits_as_told_is_served_then_and_not_before(
    steps: list[tuple[float, int]], rate: float, burst_s: float
) -> None:
    quotas = quotas_of(prompt_tokens_per_s=rate, burst_s=burst_s)
    now = 0.0
    for wait_s, num_tokens in steps:
        now += wait_s
        try:
            quotas.take_prompt("a", num_tokens, 1, now)
        except QuotaError as refused:
            with pytest.raises(QuotaError):
                quotas.take_prompt("a", num_tokens, 1, now + 0.9 * refused.retry_after_s)
            now += refused.retry_after_s
            quotas.take_prompt("a", num_tokens, 1, now)


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 40), st.integers(1, 60)), max_size=80))
def test_reserved_tokens_are_those_of_the_requests_that_run(steps: list[tuple[bool, int, int]]) -> None:
    quotas = quotas_of(concurrent_tokens=100)
    running: list[tuple[int, int]] = []
    for begins, prompt, max_tokens in steps:
        if begins:
            num_reserved = sum(num for _, num in running)
            try:
                reserved = quotas.take_prompt("a", prompt, max_tokens, 0.0)
            except QuotaError:
                assert num_reserved + prompt + max_tokens > 100
            else:
                assert num_reserved + prompt + max_tokens <= 100
                running.append((reserved, prompt + max_tokens))
        elif running:
            reserved, _ = running.pop(prompt % len(running))
            quotas.end("a", reserved)
    assert sum(it.num_held_tokens for it in quotas.record(0.0).tenants) == sum(num for _, num in running)


# -------------------------------------------------------------------------------- several gateways


class SharedRecords:
    """What Redis does: keeps the last record of each gateway."""

    def __init__(self, num_gateways: int, **limits: Any) -> None:
        self.gateways = {f"g{number}": quotas_of(**limits) for number in range(num_gateways)}
        self.records: dict[str, QuotaRecord] = {}
        # Gateways whose connection is cut.
        self.cut: set[str] = set()

    def sync(self, name: str, now: float) -> None:
        quotas = self.gateways[name]
        if name in self.cut:
            self.records.pop(name, None)
            quotas.divide(len(self.gateways) - 1, now)
            return
        self.records[name] = quotas.record(now)
        quotas.merge({it: self.records.get(it) for it in self.gateways if it != name}, now)

    def sync_all(self, now: float) -> None:
        for name in self.gateways:
            self.sync(name, now)


def take_all(quotas: Quotas, now: float) -> int:
    """Take requests until one is refused."""
    for num_taken in range(10_000):
        try:
            quotas.admit("a", now)
        except QuotaError:
            return num_taken
    raise AssertionError("nothing is refused")


def test_what_one_gateway_gives_back_is_there_at_the_others_too() -> None:
    """They may have counted it already, and counts never fall: the next one is counted in its place."""
    fleet = SharedRecords(2, requests_per_s=1.0, burst_s=10.0)
    fleet.sync_all(0.0)
    fleet.sync_all(0.0)
    one, other = fleet.gateways.values()
    for _ in range(4):
        one.admit("a", 0.0)
    fleet.sync_all(0.0)
    counted = one.record(0.0).tenants[0].num_requests
    for _ in range(4):
        one.withdraw("a", 0, 0.0)
    assert one.record(0.0).tenants[0].num_requests == counted
    for _ in range(6):
        one.admit("a", 0.0)
    fleet.sync_all(0.0)
    assert take_all(other, 0.0) == 4


@settings(max_examples=examples(60))
@given(
    st.integers(1, 4),
    st.lists(
        st.tuples(st.integers(0, 3), st.integers(1, 12), st.booleans(), st.booleans()),
        min_size=1,
        max_size=80,
    ),
    st.floats(1.0, 40.0),
    st.sampled_from([0.5, 2.0, 10.0]),
)
def test_gateways_together_exceed_the_limit_by_what_the_others_take_within_one_period(
    num_gateways: int, steps: list[tuple[int, int, bool, bool]], rate: float, burst_s: float
) -> None:
    """Each step is one period: some gateways try to take so many, one by one or as a list, all exchange
    records."""
    fleet = SharedRecords(num_gateways, requests_per_s=rate, burst_s=burst_s)
    names = list(fleet.gateways)
    taken, now = Window(), 0.0
    fleet.sync_all(now)
    fleet.sync_all(now)
    for which, num_wanted, is_all, is_list in steps:
        now += PERIOD_S
        for name in names if is_all else [names[which % num_gateways]]:
            for count in [num_wanted] if is_list else [1] * num_wanted:
                try:
                    fleet.gateways[name].admit("a", now, count)
                except QuotaError:
                    break
                taken.taken.append((now, count))
        fleet.sync_all(now)
        fleet.sync_all(now)
    longest = max((num for _, num, _, is_list in steps if is_list), default=1)
    most_in_a_period = max(rate * (burst_s + PERIOD_S), longest)
    overshoot = (num_gateways - 1) * min(most_in_a_period, max(num for _, num, _, _ in steps))
    assert taken.most(rate) <= max(rate * burst_s, longest) + overshoot + 1e-3 * rate


def test_over_a_long_time_four_gateways_give_out_the_limit_and_no_more() -> None:
    fleet = SharedRecords(4, requests_per_s=20.0, burst_s=2.0)
    fleet.sync_all(0.0)
    num_taken = 0
    for period in range(1, 501):
        for quotas in fleet.gateways.values():
            num_taken += take_all(quotas, period * PERIOD_S)
        fleet.sync_all(period * PERIOD_S)
    allowed = 20.0 * 100.0 + 40.0
    assert allowed * 0.95 <= num_taken <= allowed + 3 * (40.0 + 20.0 * PERIOD_S)


@settings(max_examples=30, deadline=None)
@given(
    st.lists(st.floats(-1e6, 1e6), min_size=3, max_size=3),
    st.lists(st.sampled_from(["", "", "", "evict g0", "evict all", "skip g1"]), min_size=20, max_size=60),
)
def test_neither_clocks_that_differ_nor_records_that_vanish_give_a_tenant_more(
    offsets: list[float], losses: list[str]
) -> None:
    """Each gateway has a clock of its own; Redis drops records, and a gateway's exchange comes late."""
    fleet = SharedRecords(3, requests_per_s=20.0, burst_s=2.0)
    clocks = dict(zip(fleet.gateways, offsets, strict=True))
    num_taken, now = 0, 0.0
    for name in [*clocks, *clocks]:
        fleet.sync(name, clocks[name])
    for loss in losses:
        now += PERIOD_S
        for name, quotas in fleet.gateways.items():
            num_taken += take_all(quotas, clocks[name] + now)
        for name in clocks:
            if loss == "skip g1" == f"skip {name}":
                continue
            fleet.sync(name, clocks[name] + now)
            if loss == "evict all":
                fleet.records.clear()
        if loss == "evict g0":
            fleet.records.pop("g0", None)
    allowed = 20.0 * (now + 2.0)
    assert num_taken <= allowed + 2 * (40.0 + 20.0 * PERIOD_S)
    if not any(losses):
        assert num_taken >= 0.9 * 20.0 * now


def test_one_busy_gateway_gets_the_whole_limit() -> None:
    fleet = SharedRecords(4, requests_per_s=10.0, burst_s=1.0)
    fleet.sync_all(0.0)
    num_taken = 0
    for period in range(1, 501):
        num_taken += take_all(fleet.gateways["g0"], period * PERIOD_S)
        fleet.sync_all(period * PERIOD_S)
    assert num_taken == pytest.approx(10.0 * 100.0 + 10.0, abs=2)


def test_concurrent_tokens_of_other_gateways_count_and_come_back() -> None:
    fleet = SharedRecords(2, concurrent_tokens=100)
    one, two = fleet.gateways.values()
    fleet.sync_all(0.0)
    reserved = one.take_prompt("a", 50, 40, 0.1)
    fleet.sync_all(0.2)
    with pytest.raises(QuotaError, match="has 90"):
        two.take_prompt("a", 10, 10, 0.2)
    one.end("a", reserved)
    fleet.sync_all(0.4)
    two.take_prompt("a", 10, 10, 0.4)


def test_tokens_of_a_gateway_that_died_do_not_keep_its_requests_out() -> None:
    """Its last record is read for a while; what another gateway really holds counts."""
    fleet = SharedRecords(3, concurrent_tokens=100)
    dead, here, other = fleet.gateways.values()
    fleet.sync_all(0.0)
    for quotas in (dead, dead, other):
        quotas.take_prompt("a", 20, 10, 0.1)
    fleet.sync_all(0.2)
    fleet.sync_all(0.2)
    moved = MovedRequest(lambda name: name == "g0", is_gone=True)
    for _ in range(2):
        here.take_prompt("a", 20, 10, 0.2, is_free=True, moved=moved)
    with pytest.raises(QuotaError, match="has 90"):
        here.take_prompt("a", 20, 10, 0.2, is_free=True, moved=moved)
    with pytest.raises(QuotaError, match="has 150"):
        here.take_prompt("a", 1, 1, 0.2)


def test_a_gateway_that_broke_a_request_and_runs_others_counts_less_by_this_one_alone() -> None:
    fleet = SharedRecords(2, concurrent_tokens=100)
    one, two = fleet.gateways.values()
    fleet.sync_all(0.0)
    for _ in range(3):
        one.take_prompt("a", 20, 10, 0.1)
    fleet.sync_all(0.2)
    fleet.sync_all(0.2)
    moved = MovedRequest(lambda name: name == "g0", is_gone=False)
    two.take_prompt("a", 20, 10, 0.2, is_free=True, moved=moved)
    with pytest.raises(QuotaError, match="has 90"):
        two.take_prompt("a", 20, 10, 0.2, is_free=True, moved=moved)


def test_the_tokens_of_a_gateway_that_died_come_back() -> None:
    fleet = SharedRecords(2, concurrent_tokens=100)
    one, two = fleet.gateways.values()
    fleet.sync_all(0.0)
    one.take_prompt("a", 50, 40, 0.1)
    fleet.sync_all(0.2)
    del fleet.records["g0"]  # it expired
    two.merge({"g0": None}, 0.2 + GRACE_S + 0.1)
    assert (two.share, two.missing) == (0.5, ("g0",))
    two.merge({}, 5.0)  # the roster knows it no more
    two.take_prompt("a", 50, 50, 5.0)


def test_without_the_others_each_gateway_has_its_part() -> None:
    fleet = SharedRecords(4, requests_per_s=40.0, burst_s=1.0)
    fleet.sync_all(0.0)
    fleet.cut = set(fleet.gateways)
    fleet.sync_all(1.0)
    assert [take_all(quotas, 1.0) for quotas in fleet.gateways.values()] == [10] * 4
    assert [take_all(quotas, 1.5) for quotas in fleet.gateways.values()] == [5] * 4


def test_a_gateway_that_is_cut_off_and_the_others_have_the_limit_together() -> None:
    fleet = SharedRecords(4, requests_per_s=40.0, burst_s=1.0)
    fleet.sync_all(0.0)
    fleet.cut = {"g3"}
    for period in range(1, 20):
        fleet.sync_all(period * PERIOD_S)
    assert [quotas.share for quotas in fleet.gateways.values()] == [0.75, 0.75, 0.75, 0.25]
    now, num_taken = 19 * PERIOD_S, 0
    for period in range(1, 501):
        for quotas in fleet.gateways.values():
            num_taken += take_all(quotas, now + period * PERIOD_S)
        fleet.sync_all(now + period * PERIOD_S)
    assert num_taken <= 40.0 * 100.0 + 3 * 48.0
    assert num_taken >= 0.95 * 40.0 * 100.0


def test_what_was_used_while_cut_off_is_not_charged_afterwards() -> None:
    fleet = SharedRecords(2, requests_per_s=10.0, burst_s=1.0)
    one, two = fleet.gateways.values()
    fleet.sync_all(0.0)
    fleet.sync_all(0.1)
    fleet.cut = {"g0", "g1"}
    for period in range(1, 100):
        fleet.sync_all(period * PERIOD_S)
        take_all(one, period * PERIOD_S)
        take_all(two, period * PERIOD_S)
    fleet.cut = set()
    fleet.sync_all(20.0)
    fleet.sync_all(20.0)
    assert (one.share, two.share) == (1.0, 1.0)
    assert take_all(one, 20.0) + take_all(two, 20.0) <= 5
    assert take_all(two, 22.0) >= 9


def test_what_was_used_before_a_short_cut_is_charged_afterwards() -> None:
    """A connection that breaks again and again does not multiply the limit."""
    fleet = SharedRecords(4, requests_per_s=20.0, burst_s=2.0)
    fleet.sync_all(0.0)
    num_taken = 0
    for period in range(1, 501):
        for quotas in fleet.gateways.values():
            num_taken += take_all(quotas, period * PERIOD_S)
        fleet.cut = set(fleet.gateways) if period % 2 else set()
        for name in fleet.cut:
            fleet.gateways[name].divide(3, period * PERIOD_S)
        if not fleet.cut:
            fleet.sync_all(period * PERIOD_S)
            fleet.sync_all(period * PERIOD_S)
    assert num_taken <= 1.25 * (20.0 * 100.0 + 4 * 40.0)


def test_use_before_a_gateway_came_is_not_charged_to_it() -> None:
    fleet = SharedRecords(1, requests_per_s=10.0, burst_s=1.0)
    fleet.sync_all(0.0)
    for second in range(50):
        take_all(fleet.gateways["g0"], float(second))
        fleet.sync_all(float(second))
    fleet.gateways["g1"] = quotas_of(requests_per_s=10.0, burst_s=1.0)
    fleet.sync_all(60.0)
    fleet.sync_all(60.0)
    assert fleet.gateways["g1"].share == 1.0
    assert take_all(fleet.gateways["g1"], 60.0) == 10


def test_a_gateway_that_stood_still_is_charged_once_when_it_is_back() -> None:
    fleet = SharedRecords(2, requests_per_s=10.0, burst_s=1.0)
    one, two = fleet.gateways.values()
    fleet.sync_all(0.0)
    fleet.sync_all(0.0)
    assert take_all(one, 0.1) == 10
    fleet.sync_all(0.2)
    fleet.sync_all(0.2)
    record = fleet.records.pop("g0")
    two.merge({"g0": None}, 20.0)
    assert two.share == 0.5
    fleet.records["g0"] = record
    two.merge({"g0": record}, 20.2)
    assert two.share == 1.0
    assert take_all(two, 22.0) == 10  # nothing new was in it


@settings(max_examples=examples(60))
@given(
    st.lists(
        st.tuples(st.sampled_from(["begin", "end", "sync", "cut", "join"]), st.integers(0, 3)), max_size=120
    )
)
def test_no_give_back_is_lost_whatever_happens_between_the_gateways(steps: list[tuple[str, int]]) -> None:
    fleet = SharedRecords(3, concurrent_tokens=300)
    names = list(fleet.gateways)
    running: list[tuple[str, int]] = []
    now = 0.0
    for what, which in steps:
        now += PERIOD_S
        name = names[which % 3]
        if what == "begin":
            with contextlib.suppress(QuotaError):
                running.append((name, fleet.gateways[name].take_prompt("a", 20, 10, now)))
        elif what == "end" and running:
            ended_at, reserved = running.pop(which % len(running))
            fleet.gateways[ended_at].end("a", reserved)
        elif what == "sync":
            fleet.sync_all(now)
        elif what == "cut":
            fleet.cut.add(name)
        else:
            fleet.cut.discard(name)
    for name, reserved in running:
        fleet.gateways[name].end("a", reserved)
    fleet.cut.clear()
    fleet.sync_all(now + 1)
    fleet.sync_all(now + 1)
    for quotas in fleet.gateways.values():
        assert quotas.share == 1.0
        quotas.end("a", quotas.take_prompt("a", 150, 150, now + 1))


@given(
    st.lists(
        st.tuples(st.integers(0, 2), st.integers(1, 5), st.sampled_from(["served", "refused", "resumed"])),
        max_size=60,
    )
)
def test_lists_and_resumed_calls_at_several_gateways_take_what_they_cost(
    steps: list[tuple[int, int, str]],
) -> None:
    """Each is charged for one when its body begins, which is given back before all of its prompts are taken;
    one that the load refuses gives these back, and one that is resumed free the first."""
    fleet = SharedRecords(3, requests_per_s=1e-9, burst_s=2e10)
    for _ in range(2):
        fleet.sync_all(0.0)
    gateways = list(fleet.gateways.values())
    num_taken = [0] * 3
    # Given back, and counted by the others until the next is taken.
    num_pending = [0] * 3
    for which, count, how in steps:
        quotas = gateways[which]
        most = [20 - sum(num_taken) - sum(num_pending) + num_pending[it] for it in range(3)]
        if most[which] < 1:
            with pytest.raises(QuotaError):
                quotas.admit("a", 0.0)
            continue
        quotas.admit("a", 0.0)
        quotas.withdraw("a", 0, 0.0)
        num_pending[which] = max(num_pending[which], 1)
        if how != "resumed":
            if most[which] < count:
                with pytest.raises(QuotaError):
                    quotas.admit("a", 0.0, count)
            else:
                quotas.admit("a", 0.0, count)
                num_pending[which] = max(0, num_pending[which] - count)
                num_taken[which] += count
                if how == "refused":
                    quotas.withdraw("a", 0, 0.0, count)
                    num_pending[which] += count
                    num_taken[which] -= count
        fleet.sync_all(0.0)
        fleet.sync_all(0.0)
        for number, each in enumerate(gateways):
            left = 20 - sum(num_taken) - sum(num_pending) + num_pending[number]
            assert round(each.rates("a", 0.0)["requests_per_s"].level) == left
