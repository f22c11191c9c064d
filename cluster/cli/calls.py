"""`tandem generate`, `models`, `status` and `explain`: calls to a running gateway, and what they show."""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from typing import Any

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from cluster.api.admin_client import AdminClient
from cluster.api.channel import ClientCredentials
from cluster.api.client import Client, Collector, Completion
from cluster.api.generate_options import GenerateOptions, Prompt, generate_request
from cluster.api.json_text import as_dict, status_json
from cluster.cli.admission_table import admission_parts
from cluster.cli.layers_table import layers_parts
from cluster.cli.prompt_table import prompt_parts
from cluster.cli.store_tables import members_table, tiers_table
from cluster.cli.terminal import NONE, err, made_table, traffic_line
from cluster.proto.enums import name_of
from cluster.proto.tandem.v1 import admin_pb2 as admin_pb
from cluster.proto.tandem.v1 import inference_pb2 as pb
from cluster.text.validation import check_values


async def generate(
    address: str,
    prompt: Prompt,
    options: GenerateOptions,
    timeout_s: float | None,
    *,
    as_json: bool,
    who: ClientCredentials | None = None,
) -> None:
    """Stream the text to standard output as it comes, or print one JSON object at the end.

    Several samples do not stream, because their texts would mix: they are printed one after the other at the
    end.
    """
    check_values(generate_request(prompt, options))
    collector = Collector()
    async with Client(address, credentials=who) as client:
        stream = client.generate(prompt, options, timeout_s=timeout_s)
        async for event in stream:
            collector.add(event)
            if isinstance(event, pb.Delta) and not as_json and (options.n or 1) == 1:
                sys.stdout.write(event.text)
                sys.stdout.flush()
    completion = collector.completion()
    if as_json:
        print(json.dumps(completion_json(completion)))
    elif len(completion.texts) > 1:
        for index, text in enumerate(completion.texts):
            print(f"--- {index}: {completion.finish_reasons[index]}\n{text}")
    else:
        print()
    if (cap := completion.finished.usage.capped_max_tokens) and not as_json:
        err.print(
            f"max_tokens was cut to {cap}, by the room that is left in the context or because of the load",
            highlight=False,
        )


def completion_json(completion: Completion) -> dict[str, Any]:
    """Return one object: text, token_ids, finish_reason, usage, timing, reasoning where there is any, and
    logprobs where requested; with more samples, `samples` holds each."""
    finished = completion.finished
    samples = [
        {
            "text": text,
            "token_ids": list(ids),
            "finish_reason": reason,
            **({"reasoning": reasoning} if reasoning else {}),
            **({"logprobs": [as_dict(item) for item in logprobs]} if logprobs else {}),
        }
        for text, ids, reason, reasoning, logprobs in zip(
            completion.texts,
            completion.token_ids,
            completion.finish_reasons,
            completion.reasonings,
            completion.logprobs,
            strict=True,
        )
    ]
    return {
        "request_id": completion.request_id,
        **samples[0],
        **({"samples": samples} if len(samples) > 1 else {}),
        "seed": completion.seed,
        "usage": as_dict(finished.usage),
        "timing": as_dict(finished.timing),
        "prefill_replica": finished.prefill_replica,
        "decode_replica": finished.decode_replica,
    }


async def models(
    address: str, console: Console, *, as_json: bool, who: ClientCredentials | None = None
) -> None:
    """Print the models that are served there."""
    async with Client(address, credentials=who) as client:
        served = await client.models()
    if as_json:
        print(json.dumps({"models": [as_dict(model) for model in served]}))
    else:
        console.print(models_table(served))


async def status(
    admin_address: str, console: Console, *, as_json: bool, who: ClientCredentials | None = None
) -> None:
    """Print the gateway's view of the cluster."""
    async with AdminClient(admin_address, credentials=who) as client:
        reply = await client.status()
        stores = (await client.store_stat()).nodes if reply.stores else []
        paths = await client.paths()
    if as_json:
        print(json.dumps(status_json(reply, stores, paths)))
    else:
        console.print(status_view(reply, stores, paths))


