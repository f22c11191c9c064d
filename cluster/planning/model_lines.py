"""The lines of a plan about its model and its devices: weights, KV, and what bounds steps."""

from __future__ import annotations

from collections.abc import Iterator

from cluster.planning.plan import Plan, PlannedPool
from cluster.planning.plan_line import PlanLine, gb
from cluster.planning.planned_model import ITEM_BYTES, PlannedModel
from cluster.planning.step_times import StepTimes
from kvtransfer.messages import STATE_ITEM_BYTES, KvGroup
from workers.model.kv_form import SCALE_BYTES
from workers.model.kv_groups import kv_groups
from workers.model.quantization.weight_form import WeightForm

_PRECISIONS = ("bf16", "fp8", "int8", "int4")


def model_lines(plan: Plan) -> Iterator[PlanLine]:
    """Yield the lines about the weights, and the KV of a token and of a sequence."""
    model, load = plan.model, plan.load
    if plan.refusal:
        how = "planned by its sizes" if model.refusal else "planned as if it did"
        yield PlanLine("model", "the engine does not start it", plan.refusal, how)
    form = "as stored" if model.form.keeps_stored else model.form.name
    yield PlanLine("model", "weights", f"{gb(model.weight_bytes)}, {form}", _weights_formula(model))
    yield PlanLine("model", "by precision", ", ".join(_by_precision(model)), "each tensor in that form")
    times = StepTimes(model, plan.profile, plan.pools[-1].capacity.split)
    yield PlanLine("model", "KV of a token", f"{times.token_bytes / 1e3:.1f} kB", _kv_formula(model))
    for group in kv_groups(model.shape)[1:]:
        yield _group_line(model, group)
    sequence = load.input_tokens + load.output_tokens
    held = model.work.of([(sequence - 1, 1)], 1).read_bytes - model.work.read_weight_bytes(1)
    yield PlanLine(
        "model",
        "KV of a sequence",
        gb(held),
        f"of {load.input_tokens} + {load.output_tokens} tokens, windows and states counted once",
    )


def _weights_formula(model: PlannedModel) -> str:
    mean = model.weights.mean_bytes(model.everything, ITEM_BYTES, model.form)
    parts = [f"layers {mean.layers:.3g}", f"head {mean.head:.3g}"]
    if model.shape.mixture is not None:
        parts.insert(1, f"experts {mean.experts:.3g}")
    return f"sum of elements x bytes over tensors; bytes a weight: {', '.join(parts)}"


def _by_precision(model: PlannedModel) -> Iterator[str]:
    for name in _PRECISIONS:
        yield f"{name} {gb(model._replace(form=WeightForm(name)).weight_bytes)}"


def _kv_formula(model: PlannedModel) -> str:
    groups = kv_groups(model.shape)
    num_layers = len(groups[0].layers) if groups else model.shape.kv_cells.num_layers
    cells = model.shape.kv_cells
    if model.kv_dtype != "auto":
        scales = SCALE_BYTES * len(cells.parts)
        return f"{cells.num_kinds} x {num_layers} x {cells.num_cells} x ({cells.width} + {scales}) bytes"
    what = f"{num_layers} layers" if not groups else f"{num_layers} layers that see all tokens"
    return f"{cells.num_kinds} x {what} x {cells.num_cells} heads x {cells.width} x {ITEM_BYTES} bytes"


def _group_line(model: PlannedModel, group: KvGroup) -> PlanLine:
    """Return the KV of a sequence in layers with a window or a state."""
    cells, num_layers = model.shape.kv_cells, len(group.layers)
    if group.state_size:
        num_heads = model.shape.num_kv_heads
        return PlanLine(
            "model",
            "state of a sequence",
            gb(num_layers * num_heads * group.state_size * STATE_ITEM_BYTES),
            f"{num_layers} layers x {num_heads} heads x {group.state_size} x {STATE_ITEM_BYTES} bytes",
        )
    each = cells.width * ITEM_BYTES
    if model.kv_dtype != "auto":
        each = cells.width + SCALE_BYTES * len(cells.parts)
    return PlanLine(
        "model",
        f"KV in a window of {group.window:,}",
        gb(cells.num_kinds * num_layers * cells.num_cells * each * group.window),
        f"{cells.num_kinds} x {num_layers} layers x {cells.num_cells} heads x {each} bytes x {group.window}",
    )


