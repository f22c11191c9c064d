"""`tandem doctor`: preflight checks of this machine, and checks of a running cluster."""

from __future__ import annotations

import importlib.metadata
import json
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Group
from rich.table import Table
from rich.text import Text

from cluster.api.channel import ClientCredentials
from cluster.cli.gateway_options import CallerOptions, gateway_options
from cluster.cli.model_download import fetched
from cluster.cli.ray_choice import ray_choice
from cluster.cli.terminal import BUNDLED_MODEL, AsJson, RayVariable, err, out, run
from cluster.config import ClusterConfig, default_config, load_config
from cluster.doctor.check_context import Check, CheckContext
from cluster.doctor.checks import C, Finding, Severity, as_json, error, exit_status, worst_first
from cluster.doctor.live_cluster import Expected, Live, look
from cluster.errors import CallError, ConfigError, StartError
from cluster.serve.auto_kv import planned_needs
from cluster.serve.machine import Machine
from cluster.serve.serve_runs import living_runs, only_run
from kvtransfer.common.clock import SystemClock
from workers.errors import CheckpointError
from workers.model.model_config import read_model_config

_STYLES = {
    Severity.OK: "green",
    Severity.NOTE: "cyan",
    Severity.WARNING: "yellow",
    Severity.ERROR: "bold red",
}
_PLURALS = {
    Severity.ERROR: ("error", "errors"),
    Severity.WARNING: ("warning", "warnings"),
    Severity.NOTE: ("note", "notes"),
    Severity.OK: ("ok", "ok"),
}


# Before all others: the file itself, one finding for each field that is wrong.
CONFIG_CHECK = "config"
# Before all others of a running cluster: that the gateway answers.
REACH_CHECK = "gateway"


@gateway_options
def doctor(
    file: Annotated[Path | None, typer.Option("-f", "--file", help="The cluster's YAML file.")] = None,
    admin_address: Annotated[
        str,
        typer.Option(
            envvar="TANDEM_ADMIN_ADDRESS",
            help="A running gateway's port for operators: look at that cluster (too, with -f).",
        ),
    ] = "",
    as_json_text: AsJson = False,
    ray_address: Annotated[
        str | None,
        typer.Option(help="As for serve; default: that of your `tandem serve` here, if there is one."),
    ] = None,
    ray_address_variable: RayVariable = "",
    seconds: Annotated[float, typer.Option(min=0.0, help="Between two looks at a running cluster.")] = 2.0,
    redis_url: Annotated[str, typer.Option(envvar="REDIS_URL", hidden=True)] = "",
    auth_mode: Annotated[str, typer.Option(envvar="RAY_AUTH_MODE", hidden=True)] = "token",
    auth_token: Annotated[str, typer.Option(envvar="RAY_AUTH_TOKEN", hidden=True)] = "",
    auth_token_path: Annotated[str, typer.Option(envvar="RAY_AUTH_TOKEN_PATH", hidden=True)] = "",
    *,
    caller: CallerOptions,
) -> None:
    """Look for what would not work here, and for why a running cluster is slow: cause and remedy.

    Without -f and --admin-address: this machine, for what `tandem serve` starts without a file, and that
    cluster, where it runs here. With -f: this machine, for that file; run it on every node. With
    --admin-address: a running cluster, wherever it is.
    """
    given = {
        "RAY_AUTH_MODE": auth_mode,
        "RAY_AUTH_TOKEN": auth_token,
        "RAY_AUTH_TOKEN_PATH": auth_token_path,
    }
    environment = {name: value for name, value in given.items() if value}
    config, findings = _read(file, admin_address, redis_url)
    is_machine = config is not None and (file is not None or not admin_address)
    choice = ray_choice(ray_address, ray_address_variable).address
    if config is not None and is_machine:
        run_here = None if choice else only_run(config, file, living_runs())
        is_running = bool(admin_address) or run_here is not None
        if run_here is not None:
            choice = run_here.ray
            if run_here.token_file:
                environment.setdefault("RAY_AUTH_TOKEN_PATH", run_here.token_file)
            if file is None:
                err.print(f"{run_here.text} runs here and is looked at, too", style="dim", soft_wrap=True)
                admin_address = run_here.admins[0]
        context = machine_context(config, environment, choice or "local", is_running=is_running)
        findings += run_checks(machine_checks(), context)
    if admin_address:
        expected = config if file is not None else None
        run(_cluster(admin_address, seconds, expected, findings, caller.credentials()))
    if as_json_text:
        print(json.dumps(as_json(findings)))
    else:
        out.print(findings_view(findings))
    raise typer.Exit(exit_status(findings))


def findings_view(findings: Sequence[Finding]) -> Group:
    """Show the findings by group, the group with the worst one first; problems come with their remedy."""
    groups = [
        worst_first(members)
        for _, members in groupby(sorted(findings, key=lambda item: item.group), key=lambda item: item.group)
    ]
    groups.sort(key=lambda members: -members[0].severity.rank)
    widest = max((len(item.check) for item in findings), default=0)
    parts: list[Table | Text] = []
    for members in groups:
        table = Table.grid(padding=(0, 1, 0, 0), expand=False)
        table.add_column(no_wrap=True, min_width=len(Severity.WARNING))
        table.add_column(no_wrap=True, min_width=widest)
        table.add_column(overflow="fold")
        for finding in members:
            _add(table, finding)
        parts += [Text(members[0].group, style="bold"), table, Text()]
    return Group(*parts, Text(summary(findings)))


