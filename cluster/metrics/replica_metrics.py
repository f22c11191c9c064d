"""The metrics that replicas and the stores of their nodes export."""

from __future__ import annotations

from cluster.metrics.metric import (
    BATCH_SIZE,
    GB,
    NEEDS_EXPERTS,
    NEEDS_FAULT,
    NEEDS_FULL_STORE,
    NEEDS_HAND_OVER,
    NEEDS_NVME,
    NEEDS_PAIR,
    NEEDS_STATES,
    NEEDS_STORED_PROMPT,
    of_node,
    of_path,
    of_replica,
    of_tier,
)

ENGINES = (
    of_replica("running_sequences", "num_running", "sequences", "Running sequences."),
    of_replica("waiting_sequences", "num_waiting", "sequences", "Waiting sequences."),
    of_replica(
        "paused_sequences",
        "num_paused",
        "sequences",
        "Running sequences of the class batch that are left out of steps, because gateways are overloaded.",
    ),
    of_replica(
        "max_running_sequences", "max_sequences", "sequences", "The most sequences that may run at a time."
    ),
    of_replica("max_batch_tokens", "max_batch_tokens", "tokens", "The most tokens of a step."),
    of_replica("context_tokens", "num_context_tokens", "tokens", "Tokens of KV of running sequences."),
    of_replica(
        "backlog_tokens", "num_backlog_tokens", "tokens", "Prompt tokens that are accepted and not computed."
    ),
    of_replica("batch_size", "", "sequences", "Sequences of a step.", buckets=BATCH_SIZE),
    of_replica("steps_total", "num_steps", "steps", "Engine steps."),
    of_replica(
        "computed_tokens_total",
        "num_computed_tokens",
        "tokens",
        "Prompt tokens, and inputs of decode steps, that went through the model.",
    ),
    of_replica("sampled_tokens_total", "num_sampled_tokens", "tokens", "Tokens that were sampled."),
    of_replica(
        "prefill_tokens_per_second",
        "prefill_tok_s",
        "tokens/s",
        "Rate of prompt tokens during prefill; 0: none yet.",
    ),
    of_replica(
        "decode_step_seconds",
        "decode_step_s",
        "seconds",
        "Duration of a step without prefill; 0: none yet.",
    ),
    of_replica(
        "prefill_token_seconds",
        "prefill_token_s",
        "seconds",
        "What a token of a chunk takes, attention excluded, fitted to the steps; 0: not known yet.",
    ),
    of_replica(
        "attention_token_seconds",
        "attention_token_s",
        "seconds",
        "What attention of a token of a chunk to one before it takes; 0: nothing, or not known yet.",
    ),
    of_replica(
        "decode_base_seconds",
        "decode_base_s",
        "seconds",
        "What a step of decodes takes whatever its size, fitted to the steps; 0: not known yet.",
    ),
    of_replica(
        "decode_sequence_seconds",
        "decode_sequence_s",
        "seconds",
        "What a sequence adds to a step of decodes; 0: nothing, or not known yet.",
    ),
    of_replica(
        "decode_context_seconds",
        "decode_context_s",
        "seconds",
        "What a token of context adds to a step of decodes; 0: nothing, or not known yet.",
    ),
    of_replica("busy_seconds_total", "busy_s", "seconds", "Time in which the replica computed."),
    of_replica(
        "stalled_seconds",
        "stalled_s",
        "seconds",
        "For how long no rank has progressed with a step that is out; 0: they progress, or nothing is out.",
    ),
    of_replica("flops_total", "num_flops", "operations", "Minimum arithmetic of the steps."),
    of_replica(
        "device_read_bytes_total",
        "num_read_bytes",
        "bytes",
        "Minimum that the steps had to read from device memory.",
    ),
    of_replica(
        "peak_flops_per_second",
        "peak_flop_s",
        "operations/s",
        "Arithmetic measured at start by a matrix product, all ranks together.",
    ),
    of_replica(
        "peak_read_bytes_per_second",
        "peak_byte_s",
        "bytes/s",
        "Bandwidth measured at start by reading memory, all ranks together.",
    ),
    of_replica("mfu_ratio", "mfu", "", "Achieved share of the measured arithmetic, while steps run (MFU)."),
    of_replica("mbu_ratio", "mbu", "", "Achieved share of the measured bandwidth, while steps run (MBU)."),
    of_replica(
        "device_memory_used_bytes",
        "",
        "bytes",
        "Memory in use on the rank's GPU, by any process; on a CPU the memory of the rank's process.",
        by="rank",
    ),
    of_replica("device_memory_total_bytes", "", "bytes", "Memory of that GPU, or of the host.", by="rank"),
    of_replica(
        "replica_load_seconds",
        "",
        "seconds",
        "Time in which the rank formed groups, loaded its weights and allocated KV.",
        by="rank",
    ),
    of_replica(
        "replica_warm_up_seconds",
        "",
        "seconds",
        "Time in which the rank then warmed up, until it was ready.",
        by="rank",
    ),
    of_replica(
        "start_phase_seconds",
        "start_phase_s",
        "seconds",
        "Time of each phase of the start of the rank that took longest, from the begin of its process.",
        by="phase",
    ),
    of_replica(
        "start_kernels_seconds",
        "kernels_s",
        "seconds",
        "Time in which kernels were compiled beside these phases; 0: none were.",
    ),
    of_replica("preemptions_total", "num_preemptions", "sequences", "Sequences that were preempted."),
    of_replica(
        "replica_role",
        "",
        "",
        "1 for the replica's current role, which differs from its pool's while it is lent.",
        by="role",
    ),
    of_replica(
        "migrated_streams_total", "num_moved_streams", "streams", "Streams that moved to another replica."
    ),
    of_replica(
        "failed_migrations_total",
        "num_failed_moves",
        "streams",
        "Streams whose move failed: they stayed or were placed again.",
    ),
    of_replica(
        "expert_imbalance_ratio",
        "",
        "",
        "Tokens of a layer's busiest expert over those of its mean expert, in the last minute.",
        why_empty=NEEDS_EXPERTS,
    ),
    of_replica(
        "expert_rank_imbalance_ratio",
        "",
        "",
        "Tokens of a layer's busiest rank over those of its mean rank, in the last minute; 1: all ranks "
        "have the same experts.",
        why_empty=NEEDS_EXPERTS,
    ),
    of_replica(
        "expert_uncopied_imbalance_ratio",
        "",
        "",
        "Tokens of a layer's busiest rank over those of its mean rank, in the last minute, as they would be "
        "without copies of experts.",
        why_empty=NEEDS_EXPERTS,
    ),
    of_replica(
        "expert_copies",
        "",
        "copies",
        "Copies of experts of all layers that share the tokens of their originals.",
        why_empty=NEEDS_EXPERTS,
    ),
    of_replica(
        "hottest_expert_ratio",
        "",
        "",
        "Largest share of a layer's tokens that one expert had in the last minute.",
        why_empty=NEEDS_EXPERTS,
    ),
    of_replica(
        "idle_experts",
        "",
        "experts",
        "Experts of all layers that had no token in the last minute.",
        why_empty=NEEDS_EXPERTS,
    ),
)

