"""The commands of `tandem store`, behind `store_cli`: they ask a gateway, which asks every node.

A node that did not answer is named on standard error with what was not done there, and fails the command,
after what the others answered was shown.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, NamedTuple

from rich.console import Console

from cluster.api.client import Client
from cluster.api.json_text import as_dict
from cluster.cli.store_display import listing_view, purged_view, stat_view, verified_view
from cluster.errors import StoreAwayError
from cluster.proto import tandem_pb2 as pb


class Selection(NamedTuple):
    """Which records; None: of all."""

    tenant: str | None
    model: str | None

    @property
    def is_everything(self) -> bool:
        return self.tenant is None and self.model is None

    def text(self) -> str:
        """`all records of tenant 'a' and model m`."""
        named = [f"tenant {self.tenant!r}"] if self.tenant is not None else []
        named += [f"model {self.model}"] if self.model is not None else []
        return f"all records of {' and '.join(named)}" if named else "all records of all tenants and models"


async def list_records(
    address: str, selection: Selection, limit: int, console: Console, *, as_json: bool
) -> None:
    async with Client(address) as client:
        asked = pb.StoreListRequest(filter=await _filter(client, selection), limit=limit)
        reply = await client.store_list(asked)
    _show(reply, as_json, console, listing_view)
    _check(reply.nodes, "not listed")


async def stat(address: str, console: Console, *, as_json: bool) -> None:
    async with Client(address) as client:
        reply = await client.store_stat()
    _show(reply, as_json, console, stat_view)
    _check(reply.nodes, "not shown")


async def verify(
    address: str, selection: Selection, timeout_s: float | None, console: Console, *, as_json: bool
) -> None:
    async with Client(address) as client:
        asked = pb.StoreVerifyRequest(filter=await _filter(client, selection))
        reply = await client.store_verify(asked, timeout_s)
    _show(reply, as_json, console, verified_view)
    _check(reply.nodes, "not verified")
    num_bad = sum(sum(node.num_bad.values()) for node in reply.nodes)
    if num_bad:
        raise StoreAwayError(f"{num_bad} records had a wrong checksum and were dropped")


async def purge(
    address: str,
    selection: Selection,
    timeout_s: float | None,
    console: Console,
    *,
    as_json: bool,
) -> None:
    async with Client(address) as client:
        chosen = await _filter(client, selection)
        asked = pb.StorePurgeRequest(filter=chosen, all=selection.is_everything)
        reply = await client.store_purge(asked, timeout_s)
    _show(reply, as_json, console, purged_view)
    failures = [f"replica {it.replica_id} {it.error}" for it in reply.replicas if it.error]
    if reply.nodes or not reply.replicas:
        failures += _failures(reply.nodes, "not purged")
    if failures:
        raise StoreAwayError("\n".join(failures))


async def _filter(client: Client, selection: Selection) -> pb.StoreFilter:
    """A served model's name becomes its fingerprint."""
    chosen = pb.StoreFilter()
    if selection.tenant is not None:
        chosen.tenant = selection.tenant
    if selection.model is not None:
        named = {model.name: model.fingerprint for model in await client.models() if model.fingerprint}
        chosen.model = named.get(selection.model, selection.model)
    return chosen


def _show(reply: Any, as_json: bool, console: Console, view: Any) -> None:
    if as_json:
        print(json.dumps(as_dict(reply)))
    else:
        console.print(view(reply))


def _check(nodes: Sequence[Any], what: str) -> None:
    """`StoreAwayError` names every node whose store did not do what was asked."""
    if lines := _failures(nodes, what):
        raise StoreAwayError("\n".join(lines))


def _failures(nodes: Sequence[Any], what: str) -> list[str]:
    if not nodes:
        return ["no store is registered in this cluster"]
    return [
        f"node {node.member.node_id} ({node.member.host}, {node.member.address}) {what}: {node.error}"
        for node in nodes
        if node.error
    ]
