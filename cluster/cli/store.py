"""`tandem store`: what the tiers of all nodes hold, whether it is whole, and deleting it."""

from __future__ import annotations

from typing import Annotated

import typer

from cluster.cli import store_calls
from cluster.cli.store_calls import Selection
from cluster.cli.terminal import DEFAULT_ADDRESS, Address, AsJson, Timeout, out, run
from cluster.stores.store_admin import DEFAULT_LIMIT, MAX_LIMIT

cli = typer.Typer(no_args_is_help=True, help="The tiered store of every node: list, measure, verify, purge.")

Tenant = Annotated[str | None, typer.Option(help='Records of this tenant; "": of requests without one.')]
Model = Annotated[
    str | None, typer.Option(help="Records of this model: the served name, or how its fingerprint begins.")
]


@cli.command("ls")
def list_records(
    address: Address = DEFAULT_ADDRESS,
    as_json: AsJson = False,
    tenant: Tenant = None,
    model: Model = None,
    limit: Annotated[int, typer.Option(min=1, max=MAX_LIMIT, help="Records of each node.")] = DEFAULT_LIMIT,
) -> None:
    """Records, the most recently used first."""
    run(store_calls.list_records(address, Selection(tenant, model), limit, out, as_json=as_json))


@cli.command()
def stat(address: Address = DEFAULT_ADDRESS, as_json: AsJson = False) -> None:
    """Every tier of every node: room, hits, writes, failures; the index; what each tenant holds."""
    run(store_calls.stat(address, out, as_json=as_json))


@cli.command()
def verify(
    address: Address = DEFAULT_ADDRESS,
    as_json: AsJson = False,
    tenant: Tenant = None,
    model: Model = None,
    timeout: Timeout = None,
) -> None:
    """Read every record of every tier, compare checksums; bad ones are dropped, and fail the command."""
    run(store_calls.verify(address, Selection(tenant, model), timeout, out, as_json=as_json))


@cli.command()
def purge(
    address: Address = DEFAULT_ADDRESS,
    as_json: AsJson = False,
    tenant: Tenant = None,
    model: Model = None,
    everything: Annotated[bool, typer.Option("--all", help="Of all tenants and models.")] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    timeout: Timeout = None,
) -> None:
    """Delete from every tier of every node and from what replicas cache; no restart brings it back."""
    selection = Selection(tenant, model)
    if selection.is_everything != everything:
        problem = "goes without --tenant and --model" if everything else "name a tenant, a model, or --all"
        raise typer.BadParameter(problem, param_hint="--all" if everything else "--tenant, --model")
    if not yes:
        typer.confirm(
            f"Delete {selection.text()} from every tier of every node and replica?", abort=True, err=True
        )
    run(store_calls.purge(address, selection, timeout, out, as_json=as_json))