def summary(findings: Sequence[Finding]) -> str:
    """Return `1 error, 2 warnings, 20 ok`."""
    counts = {severity: sum(item.severity is severity for item in findings) for severity in _PLURALS}
    parts = [f"{count} {_PLURALS[severity][count != 1]}" for severity, count in counts.items() if count]
    return ", ".join(parts) or "nothing was looked at"


def _add(table: Table, finding: Finding) -> None:
    result, style = finding.result, _STYLES[finding.severity]
    dim = "dim" if finding.severity is Severity.OK else ""
    table.add_row(Text(str(finding.severity), style), Text(finding.check, dim), Text(result.seen, dim))
    if result.why:
        table.add_row("", "", Text(result.why, "dim"))
    if result.remedy:
        table.add_row("", "", Text(f"-> {result.remedy}"))


def _read(file: Path | None, address: str, redis_url: str) -> tuple[ClusterConfig | None, list[Finding]]:
    """Return the configuration with the index server of the environment, or findings when it cannot be
    read."""
    try:
        if file is not None:
            config = load_config(file)
            config = config.with_model(fetched(config.model_source))
        elif BUNDLED_MODEL.is_dir():
            context_tokens = read_model_config(BUNDLED_MODEL).max_context_tokens
            config = default_config(BUNDLED_MODEL, context_tokens=context_tokens)
        elif address:
            return None, []
        else:
            raise typer.BadParameter("name the cluster's file, or --admin-address", param_hint="-f")
    except (ConfigError, StartError) as problem:
        return None, config_findings(str(problem))
    return config if config.store.has_redis else config.with_redis_url(redis_url), []


def machine_context(
    config: ClusterConfig, environment: Mapping[str, str], ray_address: str, *, is_running: bool
) -> CheckContext:
    """Return this machine, and what is to run on it, for the checks."""
    machine = Machine()
    try:
        needs = planned_needs(config, machine, is_running=is_running)
    except CheckpointError:
        needs = None  # the checks of the model report it
    return CheckContext(
        machine=machine,
        config=config,
        needs=needs,
        environment=environment,
        clock=SystemClock(),
        ray_address=ray_address,
        is_running=is_running,
    )


async def _cluster(
    address: str,
    seconds: float,
    config: ClusterConfig | None,
    findings: list[Finding],
    who: ClientCredentials,
) -> None:
    """Add the findings of the running cluster to `findings`."""
    try:
        version = importlib.metadata.version("tandem-serve")
    except importlib.metadata.PackageNotFoundError:
        version = ""
    if err.is_terminal:
        err.print(f"looking at {address} for {seconds:g} s", style="dim")
    try:
        live = await look(address, seconds, Expected.of(config), version, SystemClock(), who)
    except CallError as problem:
        why = "nothing can be said of the cluster behind it"
        remedy = (
            "does `tandem serve` run there (its line `admin`)? Is that port open from here? tls:// where it "
            "has a certificate"
        )
        result = error(f"no gateway answers at {address}: {problem}", why, remedy)
        findings.append(Finding(REACH_CHECK, "members", result))
        return
    findings += run_checks(cluster_checks(), live)


# ----------------------------------------------------------------------------------------------
# The list of all checks, and running them. What they import, no other command needs.


def machine_checks() -> tuple[Check[CheckContext], ...]:
    """Return the checks of a machine, in the order in which they run."""
    from cluster.doctor import (
        access,
        devices,
        hardware,
        limits,
        model,
        network,
        redis,
        state_records,
        storage,
        tls,
    )

    return (
        *model.CHECKS,
        *limits.CHECKS,
        *hardware.CHECKS,
        *devices.CHECKS,
        *storage.CHECKS,
        *state_records.CHECKS,
        *network.CHECKS,
        *access.CHECKS,
        *tls.CHECKS,
        *redis.CHECKS,
    )


def cluster_checks() -> tuple[Check[Live], ...]:
    """Return the checks of a running cluster, in the order in which they run."""
    from cluster.doctor import hit_rate, kv_transfers, members, prefill_share, serving, tiered_store

    return (
        *serving.CHECKS,
        *hit_rate.CHECKS,
        *prefill_share.CHECKS,
        *kv_transfers.CHECKS,
        *tiered_store.CHECKS,
        *members.CHECKS,
    )


def run_checks(checks: Iterable[Check[C]], context: C) -> list[Finding]:
    """Run the checks, and return what they find."""
    return [finding for check in checks for finding in check.findings(context)]


def config_findings(problem: str) -> list[Finding]:
    """Return what `load_config` refused, line by line."""
    why = "`tandem serve` refuses the file; nothing that depends on it was looked at"
    remedy = "correct that field; docs/operating.md has them"
    lines = problem.splitlines()
    return [Finding(CONFIG_CHECK, "configuration", error(line, why, remedy)) for line in lines]
