"""`tandem plan`: how many devices a model needs for a rate of requests, or what given devices hold."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from cluster.cli.plan_output import PlanOutput
from cluster.cli.terminal import AsJson, die, err
from cluster.errors import ConfigError
from cluster.planning.device_profile import DeviceProfile, device_profile, read_profile
from cluster.planning.plan import ClusterPlanner, Plan
from cluster.planning.planned_model import PlannedModel, model_of_shape, planned_model
from cluster.planning.recommended_config import chart_values, cluster_file
from cluster.planning.replica_rate import PlannedLoad
from cluster.planning.store_tiers import NodeStorage, PrefixReuse
from cluster.planning.tier_sizer import plans_with_tiers
from cluster.simulation.plan_check import checked_plans
from workers.errors import CheckpointError

_PRECISIONS = ("auto", "bf16", "fp8", "int8", "int4")
_KV_DTYPES = ("auto", "int8", "fp8")
_LATENT_KVS = ("replicated", "split")
_MOST_PRICE = 1_000_000


Name = Annotated[
    str, typer.Option(help="Folder, GGUF file or config.json, or the name of a published shape: qwen3-8b.")
]
Shape = Annotated[
    str, typer.Option(help="Sizes of a model, as layers=32,hidden=4096,...; in place of --model.")
]
Hardware = Annotated[
    Path | None, typer.Option(help="A JSON file that describes another device; in place of --gpu.")
]
Rate = Annotated[float | None, typer.Option(min=1e-6, max=1e6, help="Requests a second to hold.")]
Devices = Annotated[
    int | None, typer.Option(min=1, max=10_000, help="What so many devices hold, in place of --rate.")
]
HitRate = Annotated[
    float, typer.Option(min=0.0, max=0.99, help="Share of the prompts' tokens in earlier requests.")
]
ReuseAfter = Annotated[
    float | None,
    typer.Option(min=0.001, max=1e8, help="Mean seconds until they come back: sizes the tiers of the store."),
]
DramGb = Annotated[
    float | None, typer.Option(min=0.0, max=1e6, help="Most of a node's host memory for the store.")
]
NvmeGb = Annotated[float | None, typer.Option(min=0.0, max=1e6, help="Most of a node's disks for it.")]
DramPrice = Annotated[float, typer.Option(min=0.0, max=1e6, help="Of a GB of host memory and an hour.")]
NvmePrice = Annotated[float, typer.Option(min=0.0, max=1e6, help="Of a GB of NVMe and an hour.")]
Offload = Annotated[
    bool,
    typer.Option("--offload", help="Also try experts and KV in host memory where devices could hold all."),
]
SloTtft = Annotated[float, typer.Option(min=0.1, max=1e7, help="First token of nine of ten requests.")]
SloTpot = Annotated[float, typer.Option(min=0.1, max=1e7, help="Each further token of nine of ten requests.")]
LatentKv = Annotated[str, typer.Option(help=f"Latents on several ranks: {', '.join(_LATENT_KVS)}.")]
ApiPrice = Annotated[
    str, typer.Option(help="Of a million tokens at an API: 0.5, or of prompts and answers, 0.15:0.6.")
]
Check = Annotated[bool, typer.Option(help="Simulate the best plans, and recommend one that holds.")]
Utilization = Annotated[
    float, typer.Option(min=0.001, max=1.0, help="The mean rate, as a share of the rate to hold.")
]


def plan(
    model: Name = "",
    shape: Shape = "",
    gpu: Annotated[str, typer.Option(help="Devices to choose from, as H100 or H100,L40S.")] = "H100",
    hardware: Hardware = None,
    rate: Rate = None,
    devices: Devices = None,
    input_tokens: Annotated[int, typer.Option("--input", min=1, help="Mean tokens of a prompt.")] = 1024,
    output_tokens: Annotated[int, typer.Option("--output", min=1, help="Mean tokens of an answer.")] = 256,
    hit_rate: HitRate = 0.0,
    reuse_after: ReuseAfter = None,
    dram_gb: DramGb = None,
    nvme_gb: NvmeGb = None,
    dram_price: DramPrice = 0.0,
    nvme_price: NvmePrice = 0.0,
    offload: Offload = False,
    slo_ttft_ms: SloTtft = 1000.0,
    slo_tpot_ms: SloTpot = 50.0,
    precision: Annotated[str, typer.Option(help=f"Of weights: {', '.join(_PRECISIONS)}.")] = "auto",
    kv_dtype: Annotated[str, typer.Option(help=f"Of keys and values: {', '.join(_KV_DTYPES)}.")] = "auto",
    latent_kv: LatentKv = "replicated",
    price_per_hour: Annotated[str, typer.Option(help="Of a device: 2.5, or H100=2.5,L40S=0.9.")] = "",
    api_price: ApiPrice = "",
    utilization: Utilization = 1.0,
    explain: Annotated[bool, typer.Option("--explain", help="Show how each figure is computed.")] = False,
    out_file: Annotated[Path | None, typer.Option("--out", help="Write the cluster's file there.")] = None,
    check: Check = True,
    as_json: AsJson = False,
) -> None:
    """Plan a cluster: devices, split, replicas of each role, and cost.

    Nothing is started, and no device is needed. Steps are predicted from their bytes and operations, with
    what an H100 reached of its limits.
    """
    if (rate is None) == (devices is None):
        raise typer.BadParameter("give either --rate or --devices", param_hint="--rate")
    if bool(model) == bool(shape):
        raise typer.BadParameter("give either --model or --shape", param_hint="--model")
    if reuse_after is not None and not hit_rate:
        raise typer.BadParameter("needs a --hit-rate above 0", param_hint="--reuse-after")
    _check_choice("--precision", precision, _PRECISIONS)
    _check_choice("--kv-dtype", kv_dtype, _KV_DTYPES)
    _check_choice("--latent-kv", latent_kv, _LATENT_KVS)
    load = PlannedLoad(input_tokens, output_tokens, slo_ttft_ms / 1e3, slo_tpot_ms / 1e3, hit_rate)
    try:
        profiles = [read_profile(hardware)] if hardware is not None else _profiles(gpu)
        prices, of_api = _prices(price_per_hour, profiles), _api_price(api_price, load)
        planned = _model(model, shape, (precision, kv_dtype, latent_kv))
        load.check(planned.shape.max_context_tokens)
        planner = ClusterPlanner(planned, profiles, load, prices, tries_host=offload)
        if reuse_after is not None:
            reuse = PrefixReuse(hit_rate, reuse_after, dram_price, nvme_price)
            limits = NodeStorage(dram_gb, nvme_gb)
            plans = plans_with_tiers(planner, load, reuse, limits, rate=rate, num_devices=devices or 1)
        else:
            plans = planner.for_rate(rate) if rate is not None else planner.for_devices(devices or 1)
        checks = checked_plans(plans, rate) if check else [(each, None) for each in plans]
        plans = [each for each, _ in checks]
        if out_file is not None:
            _write(out_file, plans[0])
    except (ConfigError, CheckpointError) as error:
        die(str(error))
    output = PlanOutput(checks, rate, of_api, utilization)
    if as_json:
        print(json.dumps(output.record()))
        return
    output.show(explain=explain)
    if plans[0].refusal:
        sentence = f"no file: the engine does not start this: {plans[0].refusal}"
        err.print(sentence, markup=False, soft_wrap=True)
    elif out_file is None:
        _print_files(plans[0])


def _check_choice(option: str, value: str, known: Sequence[str]) -> None:
    if value not in known:
        raise typer.BadParameter(f"{value} is none of {', '.join(known)}", param_hint=option)


def _model(name: str, shape: str, settings: tuple[str, str, str]) -> PlannedModel:
    return model_of_shape(shape, *settings) if shape else planned_model(name, *settings)


def _profiles(names: str) -> list[DeviceProfile]:
    profiles = [device_profile(name.strip()) for name in names.split(",")]
    if repeated := [it.name for it in profiles if profiles.count(it) > 1]:
        raise ConfigError(f"--gpu: {repeated[0]} is named more than once")
    return profiles


def _prices(text: str, profiles: Sequence[DeviceProfile]) -> dict[str, float]:
    """Parse `2.5` or `H100=2.5,L40S=0.9`. Raises `ConfigError` for another form, and where one is missing."""
    prices: dict[str, float] = {}
    for entry in text.split(",") if text else ():
        name, separator, number = entry.rpartition("=")
        price = _price(f"--price-per-hour {entry}", number)
        if not separator and len(profiles) > 1:
            raise ConfigError(f"--price-per-hour {entry}: name the device of each price, as H100={entry}")
        device = _priced(entry, name, profiles) if separator else profiles[0].name
        if device in prices:
            raise ConfigError(
                f"--price-per-hour {entry}: {device} has a price already; give one of each device"
            )
        prices[device] = price
    if prices and (missing := [it.name for it in profiles if it.name not in prices]):
        raise ConfigError(f"--price-per-hour: has no price of {', '.join(missing)}")
    return prices


def _priced(entry: str, name: str, profiles: Sequence[DeviceProfile]) -> str:
    """Return the device that has a price: one of those that are planned, or one that is known."""
    if any(it.name == name for it in profiles):
        return name
    try:
        return device_profile(name).name
    except ConfigError:
        planned = ", ".join(it.name for it in profiles)
        raise ConfigError(
            f"--price-per-hour {entry}: no device is called {name!r}; there are {planned}"
        ) from None


def _api_price(text: str, load: PlannedLoad) -> float | None:
    """Parse `0.5`, or `0.15:0.6` of prompts and of answers, into the price of the load's mean tokens."""
    if not text:
        return None
    numbers = [_price(f"--api-price {text}", number) for number in text.split(":")]
    if len(numbers) > 2:
        raise ConfigError(f"--api-price {text}: give one price, or those of prompts and answers, as 0.15:0.6")
    of_input, of_output = numbers[0], numbers[-1]
    both = of_input * load.input_tokens + of_output * load.output_tokens
    return both / (load.input_tokens + load.output_tokens)


def _price(what: str, number: str) -> float:
    try:
        price = float(number)
    except ValueError:
        price = -1.0
    if not 0 < price <= _MOST_PRICE:
        raise ConfigError(f"{what}: {number!r} is no number above 0 and at most {_MOST_PRICE:,}, as 2.5")
    return price


def _write(file: Path, best: Plan) -> None:
    if best.refusal:
        raise ConfigError(f"--out {file}: not written, for the engine does not start this: {best.refusal}")
    try:
        file.write_text(cluster_file(best), encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--out {file}: {error.strerror}") from error


def _print_files(best: Plan) -> None:
    about = "" if best.model.has_files else " (the model was planned by its shape: name its folder)"
    print(f"\n# cluster.yaml{about}")
    print(cluster_file(best), end="")
    print("\n# values.yaml of the chart")
    print(chart_values(best), end="")
