"""Put a choice of replicas into a decision: the words of its reason, what is predicted, and the backlog from
which another choice would be better."""

from __future__ import annotations

from collections.abc import Sequence

from router.current_load import CurrentLoad
from router.load_views import LoadView
from router.messages import Candidate, Decision, Prediction, TimeLimit
from router.policies.cheapest_choice import Choice
from router.policies.replica_cost import ReplicaCost, RouteQuery, View, replica_costs

# The time that it costs when a replica sends a request back and the request goes to another one. A replica
# sends a request back only if that gains more.
_SENT_BACK_S = 0.005
# A larger bound of the backlog counts as none.
_MOST_BACKLOG_TOKENS = 1 << 31


def make_decision(
    request: tuple[str, str],
    query: RouteQuery,
    choice: Choice,
    candidates: Sequence[Candidate],
    view: View,
    loads: LoadView,
) -> Decision:
    """Return the decision for a `request`, its id and the policy, of a choice among the candidates."""
    request_id, policy = request

    def cost_of(replica_id: str) -> ReplicaCost:
        (cost,) = replica_costs(query, [(replica_id, loads.state(replica_id))], view)
        return cost

    decode = cost_of(choice.decode)
    prefill, transfer_s = decode, 0.0
    if choice.prefill:
        prefill = cost_of(choice.prefill)
        lacking = (query.num_tokens - decode.matched_tokens) / query.num_tokens
        rates, window_tokens = prefill.state.rates, prefill.state.report.window_tokens
        transfer_s = query.num_tokens * rates.transfer_s * lacking
        transfer_s += rates.once_s(query.num_tokens, window_tokens)
        other = _other("alone", choice.local_cost_s, view.limit)
        reason = f"the pair costs {_ms(choice.pair_cost_s)}, {other}"
    else:
        other = _other("the best pair", choice.pair_cost_s, view.limit)
        reason = f"alone costs {_ms(choice.local_cost_s)}, {other}"
    gain_s = choice.other_cost_s - choice.cost_s + _SENT_BACK_S
    return Decision(
        request_id=request_id,
        policy=policy,
        prefill=choice.prefill,
        decode=choice.decode,
        prefill_cached_tokens=query.num_tokens - prefill.uncached_tokens,
        decode_cached_tokens=decode.matched_tokens,
        candidates=candidates,
        reason=reason,
        prediction=Prediction(
            queue_s=max(prefill.queue_s, decode.place_wait_s),
            prefill_s=prefill.own_s,
            load_s=prefill.load_s,
            transfer_s=transfer_s,
            step_s=decode.state.rates.step_s,
        ),
        most_backlog_tokens=_most_backlog_tokens(prefill.state, gain_s),
        limit=view.limit,
    )


def _most_backlog_tokens(state: CurrentLoad, gain_s: float) -> int | None:
    """Return the number of tokens before a request beyond which another replica is better, if this one is
    better by `gain_s` with the work that was sent there; None: there is no such number."""
    num_tokens = state.backlog_tokens - state.num_queued_tokens + gain_s / state.rates.token_s
    return int(num_tokens) if num_tokens < _MOST_BACKLOG_TOKENS else None


def _other(name: str, cost_s: float, limit: TimeLimit | None) -> str:
    if cost_s < float("inf"):
        return f"{name} {_ms(cost_s)}"
    return f"{name} not possible" if limit is None else f"{name} not possible in time"


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.1f} ms"
