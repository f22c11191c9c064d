"""The hit rate of each tenant's prompts, and why it is not higher: their order, room, or what they are."""

from __future__ import annotations

from collections.abc import Iterator

from cluster.doctor.checks import Check, Figures, Verdict, note, ok, warning
from cluster.doctor.live import Live
from cluster.proto import tandem_pb2 as pb

GROUP = "reuse"
_MIN_PROMPTS = 10
# A hit rate above this is nothing to look into.
_GOOD_RATE = 0.5
# Of the prompts' tokens: known, but computed all the same.
_LOST_SHARE = 0.2
# Of the prompts' tokens: behind one place where they diverge, although they repeat.
_BEHIND_SHARE = 0.2


def hit_rate(live: Live) -> Iterator[Verdict]:
    """By tenant and gateway, from the prompts themselves."""
    for reply in live.gateways:
        for reuse in reply.status.prefixes if reply.status is not None else ():
            if reuse.num_prompts >= _MIN_PROMPTS and reuse.num_finished_tokens:
                yield _verdict(reuse)


def _verdict(reuse: pb.PrefixReuse) -> Verdict:
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


def _diverging(reuse: pb.PrefixReuse, tenant: str, rate: float, figures: Figures) -> Verdict:
    """The block that begins at `diverge_at` is the first that is new."""
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
        "hit-rate", GROUP, "Hit rate by tenant: at which token prompts diverge, what was evicted", hit_rate
    ),
)
