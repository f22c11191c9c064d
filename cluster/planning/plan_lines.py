"""Say what a plan rests on, a line a figure, each with its formula and numbers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from cluster.planning.plan import Plan, PlannedPool
from cluster.planning.planned_model import ITEM_BYTES
from cluster.planning.replica_rate import MISSES, ReplicaCapacity
from cluster.planning.step_times import StepTimes
from workers.model.kv_form import SCALE_BYTES
from workers.model.kv_groups import kv_groups


class PlanLine(NamedTuple):
    """A figure of a plan: `name` in its `group`, the value for people, and how it was computed."""

    group: str
    name: str
    value: str
    formula: str


def plan_lines(plan: Plan, rate: float, api_price: float | None = None) -> Iterator[PlanLine]:
    """Yield the lines of a plan at a rate of requests. `api_price` is that of a million tokens elsewhere."""
    yield from _model_lines(plan)
    yield from _device_lines(plan)
    for pool in plan.pools:
        yield from _pool_lines(plan, pool)
    yield from _cost_lines(plan, rate, api_price)


def _gb(num_bytes: float) -> str:
    return f"{num_bytes / 1e9:.2f} GB" if num_bytes >= 1e8 else f"{num_bytes / 1e6:.1f} MB"


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.1f} ms"


def _model_lines(plan: Plan) -> Iterator[PlanLine]:
    model, load = plan.model, plan.load
    config = model.shape
    form = "as stored" if model.form.keeps_stored else model.form.name
    yield PlanLine(
        "model", "weights", f"{_gb(model.weight_bytes)}, {form}", "sum of elements x bytes over tensors"
    )
    any_split = plan.pools[-1].capacity.split
    times = StepTimes(model, plan.profile, any_split)
    cells = config.kv_cells
    formula = (
        f"{cells.num_kinds} x {cells.num_layers} layers x {cells.num_cells} heads x {cells.width} x "
        f"{ITEM_BYTES} bytes"
    )
    if groups := kv_groups(config):
        formula = f"layers that see all tokens ({len(groups[0].layers)} of {config.num_layers})"
    elif model.kv_dtype != "auto":
        scales = SCALE_BYTES * len(cells.parts)
        sizes = f"{cells.num_kinds} x {cells.num_layers} x {cells.num_cells}"
        formula = f"{sizes} x ({cells.width} + {scales}) bytes"
    yield PlanLine("model", "KV of a token", f"{times.token_bytes / 1e3:.1f} kB", formula)
    sequence = load.input_tokens + load.output_tokens
    held = model.work.of([(sequence - 1, 1)], 1).read_bytes - model.work.read_weight_bytes(1)
    yield PlanLine(
        "model",
        "KV of a sequence",
        _gb(held),
        f"of {load.input_tokens} + {load.output_tokens} tokens, windows and states counted once",
    )


def _device_lines(plan: Plan) -> Iterator[PlanLine]:
    profile, work = plan.profile, plan.model.work
    yield PlanLine(
        "device",
        profile.name,
        f"{profile.read_gb_s:,.0f} GB/s, {profile.bf16_tflop_s:,.0f} TFLOP/s, {profile.memory_gb:g} GB",
        profile.source,
    )
    decoding = next(pool for pool in plan.pools if pool.capacity.role != "prefill")
    decode = decoding.served or decoding.capacity
    context = plan.load.mean_context
    one = work.of([(context - 1, 1)], 1)
    kv_bytes = one.read_bytes - work.read_weight_bytes(1)
    num_bytes = work.read_weight_bytes(decode.batch) + decode.batch * kv_bytes
    intensity = decode.batch * one.flops / num_bytes
    bound = "reading" if intensity < profile.ridge else "multiplying"
    yield PlanLine(
        "device",
        "a decode step is bound by",
        bound,
        f"{intensity:.0f} operations a byte at {decode.batch:.0f} sequences, ridge {profile.ridge:.0f}",
    )


def _pool_lines(plan: Plan, pool: PlannedPool) -> Iterator[PlanLine]:
    capacity, profile, load = pool.capacity, plan.profile, plan.load
    memory, group, split = capacity.memory, f"pool {capacity.role}", capacity.split
    yield PlanLine(
        group,
        "replicas",
        f"{pool.num_replicas} x {split.num_devices} {profile.name} ({split.name})",
        f"each holds {capacity.rate:.2f} requests/s, bound by {capacity.bound}",
    )
    yield PlanLine(
        group,
        "memory of a device",
        f"{_gb(memory.weights)} weights, {_gb(memory.activations)} activations, {_gb(memory.kv_bytes)} KV",
        f"KV = {_gb(memory.allowed)} (0.9 x memory) - weights - activations - {_gb(memory.context)} context",
    )
    yield PlanLine(
        group,
        "KV of a replica",
        f"{memory.kv_tokens:,} tokens",
        f"{_gb(memory.kv_bytes)} / {memory.token_bytes / 1e3:.1f} kB a token on the fullest device",
    )
    served = pool.served or capacity
    if capacity.role != "decode":
        yield from _prefill_lines(plan, served, group)
    if capacity.role != "prefill":
        others = "" if not served.busy else f" / (1 - {served.busy:.2f} busy with prompts)"
        step_s = StepTimes(plan.model, profile, split).decode_s(served.batch, load.mean_context)
        yield PlanLine(
            group,
            "time of a token (90 %)",
            _ms(served.tpot_s),
            f"a step of {served.batch:.0f} sequences with {load.mean_context:.0f} tokens takes "
            f"{_ms(step_s)}{others}",
        )
        yield PlanLine(
            group,
            "sequences at a time",
            f"{served.mean_batch:.0f}, {served.batch:.0f} in 90 % of moments",
            f"{served.rate:.2f}/s x {load.output_tokens} tokens x time of a step; + 1.28 deviations",
        )


def _prefill_lines(plan: Plan, served: ReplicaCapacity, group: str) -> Iterator[PlanLine]:
    yield PlanLine(
        group,
        "time of a prompt",
        _ms(served.prefill_s),
        f"{plan.load.input_tokens} tokens: max(operations / "
        f"({plan.profile.products_efficiency:g} x rate), weights / ({plan.profile.weights_efficiency:g} x "
        "bandwidth)) + launches and sums",
    )
    beside = " + hand-over of the last chunk" if served.role == "prefill" else " + steps of decodes between"
    yield PlanLine(
        group,
        "first token (90 %)",
        _ms(served.ttft_s),
        f"prompt{beside} + wait that {MISSES:.0%} exceed (Pollaczek-Khinchine, exponential tail)",
    )


def _cost_lines(plan: Plan, rate: float, api_price: float | None) -> Iterator[PlanLine]:
    yield PlanLine(
        "cluster",
        "devices",
        f"{plan.num_devices} {plan.profile.name}",
        " + ".join(f"{it.num_replicas} x {it.capacity.split.num_devices}" for it in plan.pools),
    )
    yield PlanLine(
        "cluster",
        "requests a second",
        f"{plan.rate:.2f} within the objectives",
        f"the least of its pools; asked: {rate:.2f}, which is {rate / plan.rate:.0%} of it",
    )
    if len(plan.pools) > 1:
        prefill, decode = plan.pools
        yield PlanLine(
            "cluster",
            "prefill to decode",
            f"{prefill.num_devices} : {decode.num_devices} devices",
            f"{rate:.2f} / {prefill.capacity.rate:.2f} and {rate:.2f} / {decode.capacity.rate:.2f} replicas, "
            "rounded up",
        )
    cost = plan.cost_per_million(rate)
    if cost is None:
        return
    tokens = plan.load.input_tokens + plan.load.output_tokens
    yield PlanLine(
        "cost",
        "a million tokens",
        f"{cost:.3f}",
        f"{plan.price_per_hour:.2f} an hour / (3600 x {rate:.2f} x {tokens} tokens), prompts and answers",
    )
    if api_price is not None:
        least = plan.cost_per_million(plan.rate)
        assert least is not None
        even = least / api_price
        value = f"{even:.0%} of what the plan holds" if even <= 1 else "never: the API is cheaper"
        yield PlanLine(
            "cost",
            f"as cheap as {api_price:g} a million",
            value,
            f"{least:.3f} a million at {plan.rate:.2f} requests/s / {api_price:g}",
        )
