"""`tandem update`: give a running application another configuration; and the configuration of `tandem
serve`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Group
from rich.table import Table

from cluster.cli.terminal import (
    AsJson,
    JoinedRay,
    catch_signals,
    err,
    made_table,
    out,
    progress_line,
    stages,
)
from cluster.config import ClusterConfig, default_config, load_config
from cluster.errors import ConfigError
from kvtransfer.common.clock import SystemClock
from workers.model.model_config import read_model_config

if TYPE_CHECKING:
    from cluster.serve.rollout import Roll
    from cluster.serve.update import UpdatePlan

_GATEWAYS = "gateways"


def update(
    file: Annotated[Path, typer.Option("-f", "--file", help="The cluster's changed YAML file.")],
    model: Annotated[Path | None, typer.Option(help="As given to `tandem serve`.")] = None,
    host: Annotated[str | None, typer.Option(help="As above: of the gateway.")] = None,
    port: Annotated[int | None, typer.Option(min=0, max=65535, help="As above.")] = None,
    admin_port: Annotated[int | None, typer.Option(min=0, max=65535, help="As above.")] = None,
    insecure: Annotated[bool, typer.Option("--insecure", help="As given to `tandem serve`.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would be done; do nothing.")] = False,
    ray_address: JoinedRay = "auto",
    as_json: AsJson = False,
) -> None:
    """Give a running application the settings of FILE; replicas that they concern are replaced one by one."""
    from cluster.serve.update import Update, connect  # here: it needs Ray

    config = overridden(load_config(file), model, host, port, admin_port=admin_port, insecure=insecure)
    with stages(err, "connecting to Ray"):
        connect(ray_address)
    interrupted = catch_signals()  # after Ray, which sets handlers of its own
    change = Update(config, SystemClock())
    if not as_json:
        out.print(plan_view(change.plan))
    if change.plan.changes and not dry_run:
        change.check_headroom()
        with stages(err, "rolling") as report:
            change.apply(lambda progress: report(progress_line(progress.stage, progress.ready)), interrupted)
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


# ----------------------------------------------------------------------------------------------
# The configuration of `tandem serve`: a file, options, or both.

HOST_HELP = 'Address for the gateway to listen on; "auto": all of this node\'s.'


def serve_config(
    file: Path | None,
    model: Path | None,
    prefill: int | None,
    decode: int | None,
    host: str | None,
    port: int | None,
    nvme: tuple[Path | None, float | None],
    *,
    admin_port: int | None = None,
    insecure: bool = False,
) -> ClusterConfig:
    """Return the file's configuration as the options change it, or without a file that of the options.
    `ConfigError` or a usage error where they contradict each other. `model` must be given without a file."""
    folder, num_gb = nvme
    if (folder is None) != (num_gb is None):
        raise typer.BadParameter("go together", param_hint="--nvme, --nvme-gb")
    if file is not None:
        if folder is not None:
            raise typer.BadParameter("the file says it, under store:", param_hint="--nvme, --nvme-gb")
        if prefill is not None or decode is not None:
            raise typer.BadParameter(
                "the file says how many replicas there are", param_hint="--prefill, --decode"
            )
        return overridden(load_config(file), model, host, port, admin_port=admin_port, insecure=insecure)
    assert model is not None
    return default_config(
        model,
        prefill=1 if prefill is None else prefill,
        decode=1 if decode is None else decode,
        host=host,
        port=port,
        admin_port=admin_port,
        insecure=insecure,
        context_tokens=read_model_config(model).max_context_tokens,
        nvme=None if folder is None or num_gb is None else (folder, num_gb),
    )


def overridden(
    config: ClusterConfig,
    model: Path | None,
    host: str | None,
    port: int | None,
    *,
    admin_port: int | None = None,
    insecure: bool = False,
) -> ClusterConfig:
    """Return the configuration with this model folder, and the gateway at this host and these ports; None:
    unchanged. `insecure`: other hosts than this one may reach it without authentication. `ConfigError` where
    they could and may not."""
    changes: dict[str, Any] = {} if model is None else {"model": model.resolve()}
    if insecure:
        if config.auth.mode == "required":
            raise ConfigError("--insecure contradicts the file's auth.mode: required")
        changes["auth"] = config.auth.model_copy(update={"insecure": True})
    changed = config.model_copy(update=changes | {"gateway": config.gateway.at(host, port, admin_port)})
    try:
        changed.check_exposure()
    except ValueError as error:
        raise ConfigError(str(error)) from error
    return changed