async def explain(
    address: str,
    admin_address: str,
    request_id: str,
    console: Console,
    *,
    as_json: bool,
    who: ClientCredentials | None = None,
) -> None:
    """Print where a request of this caller's went, and why; with `admin_address` one of any tenant."""
    if admin_address:
        async with AdminClient(admin_address, credentials=who) as admin:
            reply = await admin.explain(request_id)
    else:
        async with Client(address, credentials=who) as client:
            reply = await client.explain(request_id)
    if as_json:
        print(json.dumps(as_dict(reply)))
    else:
        console.print(explain_view(reply))


# ----------------------------------------------------------------------------------------------
# What the commands show: tables, the matrix of paths. Messages of the API in, rich objects out.

# Columns that a table takes at its sides.
_EDGES = 2
# Replicas report several times a second; an older report is worth a note.
_LATE_S = 3.0


def status_view(
    status: admin_pb.StatusResponse,
    stores: Sequence[admin_pb.StoreNodeStat] = (),
    paths: Sequence[admin_pb.ReplicaPaths] = (),
) -> Group:
    """Show the pools, the replicas, the matrix of measured paths, the stores with their tiers, and the
    gateways."""
    model = status.model
    head = Text(
        f"{model.name}: {'ready' if status.ready else 'not ready'}; "
        f"context {model.max_context_tokens} tokens, blocks of {model.block_tokens}\n"
        f"{_requests_line(status)}\n"
        f"{_kv_capacity(status)}"
    )
    parts: list[RenderableType] = [head, *admission_parts(status), *pool_parts(status)]
    parts += [_replica_table(status.replicas), *layers_parts(status.replicas)]
    by_replica = {replica.replica_id: replica.paths for replica in paths}
    parts += [
        Text(f"{replica.replica_id}: {note}")
        for replica in status.replicas
        for note in _replica_notes(replica, by_replica.get(replica.replica_id, ()))
    ]
    if any(by_replica.values()):
        parts.append(_PathMatrix(paths))
    if status.stores:
        parts.append(members_table(status.stores))
    if stores:
        parts.append(tiers_table(stores))
    if len(status.traffic) > 1:
        parts.append(Text(f"traffic: {traffic_line(status.traffic)}\n"))
    gateways = made_table("gateways", "gateway", "address", "admin", "process", "console")
    for gateway in status.gateways:
        scheme = "https" if gateway.has_tls else "http"
        console = f"{scheme}://{gateway.console}/console" if gateway.console else NONE
        gateways.add_row(
            gateway.gateway_id, gateway.address, gateway.admin or NONE, str(gateway.process_id), console
        )
    return Group(*parts, *_quota_parts(status.quotas), gateways)


def models_table(models: Sequence[pb.Model]) -> Table:
    """Return a row for each model. What only replicas know is missing while none is connected."""
    numbers = "context\ntokens", "vocabulary", "block\ntokens"
    table = made_table("models", "name", "chat", "fingerprint", numbers=numbers)
    for model in models:
        table.add_row(
            escape(model.name),
            "yes" if model.has_chat_template else "no template",
            model.fingerprint or NONE,
            str(model.max_context_tokens or NONE),
            str(model.vocab_size),
            str(model.block_tokens or NONE),
        )
    return table


def explain_view(explained: pb.ExplainResponse) -> Group:
    """Show every decision with its candidates, the chosen ones marked, how the prompt was reused, and the
    timeline."""
    state = name_of(pb.RequestState, explained.state)
    end = f"{state}: {explained.reason}" if explained.reason else state
    parts: list[RenderableType] = [Text(f"{explained.request_id}: {end}\n")]
    for decision in explained.decisions:
        parts += [_candidate_table(decision)]
        parts += [
            Text(f"{candidate.replica_id} ({candidate.side}): {candidate.note}")
            for candidate in decision.candidates
            if candidate.note
        ]
    parts += prompt_parts(explained)
    timeline = made_table("timeline", "ms", "event", "detail")
    for event in explained.timeline:
        timeline.add_row(f"{event.at_ms:.1f}", event.name, event.detail)
    return Group(*parts, timeline)


