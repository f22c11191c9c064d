"""Every metric that is exported, declared once. At Prometheus each name begins with `ray_tandem_`."""

from __future__ import annotations

import functools
from typing import Literal, NamedTuple

from workers.stats_record import BATCH_BOUNDS

Kind = Literal["counter", "gauge", "histogram"]


class Metric(NamedTuple):
    """One metric. `why_empty` says when it has no series on a healthy run; "": it always has one.

    `field` names the statistic that it shows, times `scale`, in the record that is exported (of a replica
    `workers.stats_record.ReplicaStats`); where that is a mapping, its keys are values of the last label. "":
    the exporter computes it.
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


# Labels: of what gateways export, of what they measured of a replica's work, of what replicas export, of
# their paths to other replicas, and of the stores of their nodes.
_GATEWAY = ("app", "gateway", "model")
_SERVED = ("app", "gateway", "model", "pool", "replica")
_REPLICA = ("app", "pool", "replica", "model")
_PATH = (*_REPLICA, "peer", "rank", "peer_rank", "transport", "device")
_NODE = ("app", "node")
_TIER = ("app", "node", "tier")

_NEEDS_PAIR = "needs two replicas of separate pools"
_NEEDS_STORE = "needs a store (`store.dram_gb`)"
_NEEDS_NVME = "needs a tier on NVMe (`store.nvme_path`)"
NEEDS_LOAD = "a prompt must be in the store and no longer on the device"
NEEDS_FULL_STORE = "the store must be full or unavailable"


def _metric(
    labels: tuple[str, ...],
    name: str,
    field: str,
    unit: str,
    help_: str,
    *,
    by: str = "",
    why_empty: str = "",
    scale: float = 1.0,
    buckets: tuple[float, ...] = (),
) -> Metric:
    """The name says which kind it is; `by` are labels beside those of its group."""
    kind: Kind = "histogram" if buckets else "counter" if name.endswith("_total") else "gauge"
    return Metric(name, kind, (*labels, *by.split()), unit, help_, why_empty, buckets, field, scale)


_gateway = functools.partial(_metric, _GATEWAY)
_served = functools.partial(_metric, _SERVED)
_replica = functools.partial(_metric, _REPLICA)
_path = functools.partial(_metric, _PATH)
_node = functools.partial(_metric, _NODE, why_empty=_NEEDS_STORE)
_tier = functools.partial(_metric, _TIER, why_empty=_NEEDS_STORE)


def _times(name: str, help_: str, why_empty: str = "") -> Metric:
    return _served(name, "", "seconds", help_, why_empty=why_empty, buckets=REQUEST_TIMES[name])


REQUESTS = (
    _times("ttft_seconds", "From acceptance to the first token; by the replica that sent it."),
    _times("itl_seconds", "Between two tokens of one continuation, as they reach the gateway."),
    _times("tpot_seconds", "Mean time for an output token after the first, of each finished request."),
    _times("e2e_seconds", "From acceptance to the end, of each finished request."),
    _times("queue_seconds", "From arrival at a replica until the prompt was scheduled."),
    _times("prefill_seconds", "From the scheduling of the prompt until it was computed."),
    _times(
        "hand_over_seconds",
        "From the first piece of KV written until the last one was verified at the decode replica.",
        NEEDS_HAND_OVER,
    ),
    _gateway(
        "requests_total",
        "",
        "requests",
        "Requests that ended; `state` is finished, failed, cancelled or refused (never accepted), `code` the "
        "gRPC status.",
        by="state code",
    ),
    _gateway("running_requests", "num_running", "requests", "Running requests."),
    _gateway(
        "unheard_gateways",
        "",
        "gateways",
        "Other gateways whose placements this one does not hear, so that both may choose the same replica.",
    ),
    _gateway(
        "quota_share_ratio",
        "quota_share",
        "",
        "Part of the tenants' limits that applies here; below 1: gateways do not know each other's use, and "
        "each has its part.",
    ),
    _gateway(
        "retried_requests_total",
        "num_retried",
        "requests",
        "Finished requests that took more than one attempt.",
    ),
    _gateway("prompt_tokens_total", "num_prompt_tokens", "tokens", "Prompt tokens of accepted requests."),
    _gateway(
        "cached_prompt_tokens_total",
        "num_cached_tokens",
        "tokens",
        "Prompt tokens whose KV was cached, by the tier that held it (device, dram, nvme, remote).",
        by="tier",
    ),
    _gateway(
        "expected_cached_tokens_total",
        "num_expected_cached_tokens",
        "tokens",
        "Prompt tokens that the router expected to be cached where it placed the prompt, over all attempts.",
    ),
    _served(
        "routed_attempts_total",
        "num_routed",
        "attempts",
        "Ended attempts that the router had placed at this replica to prefill, to decode, or for "
        "both (local).",
        by="side",
    ),
    _gateway("output_tokens_total", "num_output_tokens", "tokens", "Output tokens that reached the gateway."),
    _gateway(
        "first_tokens_total",
        "demand.num_first_tokens",
        "requests",
        "Requests whose first token reached the gateway.",
    ),
    _gateway(
        "late_first_tokens_total",
        "demand.num_late_first_tokens",
        "requests",
        "Requests whose first token came later than `scaling.ttft_slo_s`.",
    ),
    _gateway("token_gaps_total", "demand.num_gaps", "gaps", "Gaps between tokens of one continuation."),
    _gateway(
        "late_token_gaps_total",
        "demand.num_late_gaps",
        "gaps",
        "Gaps between tokens longer than `scaling.itl_slo_s`.",
    ),
    _gateway(
        "hand_overs_total",
        "num_hand_overs",
        "requests",
        "Finished requests that were handed over, by transport (none: no KV had to be transferred).",
        by="transport",
        why_empty=NEEDS_HAND_OVER,
    ),
    _gateway(
        "hand_over_bytes_total",
        "num_hand_over_bytes",
        "bytes",
        "KV transferred in hand-overs.",
        by="transport",
        why_empty=NEEDS_HAND_OVER,
    ),
    _served(
        "attempt_failures_total",
        "num_attempt_failures",
        "attempts",
        "Attempts that failed at a replica, by code: refused (no capacity), peer, internal, "
        "leaving, deadline, invalid. Most are placed again and the client does not notice.",
        by="code",
        why_empty=NEEDS_FAULT,
    ),
)

TENANTS = (
    _gateway(
        "tenant_requests_total",
        "num_requests",
        "requests",
        "Accepted requests that ended, by tenant; cancelled and failed ones too, as in all that follows.",
        by="tenant",
    ),
    _gateway(
        "tenant_over_quota_total",
        "num_over_quota",
        "requests",
        "Requests that were refused because the tenant had used up this limit of `auth.tenants`.",
        by="tenant limit",
        why_empty="a tenant must have used up a limit",
    ),
    _gateway(
        "tenant_prompt_tokens_total",
        "num_prompt_tokens",
        "tokens",
        "Prompt tokens of accepted requests.",
        by="tenant",
    ),
    _gateway(
        "tenant_computed_tokens_total",
        "num_computed_tokens",
        "tokens",
        "Prompt tokens that were computed.",
        by="tenant",
    ),
    _gateway(
        "tenant_cached_tokens_total",
        "num_cached_tokens",
        "tokens",
        "Prompt tokens whose KV was cached.",
        by="tenant",
    ),
    _gateway("tenant_output_tokens_total", "num_output_tokens", "tokens", "Output tokens.", by="tenant"),
    _gateway(
        "tenant_kv_byte_seconds_total",
        "kv_byte_s",
        "bytes x seconds",
        "KV of prompt and output so far, times how long it was held.",
        by="tenant",
    ),
)

POOLS = (
    _gateway("pool_replicas", "", "replicas", "Replicas as this gateway sees them.", by="pool state"),
    _gateway(
        "pool_desired_replicas",
        "",
        "replicas",
        "Replicas that the configuration, an operator or the autoscaler wants.",
        by="pool",
    ),
    _gateway(
        "pool_pinned", "", "", "1 while an operator's choice keeps the autoscaler from the pool.", by="pool"
    ),
    _gateway(
        "pool_lent_replicas", "", "replicas", "Replicas of the pool that have the other role now.", by="pool"
    ),
    _gateway(
        "scaling_moves_total",
        "",
        "moves",
        "Changes of a count or a role since the gateway started, by operator, autoscaler or deploy.",
        by="pool by",
    ),
    _gateway(
        "replica_losses_total",
        "",
        "replicas",
        "Links that ended to replicas that were not leaving: they died, hung, or the network broke.",
        by="pool",
    ),
    _gateway(
        "path_floor_bytes_per_second",
        "",
        "bytes/s",
        "Lowest accepted rate of a path, `transfer.min_gb_s`; 0: none.",
    ),
)

ENGINES = (
    _replica("running_sequences", "num_running", "sequences", "Running sequences."),
    _replica("waiting_sequences", "num_waiting", "sequences", "Waiting sequences."),
    _replica(
        "backlog_tokens", "num_backlog_tokens", "tokens", "Prompt tokens that are accepted and not computed."
    ),
    _replica("batch_size", "", "sequences", "Sequences of a step.", buckets=BATCH_SIZE),
    _replica("steps_total", "num_steps", "steps", "Engine steps."),
    _replica(
        "computed_tokens_total",
        "num_computed_tokens",
        "tokens",
        "Prompt tokens, and inputs of decode steps, that went through the model.",
    ),
    _replica("sampled_tokens_total", "num_sampled_tokens", "tokens", "Tokens that were sampled."),
    _replica(
        "prefill_tokens_per_second",
        "prefill_tok_s",
        "tokens/s",
        "Rate of prompt tokens during prefill; 0: none yet.",
    ),
    _replica(
        "decode_step_seconds",
        "decode_step_s",
        "seconds",
        "Duration of a step without prefill; 0: none yet.",
    ),
    _replica("busy_seconds_total", "busy_s", "seconds", "Time in which the replica computed."),
    _replica(
        "stalled_seconds",
        "stalled_s",
        "seconds",
        "For how long no rank has progressed with a step that is out; 0: they progress, or nothing is out.",
    ),
    _replica("flops_total", "num_flops", "operations", "Minimum arithmetic of the steps."),
    _replica(
        "device_read_bytes_total",
        "num_read_bytes",
        "bytes",
        "Minimum that the steps had to read from device memory.",
    ),
    _replica(
        "peak_flops_per_second",
        "peak_flop_s",
        "operations/s",
        "Arithmetic measured at start by a matrix product, all ranks together.",
    ),
    _replica(
        "peak_read_bytes_per_second",
        "peak_byte_s",
        "bytes/s",
        "Bandwidth measured at start by reading memory, all ranks together.",
    ),
    _replica("mfu_ratio", "mfu", "", "Achieved share of the measured arithmetic, while steps run (MFU)."),
    _replica("mbu_ratio", "mbu", "", "Achieved share of the measured bandwidth, while steps run (MBU)."),
    _replica(
        "device_memory_used_bytes",
        "",
        "bytes",
        "Memory in use on the rank's GPU, by any process; on a CPU the memory of the rank's process.",
        by="rank",
    ),
    _replica("device_memory_total_bytes", "", "bytes", "Memory of that GPU, or of the host.", by="rank"),
    _replica(
        "replica_load_seconds",
        "",
        "seconds",
        "Time in which the rank formed groups, loaded its weights and allocated KV.",
        by="rank",
    ),
    _replica(
        "replica_warm_up_seconds",
        "",
        "seconds",
        "Time in which the rank then warmed up, until it was ready.",
        by="rank",
    ),
    _replica("preemptions_total", "num_preemptions", "sequences", "Sequences that were preempted."),
    _replica(
        "replica_role",
        "",
        "",
        "1 for the replica's current role, which differs from its pool's while it is lent.",
        by="role",
    ),
    _replica("moved_streams_total", "num_moved_streams", "streams", "Streams that moved to another replica."),
    _replica(
        "failed_stream_moves_total",
        "num_failed_moves",
        "streams",
        "Streams whose move failed: they stayed or were placed again.",
    ),
)

KV = (
    _replica("kv_blocks", "num_total_blocks", "blocks", "All KV blocks."),
    _replica(
        "kv_tokens",
        "",
        "tokens",
        "KV capacity: `engine.kv_tokens`, or what was decided at the start where that is `auto`.",
    ),
    _replica(
        "free_blocks", "num_free_blocks", "blocks", "Blocks that can be allocated, cached ones included."
    ),
    _replica("cached_blocks", "num_cached_blocks", "blocks", "Free blocks that hold a finished prefix."),
    _replica("kv_usage_ratio", "", "", "Share of the blocks that requests hold."),
    _replica(
        "kv_fragmentation_ratio",
        "",
        "",
        "Share of the running sequences' blocks that holds no token yet; part of it is reserved "
        "for prompts that are being computed.",
    ),
    _replica("landings", "num_landings", "landings", "Landings that are open or wait for free blocks."),
    _replica(
        "quarantined_blocks",
        "num_quarantined_blocks",
        "blocks",
        "Blocks that a writer of an ended landing could still write.",
    ),
    _replica(
        "leaked_blocks", "num_leaked_blocks", "blocks", "Blocks that are referenced although nothing runs."
    ),
    _replica(
        "offloaded_blocks", "num_offloaded_blocks", "blocks", "Blocks of running sequences in host memory."
    ),
    _replica(
        "prefix_queried_tokens_total",
        "num_queried_tokens",
        "tokens",
        "Tokens of computed prompts that could have been cached.",
    ),
    _replica(
        "prefix_hit_tokens_total",
        "num_hit_tokens",
        "tokens",
        "Tokens of computed prompts that were cached, by the tier that held them.",
        by="tier",
    ),
    _replica(
        "loaded_tokens_total",
        "num_loaded_tokens",
        "tokens",
        "Tokens whose KV was loaded from the store instead of computed.",
        by="tier",
        why_empty=NEEDS_LOAD,
    ),
    _replica(
        "load_tokens_per_second",
        "load_tok_s",
        "tokens/s",
        "Rate at which KV is loaded from a tier of the store.",
        by="tier",
        why_empty=NEEDS_LOAD,
    ),
    _replica(
        "stored_blocks_total", "num_stored_blocks", "blocks", "Blocks written through to the node's store."
    ),
    _replica(
        "unstored_blocks_total",
        "num_unstored_blocks",
        "blocks",
        "Finished blocks that were not written to the store.",
        by="cause",
        why_empty=NEEDS_FULL_STORE,
    ),
    _replica(
        "store_read_failures_total",
        "num_store_checksum_failures",
        "records",
        "Records of the store that failed their checksum when this replica read them.",
    ),
)

TRANSFER = (
    _replica(
        "transfer_bytes_total",
        "num_transport_bytes",
        "bytes",
        "KV written to other replicas.",
        by="transport",
        why_empty=NEEDS_HAND_OVER,
    ),
    _replica(
        "transfer_seconds_total",
        "transport_s",
        "seconds",
        "Time spent writing KV, summed over pushes of each rank.",
        by="transport",
        why_empty=NEEDS_HAND_OVER,
    ),
    _replica(
        "transfer_bytes_per_second", "transfer_gb_s", "bytes/s", "Rate of recent pushes; 0: none.", scale=_GB
    ),
    _replica(
        "moved_bytes_total",
        "num_moved_bytes",
        "bytes",
        "KV written to other replicas, by traffic class.",
        by="class",
        why_empty=NEEDS_HAND_OVER,
    ),
    _path(
        "path_bytes_per_second",
        "",
        "bytes/s",
        "Measured rate of a path between ranks; 0: the path is lost, or there is none (transport none).",
        why_empty=_NEEDS_PAIR,
    ),
    _path(
        "path_latency_seconds",
        "",
        "seconds",
        "Measured latency of a path between ranks.",
        why_empty=_NEEDS_PAIR,
    ),
    _replica(
        "lost_landings_total",
        "num_lost_landings",
        "landings",
        "Landings that ended without hand-over.",
        by="cause",
        why_empty=NEEDS_FAULT,
    ),
    _replica(
        "checksum_failures_total",
        "num_checksum_failures",
        "pieces",
        "KV pieces that failed their checksum and were recomputed.",
    ),
)

STORES = (
    _tier("store_bytes", "num_bytes", "bytes", "Bytes in the tier, headers and padding included."),
    _tier("store_capacity_bytes", "capacity_bytes", "bytes", "Capacity of the tier."),
    _tier("store_records", "num_records", "records", "Records in the tier."),
    _tier("store_queued", "num_queued", "records", "Records that wait to be written to the tier."),
    _tier("store_leases", "num_leases", "records", "Records that are being read."),
    _tier("store_quarantined", "num_quarantined", "records", "Slots that some process could still write."),
    _tier("store_read_bytes_per_second", "read_gb_s", "bytes/s", "Measured rate of recent reads.", scale=_GB),
    _tier(
        "store_write_bytes_per_second", "write_gb_s", "bytes/s", "Measured rate of recent writes.", scale=_GB
    ),
    _tier(
        "store_latency_seconds", "latency_s", "seconds", "Latency of one read (nvme), of one fetch (remote)."
    ),
    _tier("store_hits_total", "num_hits", "blocks", "Requested blocks that the tier had."),
    _tier("store_misses_total", "num_misses", "blocks", "Requested blocks that the tier did not have."),
    _tier("store_hit_bytes_total", "num_hit_bytes", "bytes", "Bytes read from the tier."),
    _tier("store_put_bytes_total", "num_put_bytes", "bytes", "Bytes put into the tier."),
    _tier(
        "store_written_bytes_total",
        "num_written_bytes",
        "bytes",
        "Bytes written to the tier, rewrites included.",
    ),
    _tier("store_evictions_total", "num_evictions", "records", "Records evicted to free space."),
    _tier("store_refused_total", "num_refused", "records", "Records refused for lack of space."),
    _tier(
        "store_checksum_failures_total",
        "num_checksum_failures",
        "records",
        "Records dropped for a wrong checksum.",
    ),
    _tier("store_io_errors_total", "num_io_errors", "operations", "Reads and writes that failed."),
    _node(
        "store_write_amplification",
        "",
        "",
        "Bytes written to NVMe over bytes put there.",
        why_empty=_NEEDS_NVME,
    ),
    _node("store_index_lookups_total", "num_lookups", "look-ups", "Look-ups in the index of all nodes."),
    _node("store_index_late_total", "num_late", "look-ups", "Look-ups that exceeded their time budget."),
    _node("store_index_errors_total", "num_errors", "look-ups", "Look-ups that failed."),
    _node("store_index_announced_total", "num_announced", "records", "Records announced to the index."),
    _node(
        "store_index_dropped_total",
        "num_dropped",
        "records",
        "Announcements dropped because the queue was full.",
    ),
    _node(
        "store_index_rebuilds_total", "num_rebuilds", "times", "Times that all records were announced again."
    ),
    _node("store_index_latency_seconds", "latency_s", "seconds", "Latency of one look-up."),
    _node("store_index_state", "", "", "1 for the current state (off, up, slow, down), else 0.", by="state"),
)

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