KV = (
    of_replica("kv_blocks", "num_total_blocks", "blocks", "All KV blocks."),
    of_replica(
        "kv_tokens",
        "",
        "tokens",
        "KV capacity: `engine.kv_tokens`, or what was decided at the start where that is `auto`.",
    ),
    of_replica(
        "free_blocks", "num_free_blocks", "blocks", "Blocks that can be allocated, cached ones included."
    ),
    of_replica("cached_blocks", "num_cached_blocks", "blocks", "Free blocks that hold a finished prefix."),
    of_replica("kv_usage_ratio", "", "", "Share of the blocks that requests hold."),
    of_replica(
        "kv_fragmentation_ratio",
        "",
        "",
        "Share of the running sequences' blocks that holds no token yet; part of it is reserved "
        "for prompts that are being computed.",
    ),
    of_replica("landings", "num_landings", "landings", "Landings that are open or wait for free blocks."),
    of_replica(
        "quarantined_blocks",
        "num_quarantined_blocks",
        "blocks",
        "Blocks that a writer of an ended landing could still write.",
    ),
    of_replica(
        "leaked_blocks", "num_leaked_blocks", "blocks", "Blocks that are referenced although nothing runs."
    ),
    of_replica(
        "offloaded_blocks", "num_offloaded_blocks", "blocks", "Blocks of running sequences in host memory."
    ),
    of_replica(
        "layers_token_bytes",
        "layers_token_bytes",
        "bytes",
        "KV of a token in a group of layers (full, latent, window N), all ranks together.",
        by="layers",
    ),
    of_replica(
        "layers_sequence_bytes",
        "layers_sequence_bytes",
        "bytes",
        "The most that a sequence keeps in layers with a window or a recurrent state.",
        by="layers",
        why_empty=NEEDS_STATES,
    ),
    of_replica("layers_blocks", "num_layers_blocks", "blocks", "Blocks of a group of layers.", by="layers"),
    of_replica(
        "free_layers_blocks",
        "num_free_layers_blocks",
        "blocks",
        "Free blocks of a group of layers, cached ones included that nobody uses.",
        by="layers",
    ),
    of_replica(
        "cached_layers_blocks",
        "num_cached_layers_blocks",
        "blocks",
        "Cached blocks of a group of layers that nobody uses; of states, snapshots.",
        by="layers",
    ),
    of_replica(
        "snapshot_hits_total",
        "num_snapshot_hits",
        "prompts",
        "Prompts that began behind all their cached KV, where layers have windows or states.",
    ),
    of_replica(
        "snapshot_misses_total",
        "num_snapshot_misses",
        "prompts",
        "Prompts that could not, for want of the window or the state there.",
    ),
    of_replica(
        "recomputed_tokens_total",
        "num_recomputed_tokens",
        "tokens",
        "Tokens of these with cached KV that were computed again.",
    ),
    of_replica(
        "evicted_snapshot_tokens_total",
        "num_evicted_snapshot_tokens",
        "tokens",
        "Of these, tokens up to a snapshot that was evicted before it was used.",
    ),
    of_replica(
        "prefix_queried_tokens_total",
        "num_queried_tokens",
        "tokens",
        "Tokens of computed prompts that could have been cached.",
    ),
    of_replica(
        "prefix_hit_tokens_total",
        "num_hit_tokens",
        "tokens",
        "Tokens of computed prompts that were cached, by the tier that held them.",
        by="tier",
    ),
    of_replica(
        "loaded_tokens_total",
        "num_loaded_tokens",
        "tokens",
        "Tokens whose KV was loaded from the store instead of computed.",
        by="tier",
        why_empty=NEEDS_STORED_PROMPT,
    ),
    of_replica(
        "load_tokens_per_second",
        "load_tok_s",
        "tokens/s",
        "Rate at which KV is loaded from a tier of the store.",
        by="tier",
        why_empty=NEEDS_STORED_PROMPT,
    ),
    of_replica(
        "announced_prompts_total",
        "num_announced_prompts",
        "requests",
        "Requests that were announced while they waited in a gateway, to a replica with a store.",
    ),
    of_replica(
        "announced_blocks_total",
        "num_announced_blocks",
        "blocks",
        "Blocks loaded from the store for announced requests before they came.",
    ),
    of_replica(
        "stored_blocks_total", "num_stored_blocks", "blocks", "Blocks written through to the node's store."
    ),
    of_replica(
        "stored_states_total",
        "num_stored_states",
        "states",
        "Recurrent states written through to the node's store.",
    ),
    of_replica(
        "unstored_blocks_total",
        "num_unstored_blocks",
        "blocks",
        "Finished blocks that were not written to the store.",
        by="cause",
        why_empty=NEEDS_FULL_STORE,
    ),
    of_replica(
        "store_read_failures_total",
        "num_store_checksum_failures",
        "records",
        "Records of the store that failed their checksum when this replica read them.",
    ),
)