def _quota_parts(quotas: Sequence[admin_pb.TenantQuota]) -> list[RenderableType]:
    """Return a table of the tenants with limits that are not idle, if there are any."""
    if not quotas:
        return []
    table = made_table("limits of tenants", "tenant", "in use", "refused since it was idle")
    for quota in quotas:
        used = ", ".join(
            f"[yellow]{name} {share:.0%}[/]" if share >= 1 else f"{name} {share:.0%}"
            for name, share in sorted(quota.used.items())
        )
        refused = ", ".join(f"{num} by {name}" for name, num in sorted(quota.num_refused.items()))
        table.add_row(escape(quota.tenant), used, refused or NONE)
    return [table]


def _kv_capacity(status: admin_pb.StatusResponse) -> str:
    """Return the KV tokens of a replica of each pool, which memory decides where `kv_tokens` is auto; empty
    before any replica has reported."""
    pool_to_tokens: dict[str, list[int]] = {}
    for replica in status.replicas:
        num_tokens = replica.load.num_total_blocks * status.model.block_tokens
        if num_tokens:
            pool_to_tokens.setdefault(replica.pool, []).append(num_tokens)
    parts = [
        f"{pool} {min(tokens)}" + (f" to {max(tokens)}" if max(tokens) > min(tokens) else "")
        for pool, tokens in sorted(pool_to_tokens.items())
    ]
    return f"KV tokens of a replica: {', '.join(parts)}\n" if parts else ""


def _replica_table(replicas: Sequence[admin_pb.Replica]) -> Table:
    # The role names the own pool's too while a replica plays another's: `decode (of prefill)`.
    numbers = "run/\nwait", "free\nblocks", "cached", "prefill\ntok/s", "step\nms", "moved\nGB/s"
    table = made_table("replicas", "replica", "role", "state", numbers=numbers)
    for replica in replicas:
        load = replica.load
        role = name_of(admin_pb.ReplicaRole, replica.role)
        home = ""
        if replica.home_role not in (admin_pb.REPLICA_ROLE_UNSPECIFIED, replica.role):
            home = f" (of {name_of(admin_pb.ReplicaRole, replica.home_role)})"
        table.add_row(
            replica.replica_id,
            "\n".join(filter(None, (f"{role}{home}", _shape(replica), load.backend))),
            name_of(admin_pb.ReplicaState, replica.state),
            f"{load.num_running}/{load.num_waiting}",
            f"{load.num_free_blocks}/{load.num_total_blocks}",
            str(load.num_cached_blocks),
            _rate(load.prefill_tok_s, 0),
            _rate(load.decode_step_ms, 1),
            _rate(load.transfer_gb_s, 2),
        )
    return table


def _shape(replica: admin_pb.Replica) -> str:
    """Return `2x2 (10+18)`: tp x pp and the layers of each stage, and `2x2 ep 2 (10+18)` with experts in two
    parts; empty for a single rank."""
    layers = replica.stage_layers
    if replica.tp * len(layers) <= 1:
        return ""
    split = f" ({'+'.join(map(str, layers))})" if len(layers) > 1 else ""
    parts = f" ep {replica.ep}" if replica.ep > 1 else ""
    return f"{replica.tp}x{len(layers)}{parts}{split}"


