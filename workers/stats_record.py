"""The statistics record of a replica: the one declaration of what a replica measures and counts."""

from __future__ import annotations

from kvtransfer.codec import Part
from kvtransfer.messages import ReplicaIdentity


class PathMeasure(Part, frozen=True):
    """One rank-to-rank path of a replica pair, as measured when it was joined. Without a `transport` no path
    leads to the peer, because of `instead_of`."""

    peer: ReplicaIdentity
    rank: int
    peer_rank: int
    transport: str
    gb_s: float
    latency_us: float
    device: str = ""
    instead_of: str = ""


class DeviceMemory(Part, frozen=True):
    """The memory of a rank's device: a GPU's memory, or on a CPU the rank's process and the host's memory."""

    used_bytes: int
    total_bytes: int


# Sequences of a step: the upper bounds of `num_steps_by_batch`, whose last entry counts larger ones.
BATCH_BOUNDS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)


class ReplicaStats(Part, frozen=True, kw_only=True):
    """The statistics of a replica, each declared here and nowhere else: messages, metrics
    (`cluster.metrics.definitions`), the status and the samples of the autoscaler read these fields by name.

    Counters are totals since the replica's start; rates are moving averages, 0 until they are known. New ones
    are appended: they are the last fields of a `LoadReport`, whose own fields come first.
    """

    # Sequences.
    num_running: int = 0
    num_waiting: int = 0
    # Running sequences left out of steps, because gateways have paused the class `batch`.
    num_paused: int = 0
    # The most sequences that may run, and the most tokens of a step.
    max_sequences: int = 0
    max_batch_tokens: int = 0
    # KV of the sequences that run.
    num_context_tokens: int = 0
    # Prompt tokens accepted and not yet computed, cached ones excluded.
    num_backlog_tokens: int = 0
    num_preemptions: int = 0
    # Streams moved to other replicas while they ran, and those that stayed because their move failed.
    num_moved_streams: int = 0
    num_failed_moves: int = 0

    # KV blocks. Free ones include cached blocks that nobody uses; leaked ones are referenced by nothing
    # known.
    num_total_blocks: int = 0
    num_free_blocks: int = 0
    num_cached_blocks: int = 0
    num_quarantined_blocks: int = 0
    num_leaked_blocks: int = 0
    # Blocks of running sequences that are in host memory now.
    num_offloaded_blocks: int = 0
    # KV slots that running sequences hold and that contain no token yet.
    num_unfilled_tokens: int = 0

    # Steps. Computed tokens are the tokens of prompts and the inputs of decode steps.
    num_steps: int = 0
    num_computed_tokens: int = 0
    num_sampled_tokens: int = 0
    # Steps by number of sequences, in buckets with the upper bounds `BATCH_BOUNDS`.
    num_steps_by_batch: tuple[int, ...] = ()
    # Sequences, summed over all steps.
    num_batched_sequences: int = 0
    prefill_tok_s: float = 0.0
    decode_step_s: float = 0.0
    # The costs of a chunk and of a step of decodes, as told in `workers.scheduler.step_costs`.
    prefill_token_s: float = 0.0
    attention_token_s: float = 0.0
    decode_base_s: float = 0.0
    decode_sequence_s: float = 0.0
    decode_context_s: float = 0.0
    # Time in which a stage computed, the mean over the stages.
    busy_s: float = 0.0
    # The time for which no rank has progressed with the oldest step that is out, beyond the time that the
    # largest piece of a step may take; 0: ranks progress, or no step is out. Reports keep coming in that
    # time, so that a slow replica is told from a stopped one.
    stalled_s: float = 0.0
    # The least arithmetic, and the least device memory reads, that the steps needed (`workers.model.sizes`).
    num_flops: float = 0.0
    num_read_bytes: float = 0.0
    # Measured at start, all ranks together; 0: not measured.
    peak_flop_s: float = 0.0
    peak_byte_s: float = 0.0
    # Shares of the two peaks that recent steps achieved while they ran.
    mfu: float = 0.0
    mbu: float = 0.0
    # The time that each rank loaded, and then ran its first steps, until it was ready.
    load_s: tuple[float, ...] = ()
    warm_up_s: tuple[float, ...] = ()
    # The attention backend, as chosen by measurement at start; of several ranks the backends that differ.
    backend: str = ""
    # The memory of each rank's device, a few seconds old; () until all ranks have reported.
    memory: tuple[DeviceMemory, ...] = ()

    # Prefix cache. Queried tokens are those of computed prompts that could have been cached.
    num_queried_tokens: int = 0
    # Queried tokens that were cached, by tier ("device", "dram", "nvme", "remote").
    num_hit_tokens: dict[str, int] = {}

    # Landings, the waiting ones included.
    num_landings: int = 0
    num_waiting_landings: int = 0
    # Landings that ended without hand-over, by cause (`kvtransfer.protocol.actions.Lost`).
    num_lost_landings: dict[str, int] = {}
    num_checksum_failures: int = 0
    # KV written to other replicas: the rate of recent pushes, bytes by traffic class, bytes and time by
    # transport.
    transfer_gb_s: float = 0.0
    num_moved_bytes: dict[str, int] = {}
    num_transport_bytes: dict[str, int] = {}
    transport_s: dict[str, float] = {}
    paths: tuple[PathMeasure, ...] = ()

    # The node's store. Rates and loaded tokens by tier.
    load_tok_s: dict[str, float] = {}
    num_loaded_tokens: dict[str, int] = {}
    # Prompts that gateways announced while their requests waited there, and blocks that were loaded for them
    # before the requests came.
    num_announced_prompts: int = 0
    num_announced_blocks: int = 0
    # Blocks written through to the host tier, and finished blocks that were not, by cause ("queue",
    # "refused", "failed").
    num_stored_blocks: int = 0
    num_unstored_blocks: dict[str, int] = {}
    # Records that failed their checksum when they were read: their blocks were computed.
    num_store_checksum_failures: int = 0

    # Experts, by the tokens of the last minute; 0 without experts, and until there are enough tokens. The
    # load of a layer's busiest expert, and of its busiest rank, over that of the mean one, in the mean over
    # layers.
    expert_imbalance: float = 0.0
    expert_rank_imbalance: float = 0.0
    # Experts of all layers without tokens.
    num_idle_experts: int = 0
    # The expert with the largest share of its layer's tokens, and that share.
    hottest_expert_layer: int = 0
    hottest_expert: int = 0
    hottest_expert_share: float = 0.0
    # The imbalance of ranks as it would be without copies of experts, and the copies of all layers.
    expert_uncopied_imbalance: float = 0.0
    num_expert_copies: int = 0

    # Groups of layers by name: "full", "latent" (full, of one latent a token), "window N", "state". Bytes of
    # a token, of all ranks together, and the most that one sequence keeps, where this has a bound; and
    # blocks, as above.
    layers_token_bytes: dict[str, int] = {}
    layers_sequence_bytes: dict[str, int] = {}
    num_layers_blocks: dict[str, int] = {}
    num_free_layers_blocks: dict[str, int] = {}
    num_cached_layers_blocks: dict[str, int] = {}
    # Of models with windows or states, prompts that could begin behind all cached KV of theirs, and those
    # that could not; and the cached tokens of these that are computed again, for want of the window or the
    # state behind them.
    num_snapshot_hits: int = 0
    num_snapshot_misses: int = 0
    num_recomputed_tokens: int = 0
    # States written through to the host tier.
    num_stored_states: int = 0
    # Of the tokens that are computed again, those up to a snapshot that was evicted before it was used.
    num_evicted_snapshot_tokens: int = 0

    # The seconds of each phase of the start of the rank that took longest, from the begin of its process, and
    # of the compiler of kernels beside them.
    start_phase_s: dict[str, float] = {}
    kernels_s: float = 0.0

    # The time per output token that chunks of prompts leave to running sequences; 0: they are not limited.
    tpot_objective_s: float = 0.0
