"""The times of one request at one replica, from the replica's load and the cached blocks: pure functions."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from router.current_load import CurrentLoad
from router.messages import TimeLimit
from router.prefix_match import Match


class View(NamedTuple):
    """What a decision sees in addition to the loads: cached blocks, waits by replica that replace those of
    the loads, the part of what gateways hold that goes before it, the time before which a report is stale,
    and the limit beyond which choices do not exist."""

    match: Match
    waits: Mapping[str, float]
    queued_part: float
    oldest: float
    limit: TimeLimit | None = None


class RouteQuery(NamedTuple):
    """What a request needs. `num_growth_tokens` is the most that all its samples together may produce."""

    num_tokens: int
    num_growth_tokens: int
    num_samples: int
    block_tokens: int
    skip_prefill_tokens: int
    # False when a prefill replica is pinned: then no replica serves the request alone.
    may_stay: bool
    # The part of each replica's blocks that its sharing group may use.
    kv_share: float = 1.0
    # By what requests are the same to consistent hashing.
    affinity_key: bytes = b""


class ReplicaCost(NamedTuple):
    """A replica that may be chosen: its load, how many leading prompt tokens its device holds, how many it
    would compute, and how many in between it would load from which tier of its node's store; the time of
    computing these, with what decodes in the same steps in `own_s`, and of loading; and the waits until it is
    computed there, and for a place."""

    state: CurrentLoad
    is_stale: bool
    matched_tokens: int
    uncached_tokens: int
    prefill_s: float
    own_s: float
    queue_s: float
    place_wait_s: float
    dram_tokens: int = 0
    nvme_tokens: int = 0
    load_s: float = 0.0


def replica_cost(
    query: RouteQuery,
    state: CurrentLoad,
    is_stale: bool,
    device: int,
    dram: int,
    nvme: int,
    *,
    queued_part: float = 1.0,
) -> ReplicaCost:
    """Price a replica with `device` leading blocks of the prompt on its device, and after them `dram` and
    `nvme` blocks in its node's store. At least one token must be computed, even if all are held.
    `queued_part` of the work that gateways hold goes before the request."""
    rates = state.rates
    matched_tokens = min(device * query.block_tokens, query.num_tokens - 1)
    rest_tokens = query.num_tokens - matched_tokens
    dram_tokens = nvme_tokens = 0
    if dram and rates.dram_s < rates.token_s:
        dram_tokens = min(dram * query.block_tokens, rest_tokens - 1)
    if nvme and rates.nvme_s < rates.token_s:
        nvme_tokens = min(nvme * query.block_tokens, rest_tokens - 1 - dram_tokens)
    uncached_tokens = rest_tokens - dram_tokens - nvme_tokens
    prefill_s = rates.prefill_s(uncached_tokens, query.num_tokens - uncached_tokens)
    return ReplicaCost(
        state,
        is_stale,
        matched_tokens,
        uncached_tokens=uncached_tokens,
        prefill_s=prefill_s,
        own_s=rates.stretch * prefill_s + uncached_tokens * rates.mixed_s,
        queue_s=state.queue(queued_part),
        place_wait_s=state.place_wait(queued_part),
        dram_tokens=dram_tokens,
        nvme_tokens=nvme_tokens,
        load_s=dram_tokens * rates.dram_s + nvme_tokens * rates.nvme_s,
    )


def replica_costs(
    query: RouteQuery, states: Iterable[tuple[str, CurrentLoad]], view: View
) -> list[ReplicaCost]:
    """Price replicas as a decision sees them."""
    match, replicas = view.match, []
    for replica_id, state in states:
        device, (dram, nvme) = match.of(replica_id)
        is_stale = state.report.received_at < view.oldest
        cost = replica_cost(query, state, is_stale, device, dram, nvme, queued_part=view.queued_part)
        wait_s = view.waits.get(replica_id)
        replicas.append(cost if wait_s is None else cost._replace(queue_s=wait_s))
    return replicas
