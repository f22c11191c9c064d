"""Symptoms of the transfer of KV between replicas: of paths, checksums, blocks and landings."""

from __future__ import annotations

from collections.abc import Iterator

from cluster.doctor.check_context import Check
from cluster.doctor.checks import CheckResult, Figures, error, note, ok, warning
from cluster.doctor.live_cluster import Live

_GROUP = "transfer"


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


CHECKS = (
    Check(
        "paths",
        _GROUP,
        "Paths that are missing, below `transfer.min_gb_s`, or not the preferred ones",
        paths,
    ),
    Check("checksums", _GROUP, "Pieces whose bytes changed on the way", checksums),
    Check("blocks", _GROUP, "Blocks that stay in quarantine, or leak", blocks),
    Check("landings", _GROUP, "Landings that wait for free blocks at a decode replica", landings),
)
