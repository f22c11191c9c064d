"""What a gateway remembers for the doctor: prefixes against brute force, times against sums by hand."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from doctor_harness import said
from gateway_harness import BLOCK_TOKENS, GatewayHarness, Pair, until

from cluster.api.generate_options import GenerateOptions
from cluster.doctor import hit_rate, members, serving
from cluster.doctor.checks import Severity
from cluster.doctor.live_cluster import Expected, look
from cluster.gateway import history, prefix_reuse
from cluster.gateway.history import MAX_AGE_S, RequestHistory, percentile
from cluster.gateway.prefix_reuse import WINDOW_TOKENS, KnownSince, PrefixTracker, Reuse, find_anchors
from cluster.metrics.ended_request import Caller, EndedRequest, SampleResult, Summary
from cluster.roster.messages import GatewayRecord
from cluster.text.preprocess import PreparedRequest, SampleStart
from kvtransfer.blocks.keys import extend_keys, root_key
from kvtransfer.common.clock import ManualClock, SystemClock
from kvtransfer.request_facts import RequestFacts
from workers.messages.link import HandOverReport, PrefillReport, StageTimes
from workers.messages.sampling import SamplingParams

BLOCK = 16
SECRET = bytes(32)
Tokens = list[int]


def raw(tokens: Sequence[int]) -> bytes:
    return np.asarray(tokens, dtype="<u4").tobytes()


def put(
    book: PrefixTracker, tokens: Tokens, tenant: str = "t", began: float = 1.0, ended: float = 0.0
) -> int:
    """By default each begins after all before have ended."""
    prompt = raw(tokens)
    return book.saw(
        tenant, extend_keys(root_key(SECRET, b"model", tenant), prompt, BLOCK), prompt, began, ended
    )[1]


def drawn(seed: int, num_tokens: int) -> Tokens:
    return [random.Random(seed * 1000 + index).randrange(30_000) for index in range(num_tokens)]


def only_reuse(book: PrefixTracker) -> Reuse:
    (found,) = book.reuse(8)
    return found


def test_the_known_prefix_is_the_longest_shared_with_any_earlier_prompt() -> None:
    """Against a comparison with each of them, token by token."""
    chance = random.Random(3)
    book, earlier = PrefixTracker(BLOCK), list[Tokens]()
    stems = [drawn(seed, 400) for seed in range(4)]
    for number in range(120):
        tokens = chance.choice(stems)[: chance.randrange(10, 400)] + drawn(
            100 + number, chance.randrange(0, 90)
        )
        shared = max((common(tokens, other) for other in earlier), default=0)
        assert put(book, tokens) == shared // BLOCK * BLOCK
        earlier.append(tokens)


def common(one: Tokens, other: Tokens) -> int:
    """Tokens in the shared prefix, of those in full blocks of both."""
    length = min(len(one), len(other)) // BLOCK * BLOCK
    return next((at for at in range(length) if one[at] != other[at]), length)


def test_anchors_are_the_same_wherever_their_window_stands() -> None:
    text = drawn(1, 600)
    alone = find_anchors(np.asarray(text, dtype=np.uint32), 7)
    moved = find_anchors(np.asarray(drawn(2, 123) + text + drawn(3, 50), dtype=np.uint32), 7)
    assert set(alone[1].tolist()) <= set(moved[1].tolist())
    assert 600 / 16 < len(alone[0]) < 600 / 4  # one of eight windows
    at = {hash_: start for start, hash_ in zip(moved[0].tolist(), moved[1].tolist(), strict=True)}
    assert all(at[h] == s + 123 for s, h in zip(alone[0].tolist(), alone[1].tolist(), strict=True))
    other = find_anchors(np.asarray(text, dtype=np.uint32), 8)
    assert not set(alone[1].tolist()) & set(other[1].tolist())
    assert len(find_anchors(np.asarray(text[: WINDOW_TOKENS - 1], dtype=np.uint32), 7)[0]) == 0


def test_a_window_that_differs_in_one_token_has_another_hash() -> None:
    """Every hash of many windows, against a set of the windows themselves."""
    chance = random.Random(5)
    tokens = np.asarray([chance.randrange(4) for _ in range(8000)], dtype=np.uint32)
    starts, hashes = find_anchors(tokens, 0)
    windows = [tuple(tokens[start : start + WINDOW_TOKENS].tolist()) for start in starts.tolist()]
    assert (
        len(set(windows)) == len(set(hashes.tolist())) == len(set(zip(windows, hashes.tolist(), strict=True)))
    )


def test_text_that_repeats_behind_a_difference_is_found() -> None:
    """A date at token 40, then 1000 tokens that are always the same."""
    book, head, tail = PrefixTracker(BLOCK), drawn(1, 40), drawn(2, 1000)
    for number in range(30):
        put(book, head + drawn(50 + number, 4) + tail + drawn(200 + number, 30))
    found = only_reuse(book)
    assert (found.diverge_at, found.num_diverging) == (32, 29)
    assert found.num_tokens_behind == 29 * (40 + 4 + 1000 + 30 - 32)
    assert found.num_repeated_behind / found.num_tokens_behind == pytest.approx(1000 / 1042, abs=0.05)
    assert found.num_known_tokens == 29 * 32


def test_prompts_that_share_a_beginning_and_nothing_else_have_nothing_to_gain() -> None:
    book, head = PrefixTracker(BLOCK), drawn(1, 64)
    for number in range(30):
        put(book, head + drawn(50 + number, 500))
    found = only_reuse(book)
    assert (found.diverge_at, found.num_diverging) == (64, 29)
    assert found.num_repeated_behind == 0


def test_a_conversation_that_grows_has_nothing_to_gain_either() -> None:
    book, talk = PrefixTracker(BLOCK), drawn(1, 100)
    for turn in range(10):
        put(book, talk)
        talk = talk + drawn(50 + turn, 100)
    assert only_reuse(book).num_repeated_behind == 0


def test_what_ran_at_the_same_time_could_not_have_been_cached() -> None:
    book, tokens = PrefixTracker(BLOCK), drawn(1, 200)
    assert put(book, tokens, began=0.0, ended=5.0) == 0
    assert put(book, tokens, began=1.0, ended=6.0) == 0
    assert put(book, tokens, began=5.5, ended=7.0) == 192


def test_tenants_know_nothing_of_each_other() -> None:
    book, tokens = PrefixTracker(BLOCK), drawn(1, 200)
    put(book, tokens, "a")
    assert put(book, tokens, "b") == 0
    assert [item.num_repeated_behind for item in book.reuse(8)] == [0, 0]
    assert len(book.reuse(1)) == 1


def test_memory_is_bounded_and_heads_are_kept_longest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefix_reuse, "MAX_KEYS", 40)
    monkeypatch.setattr(prefix_reuse, "MAX_ANCHORS", 40)
    for module in (history, prefix_reuse):
        monkeypatch.setattr(module, "MAX_TENANTS", 3)
    book, head = PrefixTracker(BLOCK), drawn(1, 160)
    for number in range(20):
        known = put(book, head + drawn(50 + number, 320))
        assert known == (0 if number == 0 else 160)
    for tenant in "bcde":
        put(book, head, tenant)
    assert len(book._keys) <= 40
    assert len(book._anchors) <= 40
    assert {item.tenant for item in book.reuse(8)} == {"c", "d", "e"}


def test_what_is_used_again_stays_known_since_it_was_first_seen() -> None:
    known = KnownSince(20)
    known.remember([7], 1.0)
    for at in range(2, 50):
        known.remember([1000 + at, 7], float(at))
    assert known.get(7, 99.0) == 1.0
    assert known.get(1002, 99.0) == 99.0
    assert all(known.get(1000 + at, 99.0) == at for at in range(41, 50))
    assert len(known) <= 20


def test_empty_and_short_prompts_break_nothing() -> None:
    book = PrefixTracker(BLOCK)
    assert book.reuse(8) == ()
    assert put(book, []) == put(book, [1, 2]) == put(book, drawn(1, BLOCK)) == 0
    assert only_reuse(book).num_prompts == 3


# ----------------------------------------------------------------------------------- times of requests


def ended(
    clock: ManualClock,
    tokens: Tokens,
    *,
    state: str = "finished",
    queue_s: float = 0.1,
    prefill_s: float = 0.2,
    ttft_s: float = 0.5,
    decode_s: float = 1.0,
    cached: int = 0,
    attempts: int = 1,
    num_samples: int = 1,
) -> EndedRequest:
    """It ends now; each sample has 11 tokens."""
    start = clock.now() - ttft_s - decode_s
    times = StageTimes(arrived=10.0, scheduled=10.0 + queue_s, prefilled=10.0 + queue_s + prefill_s)
    moved = StageTimes(transfer_start=20.0, transfer_end=20.04)
    plan = PreparedRequest(
        request_id="r",
        facts=RequestFacts(tenant="t", sharing_group="t", priority=0),
        prompt=raw(tokens),
        root_key=b"root",
        block_keys=extend_keys(b"root", raw(tokens), BLOCK),
        sampling=SamplingParams(max_tokens=11),
        samples=(SampleStart(0, 0, b"", ""),),
        deadline_at=None,
        max_attempts=5,
    )
    summary = Summary(
        samples=tuple(SampleResult(index, "length", 11) for index in range(num_samples)),
        num_prompt_tokens=len(tokens),
        num_attempts=attempts,
        started_at=start,
        first_token_at=start + ttft_s,
        finished_at=clock.now(),
        prefill_replica="p",
        decode_replica="d",
        prefill=PrefillReport("r", 1, len(tokens), cached, times),
        hand_over=HandOverReport("r", 1, 0, 4096, 0, "shm", 4096 / 0.04 / 1e9, moved),
    )
    return EndedRequest("r", "r", "t", Caller(), state, "OK", "", start, clock.now(), summary, prepared=plan)


def test_the_times_are_those_of_the_requests() -> None:
    clock = ManualClock()
    history = RequestHistory(BLOCK, clock)
    for number in range(1, 101):
        clock.advance(1.0)
        slow = number > 90
        history.ended(
            ended(clock, drawn(number, 20), ttft_s=0.01 * number, queue_s=0.5 if slow else 0.0, decode_s=0.2)
        )
    recent = history.summary()
    assert recent.num_requests == 100
    assert recent.window_s == pytest.approx(99.0)
    assert recent.ttft_p50_ms == pytest.approx(510.0)
    assert recent.ttft_p90_ms == pytest.approx(910.0)
    assert recent.slow_ttft_ms == pytest.approx(10 * sum(range(91, 101)) / 10)
    assert recent.slow_queue_ms == pytest.approx(500.0)
    assert recent.slow_prefill_ms == pytest.approx(200.0)
    assert recent.tpot_p50_ms == pytest.approx(20.0)  # ten tokens after the first in 0.2 s
    assert recent.transfer_p90_ms == pytest.approx(40.0)


def test_samples_beside_each_other_count_once() -> None:
    clock = ManualClock()
    history = RequestHistory(BLOCK, clock)
    history.ended(ended(clock, drawn(1, 20), decode_s=0.2, num_samples=4, attempts=3))
    assert history.summary().tpot_p50_ms == pytest.approx(20.0)
    assert history.summary().num_retried == 1


def test_only_finished_requests_of_the_last_ten_minutes_count() -> None:
    clock = ManualClock()
    history = RequestHistory(BLOCK, clock)
    history.ended(ended(clock, drawn(1, 40), state="failed"))
    assert history.summary().num_requests == 0
    clock.advance(1.0)
    history.ended(ended(clock, drawn(1, 40), cached=32, decode_s=0.1))
    assert history.summary().num_requests == 1
    (prefix,) = history.prefixes()
    assert (prefix.num_prompts, prefix.num_known_tokens) == (2, 32)
    figures = prefix.num_finished_tokens, prefix.num_finished_known_tokens, prefix.num_cached_tokens
    assert figures == (40, 32, 32)
    clock.advance(MAX_AGE_S + 1)
    assert history.summary().num_requests == 0


def test_of_a_private_prompt_only_its_times_are_kept() -> None:
    clock = ManualClock()
    history = RequestHistory(BLOCK, clock)
    private = ended(clock, drawn(1, 40), cached=32)
    assert private.prepared is not None
    facts = RequestFacts(is_private=True)
    history.ended(replace(private, prepared=replace(private.prepared, facts=facts)))
    assert history.summary().num_requests == 1
    assert history.prefixes() == []
    assert not history._prefixes._keys
    assert not history._prefixes._anchors


def test_a_refused_request_says_nothing() -> None:
    history = RequestHistory(BLOCK, ManualClock())
    refused = EndedRequest("r", "", "t", Caller(), "refused", "INVALID_ARGUMENT", "x", 0.0, 0.0)
    history.ended(refused)
    assert history.summary().num_requests == 0
    assert history.prefixes() == []


def test_percentiles_of_few() -> None:
    assert percentile([], 0.9) == 0.0
    assert percentile([4.0], 0.9) == 4.0
    assert percentile([1.0, 2.0], 0.5) == 2.0


# ------------------------------------------------------------------------------------ through a gateway


async def test_a_gateway_tells_where_its_prompts_diverge(pair: Pair) -> None:
    """Fifteen prompts, each with another id at token 16 and the same 160 tokens behind it."""
    head, tail = [5] * BLOCK_TOKENS, [6 + index % 200 for index in range(160)]
    for number in range(15):
        prompt = [*head, 300 + number, *tail]
        await pair.client.complete(prompt, GenerateOptions(max_tokens=3, tenant="acme"))
    live = await look(pair.admin.address, 0.0, Expected.of(None), "", SystemClock())
    assert live.status.recent.num_requests == 15
    # The scripted replicas say that they queued for 0.25 s and computed for 0.75 s.
    assert live.status.recent.slow_queue_ms == pytest.approx(250.0)
    assert live.status.recent.slow_prefill_ms == pytest.approx(750.0)
    (result,) = [item for item in hit_rate.hit_rate(live) if item.severity is Severity.WARNING]
    assert result.figures["cause"] == "diverging"
    assert result.figures["diverge_at_token"] == BLOCK_TOKENS
    assert "acme" in result.seen
    assert said(members.clocks, live)[0][0] is Severity.OK
    assert said(serving.route, live)[0][0] is Severity.OK


async def test_every_gateway_is_asked_and_one_that_is_gone_is_told(harness: GatewayHarness) -> None:
    await harness.add_replica("b0", "both")
    gateway, address = await harness.add_gateway()
    own = f"127.0.0.1:{gateway.admin_port}"
    for gateway_id, where in (("g0", own), ("g1", "127.0.0.1:1")):
        await harness.roster.register(GatewayRecord(gateway_id, 1, address, 1, admin=where))
    await until(lambda: len(gateway.connections.gateways) == 2, "both gateways are known")
    live = await look(own, 0.0, Expected.of(None), "", SystemClock())
    assert [reply.status is not None for reply in live.gateways] == [True, False]
    assert said(members.gateways, live)[0][0] is Severity.WARNING
