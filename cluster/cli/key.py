"""`tandem key`: make, list and revoke API keys, and rotate key roots, in files that gateways read again when
they change."""

from __future__ import annotations

import json
import secrets
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from cluster.cli.terminal import NONE, AsJson, made_table, out
from cluster.errors import ConfigError
from cluster.identity.api_key_file import add_key, read_keys, revoke_key
from cluster.identity.api_keys import KeyEntry, split_key
from cluster.identity.identity import ROLES, Role
from cluster.identity.key_roots import end_rotation, rotate_key_root
from kvtransfer.common.clock import SystemClock

cli = typer.Typer(no_args_is_help=True, help="API keys of a cluster: new, list, revoke; and its key root.")

KeysFile = Annotated[
    Path, typer.Option("-f", "--file", envvar="TANDEM_KEYS_FILE", help="The file of `auth.keys_file`.")
]
DEFAULT_FILE = Path("keys.yaml")


@cli.command()
def new(
    tenant: Annotated[str, typer.Option(help="The owner of the requests that are sent with the key.")],
    file: KeysFile = DEFAULT_FILE,
    role: Annotated[
        list[str] | None, typer.Option(help=f"{', '.join(ROLES)}; may be repeated; default: user.")
    ] = None,
    days: Annotated[
        float | None, typer.Option(min=0.001, help="Valid for so many; default: for ever.")
    ] = None,
    max_priority: Annotated[int | None, typer.Option(help="In place of the tenant's.")] = None,
    model: Annotated[list[str] | None, typer.Option(help="May use this model only; may be repeated.")] = None,
    note: Annotated[str, typer.Option(help="For people: whose key it is, and for what.")] = "",
    as_json: AsJson = False,
) -> None:
    """Add a key to the file, and print it: it is shown this once, and kept nowhere."""
    created = datetime.fromtimestamp(SystemClock().wall(), UTC).replace(microsecond=0)
    key = add_key(
        file,
        secrets.token_bytes,
        tenant=tenant,
        roles=_roles(role or ["user"]),
        created=created,
        expires=None if days is None else created + timedelta(days=days),
        max_priority=max_priority,
        models=tuple(model) if model else None,
        note=note,
    )
    parts = split_key(key)
    assert parts is not None
    print(json.dumps({"id": parts[0], "key": key}) if as_json else key)


@cli.command("list")
def list_keys(file: KeysFile = DEFAULT_FILE, as_json: AsJson = False) -> None:
    """The keys of the file, without their secrets."""
    entries = read_keys(file)
    now = SystemClock().wall()
    if as_json:
        print(json.dumps({"keys": [_fields(entry, now) for entry in entries]}))
    else:
        out.print(keys_table(entries, now))


@cli.command()
def revoke(
    key_id: Annotated[str, typer.Argument(metavar="ID", help="As `tandem key list` shows it.")],
    file: KeysFile = DEFAULT_FILE,
) -> None:
    """Remove a key from the file; gateways refuse it about a second later."""
    revoke_key(file, key_id)


@cli.command()
def root(
    file: Annotated[Path, typer.Argument(help="The file of `auth.key_root_file`; made where it is missing.")],
    end: Annotated[
        bool, typer.Option("--end", help="Drop the older of two roots: what it led to is not found again.")
    ] = False,
) -> None:
    """Begin to rotate the root of block keys: a new one beside the one before. `--end` ends the rotation."""
    roots = end_rotation(file) if end else rotate_key_root(file, secrets.token_bytes)
    out.print(f"key roots, the newest first: {', '.join(it.id for it in roots)}", highlight=False)


def keys_table(entries: Sequence[KeyEntry], now: float) -> Table:
    """Show the keys, those that have expired too."""
    table = made_table("API keys", "id", "tenant", "roles", "created", "expires", "note")
    for entry in entries:
        table.add_row(
            entry.id,
            entry.tenant,
            ", ".join(entry.roles),
            f"{entry.created:%Y-%m-%d}",
            f"[red]{entry.expires:%Y-%m-%d}[/]" if _has_expired(entry, now) else _day(entry.expires),
            entry.note or NONE,
        )
    return table


def _fields(entry: KeyEntry, now: float) -> dict[str, Any]:
    shown = entry.model_dump(mode="json", exclude={"salt", "hash"}, exclude_none=True)
    return {**shown, "has_expired": _has_expired(entry, now)}


def _has_expired(entry: KeyEntry, now: float) -> bool:
    return entry.expires_at is not None and entry.expires_at <= now


def _day(at: datetime | None) -> str:
    return NONE if at is None else f"{at:%Y-%m-%d}"


def _roles(names: Sequence[str]) -> tuple[Role, ...]:
    """Return the roles of these names, each once; `ConfigError` for another one."""
    known = {role: role for role in ROLES}
    if unknown := [name for name in names if name not in known]:
        raise ConfigError(f"--role: {unknown[0]!r} is none; the roles are {', '.join(ROLES)}")
    return tuple(role for role in ROLES if role in names)
