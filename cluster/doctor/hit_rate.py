"""Checks of the hit rate of each tenant's prompts, and of why it is not higher."""

from __future__ import annotations

from collections.abc import Iterator

from cluster.doctor.check_context import Check
from cluster.doctor.checks import CheckResult, Figures, note, ok, warning
from cluster.doctor.live_cluster import Live
from cluster.proto.tandem.v1 import admin_pb2 as admin_pb

# Fewer say nothing about a rate.
_MIN_PROMPTS = 10
# A hit rate above this is nothing to look into.
_GOOD_RATE = 0.5
# Share of the prompts' tokens that were known and computed again.
_LOST_SHARE = 0.2
# Share of the prompts' tokens that repeat, behind the place where prompts diverge.
_BEHIND_SHARE = 0.2


def hit_rate(live: Live) -> Iterator[CheckResult]:
    """Check the hit rate of each tenant at each gateway."""
    for reply in live.gateways:
        for reuse in reply.status.prefixes if reply.status is not None else ():
            if reuse.num_prompts >= _MIN_PROMPTS and reuse.num_finished_tokens:
                yield _reuse_result(reuse)


def _reuse_result(reuse: admin_pb.PrefixReuse) -> CheckResult:
    total = reuse.num_finished_tokens
    rate, known = reuse.num_cached_tokens / total, reuse.num_finished_known_tokens / total
    tenant = f"tenant {reuse.tenant!r}" if reuse.tenant else "requests without a tenant"
    seen = (
        f"{tenant}: {rate:.0%} of the prompt tokens were cached; {known:.0%} were in a prefix of earlier "
        f"prompts (last {reuse.num_prompts} prompts)"
    )
    figures: Figures = {
        "tenant": reuse.tenant,
        "hit_rate": round(rate, 4),
        "known_rate": round(known, 4),
        "diverge_at_token": reuse.diverge_at,
    }
    repeated_share = reuse.num_repeated_behind / max(reuse.num_prompt_tokens, 1)
    if rate >= _GOOD_RATE and known - rate < _LOST_SHARE:
        return ok(seen, **figures)
    if repeated_share >= _BEHIND_SHARE and repeated_share > known - rate:
        return _diverging(reuse, tenant, rate, figures)
    if known - rate >= _LOST_SHARE:
        return warning(
            f"{seen}: {known - rate:.0%} were known once and computed again",
            "their KV was evicted, or is at a replica that these requests do not go to",
            "a larger store.dram_gb, an NVMe tier, or engine.kv_tokens; `tandem store stat` has evictions",
            cause="evicted",
            **figures,
        )
    return note(
        f"{seen}: the prompts have little in common",
        "no cache can do more for prompts like these",
        cause="little in common",
        **figures,
    )


def _diverging(reuse: admin_pb.PrefixReuse, tenant: str, rate: float, figures: Figures) -> CheckResult:
    """Return the result for prompts whose block at `diverge_at` is the first new one."""
    behind = reuse.num_tokens_behind / max(reuse.num_diverging, 1)
    repeated = reuse.num_repeated_behind / max(reuse.num_tokens_behind, 1)
    return warning(
        f"{tenant}: {reuse.num_diverging} of {reuse.num_prompts} prompts diverge from all earlier ones in "
        f"the block at token {reuse.diverge_at}; about {repeated:.0%} of the {behind:.0f} tokens behind that "
        f"are in earlier prompts too (hit rate {rate:.0%})",
        "KV is reused for equal beginnings only: whatever follows a difference is computed again",
        f"look at what stands near token {reuse.diverge_at} and changes with every request (a date, an id, a "
        "name, the order of documents), and move it behind what stays the same",
        cause="diverging",
        num_diverging=reuse.num_diverging,
        repeated_behind=round(repeated, 4),
        **figures,
    )


CHECKS = (
    Check(
        "hit-rate",
        "reuse",
        "Hit rate by tenant, the token at which prompts diverge, and what was evicted",
        hit_rate,
    ),
)