def _replica_notes(replica: admin_pb.Replica, paths: Iterable[admin_pb.Path]) -> list[str]:
    """Return a line for each problem, and none for a healthy replica."""
    load = replica.load
    counts = (
        (load.num_checksum_failures, "pieces failed their checksum and were computed again"),
        (load.num_quarantined_blocks, "blocks in quarantine"),
        (load.num_leaked_blocks, "blocks referenced although nothing runs"),
        (load.num_unstored_blocks.get("failed", 0), "finished blocks could not be written to the store"),
        (load.num_store_checksum_failures, "records of the store failed their checksum and were computed"),
    )
    notes = [replica.note] if replica.note else []
    if load.age_s > _LATE_S:
        notes.append(f"its last report is {load.age_s:.0f} s old")
    notes += [_path_note(path) for path in paths if path.instead_of]
    return notes + [f"{number} {meaning}" for number, meaning in counts if number]


def _path_note(path: admin_pb.Path) -> str:
    if not path.transport:
        return f"cannot write to {path.peer_replica_id}: {path.instead_of}"
    return (
        f"rank {path.rank} writes to {path.peer_replica_id} rank {path.peer_rank} over {path.transport} "
        f"({path.device}), {path.gb_s:.2f} GB/s: {path.instead_of}"
    )


# Of a candidate's cost.
_TERMS = {
    "queue": "queue",
    "load": "load",
    "prefill": "pre-\nfill",
    "transfer": "trans-\nfer",
    "pressure": "pres-\nsure",
    "cost": "cost",
}


def _candidate_table(decision: pb.Decision) -> Table:
    title = f"attempt {decision.attempt}, policy {decision.policy}: {decision.reason}"
    numbers = ("cached\ntokens", "new\ntokens", *(f"{name},\nms" for name in _TERMS.values()))
    table = made_table(title, "", "replica", "side", numbers=numbers)
    chosen = {("prefill", decision.prefill), ("decode" if decision.prefill else "local", decision.decode)}
    for candidate in decision.candidates:
        table.add_row(
            "[green]*[/]" if (candidate.side, candidate.replica_id) in chosen else "",
            candidate.replica_id,
            candidate.side,
            str(candidate.matched_tokens),
            str(candidate.uncached_tokens),
            *(f"{1e3 * _term_s(candidate, name):.1f}" for name in _TERMS),
        )
    return table


def _term_s(candidate: pb.Candidate, name: str) -> float:
    """Return a term of a candidate's cost. A transfer includes windows and states, which are sent whatever
    the other side has."""
    once_s = candidate.once_s if name == "transfer" else 0.0
    return float(getattr(candidate, f"{name}_s")) + once_s


class _PathMatrix:
    """Renders the paths: rows write, columns receive, each cell sums up the paths between the ranks of the
    two. A table has as many columns as the width allows."""

    def __init__(self, replicas: Sequence[admin_pb.ReplicaPaths]) -> None:
        cells: dict[tuple[str, str], list[admin_pb.Path]] = {}
        for replica in replicas:
            for path in replica.paths:
                cells.setdefault((replica.replica_id, path.peer_replica_id), []).append(path)
        self._sources = sorted({source for source, _ in cells})
        self._targets = sorted({target for _, target in cells})
        self._cells = {pair: _path_cell(paths) for pair, paths in cells.items()}

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        left = list(self._targets)
        while left:
            shown, left = self._split(left, options.max_width)
            table = made_table("paths (rows write to columns; the slowest of several)", "from", *shown)
            for source in self._sources:
                table.add_row(source, *(self._cells.get((source, target), NONE) for target in shown))
            yield table

    def _split(self, targets: list[str], width: int) -> tuple[list[str], list[str]]:
        """Return the targets that fit beside the sources (at least one), and the others."""
        left = width - _EDGES - max(len(source) for source in self._sources)
        for index, target in enumerate(targets):
            cells = (self._cells.get((source, target), "") for source in self._sources)
            lines = (Text.from_markup(cell).plain.split("\n") for cell in cells)
            left -= 1 + max(len(target), *(len(line) for cell in lines for line in cell))
            if left < 0 and index > 0:
                return targets[:index], targets[index:]
        return targets, []


