"""The lines of a plan about a pool: replicas, memory, and times."""

from __future__ import annotations

from collections.abc import Iterator

from cluster.planning.plan import Plan, PlannedPool
from cluster.planning.plan_line import PlanLine, gb, ms
from cluster.planning.replica_rate import MAX_SEQUENCES, MISSES, ReplicaCapacity
from cluster.planning.step_times import StepTimes
from workers.model.kv_groups import kv_groups


def pool_lines(plan: Plan, pool: PlannedPool) -> Iterator[PlanLine]:
    """Yield the lines of a pool of the plan."""
    capacity, profile = pool.capacity, pool.profile
    group, split = f"pool {capacity.role}", capacity.split
    yield PlanLine(
        group,
        "replicas",
        f"{pool.num_replicas} x {split.num_devices} {profile.name} ({split.name})",
        f"each holds {capacity.rate:.2f} requests/s, bound by {capacity.bound}",
    )
    yield from _memory_lines(plan, pool, group)
    served = pool.served or capacity
    if capacity.role != "decode":
        yield from _prefill_lines(plan, pool, served, group)
    if capacity.role != "prefill":
        yield from _decode_lines(plan, pool, served, group)


def _memory_lines(plan: Plan, pool: PlannedPool, group: str) -> Iterator[PlanLine]:
    memory, load = pool.capacity.memory, plan.load
    yield PlanLine(
        group,
        "memory of a device",
        f"{gb(memory.weights)} weights, {gb(memory.activations)} activations, {gb(memory.staging)} staging, "
        f"{gb(memory.kv_bytes)} KV",
        f"KV = {gb(memory.allowed)} (0.9 x memory) - weights - activations - staging - "
        f"{gb(memory.context)} {'context' if pool.profile.kind == 'cuda' else 'processes and store'}",
    )
    if memory.host_bytes:
        yield PlanLine(
            group,
            "host memory of a device",
            f"{gb(memory.host_bytes)}, {memory.host_tokens:,} tokens of KV",
            "all experts, where the CPU computes some; KV beyond the device's (not yet validated on a card)",
        )
    yield PlanLine(
        group,
        "KV of a replica",
        f"{memory.all_tokens:,} tokens",
        f"{gb(memory.kv_bytes)} / {memory.token_bytes / 1e3:.1f} kB a token on the fullest device, at most "
        f"{MAX_SEQUENCES} contexts of the model{_about_windows(plan, pool)}",
    )
    sequence, context = load.input_tokens + load.output_tokens, plan.model.shape.max_context_tokens
    most = min(MAX_SEQUENCES, memory.all_tokens // sequence)
    yield PlanLine(
        group,
        "largest batch",
        f"{most:,} sequences of {sequence:,} tokens",
        f"{memory.all_tokens:,} / {sequence:,}, at most {MAX_SEQUENCES}",
    )
    yield PlanLine(
        group,
        "longest context",
        f"{min(context, memory.all_tokens):,} tokens",
        f"the lesser of the model's {context:,} and the KV of a replica, {memory.all_tokens:,}",
    )


def _about_windows(plan: Plan, pool: PlannedPool) -> str:
    """Say that windows save no memory between a GPU and a store."""
    has_windows = any(not group.state_size for group in kv_groups(plan.model.shape)[1:])
    return "; with a store all layers keep all tokens" if has_windows and pool.profile.kind == "cuda" else ""


def _decode_lines(plan: Plan, pool: PlannedPool, served: ReplicaCapacity, group: str) -> Iterator[PlanLine]:
    load, profile, split = plan.load, pool.profile, pool.capacity.split
    device_tokens = served.memory.kv_tokens if split.offload_tokens else float("inf")
    times = StepTimes(plan.model, profile, split, device_tokens)
    of_stage = max(1.0, served.batch / split.pp)
    parts = times.parts_of_step(of_stage, load.mean_context)
    host = f" + {ms(parts.host_experts_s)} experts of the CPU" if parts.host_experts_s else ""
    bus = f", while {ms(parts.host_kv_s)} of KV come over the bus" if parts.host_kv_s else ""
    yield PlanLine(
        group,
        "a decode step",
        ms(parts.total_s),
        f"{served.batch:.0f} sequences of {load.mean_context:.0f} tokens: (({ms(parts.read_s)} weights)^4 + "
        f"({ms(parts.product_s)} products)^4)^(1/4) + {ms(parts.kv_s)} KV + {ms(parts.sequences_s)} sampling "
        f"+ {ms(parts.beside_s)} launches and sums{host}{bus}",
    )
    others = ""
    if (chunk := served.chunk) is not None:
        beside = f"{chunk.num_tokens:.0f} tokens of prompts take {ms(chunk.step_s)}"
        others = f", and of the steps with prompts, {served.busy:.0%} of the time, those with {beside}"
    yield PlanLine(group, "time of a token (90 %)", ms(served.tpot_s), f"{ms(parts.total_s)}{others}")
    yield PlanLine(
        group,
        "sequences at a time",
        f"{served.mean_batch:.0f}, {served.batch:.0f} in 90 % of moments",
        f"{served.rate:.2f}/s x {load.output_tokens} tokens x time of a step; + 1.28 deviations",
    )


def _prefill_lines(plan: Plan, pool: PlannedPool, served: ReplicaCapacity, group: str) -> Iterator[PlanLine]:
    load, profile = plan.load, pool.profile
    cached = f", of which {load.cached_tokens} are cached" if load.cached_tokens else ""
    yield PlanLine(
        group,
        "time of a prompt",
        ms(served.prefill_s),
        f"{load.input_tokens} tokens{cached}: max(operations / ({profile.products_efficiency:g} x rate), "
        f"weights / ({profile.weights_efficiency:g} x bandwidth)) + launches and sums",
    )
    beside = " + hand-over of the last chunk" if served.role == "prefill" else ""
    if (chunk := served.chunk) is not None:
        beside = f" x {ms(chunk.step_s)} for each {chunk.num_tokens:.0f} tokens"
    if load.load_s:
        beside += f" + {ms(load.load_s)} to load what is cached"
    yield PlanLine(
        group,
        "first token (90 %)",
        ms(served.ttft_s),
        f"prompt{beside} + wait that {MISSES:.0%} exceed (Pollaczek-Khinchine, exponential tail)",
    )
