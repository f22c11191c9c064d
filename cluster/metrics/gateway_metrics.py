"""The metrics that gateways and the scaler export."""

from __future__ import annotations

from cluster.metrics.metric import (
    NEEDS_FAULT,
    NEEDS_HAND_OVER,
    NEEDS_MEASURED_STEPS,
    NEEDS_OVERLOAD,
    NEEDS_PRICE,
    NEEDS_USED_UP_LIMIT,
    of_gateway,
    of_served,
    times_of,
)

REQUESTS = (
    times_of("ttft_seconds", "From acceptance to the first token; by the replica that sent it."),
    times_of(
        "ttft_prediction_ratio",
        "Time to the first token over what was predicted when the request was taken; by the replica that "
        "sent it.",
        unit="",
    ),
    times_of("itl_seconds", "Between two tokens of one continuation, as they reach the gateway."),
    times_of("tpot_seconds", "Mean time for an output token after the first, of each finished request."),
    times_of(
        "tpot_prediction_ratio",
        "That mean over the decode step that was predicted when the request was taken.",
        unit="",
    ),
    times_of("e2e_seconds", "From acceptance to the end, of each finished request."),
    times_of("queue_seconds", "From arrival at a replica until the prompt was scheduled."),
    times_of("prefill_seconds", "From the scheduling of the prompt until it was computed."),
    times_of(
        "hand_over_seconds",
        "From the first piece of KV written until the last one was verified at the decode replica.",
        NEEDS_HAND_OVER,
    ),
    of_gateway(
        "requests_total",
        "",
        "requests",
        "Requests that ended; `state` is finished, failed, cancelled or refused (never accepted), `code` the "
        "gRPC status.",
        by="state code",
    ),
    of_gateway("running_requests", "num_running", "requests", "Running requests."),
    of_gateway(
        "unheard_gateways",
        "",
        "gateways",
        "Other gateways whose placements this one does not hear, so that both may choose the same replica.",
    ),
    of_gateway(
        "quota_share_ratio",
        "quota_share",
        "",
        "Part of the tenants' limits that applies here; below 1: gateways do not know each other's use, and "
        "each has its part.",
    ),
    of_gateway(
        "retried_requests_total",
        "num_retried",
        "requests",
        "Finished requests that took more than one attempt.",
    ),
    of_gateway("prompt_tokens_total", "num_prompt_tokens", "tokens", "Prompt tokens of accepted requests."),
    of_gateway(
        "cached_prompt_tokens_total",
        "num_cached_tokens",
        "tokens",
        "Prompt tokens whose KV was cached, by the tier that held it (device, dram, nvme, remote).",
        by="tier",
    ),
    of_gateway(
        "expected_cached_tokens_total",
        "num_expected_cached_tokens",
        "tokens",
        "Prompt tokens that the router expected to be cached where it placed the prompt, over all attempts.",
    ),
    of_gateway(
        "achievable_cached_tokens_total",
        "num_achievable_cached_tokens",
        "tokens",
        "Prompt tokens that a cache of the whole cluster without a limit would have had, over all attempts.",
    ),
    of_served(
        "routed_attempts_total",
        "num_routed",
        "attempts",
        "Ended attempts that the router had placed at this replica to prefill, to decode, or for "
        "both (local).",
        by="side",
    ),
    of_gateway(
        "output_tokens_total", "num_output_tokens", "tokens", "Output tokens that reached the gateway."
    ),
    of_gateway(
        "first_tokens_total",
        "demand.num_first_tokens",
        "requests",
        "Requests whose first token reached the gateway.",
    ),
    of_gateway(
        "late_first_tokens_total",
        "demand.num_late_first_tokens",
        "requests",
        "Requests whose first token came later than `scaling.ttft_slo_s`.",
    ),
    of_gateway("token_gaps_total", "demand.num_gaps", "gaps", "Gaps between tokens of one continuation."),
    of_gateway(
        "late_token_gaps_total",
        "demand.num_late_gaps",
        "gaps",
        "Gaps between tokens longer than `scaling.itl_slo_s`.",
    ),
    of_gateway(
        "hand_overs_total",
        "num_hand_overs",
        "requests",
        "Finished requests that were handed over, by transport (none: no KV had to be transferred).",
        by="transport",
        why_empty=NEEDS_HAND_OVER,
    ),
    of_gateway(
        "hand_over_bytes_total",
        "num_hand_over_bytes",
        "bytes",
        "KV transferred in hand-overs.",
        by="transport",
        why_empty=NEEDS_HAND_OVER,
    ),
    of_served(
        "attempt_failures_total",
        "num_attempt_failures",
        "attempts",
        "Attempts that failed at a replica: refused (no capacity), peer, internal, leaving, crowded (another "
        "gateway was faster), deadline, invalid. Most are placed again, unnoticed by clients.",
        by="code",
        why_empty=NEEDS_FAULT,
    ),
)

RECORDING = (
    of_gateway("recorded_requests", "num_requests", "requests", "Requests that the gateway's recording has."),
    of_gateway("recording_bytes", "num_bytes", "bytes", "Memory that the recording takes, about."),
)

OUTPUT = (
    of_gateway("unread_output_bytes", "num_bytes", "bytes", "Output that waits for clients to read it."),
    of_gateway(
        "write_pause_seconds",
        "pause_s",
        "seconds",
        "How long output waits to be merged, because the gateway's event loop is busy: add gateways, or give "
        "this one a faster core.",
    ),
)

