"""Carry out the calls of `tandem store`, which a gateway passes on to every node.

A node that did not answer is named on standard error with the work that was not done there, and fails the
command after the answers of the others were shown.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, NamedTuple

from rich.console import Console

from cluster.api.admin_client import AdminClient
from cluster.api.channel import ClientCredentials
from cluster.api.json_text import as_dict
from cluster.cli.store_tables import listing_view, purged_view, stat_view, verified_view
from cluster.errors import StoreAwayError
from cluster.proto.tandem.v1 import admin_pb2 as admin_pb


class Selection(NamedTuple):
    """Selects records by sharing group and model; None: of all."""

    sharing_group: str | None
    model: str | None

    @property
    def is_everything(self) -> bool:
        return self.sharing_group is None and self.model is None

    def text(self) -> str:
        """Return `all records of sharing group 'a' and model m`."""
        named = [f"sharing group {self.sharing_group!r}"] if self.sharing_group is not None else []
        named += [f"model {self.model}"] if self.model is not None else []
        return (
            f"all records of {' and '.join(named)}"
            if named
            else "all records of all sharing groups and models"
        )


async def show_records(
    address: str,
    selection: Selection,
    limit: int,
    console: Console,
    *,
    as_json: bool,
    who: ClientCredentials | None = None,
) -> None:
    """Print the records of every node."""
    async with AdminClient(address, credentials=who) as client:
        asked = admin_pb.StoreListRequest(filter=await _filter(client, selection), limit=limit)
        reply = await client.store_list(asked)
    _show(reply, as_json, console, listing_view)
    _check(_failures(reply.nodes, "not listed"))


async def show_stat(
    address: str, console: Console, *, as_json: bool, who: ClientCredentials | None = None
) -> None:
    """Print what every tier of every node reports."""
    async with AdminClient(address, credentials=who) as client:
        reply = await client.store_stat()
    _show(reply, as_json, console, stat_view)
    _check(_failures(reply.nodes, "not shown"))


async def verify_records(
    address: str,
    selection: Selection,
    timeout_s: float | None,
    console: Console,
    *,
    as_json: bool,
    who: ClientCredentials | None = None,
) -> None:
    """Have every node read its records; `StoreAwayError` when one was bad."""
    async with AdminClient(address, credentials=who) as client:
        asked = admin_pb.StoreVerifyRequest(filter=await _filter(client, selection))
        reply = await client.store_verify(asked, timeout_s)
    _show(reply, as_json, console, verified_view)
    _check(_failures(reply.nodes, "not verified"))
    num_bad = sum(sum(node.num_bad.values()) for node in reply.nodes)
    if num_bad:
        raise StoreAwayError(f"{num_bad} records had a wrong checksum and were dropped")


async def purge_records(
    address: str,
    selection: Selection,
    timeout_s: float | None,
    console: Console,
    *,
    as_json: bool,
    who: ClientCredentials | None = None,
) -> None:
    """Delete the records from every node and replica."""
    async with AdminClient(address, credentials=who) as client:
        chosen = await _filter(client, selection)
        asked = admin_pb.StorePurgeRequest(filter=chosen, all=selection.is_everything)
        reply = await client.store_purge(asked, timeout_s)
    _show(reply, as_json, console, purged_view)
    failures = [f"replica {it.replica_id} {it.error}" for it in reply.replicas if it.error]
    if reply.nodes or not reply.replicas:
        failures += _failures(reply.nodes, "not purged")
    _check(failures)


async def _filter(client: AdminClient, selection: Selection) -> admin_pb.StoreFilter:
    """Return the filter, in which a served model's name becomes its fingerprint."""
    chosen = admin_pb.StoreFilter()
    if selection.sharing_group is not None:
        chosen.sharing_group = selection.sharing_group
    if selection.model is not None:
        served = (await client.status()).model
        is_served = served.name == selection.model and served.fingerprint
        chosen.model = served.fingerprint if is_served else selection.model
    return chosen


def _show(reply: Any, as_json: bool, console: Console, view: Any) -> None:
    if as_json:
        print(json.dumps(as_dict(reply)))
    else:
        console.print(view(reply))


def _check(failures: Sequence[str]) -> None:
    """Raise `StoreAwayError` with every node or replica that did not do what was asked."""
    if failures:
        raise StoreAwayError("\n".join(failures))


def _failures(nodes: Sequence[Any], what: str) -> list[str]:
    if not nodes:
        return ["no store is registered in this cluster"]
    return [
        f"node {node.member.node_id} ({node.member.host}, {node.member.address}) {what}: {node.error}"
        for node in nodes
        if node.error
    ]
