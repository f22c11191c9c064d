"""`tandem update`: give a running application another configuration."""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Group
from rich.table import Table

from cluster.cli.model_download import fetched
from cluster.cli.progress_report import progress_to, stages
from cluster.cli.ray_choice import ray_choice
from cluster.cli.refusals import refuse_what_cannot_run
from cluster.cli.serve_options import ServeOptions, announced_config, serve_options
from cluster.cli.terminal import AsJson, RayVariable, catch_signals, err, made_table, out
from cluster.config import ClusterConfig
from kvtransfer.common.clock import SystemClock

if TYPE_CHECKING:
    from cluster.serve.rollout import Roll
    from cluster.serve.update import UpdatePlan

_GATEWAYS = "gateways"
RayAddress = Annotated[
    str | None,
    typer.Option(
        help="The Ray cluster of the application, host:port. Default: the one that RAY_ADDRESS names, else "
        "that of your `tandem serve` on this host that FILE means."
    ),
]


@serve_options
def update(
    file: Annotated[Path, typer.Option("-f", "--file", help="The cluster's changed YAML file.")],
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would be done; do nothing.")] = False,
    ray_address: RayAddress = None,
    ray_address_variable: RayVariable = "",
    as_json: AsJson = False,
    *,
    given: ServeOptions,
) -> None:
    """Give a running application the settings of FILE; replicas that they concern are replaced one by one.

    Options that `tandem serve` was given beside the file are given here too: what they say goes before FILE.
    """
    from cluster.serve.joined_ray import JoinedRay, running_target  # here: they need Ray
    from cluster.serve.serve_runs import living_runs

    config, choice = announced_config(file, given), ray_choice(ray_address, ray_address_variable)
    # What the branch was when the cluster was started: another version is another model.
    config = config.with_model(fetched(config.model_source, prefer_cached=True))
    os.environ.pop("RAY_ADDRESS", None)
    refuse_what_cannot_run(config, given, os.environ, ray_address=choice.address, is_running=True)
    target = running_target(choice.address, config, file, living_runs(), os.environ)
    logging.getLogger("ray.serve").setLevel(logging.ERROR)
    with stages(err, f"joining {target.text}{choice.reason}"):
        joined = JoinedRay(target, SystemClock(), logging_level=logging.ERROR, log_to_driver=False)
    try:
        _carry_out(config, dry_run=dry_run, as_json=as_json)
    finally:
        joined.shut_down()


def _carry_out(config: ClusterConfig, *, dry_run: bool, as_json: bool) -> None:
    from cluster.serve.update import Update  # here, as above

    interrupted = catch_signals()  # after Ray, which sets handlers of its own
    change = Update(config, SystemClock())
    if not as_json:
        out.print(plan_view(change.plan))
    if change.plan.changes and not dry_run:
        change.check_headroom()
        with stages(err, "rolling") as report:
            change.apply(progress_to(report), interrupted)
    if as_json:
        print(json.dumps(plan_json(change.plan, applied=not dry_run)))
    elif interrupted.is_set():
        out.print("interrupted: Ray Serve continues the update; `tandem status` shows the replicas")
    elif not change.plan.changes:
        out.print("nothing differs")
    else:
        out.print("nothing was done: --dry-run" if dry_run else "done")


def plan_view(plan: UpdatePlan) -> Group:
    """Show what changes, and what happens to each deployment."""
    parts: list[Table] = []
    if plan.changes:
        changes = made_table("changes", "setting", "now", "then")
        for change in plan.changes:
            changes.add_row(change.path, _text(change.before), _text(change.after))
        parts.append(changes)
    rolls = made_table("replicas", "pool", "what happens", "", numbers=("replicas",))
    for roll in plan.rolls:
        rolls.add_row(roll.pool or _GATEWAYS, _happens(roll), roll.kept, str(roll.num_replicas))
    parts.append(rolls)
    return Group(*parts)


def plan_json(plan: UpdatePlan, *, applied: bool) -> dict[str, Any]:
    """Return the plan as one JSON object."""
    return {
        "applied": applied and bool(plan.changes),
        "changes": [change._asdict() for change in plan.changes],
        "deployments": [{**roll._asdict(), "pool": roll.pool or _GATEWAYS} for roll in plan.rolls],
    }


def _happens(roll: Roll) -> str:
    if roll.action != "roll":
        return {"stay": "continue", "start": "start", "stop": "drain and end"}[roll.action]
    return f"one by one, the {'new' if roll.surges else 'old'} one first"


def _text(value: object) -> str:
    return "-" if value is None else json.dumps(value) if not isinstance(value, str) else value
