"""Whether prefill pools get prompts, and why they do not: the router computes a prompt where it is decoded
when that costs less than to compute it in a prefill pool and send its KV."""

from __future__ import annotations

from collections.abc import Iterator

from cluster.doctor.check_context import Check
from cluster.doctor.checks import CheckResult, ok, warning
from cluster.doctor.live_cluster import Live
from cluster.doctor.serving import GROUP, Cause
from cluster.proto.tandem.v1 import admin_pb2 as admin_pb

# Fewer prompts in a minute say nothing.
_MIN_PROMPTS = 10
# Prompts of which fewer tokens are to be computed cost about as much to send as to compute.
_SHORT_TOKENS = 256
# A decode replica is taken for as fast at prompts when it has this part of a prefill replica's rate.
_AS_FAST = 0.8


def prefill_share(live: Live) -> Iterator[CheckResult]:
    """Check the share of the last minute's prompts that each prefill pool has computed."""
    total = sum(pool.num_recent_prompts for pool in live.status.pools)
    if total < _MIN_PROMPTS:
        return
    for pool in live.status.pools:
        if pool.role != admin_pb.REPLICA_ROLE_PREFILL or pool.num_ready <= pool.num_reassigned:
            continue
        share = pool.num_recent_prompts / total
        if pool.num_recent_prompts:
            yield ok(
                f"pool {pool.name} computed {share:.0%} of {total} prompts in the last minute", share=share
            )
            continue
        cause = _cause(live, pool.name)
        yield warning(
            f"pool {pool.name} computed none of {total} prompts in the last minute, with {pool.num_ready} "
            f"ready replicas: {cause.name}",
            cause.why,
            cause.remedy,
            share=share,
            cause=cause.name,
        )


def _cause(live: Live, pool: str) -> Cause:
    """Return why the router sends the pool nothing, by the signs that can be seen from outside."""
    own = [item for item in live.of_role("prefill") if item.pool == pool]
    if noted := [f"{item.replica_id}: {item.note}" for item in own if item.note]:
        return Cause(
            "its replicas are avoided",
            "; ".join(noted),
            "see the replicas' notes here and their worker-*.err logs",
        )
    demand = live.status.demand
    mean_tokens = demand.num_computed_tokens / max(demand.num_prompts, 1)
    computed = f"{mean_tokens:.0f} tokens of a prompt are computed in the mean"
    if demand.num_prompts and mean_tokens < _SHORT_TOKENS:
        return Cause(
            "prompts are short beside what a transfer costs",
            f"{computed}: that takes less than to wait for a prefill replica and to receive the KV",
            "prefill pools are for longer prompts: give their devices to the decode pool, or to one pool of "
            "the role both; router.skip_prefill_tokens: 0 sends shorter ones there",
        )
    theirs = max((item.load.prefill_tok_s for item in live.of_role("decode", "both")), default=0.0)
    rate = max((item.load.prefill_tok_s for item in own), default=0.0)
    if rate and theirs >= _AS_FAST * rate:
        return Cause(
            "decode replicas compute prompts as fast",
            f"{theirs:.0f} tok/s at decode replicas, {rate:.0f} tok/s in the pool, and KV that is computed "
            "there need not be sent",
            "while decode replicas have time to spare this is the faster way: the pool is used when they are "
            "busy. Otherwise give the pool faster devices or more tp",
        )
    return Cause(
        "computing prompts where they are decoded costs less",
        f"{computed}; the transfer of their KV, or the queue of the pool, takes the rest",
        "`tandem explain ID` has the costs of each choice, `tandem status` the rates of transfers",
    )


CHECKS = (
    Check(
        "prefill-share",
        GROUP,
        "Prefill pools that get no prompts, and what makes them cost more",
        prefill_share,
    ),
)
