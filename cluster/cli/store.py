"""`tandem store`: the commands that list, measure, verify and purge what the tiers of all nodes hold."""

from __future__ import annotations

from typing import Annotated

import typer

from cluster.api.listing_limits import DEFAULT_LIMIT, MAX_LIMIT
from cluster.cli.gateway_options import AdminOptions, gateway_options
from cluster.cli.store_calls import Selection, purge_records, show_records, show_stat, verify_records
from cluster.cli.terminal import AsJson, Timeout, out, run

cli = typer.Typer(no_args_is_help=True, help="The tiered store of every node: list, measure, verify, purge.")

SharingGroup = Annotated[
    str | None,
    typer.Option(
        help="Records of this sharing group: a tenant's own name, unless `auth.tenants` puts the tenant into "
        'a group; "": of requests without a tenant.'
    ),
]
Model = Annotated[
    str | None, typer.Option(help="Records of this model: the served name, or how its fingerprint begins.")
]


@cli.command("ls")
@gateway_options
def list_records(
    as_json: AsJson = False,
    sharing_group: SharingGroup = None,
    model: Model = None,
    limit: Annotated[int, typer.Option(min=1, max=MAX_LIMIT, help="Records of each node.")] = DEFAULT_LIMIT,
    *,
    to: AdminOptions,
) -> None:
    """Records, the most recently used first."""
    selection, who = Selection(sharing_group, model), to.credentials()
    run(show_records(to.admin_address, selection, limit, out, as_json=as_json, who=who))


@cli.command()
@gateway_options
def stat(
    as_json: AsJson = False,
    *,
    to: AdminOptions,
) -> None:
    """Every tier of every node: space, hits, writes, failures; the index; what each sharing group holds."""
    run(show_stat(to.admin_address, out, as_json=as_json, who=to.credentials()))


@cli.command()
@gateway_options
def verify(
    as_json: AsJson = False,
    sharing_group: SharingGroup = None,
    model: Model = None,
    timeout: Timeout = None,
    *,
    to: AdminOptions,
) -> None:
    """Read every record of every tier, compare checksums; bad ones are dropped, and fail the command."""
    selection, who = Selection(sharing_group, model), to.credentials()
    run(verify_records(to.admin_address, selection, timeout, out, as_json=as_json, who=who))


@cli.command()
@gateway_options
def purge(
    as_json: AsJson = False,
    sharing_group: SharingGroup = None,
    model: Model = None,
    everything: Annotated[bool, typer.Option("--all", help="Of all sharing groups and models.")] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    timeout: Timeout = None,
    *,
    to: AdminOptions,
) -> None:
    """Delete from every tier of every node and from what replicas cache; no restart brings it back."""
    selection = Selection(sharing_group, model)
    if selection.is_everything != everything:
        problem = (
            "goes without --sharing-group and --model"
            if everything
            else "name a sharing group, a model, or --all"
        )
        raise typer.BadParameter(problem, param_hint="--all" if everything else "--sharing-group, --model")
    if not yes:
        typer.confirm(
            f"Delete {selection.text()} from every tier of every node and replica?", abort=True, err=True
        )
    run(purge_records(to.admin_address, selection, timeout, out, as_json=as_json, who=to.credentials()))
