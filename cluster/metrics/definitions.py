"""Every metric that is exported, declared once. At Prometheus each name begins with `ray_tandem_`."""

from __future__ import annotations

from typing import Literal, NamedTuple

from workers.messages import BATCH_BOUNDS

Kind = Literal["counter", "gauge", "histogram"]


class Metric(NamedTuple):
    """One metric. `why_empty` says when it has no series on a healthy run; "": it always has one.

    `field` names the statistic that it shows, times `scale`, in the record that is exported (of a replica
    `workers.messages.ReplicaStats`); where that is a mapping, its keys are values of the last label. "": the
    exporter computes it.
    """

    name: str
    kind: Kind
    labels: tuple[str, ...]
    unit: str
    help: str
    why_empty: str = ""
    buckets: tuple[float, ...] = ()
    field: str = ""
    scale: float = 1.0


NEEDS_FAULT = "something must fail first"
NEEDS_HAND_OVER = "needs a hand-over: separate pools, and prompts of more than a block"
_GB = 1e9

# Upper bounds of histogram buckets, in seconds where the name says so.
_TTFT_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
_ITL_S = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1.0, 5.0)
_E2E_S = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)
_STAGE_S = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)

# By metric: what gateways measure of requests.
REQUEST_TIMES = {
    "ttft_seconds": _TTFT_S,
    "tpot_seconds": _ITL_S,
    "itl_seconds": _ITL_S,
    "e2e_seconds": _E2E_S,
    "queue_seconds": _STAGE_S,
    "prefill_seconds": _TTFT_S,
    "hand_over_seconds": _STAGE_S,
}

# Sequences of a step.
BATCH_SIZE = tuple(float(bound) for bound in BATCH_BOUNDS)

# ----------------------------------------------------------------------------------------------
# Metrics that gateways export: of requests, tenants and pools.

_GATEWAY = ("app", "gateway", "model")
# What a gateway measured of the work of a replica.
_SERVED = ("app", "gateway", "model", "pool", "replica")


def _times(name: str, help_: str, why_empty: str = "") -> Metric:
    return Metric(name, "histogram", _SERVED, "seconds", help_, why_empty, REQUEST_TIMES[name])


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
    Metric("running_requests", "gauge", _GATEWAY, "requests", "Requests that run.", field="num_running"),
    Metric(
        "retried_requests_total",
        "counter",
        _GATEWAY,
        "requests",
        "Finished requests that took more than one attempt.",
        field="num_retried",
    ),
    Metric(
        "prompt_tokens_total",
        "counter",
        _GATEWAY,
        "tokens",
        "Of accepted requests.",
        field="num_prompt_tokens",
    ),
    Metric(
        "cached_prompt_tokens_total",
        "counter",
        (*_GATEWAY, "tier"),
        "tokens",
        "Of those: tokens whose KV was there, by the tier where it was (device, dram, nvme, remote).",
        field="num_cached_tokens",
    ),
    Metric(
        "expected_cached_tokens_total",
        "counter",
        _GATEWAY,
        "tokens",
        "That the router expected to be cached where it placed the prompt, over all attempts.",
        field="num_expected_cached_tokens",
    ),
    Metric(
        "routed_attempts_total",
        "counter",
        (*_SERVED, "side"),
        "attempts",
        "That ended after the router had placed them here to prefill, to decode, or for both (local).",
        field="num_routed",
    ),
    Metric(
        "output_tokens_total",
        "counter",
        _GATEWAY,
        "tokens",
        "That reached the gateway.",
        field="num_output_tokens",
    ),
    Metric(
        "first_tokens_total",
        "counter",
        _GATEWAY,
        "requests",
        "Requests whose first token reached the gateway.",
        field="demand.num_first_tokens",
    ),
    Metric(
        "late_first_tokens_total",
        "counter",
        _GATEWAY,
        "requests",
        "Of those: the ones later than `scaling.ttft_slo_s`.",
        field="demand.num_late_first_tokens",
    ),
    Metric(
        "token_gaps_total",
        "counter",
        _GATEWAY,
        "gaps",
        "Gaps between tokens of one continuation.",
        field="demand.num_gaps",
    ),
    Metric(
        "late_token_gaps_total",
        "counter",
        _GATEWAY,
        "gaps",
        "Of those: the ones longer than `scaling.itl_slo_s`.",
        field="demand.num_late_gaps",
    ),
    Metric(
        "hand_overs_total",
        "counter",
        (*_GATEWAY, "transport"),
        "requests",
        "Finished requests that were handed over, by transport (none: nothing had to move).",
        NEEDS_HAND_OVER,
        field="num_hand_overs",
    ),
    Metric(
        "hand_over_bytes_total",
        "counter",
        (*_GATEWAY, "transport"),
        "bytes",
        "KV that moved for them.",
        NEEDS_HAND_OVER,
        field="num_hand_over_bytes",
    ),
    Metric(
        "attempt_failures_total",
        "counter",
        (*_SERVED, "code"),
        "attempts",
        "Attempts that a replica gave up, by code: refused (no room), peer, internal, leaving, deadline, "
        "invalid. Most are placed again and the client sees nothing.",
        NEEDS_FAULT,
        field="num_attempt_failures",
    ),
)

