"""What a metric is declared with. The declarations are in `gateway_catalogue` and `replica_catalogue`."""

from __future__ import annotations

from typing import Literal, NamedTuple

from cluster.metrics import buckets

Kind = Literal["counter", "gauge", "histogram"]


class Metric(NamedTuple):
    """One metric. `why_empty` says when it has no series on a healthy run; "": it always has one."""

    name: str
    kind: Kind
    labels: tuple[str, ...]
    unit: str
    help: str
    why_empty: str = ""
    buckets: tuple[float, ...] = ()


NEEDS_FAULT = "something must fail first"
NEEDS_HAND_OVER = "needs a hand-over: separate pools, and prompts of more than a block"


# ----------------------------------------------------------------------------------------------
# Metrics that gateways export: of requests, tenants and pools.

_GATEWAY = ("app", "gateway", "model")
# What a gateway measured of the work of a replica.
_SERVED = ("app", "gateway", "model", "pool", "replica")


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


# ----------------------------------------------------------------------------------------------
# Metrics that replicas export, and the stores of their nodes.

_REPLICA = ("app", "pool", "replica", "model")
_PATH = (*_REPLICA, "peer", "rank", "peer_rank", "transport", "device")
_NODE = ("app", "node")
_TIER = ("app", "node", "tier")
_NEEDS_STORE = "needs a store with room (`store.dram_gb`)"
_NEEDS_NVME = "needs a tier on NVMe (`store.nvme_path`)"

ENGINES = (
    Metric("running_sequences", "gauge", _REPLICA, "sequences", "Sequences that are computed."),
    Metric("waiting_sequences", "gauge", _REPLICA, "sequences", "Sequences that wait."),
    Metric(
        "backlog_tokens", "gauge", _REPLICA, "tokens", "Prompt tokens that are accepted and not computed."
    ),
    Metric(
        "batch_size", "histogram", _REPLICA, "sequences", "Sequences of a step.", buckets=buckets.BATCH_SIZE
    ),
    Metric("steps_total", "counter", _REPLICA, "steps", "Engine steps."),
    Metric(
        "computed_tokens_total",
        "counter",
        _REPLICA,
        "tokens",
        "Prompt tokens, and inputs of decode steps, that went through the model.",
    ),
    Metric("sampled_tokens_total", "counter", _REPLICA, "tokens", "Tokens that were sampled."),
    Metric(
        "prefill_tokens_per_second",
        "gauge",
        _REPLICA,
        "tokens/s",
        "Prompt tokens computed while there is prefill; 0: none yet.",
    ),
    Metric(
        "decode_step_seconds",
        "gauge",
        _REPLICA,
        "seconds",
        "How long a step without prefill takes; 0: none yet.",
    ),
    Metric("busy_seconds_total", "counter", _REPLICA, "seconds", "Time in which it computed."),
    Metric("flops_total", "counter", _REPLICA, "operations", "The least arithmetic its steps needed."),
    Metric(
        "device_read_bytes_total",
        "counter",
        _REPLICA,
        "bytes",
        "The least its steps had to read from device memory.",
    ),
    Metric(
        "peak_flops_per_second",
        "gauge",
        _REPLICA,
        "operations/s",
        "Measured at start by a matrix product, all ranks together.",
    ),
    Metric(
        "peak_read_bytes_per_second",
        "gauge",
        _REPLICA,
        "bytes/s",
        "Measured at start by reading memory, all ranks together.",
    ),
    Metric(
        "mfu_ratio",
        "gauge",
        _REPLICA,
        "",
        "Achieved share of the measured arithmetic, while steps run (MFU).",
    ),
    Metric(
        "mbu_ratio", "gauge", _REPLICA, "", "Achieved share of the measured bandwidth, while steps run (MBU)."
    ),
    Metric(
        "device_memory_used_bytes",
        "gauge",
        (*_REPLICA, "rank"),
        "bytes",
        "In use on the rank's GPU, by whomever; on a CPU what the rank's process has in memory.",
    ),
    Metric(
        "device_memory_total_bytes", "gauge", (*_REPLICA, "rank"), "bytes", "Of that GPU, or of the host."
    ),
    Metric("preemptions_total", "counter", _REPLICA, "sequences", "That gave their blocks to others."),
    Metric(
        "replica_role",
        "gauge",
        (*_REPLICA, "role"),
        "",
        "1 for the role that it plays now; not its pool's while it is lent.",
    ),
    Metric("moved_streams_total", "counter", _REPLICA, "streams", "That went on at another replica."),
    Metric(
        "failed_stream_moves_total",
        "counter",
        _REPLICA,
        "streams",
        "That should have, and stayed or were placed again.",
    ),
)

