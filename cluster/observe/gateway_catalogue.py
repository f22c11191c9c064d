"""Metrics that gateways export: of requests, tenants and pools."""

from __future__ import annotations

from cluster.observe import buckets
from cluster.observe.metric import NEEDS_FAULT, NEEDS_HAND_OVER, Metric

_GATEWAY = ("app", "gateway", "model")
_SERVED = ("app", "gateway", "model", "pool", "replica")
"""What a gateway measured of the work of a replica."""


def _times(name: str, help_: str, why_empty: str = "") -> Metric:
    return Metric(name, "histogram", _SERVED, "seconds", help_, why_empty, buckets.REQUEST_TIMES[name])


REQUESTS = (
    _times("ttft_seconds", "From acceptance to the first token; by the replica that sent it."),
    _times("itl_seconds", "Between two tokens of one continuation, as they reach the gateway."),
    _times("tpot_seconds", "Mean time for an output token after the first, of each finished request."),
    _times("e2e_seconds", "From acceptance to the end, of each finished request."),
    _times("queue_seconds", "From arrival at a replica until the prompt was scheduled."),
    _times("prefill_seconds", "From then until the prompt was computed."),
    _times(
        "hand_over_seconds",
        "From the first piece of KV written until the last one was verified at the decode replica.",
        NEEDS_HAND_OVER,
    ),
    Metric(
        "requests_total",
        "counter",
        (*_GATEWAY, "state", "code"),
        "requests",
        "Requests that ended; `state` is finished, failed, cancelled or refused (never accepted), `code` the "
        "gRPC status.",
    ),
    Metric("running_requests", "gauge", _GATEWAY, "requests", "Requests that run."),
    Metric(
        "retried_requests_total",
        "counter",
        _GATEWAY,
        "requests",
        "Finished requests that took more than one attempt.",
    ),
    Metric("prompt_tokens_total", "counter", _GATEWAY, "tokens", "Of accepted requests."),
    Metric(
        "cached_prompt_tokens_total",
        "counter",
        (*_GATEWAY, "tier"),
        "tokens",
        "Of those: tokens whose KV was there, by the tier where it was (device, dram, nvme, remote).",
    ),
    Metric(
        "expected_cached_tokens_total",
        "counter",
        _GATEWAY,
        "tokens",
        "That the router expected to be cached where it placed the prompt, over all attempts.",
    ),
    Metric(
        "routed_attempts_total",
        "counter",
        (*_SERVED, "side"),
        "attempts",
        "That ended after the router had placed them here to prefill, to decode, or for both (local).",
    ),
    Metric("output_tokens_total", "counter", _GATEWAY, "tokens", "That reached the gateway."),
    Metric(
        "first_tokens_total",
        "counter",
        _GATEWAY,
        "requests",
        "Requests whose first token reached the gateway.",
    ),
    Metric(
        "late_first_tokens_total",
        "counter",
        _GATEWAY,
        "requests",
        "Of those: the ones later than `scaling.ttft_slo_s`.",
    ),
    Metric("token_gaps_total", "counter", _GATEWAY, "gaps", "Gaps between tokens of one continuation."),
    Metric(
        "late_token_gaps_total",
        "counter",
        _GATEWAY,
        "gaps",
        "Of those: the ones longer than `scaling.itl_slo_s`.",
    ),
    Metric(
        "hand_overs_total",
        "counter",
        (*_GATEWAY, "transport"),
        "requests",
        "Finished requests that were handed over, by transport (none: nothing had to move).",
        NEEDS_HAND_OVER,
    ),
    Metric(
        "hand_over_bytes_total",
        "counter",
        (*_GATEWAY, "transport"),
        "bytes",
        "KV that moved for them.",
        NEEDS_HAND_OVER,
    ),
    Metric(
        "attempt_failures_total",
        "counter",
        (*_SERVED, "code"),
        "attempts",
        "Attempts that a replica gave up, by code: refused (no room), peer, internal, leaving, deadline, "
        "invalid. Most are placed again and the client sees nothing.",
        NEEDS_FAULT,
    ),
)

TENANTS = tuple(
    Metric(name, "counter", (*_GATEWAY, "tenant"), unit, help_)
    for name, unit, help_ in (
        ("tenant_requests_total", "requests", "Accepted requests that ended, by tenant."),
        ("tenant_computed_tokens_total", "tokens", "Prompt tokens that were computed."),
        ("tenant_cached_tokens_total", "tokens", "Prompt tokens whose KV was there."),
        ("tenant_output_tokens_total", "tokens", "Output tokens."),
        (
            "tenant_kv_byte_seconds_total",
            "bytes x seconds",
            "KV of prompt and output so far, times how long it was held.",
        ),
    )
)

POOLS = (
    Metric("pool_replicas", "gauge", (*_GATEWAY, "pool", "state"), "replicas", "As this gateway sees them."),
    Metric(
        "pool_desired_replicas",
        "gauge",
        (*_GATEWAY, "pool"),
        "replicas",
        "What the configuration, an operator or the autoscaler wants.",
    ),
    Metric(
        "pool_pinned",
        "gauge",
        (*_GATEWAY, "pool"),
        "",
        "1 while an operator's choice keeps the autoscaler from the pool.",
    ),
    Metric(
        "pool_lent_replicas",
        "gauge",
        (*_GATEWAY, "pool"),
        "replicas",
        "Replicas of the pool that play the other role now.",
    ),
    Metric(
        "scaling_moves_total",
        "counter",
        (*_GATEWAY, "pool", "by"),
        "moves",
        "Changes of a count or a role since the gateway started, by operator, autoscaler or deploy.",
    ),
    Metric(
        "replica_losses_total",
        "counter",
        (*_GATEWAY, "pool"),
        "replicas",
        "Links that ended to replicas that were not leaving: they died, hung, or the network broke.",
    ),
    Metric("path_floor_bytes_per_second", "gauge", _GATEWAY, "bytes/s", "`transfer.min_gb_s`; 0: none."),
)
