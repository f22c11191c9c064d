"""Symptoms of the KV cache: of transfers between replicas, and of the tiered store."""

from __future__ import annotations

from collections.abc import Iterator

from cluster.doctor.check_context import Check
from cluster.doctor.checks import CheckResult, Figures, error, note, ok, warning
from cluster.doctor.live_cluster import Live

_TRANSFER, _STORE = "transfer", "store"


def paths(live: Live) -> Iterator[CheckResult]:
    """Check that each path exists, is not below the floor, and uses the preferred transport."""
    num_good = 0
    for replica in live.paths:
        for path in replica.paths:
            ends = f"{replica.replica_id} rank {path.rank} to {path.peer_replica_id} rank {path.peer_rank}"
            figures: Figures = {
                "from": replica.replica_id,
                "to": path.peer_replica_id,
                "gb_s": round(path.gb_s, 3),
            }
            if not path.transport:
                yield error(
                    f"there is no path from {replica.replica_id} to {path.peer_replica_id}",
                    f"each transport was passed over: {path.instead_of}. Their requests go to others, or the "
                    "decode replica computes the prompts itself",
                    "allow a transport that both ends have (transfer.transports), open the ports between the "
                    "nodes, or lower transfer.min_gb_s",
                    **figures,
                )
            elif 0 < path.gb_s < live.expected.min_gb_s:
                yield warning(
                    f"{ends} moves {path.gb_s:.2f} GB/s over {path.transport} ({path.device}), below "
                    f"transfer.min_gb_s {live.expected.min_gb_s:g}",
                    path.instead_of or "transfer.below_floor is warn, so that it is used all the same",
                    "see to the network between the nodes (pcie-links, rdma), or lower the floor",
                    **figures,
                )
            elif path.instead_of:
                yield warning(
                    f"{ends} goes over {path.transport} ({path.device}), {path.gb_s:.2f} GB/s",
                    f"preferred ones were passed over: {path.instead_of}",
                    "make the preferred one work, or leave it out of transfer.transports",
                    **figures,
                )
            else:
                num_good += 1
    if num_good:
        yield ok(f"{num_good} paths are as they should be", num_paths=num_good)


def checksums(live: Live) -> Iterator[CheckResult]:
    grown = live.growth(lambda load: load.num_checksum_failures)
    for replica in live.status.replicas:
        total = replica.load.num_checksum_failures
        if not total:
            continue
        seen = f"{replica.replica_id}: {total} pieces arrived with a wrong checksum"
        why = "they were computed again, so no token is wrong; but memory or the network alters bytes"
        remedy = "look for memory errors (`edac-util`, `nvidia-smi -q -d ECC`) and link errors on both ends"
        growth = grown.get(replica.replica_id, 0)
        say = error if growth else warning
        yield say(f"{seen}, {growth} of them while we looked", why, remedy, total=total, growth=growth)


def blocks(live: Live) -> Iterator[CheckResult]:
    """Report blocks that stay in quarantine, or leak, from one look to the next."""
    earlier = {(item.replica_id, item.epoch): item.load for item in live.before.replicas}
    for replica in live.status.replicas:
        load, before = replica.load, earlier.get((replica.replica_id, replica.epoch))
        if before is None:
            continue
        if load.num_quarantined_blocks and before.num_quarantined_blocks:
            yield warning(
                f"{replica.replica_id}: {load.num_quarantined_blocks} blocks stay in quarantine",
                "a writer that lost its landing could still write there: it neither acknowledged nor ended",
                "look for a prefill replica that is stopped or hangs; transfer.writer_ack_s ends it",
                num_blocks=load.num_quarantined_blocks,
            )
        if load.num_leaked_blocks and before.num_leaked_blocks:
            yield warning(
                f"{replica.replica_id}: {load.num_leaked_blocks} blocks are referenced although nothing runs",
                "those blocks are lost until the replica ends; it is a defect of ours",
                "restart that replica, and report it with its worker-*.err log",
                num_blocks=load.num_leaked_blocks,
            )


def landings(live: Live) -> Iterator[CheckResult]:
    for replica in live.status.replicas:
        load = replica.load
        if load.num_waiting_landings:
            free = load.num_free_blocks / max(load.num_total_blocks, 1)
            yield note(
                f"{replica.replica_id}: {load.num_waiting_landings} landings wait for blocks, {free:.0%} of "
                "its blocks are free",
                "their prompts are not computed until blocks are free; past their deadline, or "
                "transfer.landing_queue, they are refused",
                "more decode replicas or engine.kv_tokens, if this lasts",
                num_landings=load.num_waiting_landings,
            )


# ----------------------------------------------------------------------------------------------
# The tiered store: its processes, its index, its tiers, and what was not stored.


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
    Check(
        "paths",
        _TRANSFER,
        "Paths that are missing, below `transfer.min_gb_s`, or not the preferred ones",
        paths,
    ),
    Check("checksums", _TRANSFER, "Pieces whose bytes changed on the way", checksums),
    Check("blocks", _TRANSFER, "Blocks that stay in quarantine, or leak", blocks),
    Check("landings", _TRANSFER, "Landings that wait for free blocks at a decode replica", landings),
    Check("stores", _STORE, "Each node's store process answers", stores),
    Check("store-index", _STORE, "State of the index, look-ups cut off", index),
    Check("store-tiers", _STORE, "Failing disks, refused records, quarantine, wrong bytes", tiers),
    Check("unstored", _STORE, "Finished blocks that were not stored", unstored),
)
