"""Tables of the stores: messages of the API in, rich objects out."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich.console import Group
from rich.table import Table
from rich.text import Text

from cluster.cli.terminal import NONE, made_table
from cluster.proto.tandem.v1 import admin_pb2 as admin_pb

_UNITS = ("B", "kB", "MB", "GB", "TB")
_KEY_CHARS = 12
_MODEL_CHARS = 8
_MAX_GROUPS = 20


def members_table(members: Sequence[admin_pb.StoreMember]) -> Table:
    """Show the store processes, as registered."""
    table = made_table("stores", "node", "host", "address", numbers=("process",))
    for member in members:
        table.add_row(member.node_id, member.host or NONE, member.address, str(member.process_id))
    return table


def tiers_table(nodes: Sequence[admin_pb.StoreNodeStat]) -> Group:
    """Show one row for each tier, and below the problems, for `tandem status`."""
    table = made_table("store", "node", "tier", numbers=("used", "of", "records", "hits", "index"))
    for node in nodes:
        for tier in node.tiers:
            table.add_row(
                node.member.node_id,
                tier.tier,
                size(tier.num_bytes),
                _capacity(tier),
                str(tier.num_records),
                hit_rate(tier),
                _index_cell(node.index) if tier.tier == "dram" else "",
            )
    return _group([table], notes(nodes))


def stat_view(reply: admin_pb.StoreStatResponse) -> Group:
    """Show all statistics of every tier, of the index, and of the sharing groups."""
    tiers = made_table(
        "tiers", "node", "tier", numbers=("used", "of", "records", "hits", "evicted", "refused", "queue")
    )
    work = made_table(
        "work",
        "node",
        "tier",
        numbers=("put", "written\nper put", "read\nGB/s", "write\nGB/s", "ms", "leases"),
    )
    for node_id, tier in ((node.member.node_id, tier) for node in reply.nodes for tier in node.tiers):
        place = node_id, tier.tier
        tiers.add_row(
            *place,
            size(tier.num_bytes),
            _capacity(tier),
            str(tier.num_records),
            hit_rate(tier),
            str(tier.num_evictions),
            str(tier.num_refused),
            str(tier.num_queued),
        )
        work.add_row(
            *place,
            size(tier.num_put_bytes),
            _amplification(tier),
            f"{tier.read_gb_s:.2f}" if tier.read_gb_s else NONE,
            f"{tier.write_gb_s:.2f}" if tier.write_gb_s else NONE,
            f"{tier.latency_ms:.2f}" if tier.latency_ms else NONE,
            str(tier.num_leases),
        )
    index = made_table("index", "node", "state", numbers=("look-ups", "late", "errors", "announced", "ms"))
    for node in reply.nodes:
        if not node.error:
            seen = node.index
            counts = seen.num_lookups, seen.num_late, seen.num_errors, seen.num_announced
            index.add_row(node.member.node_id, _index_cell(seen), *map(str, counts), f"{seen.latency_ms:.2f}")
    parts = [tiers, work, index]
    if groups := _by_group(reply.nodes):
        held = made_table("sharing groups", "group", numbers=("used",))
        for group, num_bytes in groups[:_MAX_GROUPS]:
            held.add_row(group or "(none)", size(num_bytes))
        if len(groups) > _MAX_GROUPS:
            held.caption = f"and {len(groups) - _MAX_GROUPS} groups that hold less"
        parts.append(held)
    return _group(parts, notes(node for node in reply.nodes if not node.error))  # those fail the command


def listing_view(reply: admin_pb.StoreListResponse) -> Group:
    """Show the records of every node, and how many more there are."""
    parts = []
    for node in reply.nodes:
        if node.error:
            continue
        table = made_table(
            f"node {node.member.node_id}: {len(node.records)} of {node.num_matching} records",
            "key",
            "group",
            "model",
            "layers",
            "heads",
            "tiers",
            numbers=("size", "hits"),
        )
        for record in node.records:
            table.add_row(
                record.key[:_KEY_CHARS],
                record.sharing_group or "(none)",
                record.model[:_MODEL_CHARS],
                f"{record.layer_start}-{record.layer_end - 1}",
                f"{record.head_start}-{record.head_end - 1}",
                ", ".join(record.tiers),
                size(record.num_bytes),
                str(record.num_hits),
            )
        parts.append(table)
    return Group(*parts)  # also those without a record: their node was asked


def verified_view(reply: admin_pb.StoreVerifyResponse) -> Group:
    """Show what was read, and how much of it was bad."""
    table = made_table("verified", "node", "tier", numbers=("records", "bad"))
    texts = []
    for node in reply.nodes:
        if node.error:
            continue
        for tier in sorted(node.num_read):
            table.add_row(node.member.node_id, tier, str(node.num_read[tier]), str(node.num_bad.get(tier, 0)))
        rate = f", {node.num_bytes / node.seconds / 1e9:.2f} GB/s" if node.seconds else ""
        texts.append(f"{node.member.node_id}: {size(node.num_bytes)} in {node.seconds:.1f} s{rate}")
    return _group([table], texts)


def purged_view(reply: admin_pb.StorePurgeResponse) -> Group:
    """Show what was deleted, and what is deleted when its last user is done."""
    table = made_table("purged", "node or replica", "tier", numbers=("records", "size"))
    texts = []
    for replica in reply.replicas:
        if replica.error:
            continue
        table.add_row(replica.replica_id, "device", str(replica.num_blocks), "")
        if replica.num_requests:
            left = (
                f"{replica.num_requests} requests are under way and hold {replica.num_held} of these blocks"
            )
            texts.append(f"{replica.replica_id}: {left} until they end; purge again then, to be certain")
    for node in reply.nodes:
        if node.error:
            continue
        for tier in sorted(node.num_records):
            num_bytes = node.num_bytes.get(tier, 0)
            table.add_row(node.member.node_id, tier, str(node.num_records[tier]), size(num_bytes))
        if node.num_pending:
            left = (
                f"{node.num_pending} of them are in use: found by nobody, deleted when their users are done"
            )
            texts.append(f"{node.member.node_id}: {left}")
    return _group([table], texts)


def notes(nodes: Iterable[admin_pb.StoreNodeStat]) -> list[str]:
    """Return a line for each problem, and none for healthy stores."""
    lines = []
    for node in nodes:
        if node.error:
            lines.append(f"store of node {node.member.node_id} at {node.member.address}: {node.error}")
        if node.index.note:
            lines.append(f"index of node {node.member.node_id}: {node.index.note}")
        for tier in node.tiers:
            counts = (
                (tier.num_checksum_failures, "records had a wrong checksum and were dropped"),
                (tier.num_io_errors, "reads or writes failed"),
                (tier.num_quarantined, "slots in quarantine: a process could still write there"),
            )
            found = [f"{count} {meaning}" for count, meaning in counts if count]
            where = f"{tier.tier} of node {node.member.node_id}: "
            lines += [where + note for note in ([tier.note] if tier.note else []) + found]
    return lines


def size(num_bytes: float) -> str:
    """Return `1.5 GB`, in units of 1000."""
    unit = 0
    while num_bytes >= 1000 and unit < len(_UNITS) - 1:
        num_bytes, unit = num_bytes / 1000, unit + 1
    return f"{num_bytes:.1f} {_UNITS[unit]}" if unit else f"{num_bytes:.0f} B"


def hit_rate(tier: admin_pb.StoreTier) -> str:
    """Return the share of the requested blocks that the tier had."""
    asked = tier.num_hits + tier.num_misses
    return f"{tier.num_hits / asked:.0%}" if asked else NONE


def _group(tables: Iterable[Table], texts: Iterable[str]) -> Group:
    """Join the tables that have a row, then the texts."""
    return Group(*(table for table in tables if table.row_count), *(Text(text) for text in texts))


def _amplification(tier: admin_pb.StoreTier) -> str:
    """Return the bytes written per byte put, for NVMe only: the host tier is also written when blocks are
    read."""
    if tier.tier != "nvme" or not tier.num_put_bytes:
        return NONE
    return f"{tier.num_written_bytes / tier.num_put_bytes:.2f}"


def _capacity(tier: admin_pb.StoreTier) -> str:
    return size(tier.capacity_bytes) if tier.capacity_bytes else NONE


def _index_cell(index: admin_pb.StoreIndex) -> str:
    colour = {"up": "green", "slow": "yellow", "down": "red"}.get(index.state)
    return f"[{colour}]{index.state}[/]" if colour else index.state or NONE


def _by_group(nodes: Iterable[admin_pb.StoreNodeStat]) -> list[tuple[str, int]]:
    """Return the bytes of each sharing group on all nodes, the largest first."""
    total: dict[str, int] = {}
    for node in nodes:
        for group, num_bytes in node.bytes_by_sharing_group.items():
            total[group] = total.get(group, 0) + num_bytes
    return sorted(total.items(), key=lambda item: (-item[1], item[0]))