KV = (
    Metric("kv_blocks", "gauge", _REPLICA, "blocks", "KV blocks that there are."),
    Metric("free_blocks", "gauge", _REPLICA, "blocks", "That can be taken, cached ones included."),
    Metric("cached_blocks", "gauge", _REPLICA, "blocks", "Of those: the ones that hold a finished prefix."),
    Metric("kv_usage_ratio", "gauge", _REPLICA, "", "Share of the blocks that requests hold."),
    Metric(
        "kv_fragmentation_ratio",
        "gauge",
        _REPLICA,
        "",
        "Share of what running sequences hold that no token is in yet; part of it is reserved for prompts "
        "that are being computed.",
    ),
    Metric("landings", "gauge", _REPLICA, "landings", "That are open or wait for room."),
    Metric(
        "quarantined_blocks",
        "gauge",
        _REPLICA,
        "blocks",
        "That a writer of an ended landing could still write.",
    ),
    Metric("leaked_blocks", "gauge", _REPLICA, "blocks", "That are referenced although nothing runs."),
    Metric("offloaded_blocks", "gauge", _REPLICA, "blocks", "Of running sequences that lie in host memory."),
    Metric(
        "prefix_queried_tokens_total",
        "counter",
        _REPLICA,
        "tokens",
        "Of prompts that were computed: what could have been cached.",
    ),
    Metric(
        "prefix_hit_tokens_total",
        "counter",
        (*_REPLICA, "tier"),
        "tokens",
        "Of those: what was, by the tier that had it.",
    ),
    Metric(
        "loaded_tokens_total",
        "counter",
        (*_REPLICA, "tier"),
        "tokens",
        "Whose KV was loaded from the store instead of computed.",
        "a prompt must be in the store and no longer on the device",
    ),
    Metric(
        "load_tokens_per_second",
        "gauge",
        (*_REPLICA, "tier"),
        "tokens/s",
        "Rate at which KV comes from a tier of the store.",
        "a prompt must be in the store and no longer on the device",
    ),
    Metric("stored_blocks_total", "counter", _REPLICA, "blocks", "Written through to the node's store."),
    Metric(
        "unstored_blocks_total",
        "counter",
        (*_REPLICA, "cause"),
        "blocks",
        "Finished blocks that were not written to the store.",
        "the store must be full or away",
    ),
    Metric(
        "store_read_failures_total",
        "counter",
        _REPLICA,
        "records",
        "Records of the store that failed their checksum when this replica read them.",
    ),
)

TRANSFER = (
    Metric(
        "transfer_bytes_total",
        "counter",
        (*_REPLICA, "transport"),
        "bytes",
        "KV written to other replicas.",
        NEEDS_HAND_OVER,
    ),
    Metric(
        "transfer_seconds_total",
        "counter",
        (*_REPLICA, "transport"),
        "seconds",
        "Time spent writing it, summed over pushes of each rank.",
        NEEDS_HAND_OVER,
    ),
    Metric("transfer_bytes_per_second", "gauge", _REPLICA, "bytes/s", "Rate of recent pushes; 0: none."),
    Metric(
        "moved_bytes_total",
        "counter",
        (*_REPLICA, "class"),
        "bytes",
        "KV written to other replicas, by traffic class.",
        NEEDS_HAND_OVER,
    ),
    Metric(
        "path_bytes_per_second",
        "gauge",
        _PATH,
        "bytes/s",
        "Measured rate of a path between ranks; 0: it is gone, or there is none (transport none).",
        "needs two replicas of separate pools",
    ),
    Metric(
        "path_latency_seconds",
        "gauge",
        _PATH,
        "seconds",
        "Its measured latency.",
        "needs two replicas of separate pools",
    ),
    Metric(
        "lost_landings_total",
        "counter",
        (*_REPLICA, "cause"),
        "landings",
        "That ended without hand-over.",
        NEEDS_FAULT,
    ),
    Metric(
        "checksum_failures_total",
        "counter",
        _REPLICA,
        "pieces",
        "KV pieces that failed their checksum and were computed again.",
    ),
)