TENANTS = tuple(
    Metric(f"tenant_{name}_total", "counter", (*_GATEWAY, "tenant"), unit, help_, field=field)
    for name, field, unit, help_ in (
        ("requests", "num_requests", "requests", "Accepted requests that ended, by tenant."),
        ("computed_tokens", "num_computed_tokens", "tokens", "Prompt tokens that were computed."),
        ("cached_tokens", "num_cached_tokens", "tokens", "Prompt tokens whose KV was there."),
        ("output_tokens", "num_output_tokens", "tokens", "Output tokens."),
        (
            "kv_byte_seconds",
            "kv_byte_s",
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
    Metric(
        "running_sequences",
        "gauge",
        _REPLICA,
        "sequences",
        "Sequences that are computed.",
        field="num_running",
    ),
    Metric("waiting_sequences", "gauge", _REPLICA, "sequences", "Sequences that wait.", field="num_waiting"),
    Metric(
        "backlog_tokens",
        "gauge",
        _REPLICA,
        "tokens",
        "Prompt tokens that are accepted and not computed.",
        field="num_backlog_tokens",
    ),
    Metric("batch_size", "histogram", _REPLICA, "sequences", "Sequences of a step.", buckets=BATCH_SIZE),
    Metric("steps_total", "counter", _REPLICA, "steps", "Engine steps.", field="num_steps"),
    Metric(
        "computed_tokens_total",
        "counter",
        _REPLICA,
        "tokens",
        "Prompt tokens, and inputs of decode steps, that went through the model.",
        field="num_computed_tokens",
    ),
    Metric(
        "sampled_tokens_total",
        "counter",
        _REPLICA,
        "tokens",
        "Tokens that were sampled.",
        field="num_sampled_tokens",
    ),
    Metric(
        "prefill_tokens_per_second",
        "gauge",
        _REPLICA,
        "tokens/s",
        "Prompt tokens computed while there is prefill; 0: none yet.",
        field="prefill_tok_s",
    ),
    Metric(
        "decode_step_seconds",
        "gauge",
        _REPLICA,
        "seconds",
        "How long a step without prefill takes; 0: none yet.",
        field="decode_step_s",
    ),
    Metric(
        "busy_seconds_total", "counter", _REPLICA, "seconds", "Time in which it computed.", field="busy_s"
    ),
    Metric(
        "flops_total",
        "counter",
        _REPLICA,
        "operations",
        "The least arithmetic its steps needed.",
        field="num_flops",
    ),
    Metric(
        "device_read_bytes_total",
        "counter",
        _REPLICA,
        "bytes",
        "The least its steps had to read from device memory.",
        field="num_read_bytes",
    ),
    Metric(
        "peak_flops_per_second",
        "gauge",
        _REPLICA,
        "operations/s",
        "Measured at start by a matrix product, all ranks together.",
        field="peak_flop_s",
    ),
    Metric(
        "peak_read_bytes_per_second",
        "gauge",
        _REPLICA,
        "bytes/s",
        "Measured at start by reading memory, all ranks together.",
        field="peak_byte_s",
    ),
    Metric(
        "mfu_ratio",
        "gauge",
        _REPLICA,
        "",
        "Achieved share of the measured arithmetic, while steps run (MFU).",
        field="mfu",
    ),
    Metric(
        "mbu_ratio",
        "gauge",
        _REPLICA,
        "",
        "Achieved share of the measured bandwidth, while steps run (MBU).",
        field="mbu",
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
    Metric(
        "preemptions_total",
        "counter",
        _REPLICA,
        "sequences",
        "That gave their blocks to others.",
        field="num_preemptions",
    ),
    Metric(
        "replica_role",
        "gauge",
        (*_REPLICA, "role"),
        "",
        "1 for the role that it plays now; not its pool's while it is lent.",
    ),
    Metric(
        "moved_streams_total",
        "counter",
        _REPLICA,
        "streams",
        "That went on at another replica.",
        field="num_moved_streams",
    ),
    Metric(
        "failed_stream_moves_total",
        "counter",
        _REPLICA,
        "streams",
        "That should have, and stayed or were placed again.",
        field="num_failed_moves",
    ),
)

KV = (
    Metric("kv_blocks", "gauge", _REPLICA, "blocks", "KV blocks that there are.", field="num_total_blocks"),
    Metric(
        "free_blocks",
        "gauge",
        _REPLICA,
        "blocks",
        "That can be taken, cached ones included.",
        field="num_free_blocks",
    ),
    Metric(
        "cached_blocks",
        "gauge",
        _REPLICA,
        "blocks",
        "Of those: the ones that hold a finished prefix.",
        field="num_cached_blocks",
    ),
    Metric("kv_usage_ratio", "gauge", _REPLICA, "", "Share of the blocks that requests hold."),
    Metric(
        "kv_fragmentation_ratio",
        "gauge",
        _REPLICA,
        "",
        "Share of what running sequences hold that no token is in yet; part of it is reserved for prompts "
        "that are being computed.",
    ),
    Metric(
        "landings", "gauge", _REPLICA, "landings", "That are open or wait for room.", field="num_landings"
    ),
    Metric(
        "quarantined_blocks",
        "gauge",
        _REPLICA,
        "blocks",
        "That a writer of an ended landing could still write.",
        field="num_quarantined_blocks",
    ),
    Metric(
        "leaked_blocks",
        "gauge",
        _REPLICA,
        "blocks",
        "That are referenced although nothing runs.",
        field="num_leaked_blocks",
    ),
    Metric(
        "offloaded_blocks",
        "gauge",
        _REPLICA,
        "blocks",
        "Of running sequences that lie in host memory.",
        field="num_offloaded_blocks",
    ),
    Metric(
        "prefix_queried_tokens_total",
        "counter",
        _REPLICA,
        "tokens",
        "Of prompts that were computed: what could have been cached.",
        field="num_queried_tokens",
    ),
    Metric(
        "prefix_hit_tokens_total",
        "counter",
        (*_REPLICA, "tier"),
        "tokens",
        "Of those: what was, by the tier that had it.",
        field="num_hit_tokens",
    ),
    Metric(
        "loaded_tokens_total",
        "counter",
        (*_REPLICA, "tier"),
        "tokens",
        "Whose KV was loaded from the store instead of computed.",
        "a prompt must be in the store and no longer on the device",
        field="num_loaded_tokens",
    ),
    Metric(
        "load_tokens_per_second",
        "gauge",
        (*_REPLICA, "tier"),
        "tokens/s",
        "Rate at which KV comes from a tier of the store.",
        "a prompt must be in the store and no longer on the device",
        field="load_tok_s",
    ),
    Metric(
        "stored_blocks_total",
        "counter",
        _REPLICA,
        "blocks",
        "Written through to the node's store.",
        field="num_stored_blocks",
    ),
    Metric(
        "unstored_blocks_total",
        "counter",
        (*_REPLICA, "cause"),
        "blocks",
        "Finished blocks that were not written to the store.",
        "the store must be full or away",
        field="num_unstored_blocks",
    ),
    Metric(
        "store_read_failures_total",
        "counter",
        _REPLICA,
        "records",
        "Records of the store that failed their checksum when this replica read them.",
        field="num_store_checksum_failures",
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
        field="num_transport_bytes",
    ),
    Metric(
        "transfer_seconds_total",
        "counter",
        (*_REPLICA, "transport"),
        "seconds",
        "Time spent writing it, summed over pushes of each rank.",
        NEEDS_HAND_OVER,
        field="transport_s",
    ),
    Metric(
        "transfer_bytes_per_second",
        "gauge",
        _REPLICA,
        "bytes/s",
        "Rate of recent pushes; 0: none.",
        field="transfer_gb_s",
        scale=_GB,
    ),
    Metric(
        "moved_bytes_total",
        "counter",
        (*_REPLICA, "class"),
        "bytes",
        "KV written to other replicas, by traffic class.",
        NEEDS_HAND_OVER,
        field="num_moved_bytes",
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
        field="num_lost_landings",
    ),
    Metric(
        "checksum_failures_total",
        "counter",
        _REPLICA,
        "pieces",
        "KV pieces that failed their checksum and were computed again.",
        field="num_checksum_failures",
    ),
)


def _store(name: str, kind: Kind, unit: str, help_: str, field: str, scale: float = 1.0) -> Metric:
    return Metric(name, kind, _TIER, unit, help_, _NEEDS_STORE, field=field, scale=scale)


STORES = (
    _store("store_bytes", "gauge", "bytes", "What a tier holds, headers and padding included.", "num_bytes"),
    _store("store_capacity_bytes", "gauge", "bytes", "What it may hold.", "capacity_bytes"),
    _store("store_records", "gauge", "records", "In it.", "num_records"),
    _store("store_queued", "gauge", "records", "That wait to be written to it.", "num_queued"),
    _store("store_leases", "gauge", "records", "That are being read.", "num_leases"),
    _store(
        "store_quarantined", "gauge", "records", "Places that somebody could still write.", "num_quarantined"
    ),
    _store(
        "store_read_bytes_per_second", "gauge", "bytes/s", "Measured rate of recent reads.", "read_gb_s", _GB
    ),
    _store(
        "store_write_bytes_per_second",
        "gauge",
        "bytes/s",
        "Measured rate of recent writes.",
        "write_gb_s",
        _GB,
    ),
    _store(
        "store_latency_seconds", "gauge", "seconds", "Of one read (nvme), of one fetch (remote).", "latency_s"
    ),
    _store("store_hits_total", "counter", "blocks", "Asked for that it had.", "num_hits"),
    _store("store_misses_total", "counter", "blocks", "Asked for that it did not have.", "num_misses"),
    _store("store_hit_bytes_total", "counter", "bytes", "That were read of it.", "num_hit_bytes"),
    _store("store_put_bytes_total", "counter", "bytes", "That were put into it.", "num_put_bytes"),
    _store(
        "store_written_bytes_total",
        "counter",
        "bytes",
        "The same, with what was written again.",
        "num_written_bytes",
    ),
    _store("store_evictions_total", "counter", "records", "That made room for others.", "num_evictions"),
    _store("store_refused_total", "counter", "records", "That found no room.", "num_refused"),
    _store(
        "store_checksum_failures_total",
        "counter",
        "records",
        "Dropped for a wrong checksum.",
        "num_checksum_failures",
    ),
    _store(
        "store_io_errors_total", "counter", "operations", "Reads and writes that failed.", "num_io_errors"
    ),
    Metric(
        "store_write_amplification",
        "gauge",
        _NODE,
        "",
        "Bytes written to NVMe over bytes put there.",
        _NEEDS_NVME,
    ),
    *(
        Metric(
            f"store_index_{name}_total",
            "counter",
            _NODE,
            unit,
            help_,
            _NEEDS_STORE,
            field=f"num_{name}",
        )
        for name, unit, help_ in (
            ("lookups", "look-ups", "In the index of all nodes."),
            ("late", "look-ups", "That were not waited for."),
            ("errors", "look-ups", "That failed."),
            ("announced", "records", "Announced to it."),
            ("dropped", "records", "Announcements that found no room in the queue."),
            ("rebuilds", "times", "That everything was announced again."),
        )
    ),
    Metric(
        "store_index_latency_seconds",
        "gauge",
        _NODE,
        "seconds",
        "Of one look-up.",
        _NEEDS_STORE,
        field="latency_s",
    ),
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
# All of them.

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
