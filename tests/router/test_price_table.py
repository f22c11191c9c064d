"""What compiled code prices costs what the formulas say, one by one, and so does the next best choice."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any
from unittest import mock

from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from optional_programs import needs_compiler

from kvtransfer.common.clock import ManualClock
from kvtransfer.kv_events import BlocksStored, KvSnapshot
from kvtransfer.messages import ReplicaIdentity
from kvtransfer.request_facts import RequestFacts
from router import service
from router.config import RouterConfig
from router.make_decision import _SENT_BACK_S
from router.messages import Decision, QueueState, ReplicaLoad, RouteRequest, TimeLimit
from router.native import load_kernel
from router.policies.cheapest_choice import OVERLAP, cost_of, recompute
from router.service import _LEAST_GAIN_S, RouterService

BLOCK_TOKENS = 16
KEYS = tuple(f"k{index}".encode() for index in range(40))

replicas = st.fixed_dictionaries(
    {
        "role": st.sampled_from(["prefill", "decode", "both"]),
        "backlog": st.sampled_from([0, 0, 100, 5000]),
        "running": st.integers(0, 40),
        "free": st.sampled_from([0, 10, 1000]),
        "tok_s": st.sampled_from([0.0, 1000.0, 10_000.0]),
        "token_s": st.sampled_from([0.0, 0.0001]),
        "max_local": st.sampled_from([0, 100, 100_000]),
        "max_sequences": st.sampled_from([0, 8]),
        "age_s": st.sampled_from([0.0, 0.0, 0.0, 60.0]),
        "device": st.integers(0, 40),
        "dram": st.integers(0, 10),
        "nvme": st.integers(0, 10),
        "wait": st.sampled_from([None, None, 0.0, 3.0]),
        "sequence_s": st.sampled_from([0.0, 0.001]),
        "base_s": st.sampled_from([0.0, 0.01]),
        "objective_s": st.sampled_from([0.0, 0.02, 0.04]),
        # The blocks that are marked, of a replica with windows and states; None: it has neither.
        "marked": st.none() | st.sets(st.integers(0, 43)),
    }
)


@needs_compiler
@settings(deadline=None)
@given(
    st.lists(replicas, min_size=1, max_size=12),
    st.integers(1, 700),
    st.integers(0, 5000),
    st.sampled_from([1.0, 0.3, 0.01]),
    st.sampled_from(["", "g0"]),
    st.sampled_from([0.0, 0.3, 1.0]),
    st.booleans(),
    st.none() | st.builds(TimeLimit, st.sampled_from([0.0, 0.5, 5]), st.sampled_from([0.05, 1, math.inf])),
)
def test_the_choice_is_that_of_the_formulas(
    drawn: list[dict[str, object]],
    num_tokens: int,
    num_new: int,
    kv_share: float,
    salt: str,
    queued_part: float,
    is_shared: bool,
    limit: TimeLimit | None,
) -> None:
    clock = ManualClock(100.0)
    waits = {
        f"{it['role']}-{index}": it["wait"] for index, it in enumerate(drawn) if isinstance(it["wait"], float)
    }
    assert load_kernel() is not None
    router = _router(drawn, clock, salt, is_shared)
    with mock.patch.object(service, "load_kernel", return_value=None):
        reference = _router(drawn, clock, salt, is_shared)
    if all(it["role"] == "prefill" for it in drawn):
        return
    names = [f"{it['role']}-{index}" for index, it in enumerate(drawn)]
    for number in range(3):
        for it in (router, reference):
            it.loads.on_queue(
                ReplicaIdentity(names[0], 1), QueueState(number, 0, 1, 100 * number, 500), clock.now()
            )
        request = RouteRequest(
            f"q{number}",
            RequestFacts("t", kv_share=kv_share),
            KEYS[: num_tokens // BLOCK_TOKENS],
            num_tokens,
            num_new,
        )
        loads = {name: router.loads.state(name) for name in names}
        decision, expected = (
            it.decide(request, waits=waits, queued_part=queued_part, limit=limit)
            for it in (router, reference)
        )
        for it in (router, reference):
            it.place(request, decision, is_queued=number < 2)
        if decision.limit is not None:
            assert decision.limit == limit
            assert decision.limit.includes(decision.prediction)
        elif limit is not None:  # all are late
            assert min((cost for _, cost in _choices(decision, limit)), default=math.inf) == math.inf
        assert replace(decision, candidates=list(decision.candidates)) == expected
        assert recompute(decision) == (decision.prefill, decision.decode)
        chosen = {(it.side, it.replica_id): it for it in decision.candidates}
        prefill = chosen["prefill" if decision.prefill else "local", decision.compute_id]
        assert decision.prediction.prefill_s == prefill.prefill_s
        assert decision.prediction.load_s == prefill.load_s
        assert decision.prefill_cached_tokens == (
            prefill.matched_tokens + prefill.dram_tokens + prefill.nvme_tokens
        )
        cost_s = prefill.cost_s
        if decision.prefill:
            decode = chosen["decode", decision.decode]
            cost_s += decode.cost_s - OVERLAP * min(prefill.queue_s, decode.queue_s)
            cost_s += prefill.transfer_s * (decode.uncached_tokens / num_tokens)
        assert f"costs {1e3 * cost_s:.1f} ms" in decision.reason
        if number < 2:
            _check_moves(router, request, decision, cost_s, waits, queued_part, names, limit)
        compute_id = decision.compute_id
        other_s = min(
            (cost for at, cost in _choices(decision, decision.limit) if at != compute_id), default=math.inf
        )
        if not is_shared or other_s > 1e4:  # no other choice, or one with a penalty
            assert decision.most_backlog_tokens is None or other_s < math.inf
            continue
        load = loads[compute_id]
        num_sent_tokens = load.backlog_tokens - load.num_queued_tokens
        most = num_sent_tokens + (other_s - cost_s + _SENT_BACK_S) / load.rates.token_s
        if most < 1e9:
            assert decision.most_backlog_tokens is not None
            assert abs(decision.most_backlog_tokens - most) <= 1 + 1e-6 * most


def _router(drawn: list[dict[str, object]], clock: ManualClock, salt: str, is_shared: bool) -> RouterService:
    router = RouterService(RouterConfig(), BLOCK_TOKENS, clock, 1, salt=salt)
    router.set_shared(is_shared)
    for index, it in enumerate(drawn):
        identity = ReplicaIdentity(f"{it['role']}-{index}", 1)
        router.add_replica(identity, str(it["role"]))
        ends = [int(str(it["device"]))]
        for tier in ("dram", "nvme"):
            ends.append(ends[-1] + int(str(it[tier])))
        chains = (
            BlocksStored(b"", KEYS[: ends[0]]),
            BlocksStored(b"", KEYS[ends[0] : ends[1]], "dram"),
            BlocksStored(b"", KEYS[ends[1] : ends[2]], "nvme"),
        )
        marked: Any = it["marked"]
        has_groups = marked is not None
        marks = tuple(KEYS[index] for index in sorted(marked) if index < len(KEYS)) if has_groups else ()
        router.tree.apply_snapshot(KvSnapshot(identity, 1, chains, marks, 2 if has_groups else 0))
        router.loads.on_load(
            ReplicaLoad(
                identity=identity,
                received_at=clock.now() - float(str(it["age_s"])),
                num_running=int(str(it["running"])),
                num_waiting=0,
                num_landings=0,
                num_backlog_tokens=int(str(it["backlog"])),
                num_free_blocks=int(str(it["free"])),
                num_total_blocks=1000,
                prefill_tok_s=float(str(it["tok_s"])),
                decode_step_s=0.02,
                transfer_tok_s=100_000.0,
                load_tok_s={"dram": 50_000.0, "nvme": 2000.0},
                max_local_tokens=int(str(it["max_local"])),
                prefill_token_s=float(str(it["token_s"])),
                attention_token_s=1e-8,
                decode_base_s=float(str(it["base_s"])),
                decode_sequence_s=float(str(it["sequence_s"])),
                tpot_objective_s=float(str(it["objective_s"])),
                max_sequences=int(str(it["max_sequences"])),
                window_tokens=300 if has_groups else 0,
                window_token_ratio=1.75 if has_groups else 0.0,
                state_tokens=1024.5 if has_groups else 0.0,
            )
        )
    return router


def _check_moves(
    router: RouterService,
    request: RouteRequest,
    decision: Decision,
    cost_s: float,
    waits: dict[str, float],
    queued_part: float,
    names: list[str],
    limit: TimeLimit | None,
) -> None:
    """A request that is held is priced as if it were not, and moves where that is worth it, or alone in
    time."""
    for before in (("", names[0]), (names[-1], names[0]), (names[0], names[-1])):
        earlier = replace(decision, prefill=before[0], decode=before[1])
        better = router.improve(request, earlier, waits=waits, queued_part=queued_part, limit=limit)
        gain_s = cost_of(decision.candidates, *before, decision.limit) - cost_s
        if abs(gain_s - _LEAST_GAIN_S) > 1e-9:
            assert (better is not None) == (gain_s > _LEAST_GAIN_S)


def _choices(decision: Decision, limit: TimeLimit | None) -> Iterator[tuple[str, float]]:
    """Who would compute the prompt, and what that costs, of every choice within the limit."""
    limit = limit or TimeLimit()
    for candidate in decision.candidates:
        wait_s = max(candidate.queue_s, candidate.load_s)
        if candidate.side == "local" and limit.allows(wait_s, candidate.prefill_s):
            yield candidate.replica_id, candidate.cost_s
        for decode in decision.candidates if candidate.side == "prefill" else ():
            is_pair = decode.side == "decode" and decode.replica_id != candidate.replica_id
            if is_pair and limit.allows(max(wait_s, decode.queue_s), candidate.prefill_s):
                share = decode.uncached_tokens / (decode.matched_tokens + decode.uncached_tokens)
                cost_s = candidate.cost_s + decode.cost_s + candidate.transfer_s * share
                yield candidate.replica_id, cost_s - OVERLAP * min(candidate.queue_s, decode.queue_s)
