"""Symptoms of the tiered store: its processes, its index, its tiers, and what was not stored."""

from __future__ import annotations

from collections.abc import Iterator

from cluster.doctor.check_context import Check
from cluster.doctor.checks import CheckResult, Figures, error, note, ok, warning
from cluster.doctor.live_cluster import Live

_GROUP = "store"


def stores(live: Live) -> Iterator[CheckResult]:
    """Check that each node's store process answers."""
    for node in live.stores:
        if node.error:
            yield error(
                f"the store of {node.member.host} (process {node.member.process_id}): {node.error}",
                "serving continues without what it holds",
                "see its worker-*.err log; Ray starts an ended one again, a stopped one must be ended",
                node=node.member.host,
            )
    num_good = sum(not node.error for node in live.stores)
    if num_good:
        yield ok(f"{num_good} stores answer", num_stores=num_good)


def index(live: Live) -> Iterator[CheckResult]:
    earlier = {(node.member.node_id, node.member.epoch): node.index for node in live.stores_before}
    for node in live.stores:
        if node.error:
            continue
        state, host = node.index.state, node.member.host
        before = earlier.get((node.member.node_id, node.member.epoch), node.index)
        num_late = node.index.num_late - before.num_late
        figures: Figures = {
            "node": host,
            "state": state,
            "late": num_late,
            "latency_ms": round(node.index.latency_ms, 3),
        }
        if state in ("slow", "down"):
            yield warning(
                f"{host}: the index is {state}{f' ({node.index.note})' if node.index.note else ''}",
                "look-ups are cut off: this node serves from its own tiers, and computes what others hold",
                "see to the Redis server (redis); with state slow, to its latency and store.lookup_budget_ms",
                **figures,
            )
        elif num_late:
            yield warning(
                f"{host}: {num_late} look-ups took longer than store.lookup_budget_ms while we looked",
                "they were not waited for: those blocks are computed",
                "a Redis nearer to the node, or a larger budget",
                **figures,
            )
        elif state == "up":
            yield ok(f"{host}: the index answers in {node.index.latency_ms:.2f} ms", **figures)


def tiers(live: Live) -> Iterator[CheckResult]:
    for host, tier, before in live.tiers():
        name = f"{host}, {tier.tier}"
        if tier.note:
            yield warning(f"{name}: {tier.note}", "the tier is used less than it could be", "see the note")
        if tier.num_checksum_failures:
            yield warning(
                f"{name}: {tier.num_checksum_failures} records had bytes that were not written so",
                "they were computed again; but this disk or memory alters bytes",
                "`tandem store verify` reads all; look for memory and disk errors (`smartctl`)",
                total=tier.num_checksum_failures,
            )
        if tier.num_io_errors > before.num_io_errors:
            yield error(
                f"{name}: {tier.num_io_errors - before.num_io_errors} reads or writes failed while we looked",
                "the disk is full, read-only or fails: writes are suspended, reads continue",
                "`dmesg` and `df` on that node; replace the disk, or free space",
                total=tier.num_io_errors,
            )
        elif tier.num_io_errors:
            yield note(
                f"{name}: {tier.num_io_errors} reads or writes failed since the store started, none now"
            )
        if tier.num_refused > before.num_refused:
            yield warning(
                f"{name}: {tier.num_refused - before.num_refused} records found no space while we looked",
                "all it holds is in use, or a group has its share: those blocks are not kept",
                "a larger store.dram_gb, or dram_share of the tenant in auth.tenants",
                total=tier.num_refused,
            )
        if tier.num_quarantined and before.num_quarantined:
            yield warning(
                f"{name}: {tier.num_quarantined} records stay in quarantine",
                "a process that is stopped, not dead, could still write there",
                "end or continue that process (`ps`, state T)",
                num_records=tier.num_quarantined,
            )


def unstored(live: Live) -> Iterator[CheckResult]:
    """Report finished blocks that could not be written through, by cause."""
    for cause, why in (
        ("failed", "the store did not take them: see the findings on stores"),
        ("queue", "they came faster than they could be copied: engine.write_queue was full"),
        ("refused", "the host tier had no space for them"),
    ):
        grown = live.growth(lambda load, name=cause: load.num_unstored_blocks.get(name, 0))  # type: ignore[misc]
        for replica, count in grown.items():
            yield note(
                f"{replica}: {count} finished blocks were not stored while we looked ({cause})",
                why,
                "a larger store.dram_gb for refused, a larger engine.write_queue for queue",
                num_blocks=count,
            )


CHECKS = (
    Check("stores", _GROUP, "Each node's store process answers", stores),
    Check("store-index", _GROUP, "State of the index, look-ups cut off", index),
    Check("store-tiers", _GROUP, "Failing disks, refused records, quarantine, wrong bytes", tiers),
    Check("unstored", _GROUP, "Finished blocks that were not stored", unstored),
)