TRANSFER = (
    of_replica(
        "transfer_bytes_total",
        "num_transport_bytes",
        "bytes",
        "KV written to other replicas.",
        by="transport",
        why_empty=NEEDS_HAND_OVER,
    ),
    of_replica(
        "transfer_seconds_total",
        "transport_s",
        "seconds",
        "Time spent writing KV, summed over pushes of each rank.",
        by="transport",
        why_empty=NEEDS_HAND_OVER,
    ),
    of_replica(
        "transfer_bytes_per_second", "transfer_gb_s", "bytes/s", "Rate of recent pushes; 0: none.", scale=GB
    ),
    of_replica(
        "moved_bytes_total",
        "num_moved_bytes",
        "bytes",
        "KV written to other replicas, by traffic class.",
        by="class",
        why_empty=NEEDS_HAND_OVER,
    ),
    of_path(
        "path_bytes_per_second",
        "",
        "bytes/s",
        "Measured rate of a path between ranks; 0: the path is lost, or there is none (transport none).",
        why_empty=NEEDS_PAIR,
    ),
    of_path(
        "path_latency_seconds",
        "",
        "seconds",
        "Measured latency of a path between ranks.",
        why_empty=NEEDS_PAIR,
    ),
    of_replica(
        "lost_landings_total",
        "num_lost_landings",
        "landings",
        "Landings that ended without hand-over.",
        by="cause",
        why_empty=NEEDS_FAULT,
    ),
    of_replica(
        "checksum_failures_total",
        "num_checksum_failures",
        "pieces",
        "KV pieces that failed their checksum and were recomputed.",
    ),
)

