"""Whether the states of a model fit what moves and keeps them: a state is one record, and one piece of a
transfer, however large it is, where KV comes in small blocks."""

from __future__ import annotations

from collections.abc import Iterator

from cluster.doctor.check_context import Check, CheckContext
from cluster.doctor.checks import CheckResult, Figures, ok, warning
from cluster.doctor.storage import GROUP
from cluster.serve.resource_needs import gb
from kvtransfer.store.record import PAGE_BYTES, image_bytes

# A segment's directory, and the page behind it.
_DIRECTORY_BYTES = 2 * PAGE_BYTES
# A host tier with fewer states loses them before their prompts come again.
_FEW_STATES = 8
_MIB = 1 << 20
_LOST = "they are computed again wherever no snapshot is on the device"


def state_records(context: CheckContext) -> Iterator[CheckResult]:
    """Compare the states of a sequence with a segment, with the host tier, and with the pace of hand-overs;
    of models that have some."""
    if context.needs is None:
        return
    ranks = [rank for pool in context.needs.pools for rank in pool.ranks]
    largest = max((rank.block_bytes.states_of_sequence for rank in ranks), default=0)
    if not largest:
        return
    problems = [
        *_segment_problems(context, largest),
        *_host_tier_problems(context),
        *_pace_problems(context, largest),
    ]
    yield from problems
    if not problems:
        staging_bytes = context.config.transfer.tcp_streams * largest
        yield ok(
            f"the states of a sequence take {gb(largest)} at a rank, and fit wherever they go; a path over "
            f"TCP has up to {gb(staging_bytes)} of staging memory for them",
            state_bytes=largest,
            staging_bytes=staging_bytes,
        )


def _segment_problems(context: CheckContext, state_bytes: int) -> Iterator[CheckResult]:
    store = context.config.store
    needed = image_bytes(state_bytes) + _DIRECTORY_BYTES
    if store.nvme_path is not None and needed > store.segment_mb * _MIB:
        yield warning(
            f"the states of a sequence take {gb(state_bytes)} at a rank, a segment of the NVMe tier has "
            f"{gb(store.segment_mb * _MIB)}",
            f"no state is written to NVMe: {_LOST}",
            f"raise store.segment_mb to {-(-needed // _MIB)} or more",
            state_bytes=state_bytes,
            segment_bytes=store.segment_mb * _MIB,
        )


def _host_tier_problems(context: CheckContext) -> Iterator[CheckResult]:
    """Compare the host tier with the states of a sequence at all ranks of a replica, each of which stores a
    record."""
    assert context.needs is not None
    store = context.config.store
    if not store.dram_gb:
        return
    of_pools = (pool.ranks for pool in context.needs.pools)
    needed = max(sum(image_bytes(rank.block_bytes.states_of_sequence) for rank in its) for its in of_pools)
    num_states = int(store.dram_gb * 1e9) // needed
    if num_states >= _FEW_STATES:
        return
    figures: Figures = {"record_bytes": needed, "num_states": num_states}
    fits = f"only {num_states} of them" if num_states else "none of them"
    yield warning(
        f"the states of a sequence take {gb(needed)} in the host tier, which has space for {fits}",
        f"prompts find KV in the store and no state to begin behind it: {_LOST}",
        f"raise store.dram_gb to {_FEW_STATES * needed / 1e9:.1f} or more",
        **figures,
    )


def _pace_problems(context: CheckContext, state_bytes: int) -> Iterator[CheckResult]:
    transfer, pools = context.config.transfer, context.config.pools
    if not transfer.hand_over_gb_s or all(pool.role == "both" for pool in pools):
        return
    needed_s = state_bytes / (transfer.hand_over_gb_s * 1e9)
    if needed_s > transfer.landing_stall_s:
        yield warning(
            f"at transfer.hand_over_gb_s the states of a sequence take {needed_s:.0f} s to hand over, "
            f"transfer.landing_stall_s is {transfer.landing_stall_s:.0f} s",
            "hand-overs are taken for stalled, and end",
            "raise transfer.hand_over_gb_s to "
            f"{state_bytes / transfer.landing_stall_s / 1e9 * 2:.3g} or more, or transfer.landing_stall_s",
            state_bytes=state_bytes,
            needed_s=round(needed_s, 1),
        )


CHECKS = (
    Check(
        "state-records",
        GROUP,
        "The states of a sequence against an NVMe segment, the host tier, and the pace of hand-overs",
        state_records,
    ),
)
