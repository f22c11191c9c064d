"""The needs of waiting sequences before a step may compute them: the landing of a prompt that is handed over,
and the blocks that are loaded from the store."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable
from collections.abc import Sequence as Seq

from workers.scheduler.block_tables import BlockTables
from workers.scheduler.micro_batches import BatchPause
from workers.scheduler.sequence import HeldBack, LandingState, Sequence, StoreLoad
from workers.scheduler.step import LandingNeed, LoadNeed

# The time for which a request that waits for its landing holds back others.
_WAIT_S = 1.0


def landing_needs(
    tables: BlockTables,
    running: Seq[Sequence],
    waiting: Collection[Sequence],
    window_tokens: int,
    now: float,
    is_isolating: bool = False,
    pause: BatchPause | None = None,
) -> list[LandingNeed]:
    """Return the requests to hand over that have at most `window_tokens` tokens to compute ahead of them, and
    mark them ASKED.

    A request that waits for its landing holds back only the requests behind it that go to the same decode
    replica, so that a full decode replica does not make the others idle. After `_WAIT_S` the first of them
    holds back nobody: it may need more blocks than the others (`kvtransfer.protocol.receiver`). Only one
    suspect at a time asks, and none while another is isolated (`is_isolating`): its landing would time out
    before its turn.

    Paused requests are ahead of nobody. Requests that wait for the share of their sharing group are ahead of
    their own group alone. So are requests of a group with a limit that wait for their landing, since they may
    wait for the share there.
    """
    needs: list[LandingNeed] = []
    if not waiting:
        return needs
    is_pausing = pause is not None and pause.is_active

    def is_paused(sequence: Sequence) -> bool:
        return is_pausing and pause is not None and pause.is_paused(sequence)

    num_ready_tokens = sum(it.num_remaining for it in running if not is_paused(it))
    shares = _WaitingShares(tables, running)
    # The tokens ahead by target; of groups with a limit, those that are ahead of their own group alone also
    # by target and group.
    target_to_asked_tokens: Counter[str | tuple[str, str]] = Counter()
    passed_targets: set[str | tuple[str, str]] = set()
    for sequence in waiting:
        if num_ready_tokens > window_tokens:
            break
        request = sequence.request
        if request.submission.suspect:
            if is_isolating:
                continue
            is_isolating = True
        num_uncached_tokens = sequence.num_tokens - sequence.num_expected_cached_tokens
        has_limit = tables.pool.has_limit(sequence.sharing_group)
        if request.landing is LandingState.READY:
            if has_limit and not shares.claim(sequence):
                shares.group_to_held_tokens[sequence.sharing_group] += num_uncached_tokens
            elif not is_paused(sequence):
                num_ready_tokens += num_uncached_tokens
            continue
        assert request.submission.decode is not None
        target = request.submission.decode.address
        of_group = (target, sequence.sharing_group) if has_limit else target
        is_late = now >= request.landing_asked_at + _WAIT_S
        if request.landing is LandingState.NEEDED:
            num_ahead_tokens = num_ready_tokens + target_to_asked_tokens[target]
            if has_limit:
                num_ahead_tokens += target_to_asked_tokens[of_group]
                num_ahead_tokens += shares.group_to_held_tokens[sequence.sharing_group]
            if num_ahead_tokens > window_tokens:
                continue
            request.landing, request.landing_asked_at, is_late = LandingState.ASKED, now, False
            needs.append(_landing_need(sequence))
        elif is_late and of_group not in passed_targets:
            passed_targets.add(of_group)
            continue
        target_to_asked_tokens[of_group] += num_uncached_tokens
    return needs


class _WaitingShares:
    """Finds out, in the order of the line, which waiting sequences fit into the rest of their group's share.
    The first one that does not fit holds back its group."""

    def __init__(self, tables: BlockTables, running: Seq[Sequence]) -> None:
        self.group_to_held_tokens: Counter[str] = Counter()
        self._tables = tables
        self._running = running
        self._group_to_left: dict[str, int] = {}

    def claim(self, sequence: Sequence) -> bool:
        """Take the blocks that a sequence needs from its group's share. Return False if too few are left."""
        group, pool = sequence.sharing_group, self._tables.pool
        if group not in self._group_to_left:
            num_spare = sum(
                each.sharing_group == group and not each.request.decodes_remotely for each in self._running
            )
            self._group_to_left[group] = pool.num_left(group) - num_spare
        if self._group_to_left[group] >= 0:
            demand = self._tables.demand(sequence)
            self._group_to_left[group] -= demand.num_new + pool.num_to_use(demand.cached)
        return self._group_to_left[group] >= 0


def load_needs(waiting: Iterable[Sequence], tables: BlockTables, most: int) -> list[LoadNeed]:
    """Return the loads to begin for the first waiting sequences, so that at most `most` are under way, and
    mark the sequences ASKED, or DONE if the device has all reusable blocks. A sequence that waits for the
    share of its sharing group holds back its group alone."""
    needs: list[LoadNeed] = []
    num_loading = 0
    held_groups: set[str] = set()
    for sequence in waiting:
        if num_loading >= most:
            break
        if sequence.holds_back is HeldBack.GROUP:
            held_groups.add(sequence.sharing_group)
        if held_groups and sequence.sharing_group in held_groups:
            continue
        if sequence.load is StoreLoad.WANTED:
            keys, num_held = tables.wanted_keys(sequence)
            sequence.load = StoreLoad.ASKED if num_held < len(keys) else StoreLoad.DONE
            if sequence.load is StoreLoad.ASKED:
                key, group = sequence.request.key, sequence.request.submission.facts.sharing_group
                needs.append(LoadNeed(*key, sequence.index, group, tuple(keys), num_held))
        num_loading += sequence.load is StoreLoad.ASKED
    return needs


def _landing_need(sequence: Sequence) -> LandingNeed:
    request = sequence.request
    return LandingNeed(
        request_id=request.submission.request_id,
        attempt=request.submission.attempt,
        submission=request.submission,
        num_tokens=sequence.num_tokens,
        deadline=request.deadline,
    )
