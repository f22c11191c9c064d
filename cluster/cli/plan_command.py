"""`tandem plan`: how many devices a model needs for a rate of requests, or what given devices hold."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape

from cluster.cli.terminal import AsJson, die, made_table, out
from cluster.errors import ConfigError
from cluster.planning.device_profile import DeviceProfile, device_profile, read_profile
from cluster.planning.plan import ClusterPlanner, Plan
from cluster.planning.plan_lines import plan_lines
from cluster.planning.planned_model import planned_model
from cluster.planning.recommended_config import chart_values, cluster_file
from cluster.planning.replica_rate import PlannedLoad
from workers.errors import CheckpointError

_PRECISIONS = ("auto", "bf16", "fp8", "int8", "int4")
_KV_DTYPES = ("auto", "int8", "fp8")


def plan(
    model: Annotated[
        str,
        typer.Option(help="Folder, GGUF file or config.json, or the name of a published shape: qwen3-8b."),
    ],
    gpu: Annotated[str, typer.Option(help="Devices to choose from, as H100 or H100,L40S.")] = "H100",
    hardware: Annotated[
        Path | None, typer.Option(help="A JSON file that describes another device; in place of --gpu.")
    ] = None,
    rate: Annotated[float | None, typer.Option(min=1e-6, help="Requests a second to hold.")] = None,
    devices: Annotated[
        int | None, typer.Option(min=1, help="What so many devices hold, in place of --rate.")
    ] = None,
    input_tokens: Annotated[int, typer.Option("--input", min=1, help="Mean tokens of a prompt.")] = 1024,
    output_tokens: Annotated[int, typer.Option("--output", min=1, help="Mean tokens of an answer.")] = 256,
    slo_ttft_ms: Annotated[
        float, typer.Option(min=0.1, help="First token of nine of ten requests.")
    ] = 1000.0,
    slo_tpot_ms: Annotated[
        float, typer.Option(min=0.1, help="Each further token of nine of ten requests.")
    ] = 50.0,
    precision: Annotated[str, typer.Option(help=f"Of weights: {', '.join(_PRECISIONS)}.")] = "auto",
    kv_dtype: Annotated[str, typer.Option(help=f"Of keys and values: {', '.join(_KV_DTYPES)}.")] = "auto",
    price_per_hour: Annotated[str, typer.Option(help="Of a device: 2.5, or H100=2.5,L40S=0.9.")] = "",
    api_price: Annotated[
        float | None, typer.Option(min=1e-9, help="Of a million tokens at an API, to compare with.")
    ] = None,
    explain: Annotated[bool, typer.Option("--explain", help="Show how each figure is computed.")] = False,
    out_file: Annotated[Path | None, typer.Option("--out", help="Write the cluster's file there.")] = None,
    as_json: AsJson = False,
) -> None:
    """Plan a cluster: devices, split, replicas of each role, and cost.

    Nothing is started, and no device is needed. Steps are predicted from their bytes and operations, with
    what an H100 reached of its limits.
    """
    if (rate is None) == (devices is None):
        raise typer.BadParameter("give either --rate or --devices", param_hint="--rate")
    for name, value, known in (("--precision", precision, _PRECISIONS), ("--kv-dtype", kv_dtype, _KV_DTYPES)):
        if value not in known:
            raise typer.BadParameter(f"{value} is none of {', '.join(known)}", param_hint=name)
    load = PlannedLoad(input_tokens, output_tokens, slo_ttft_ms / 1e3, slo_tpot_ms / 1e3)
    try:
        profiles = [read_profile(hardware)] if hardware is not None else _profiles(gpu)
        prices = _prices(price_per_hour, profiles)
        planned = planned_model(model, precision, kv_dtype)
        load.check(planned.shape.max_context_tokens)
        planner = ClusterPlanner(planned, profiles, load, prices)
        plans = planner.for_rate(rate) if rate is not None else planner.for_devices(devices or 1)
        if out_file is not None:
            _write(out_file, plans[0])
    except (ConfigError, CheckpointError) as error:
        die(str(error))
    if as_json:
        print(json.dumps(_record(plans, rate, api_price)))
        return
    _show(plans, rate, api_price, explain=explain)
    if out_file is None:
        print("\n# cluster.yaml" + _about_model(plans[0]))
        print(cluster_file(plans[0]), end="")
        print("\n# values.yaml of the chart")
        print(chart_values(plans[0]), end="")


def _profiles(names: str) -> list[DeviceProfile]:
    return [device_profile(name.strip()) for name in names.split(",")]


def _prices(text: str, profiles: Sequence[DeviceProfile]) -> dict[str, float]:
    """Parse `2.5` or `H100=2.5,L40S=0.9`. Raises `ConfigError` for another form, and where one is missing."""
    prices: dict[str, float] = {}
    for entry in filter(None, text.split(",")):
        name, separator, number = entry.rpartition("=")
        try:
            price = float(number)
        except ValueError:
            price = -1.0
        if not 0 < price < float("inf"):
            raise ConfigError(f"--price-per-hour {entry}: no number above 0")
        if not separator and len(profiles) > 1:
            raise ConfigError(f"--price-per-hour {entry}: name the device of each price, as H100={entry}")
        prices[device_profile(name).name if separator else profiles[0].name] = price
    if prices and (missing := [it.name for it in profiles if it.name not in prices]):
        raise ConfigError(f"--price-per-hour: has no price of {', '.join(missing)}")
    return prices


def _write(file: Path, best: Plan) -> None:
    try:
        file.write_text(cluster_file(best), encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--out {file}: {error.strerror}") from error


def _about_model(best: Plan) -> str:
    return "" if best.model.has_files else " (the model was planned by its shape: name its folder)"


def _record(plans: list[Plan], rate: float | None, api_price: float | None) -> dict[str, Any]:
    """Return what `--json` prints."""
    return {
        "plans": [
            {
                "device": plan.profile.name,
                "num_devices": plan.num_devices,
                "disaggregated": plan.is_disaggregated,
                "rate": round(plan.rate, 4),
                "price_per_hour": plan.price_per_hour,
                "cost_per_million_tokens": plan.cost_per_million(rate or plan.rate),
                "pools": [
                    {
                        "role": pool.capacity.role,
                        "replicas": pool.num_replicas,
                        **pool.capacity.split._asdict(),
                        "rate_of_replica": round(pool.capacity.rate, 4),
                        "bound": pool.capacity.bound,
                        "kv_tokens": pool.capacity.memory.kv_tokens,
                        "weight_bytes": pool.capacity.memory.weights,
                        "activation_bytes": pool.capacity.memory.activations,
                        "batch": round(pool.capacity.batch, 1),
                        "ttft_ms": round(1e3 * (pool.served or pool.capacity).ttft_s, 2),
                        "tpot_ms": round(1e3 * (pool.served or pool.capacity).tpot_s, 2),
                    }
                    for pool in plan.pools
                ],
                "lines": [line._asdict() for line in plan_lines(plan, rate or plan.rate, api_price)],
                "cluster_yaml": cluster_file(plan),
                "values_yaml": chart_values(plan),
            }
            for plan in plans
        ]
    }


def _show(plans: list[Plan], rate: float | None, api_price: float | None, *, explain: bool) -> None:
    """Print the best plan line by line, and the others beside it."""
    best = plans[0]
    columns = ["", "", "", *(["how"] if explain else [])]
    table = made_table(f"plan for {escape(best.model.source)}", *columns)
    group = ""
    for line in plan_lines(best, rate or best.rate, api_price):
        shown = "" if line.group == group else line.group
        group = line.group
        cells = [shown, line.name, line.value, *([line.formula] if explain else [])]
        table.add_row(*map(escape, cells))
    out.print(table)
    if len(plans) > 1:
        others = made_table("beside others", "devices", "pools", numbers=["requests/s", "an hour"])
        for plan in plans:
            pools = ", ".join(
                f"{it.num_replicas} {it.capacity.role} ({it.capacity.split.name})" for it in plan.pools
            )
            price = "-" if plan.price_per_hour is None else f"{plan.price_per_hour:.2f}"
            others.add_row(f"{plan.num_devices} {plan.profile.name}", pools, f"{plan.rate:.2f}", price)
        out.print(others)
