"""The policy `tandem`: price each choice in seconds.

All delays that a choice causes are added: those of the request itself, of later requests, and of the streams
that it disturbs. What things take at a replica is in `router.rates`, by its own measurements, so unlike
replicas share load by their speed.

    prefill p         own_s(p) + load_s(p) + queue_s(p) + work(p) + disturbance(p) + once_s(p)
    decode d          place_wait_s(d) + num_steps x step_s(d) + no space(d)
    pair p, d         prefill p + decode d - met(p, d) + transfer_s(p) x uncached part(d)
    local d           prefill d + decode d

*Own*: the time to compute what is uncached, behind what is held, and what decodes in the same steps; at least
one token must be computed. *Prefill* is that without the decodes: what others suffer.

*Loading*: a token of the prefix that the store of the replica's node holds is loaded instead of computed, in
the time its tier takes. Loading delays no other request: other work runs meanwhile. A token that would take
as long to load as to compute is computed, and counts as uncached. At the decode side of a pair only the
device counts: the prefill side sends what only the store holds all the same.

*Once*: what is sent to the decode side whatever that has: states, and the KV in layers with a window, of the
last tokens alone.

*Queue*: the time of all that was placed there before and is not computed, also of what gateways still hold,
as far as it goes before the request; or of waiting for a place among the sequences that run, if that is
longer.

*Waiting for a place*: where as many sequences run as the replica takes, a place is free whenever one ends:
after the mean time of a sequence there, over their number. Blocks, the streams that a prefill disturbs and
the sequences of a step are those that were sent there: what gateways hold takes none yet. A pair waits for
both at the same time: `met` is 0.7 of the shorter wait.

*Work*: a part of the prefill once more. For the request itself, queueing behind a sibling that computes the
prefix is no better than computing it again on an idle replica; for all others it is.

*Disturbance*: each of the n streams of the replica waits as long as the prefill takes. A wait that is a small
part of a decode step goes unnoticed, so it counts by that part: n x prefill_s x min(1, prefill_s / step_s).
Where chunks are sized by an objective that the streams keep, a tenth of the wait counts; the rest as far as
the objective is missed (`router.rates`). So decode replicas compute prompts in the time that it leaves.
Prefill replicas have no streams. On a replica of the decode role one more stream is counted: its capacity is
reserved for streams, and the next is due.

*Decode*: the step at the batch and context that result, `num_steps` times: as many output tokens count as
the time to the first one.
"""

from __future__ import annotations

from collections.abc import Sequence

from router.current_load import CurrentLoad
from router.messages import Candidate
from router.policies.replica_cost import ReplicaCost, RouteQuery
from router.policies.routing_policy import must_stay

# The part of the prefill that counts as delay of later requests. Chosen on a public conversation trace (16
# nodes): 0.2 has the least mean TTFT at 100 % load and costs under 1 % of it at 50 %; 1.0 has more hits.
WORK_PART = 0.2
# Added when the prompt and its growth do not fit the free blocks now (plus the time of the missing tokens).
NO_SPACE_S = 1e3
# Added for each side whose load is unknown or stale: the replica becomes the last choice.
STALE_S = 1e6
# Added when the prompt would not fit the device even if it were empty, for a prefill replica and for the
# decode side of a pair. A replica that serves alone may keep the rest in host memory, as much as it reported.
NEVER_FITS_S = 1e9


class CostPolicy:
    """Prices choices by the formulas above. Skips the prefill pool whenever little is uncached at the decode
    side."""

    def __init__(self, num_steps: float) -> None:
        self._num_steps = num_steps

    def candidates(
        self, query: RouteQuery, prefills: Sequence[ReplicaCost], decodes: Sequence[ReplicaCost]
    ) -> list[Candidate]:
        priced = [prefill_candidate(query, replica) for replica in prefills]
        for replica in decodes:
            if not must_stay(query, replica):
                priced.append(decode_candidate(query, replica, self._num_steps))
            if query.may_stay:
                priced.append(local_candidate(query, replica, self._num_steps))
        return priced


def disturbance_s(state: CurrentLoad, prefill_s: float) -> float:
    """Return the delay of the replica's streams if it computes for so long (formula above)."""
    if state.role == "prefill":
        return 0.0
    num_streams = state.num_sent_sequences + (1 if state.role == "decode" else 0)
    part = state.rates.disturbed_part
    return num_streams * prefill_s * (min(1.0, prefill_s / state.rates.present_step_s) if part < 0 else part)