def _store(name: str, kind: Kind, unit: str, help_: str) -> Metric:
    return Metric(name, kind, _TIER, unit, help_, _NEEDS_STORE)


STORES = (
    _store("store_bytes", "gauge", "bytes", "What a tier holds, headers and padding included."),
    _store("store_capacity_bytes", "gauge", "bytes", "What it may hold."),
    _store("store_records", "gauge", "records", "In it."),
    _store("store_queued", "gauge", "records", "That wait to be written to it."),
    _store("store_leases", "gauge", "records", "That are being read."),
    _store("store_quarantined", "gauge", "records", "Places that somebody could still write."),
    _store("store_read_bytes_per_second", "gauge", "bytes/s", "Measured rate of recent reads."),
    _store("store_write_bytes_per_second", "gauge", "bytes/s", "Measured rate of recent writes."),
    _store("store_latency_seconds", "gauge", "seconds", "Of one read (nvme), of one fetch (remote)."),
    _store("store_hits_total", "counter", "blocks", "Asked for that it had."),
    _store("store_misses_total", "counter", "blocks", "Asked for that it did not have."),
    _store("store_hit_bytes_total", "counter", "bytes", "That were read of it."),
    _store("store_put_bytes_total", "counter", "bytes", "That were put into it."),
    _store("store_written_bytes_total", "counter", "bytes", "The same, with what was written again."),
    _store("store_evictions_total", "counter", "records", "That made room for others."),
    _store("store_refused_total", "counter", "records", "That found no room."),
    _store("store_checksum_failures_total", "counter", "records", "Dropped for a wrong checksum."),
    _store("store_io_errors_total", "counter", "operations", "Reads and writes that failed."),
    Metric(
        "store_write_amplification",
        "gauge",
        _NODE,
        "",
        "Bytes written to NVMe over bytes put there.",
        _NEEDS_NVME,
    ),
    *(
        Metric(f"store_index_{name}_total", "counter", _NODE, unit, help_, _NEEDS_STORE)
        for name, unit, help_ in (
            ("lookups", "look-ups", "In the index of all nodes."),
            ("late", "look-ups", "That were not waited for."),
            ("errors", "look-ups", "That failed."),
            ("announced", "records", "Announced to it."),
            ("dropped", "records", "Announcements that found no room in the queue."),
            ("rebuilds", "times", "That everything was announced again."),
        )
    ),
    Metric("store_index_latency_seconds", "gauge", _NODE, "seconds", "Of one look-up.", _NEEDS_STORE),
    Metric(
        "store_index_state",
        "gauge",
        (*_NODE, "state"),
        "",
        "1 for what it is (off, up, slow, down), else 0.",
        _NEEDS_STORE,
    ),
)


# ----------------------------------------------------------------------------------------------
# Every metric that is exported, declared once. At Prometheus each name begins with `ray_tandem_`.

SECTIONS = {
    "Requests": REQUESTS,
    "Tenants": TENANTS,
    "Pools": POOLS,
    "Engines": ENGINES,
    "KV": KV,
    "Transfer": TRANSFER,
    "Stores": STORES,
}
# By name.
METRICS = {metric.name: metric for section in SECTIONS.values() for metric in section}


def series_names(metric: Metric) -> tuple[str, ...]:
    """Under which Prometheus knows it, without `ray_tandem_`."""
    if metric.kind == "histogram":
        return tuple(f"{metric.name}_{part}" for part in ("bucket", "sum", "count"))
    return (metric.name,)