ADMISSION = (
    of_gateway(
        "admission_rung",
        "rung",
        "",
        "What the gateway does under load: 0 nothing, 1 pauses the class batch, 2 caps max_tokens, 3 refuses "
        "low weights, 4 refuses most.",
    ),
    of_gateway(
        "admission_pressure_ratio",
        "pressure",
        "",
        "How much of its objective a new request waits, the mean of the tenants and classes that ask.",
    ),
    of_gateway(
        "admission_rung_changes_total",
        "num_rung_changes",
        "changes",
        "Changes of what the gateway does under load, by what it does since.",
        by="rung",
        why_empty=NEEDS_OVERLOAD,
    ),
    of_gateway("admission_waiting_bytes", "num_waiting_bytes", "bytes", "Size of the requests that wait."),
    of_gateway(
        "admission_waiting_work_seconds",
        "waiting_s",
        "seconds",
        "How long the replicas will compute the prompts of the requests that wait.",
    ),
    of_gateway(
        "admission_capped_requests_total",
        "num_capped",
        "requests",
        "Requests whose max_tokens was cut because of the load.",
    ),
)

# Metrics of each class.
CLASSES = (
    of_gateway(
        "class_waiting_requests",
        "num_waiting",
        "requests",
        "Requests that wait in the gateway.",
        by="class",
    ),
    of_gateway(
        "class_wait_seconds",
        "wait_s",
        "seconds",
        "How long a new request would wait now, of a tenant that has none waiting.",
        by="class",
    ),
    of_gateway(
        "class_released_requests_total",
        "num_released",
        "requests",
        "Requests that were sent to replicas.",
        by="class",
    ),
    of_gateway(
        "class_refused_requests_total",
        "num_refused",
        "requests",
        "Refused requests: late (would miss the objective), unattainable (prompt alone would), aged "
        "(waited too long), shed (low weight), bytes (too much waits), requests (`gateway.max_requests`).",
        by="class reason",
        why_empty=NEEDS_OVERLOAD,
    ),
)

TENANTS = (
    of_gateway(
        "tenant_requests_total",
        "num_requests",
        "requests",
        "Accepted requests that ended, by tenant; cancelled and failed ones too, as in all that follows.",
        by="tenant",
    ),
    of_gateway(
        "tenant_over_quota_total",
        "num_over_quota",
        "requests",
        "Requests that were refused because the tenant had used up this limit of `auth.tenants`.",
        by="tenant limit",
        why_empty=NEEDS_USED_UP_LIMIT,
    ),
    of_gateway(
        "tenant_prompt_tokens_total",
        "num_prompt_tokens",
        "tokens",
        "Prompt tokens of accepted requests.",
        by="tenant",
    ),
    of_gateway(
        "tenant_computed_tokens_total",
        "num_computed_tokens",
        "tokens",
        "Prompt tokens that were computed.",
        by="tenant",
    ),
    of_gateway(
        "tenant_cached_tokens_total",
        "num_cached_tokens",
        "tokens",
        "Prompt tokens whose KV was cached.",
        by="tenant",
    ),
    of_gateway("tenant_output_tokens_total", "num_output_tokens", "tokens", "Output tokens.", by="tenant"),
    of_gateway(
        "tenant_kv_byte_seconds_total",
        "kv_byte_s",
        "bytes x seconds",
        "KV of prompt and output so far, times how long it was held.",
        by="tenant",
    ),
    of_gateway(
        "tenant_device_seconds_total",
        "device_s",
        "seconds",
        "Time of the pools' devices that requests took, summed over the devices.",
        by="tenant pool",
        why_empty=NEEDS_MEASURED_STEPS,
    ),
)

TENANT_CLASSES = (
    of_gateway(
        "tenant_class_requests_total",
        "num_requests",
        "requests",
        "Requests by how they were served: good (finished within the objectives of their class), late "
        "(finished), failed, cancelled or refused.",
        by="tenant class outcome",
    ),
    of_gateway(
        "tenant_class_output_tokens_total",
        "num_output_tokens",
        "tokens",
        "Output tokens of these requests.",
        by="tenant class outcome",
    ),
)

COSTS = (
    of_gateway(
        "tenant_cost_total",
        "",
        "",
        "Price of the device time, by `costs.device_hour`, in its currency.",
        by="tenant",
        why_empty=NEEDS_PRICE,
    ),
)

POOLS = (
    of_gateway("pool_replicas", "", "replicas", "Replicas as this gateway sees them.", by="pool state"),
    of_gateway(
        "pool_desired_replicas",
        "",
        "replicas",
        "Replicas that the configuration, an operator or the autoscaler wants.",
        by="pool",
    ),
    of_gateway(
        "pool_pinned", "", "", "1 while an operator's choice keeps the autoscaler from the pool.", by="pool"
    ),
    of_gateway(
        "pool_reassigned_replicas",
        "",
        "replicas",
        "Replicas of the pool that have the other role now.",
        by="pool",
    ),
    of_gateway(
        "scaling_changes_total",
        "",
        "moves",
        "Changes of a count or a role since the gateway started, by operator, autoscaler or deploy.",
        by="pool by",
    ),
    of_gateway(
        "replica_losses_total",
        "",
        "replicas",
        "Links that ended to replicas that were not leaving: they died, hung, or the network broke.",
        by="pool",
    ),
    of_gateway(
        "breaker_changes_total",
        "",
        "changes",
        "Changes of the circuit breakers of replicas, by the state that came: open (it failed several times "
        "in a row, or stands still), half-open (it is tried again) or closed.",
        by="pool state",
    ),
    of_gateway(
        "path_floor_bytes_per_second",
        "",
        "bytes/s",
        "Lowest accepted rate of a path, `transfer.min_gb_s`; 0: none.",
    ),
)