STORES = (
    of_tier("store_bytes", "num_bytes", "bytes", "Bytes in the tier, headers and padding included."),
    of_tier("store_capacity_bytes", "capacity_bytes", "bytes", "Capacity of the tier."),
    of_tier("store_records", "num_records", "records", "Records in the tier."),
    of_tier("store_queued", "num_queued", "records", "Records that wait to be written to the tier."),
    of_tier("store_leases", "num_leases", "records", "Records that are being read."),
    of_tier("store_quarantined", "num_quarantined", "records", "Slots that some process could still write."),
    of_tier(
        "store_read_bytes_per_second", "read_gb_s", "bytes/s", "Measured rate of recent reads.", scale=GB
    ),
    of_tier(
        "store_write_bytes_per_second", "write_gb_s", "bytes/s", "Measured rate of recent writes.", scale=GB
    ),
    of_tier(
        "store_latency_seconds", "latency_s", "seconds", "Latency of one read (nvme), of one fetch (remote)."
    ),
    of_tier("store_hits_total", "num_hits", "blocks", "Requested blocks that the tier had."),
    of_tier("store_misses_total", "num_misses", "blocks", "Requested blocks that the tier did not have."),
    of_tier("store_hit_bytes_total", "num_hit_bytes", "bytes", "Bytes read from the tier."),
    of_tier("store_put_bytes_total", "num_put_bytes", "bytes", "Bytes put into the tier."),
    of_tier(
        "store_written_bytes_total",
        "num_written_bytes",
        "bytes",
        "Bytes written to the tier, rewrites included.",
    ),
    of_tier("store_evictions_total", "num_evictions", "records", "Records evicted to free space."),
    of_tier("store_refused_total", "num_refused", "records", "Records refused for lack of space."),
    of_tier(
        "store_checksum_failures_total",
        "num_checksum_failures",
        "records",
        "Records dropped for a wrong checksum.",
    ),
    of_tier("store_io_errors_total", "num_io_errors", "operations", "Reads and writes that failed."),
    of_node(
        "store_write_amplification",
        "",
        "",
        "Bytes written to NVMe over bytes put there.",
        why_empty=NEEDS_NVME,
    ),
    of_node("store_index_lookups_total", "num_lookups", "look-ups", "Look-ups in the index of all nodes."),
    of_node("store_index_late_total", "num_late", "look-ups", "Look-ups that exceeded their time budget."),
    of_node("store_index_errors_total", "num_errors", "look-ups", "Look-ups that failed."),
    of_node("store_index_announced_total", "num_announced", "records", "Records announced to the index."),
    of_node(
        "store_index_dropped_total",
        "num_dropped",
        "records",
        "Announcements dropped because the queue was full.",
    ),
    of_node(
        "store_index_rebuilds_total", "num_rebuilds", "times", "Times that all records were announced again."
    ),
    of_node("store_index_latency_seconds", "latency_s", "seconds", "Latency of one look-up."),
    of_node(
        "store_index_state", "", "", "1 for the current state (off, up, slow, down), else 0.", by="state"
    ),
)