def space_penalty_s(query: RouteQuery, replica: ReplicaCost) -> float:
    """Return 0 if prompt and growth fit the decode replica's free blocks; else a large penalty that grows
    with the number of missing blocks. Before any report the free blocks are unknown and taken to be
    enough."""
    state = replica.state
    if not state.report.num_total_blocks:
        return 0.0
    needed_tokens = query.num_tokens - replica.matched_tokens + query.num_growth_tokens
    missing = -(-needed_tokens // query.block_tokens) - state.num_free_blocks
    return 0.0 if missing <= 0 else NO_SPACE_S + missing * query.block_tokens * state.rates.token_s


def never_fits(query: RouteQuery, state: CurrentLoad) -> bool:
    """Whether the prompt exceeds all of the replica's device memory, or its group's share of it, as far as
    that is known."""
    num_blocks = state.report.num_total_blocks
    return num_blocks > 0 and int(num_blocks * query.kv_share) * query.block_tokens <= query.num_tokens


def prefill_candidate(query: RouteQuery, replica: ReplicaCost) -> Candidate:
    """Price the replica as the prefill side of a pair."""
    state = replica.state
    pressure_s = WORK_PART * replica.prefill_s + disturbance_s(state, replica.prefill_s)
    note = ""
    if never_fits(query, state):
        pressure_s += NEVER_FITS_S
        note = "never fits"
    if replica.is_stale:
        pressure_s += STALE_S
        note = f"{note}, stale load" if note else "stale load"
    rates = state.rates
    once_s = rates.once_s(query.num_tokens, state.report.window_tokens)
    return _computing("prefill", replica, pressure_s, note, query.num_tokens * rates.transfer_s, once_s)


def decode_candidate(query: RouteQuery, replica: ReplicaCost, num_steps: float) -> Candidate:
    """Price the replica as the decode side of a pair, which is sent all blocks that its device does not
    hold."""
    pressure_s, note = _decode_pressure(query, replica, num_steps)
    state = replica.state
    if never_fits(query, state):
        pressure_s += NEVER_FITS_S
        note = f"never fits, {note}" if note else "never fits"
    return Candidate(
        replica_id=state.report.identity.replica_id,
        side="decode",
        matched_tokens=replica.matched_tokens,
        uncached_tokens=query.num_tokens - replica.matched_tokens,
        queue_s=replica.place_wait_s,
        transfer_s=0.0,
        pressure_s=pressure_s,
        cost_s=replica.place_wait_s + pressure_s,
        note=note,
        step_s=state.rates.step_s,
    )


def local_candidate(query: RouteQuery, replica: ReplicaCost, num_steps: float) -> Candidate:
    """Price the replica as one that prefills and decodes the request by itself."""
    state = replica.state
    pressure_s, note = _decode_pressure(query, replica, num_steps)
    disturbed_s = disturbance_s(state, replica.prefill_s)
    pressure_s += WORK_PART * replica.prefill_s + disturbed_s
    exceeds_share = query.kv_share < 1 and never_fits(query, state)
    if exceeds_share or 0 < state.report.max_local_tokens <= query.num_tokens:
        pressure_s += NEVER_FITS_S
        note = f"never fits, {note}" if note else "never fits"
    if replica.is_stale:  # once for each side, as for a pair: with all loads stale, the rest decides
        pressure_s += STALE_S
    if disturbed_s:
        disturbs = f"disturbs by {1e3 * disturbed_s:.1f} ms"
        note = f"{note}; {disturbs}" if note else disturbs
    return _computing("local", replica, pressure_s, note, 0.0)


def _computing(
    side: str, replica: ReplicaCost, pressure_s: float, note: str, transfer_s: float, once_s: float = 0.0
) -> Candidate:
    """Return a candidate on whose replica the prompt is computed."""
    state = replica.state
    queue_s = max(replica.queue_s, replica.place_wait_s) if side == "local" else replica.queue_s
    return Candidate(
        replica_id=state.report.identity.replica_id,
        side=side,
        matched_tokens=replica.matched_tokens,
        uncached_tokens=replica.uncached_tokens,
        queue_s=queue_s,
        transfer_s=transfer_s,
        pressure_s=pressure_s,
        cost_s=replica.own_s + replica.load_s + queue_s + pressure_s + once_s,
        note=note,
        dram_tokens=replica.dram_tokens,
        nvme_tokens=replica.nvme_tokens,
        load_s=replica.load_s,
        prefill_s=replica.own_s,
        step_s=state.rates.step_s,
        once_s=once_s,
    )


def _decode_pressure(query: RouteQuery, replica: ReplicaCost, num_steps: float) -> tuple[float, str]:
    """Return the cost of decoding there, with penalties, and a note that names the penalties."""
    pressure_s = num_steps * replica.state.rates.step_s
    penalty_s = space_penalty_s(query, replica)
    if not penalty_s and not replica.is_stale:
        return pressure_s, ""
    notes = ["no space now"] if penalty_s else []
    if replica.is_stale:
        notes.append("stale load")
    return pressure_s + penalty_s + (STALE_S if replica.is_stale else 0.0), ", ".join(notes)