def _path_cell(paths: Sequence[admin_pb.Path]) -> str:
    """Return a line `shm memory x3` for each transport, then `5.80 GB/s 3 us`; warnings are yellow."""
    if not all(path.transport for path in paths):
        return "[red]none[/]"
    kinds = Counter(f"{path.transport} {path.device}" for path in paths)
    lines = [f"{kind} x{count}" if len(paths) > 1 else kind for kind, count in sorted(kinds.items())]
    gb_s, latency_us = min(path.gb_s for path in paths), max(path.latency_us for path in paths)
    cell = "\n".join([*lines, f"{gb_s:.2f} GB/s {latency_us:.0f} us"])
    return f"[yellow]{cell}[/]" if any(path.instead_of for path in paths) else cell


def _rate(value: float, num_digits: int) -> str:
    return f"{value:.{num_digits}f}" if value else NONE


# ----------------------------------------------------------------------------------------------
# The pools: their counts, and the latest changes.

_NUM_MOVES = 5


def _requests_line(status: admin_pb.StatusResponse) -> str:
    """The requests of all gateways that answered; of the one that was asked where none is registered."""
    silent = [f"{it.gateway_id} {it.note}" for it in status.gateways if it.note]
    known: Sequence[admin_pb.GatewayStatus | admin_pb.StatusResponse]
    known = [it for it in status.gateways if not it.note] or [status]
    running, finished, cancelled, failed = (
        sum(getattr(it, f"num_{kind}_requests") for it in known)
        for kind in ("running", "finished", "cancelled", "failed")
    )
    line = f"requests: {running} running, {finished} finished, {cancelled} cancelled, {failed} failed"
    line += f" (without {'; '.join(silent)})" if silent else ""
    unheard = [
        f"; {it.gateway_id} does not hear {other}: {reason}"
        for it in status.gateways
        for other, reason in sorted(it.unheard.items())
    ]
    divided = [f"; {it.gateway_id}: {it.quota_note}" for it in status.gateways if it.quota_note]
    return line + "".join(unheard + divided)


def pool_parts(status: admin_pb.StatusResponse) -> list[RenderableType]:
    """Return a table of the pools, then the latest changes, oldest first."""
    if not status.pools:
        return []
    numbers = "configured", "desired", "ready", "lent", "limits", "prompts,\nlast minute"
    num_prompts = sum(pool.num_recent_prompts for pool in status.pools)
    table = made_table("pools", "pool", "role", "chosen by", numbers=numbers)
    for pool in status.pools:
        late = pool.num_ready != pool.desired
        table.add_row(
            pool.name,
            name_of(admin_pb.ReplicaRole, pool.role),
            _chosen_by(pool),
            str(pool.configured),
            str(pool.desired),
            f"[yellow]{pool.num_ready}[/]" if late else str(pool.num_ready),
            str(pool.num_reassigned) if pool.num_reassigned else NONE,
            f"{pool.min}-{pool.max}" if pool.max else NONE,
            f"{pool.num_recent_prompts / num_prompts:.0%} of {num_prompts}" if num_prompts else NONE,
        )
    moves = [Text(move_line(move)) for move in status.scaling_changes[-_NUM_MOVES:]]
    return [table, *moves, Text("")] if moves else [table]


def move_line(move: admin_pb.ScalingChange) -> str:
    """Return `2026-01-31 12:00:00Z decode 1 -> 3 by operator: why`; a change of role has no counts."""
    at = datetime.fromtimestamp(move.at, UTC).strftime("%Y-%m-%d %H:%M:%SZ")
    counts = f" {move.before} -> {move.after}" if move.before != move.after else ""
    return f"{at} {move.pool}{counts} by {move.by}: {move.reason}"


def _chosen_by(pool: admin_pb.Pool) -> str:
    if pool.pinned:
        return "operator (pinned)"
    return "autoscaler" if pool.max else "configuration" if pool.desired == pool.configured else "nobody now"