def device_lines(plan: Plan) -> Iterator[PlanLine]:
    """Yield the lines about each kind of device, and what bounds its steps."""
    seen: set[str] = set()
    for pool in plan.pools:
        profile = pool.profile
        if profile.name not in seen:
            seen.add(profile.name)
            rates = f"{profile.read_gb_s:,.0f} GB/s, {profile.bf16_tflop_s:,.0f} TFLOP/s"
            value = f"{rates}, {profile.memory_gb:g} GB"
            yield PlanLine("device", profile.name, value, profile.source)
    prefill, decode = plan.pools[0], plan.pools[-1]
    yield _intensity_line(plan, decode)
    yield _multiplying_line(plan, decode)
    yield _prompt_line(plan, prefill)


def _ridge(plan: Plan, pool: PlannedPool) -> float:
    """Return the operations for each byte read above which multiplying takes longer than reading."""
    flop_s = pool.profile.flop_s(plan.model.product_precision(pool.profile.kind))
    return flop_s / (1e9 * pool.profile.read_gb_s)


def _intensity_line(plan: Plan, pool: PlannedPool) -> PlanLine:
    served, work = pool.served or pool.capacity, plan.model.work
    one = work.of([(plan.load.mean_context - 1, 1)], 1)
    kv_bytes = one.read_bytes - work.read_weight_bytes(1)
    num_bytes = work.read_weight_bytes(served.batch) + served.batch * kv_bytes
    intensity, ridge = served.batch * one.flops / num_bytes, _ridge(plan, pool)
    return PlanLine(
        "device",
        "a decode step is bound by",
        "reading" if intensity < ridge else "multiplying",
        f"{intensity:.0f} operations a byte at {served.batch:.0f} sequences, ridge {ridge:.0f}",
    )


def _multiplying_line(plan: Plan, pool: PlannedPool) -> PlanLine:
    """Return from which batch on a decode step multiplies for longer than it reads."""
    work, ridge = plan.model.work, _ridge(plan, pool)
    one = work.of([(plan.load.mean_context - 1, 1)], 1)
    kv_bytes = one.read_bytes - work.read_weight_bytes(1)
    gained = one.flops - ridge * kv_bytes
    batch = ridge * work.weight_bytes / gained if gained > 0 else 0.0
    return PlanLine(
        "device",
        "decoding multiplies from",
        f"{batch:,.0f} sequences" if batch else "no batch on: each brings too much KV",
        f"batch x {one.flops / 1e9:.2f} GFLOP = ridge x ({gb(work.weight_bytes)} + batch x {gb(kv_bytes)})",
    )


def _prompt_line(plan: Plan, pool: PlannedPool) -> PlanLine:
    work, load, ridge = plan.model.work, plan.load, _ridge(plan, pool)
    chunk = min(load.computed_tokens, StepTimes(plan.model, pool.profile, pool.capacity.split).chunk_tokens)
    of_chunk = work.of([(load.cached_tokens, chunk)], 1)
    intensity = of_chunk.flops / of_chunk.read_bytes
    return PlanLine(
        "device",
        "a prompt's chunk is bound by",
        "reading" if intensity < ridge else "multiplying",
        f"{of_chunk.flops / 1e9:,.0f} GFLOP / {gb(of_chunk.read_bytes)} = {intensity:,.0f} operations a byte "
        f"in {chunk} tokens, ridge {ridge:.0f}",
    )
