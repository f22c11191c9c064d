"""Planner: fills a step with decodes first, then prompt chunks, then waiting sequences, and frees blocks for
them."""

from __future__ import annotations

import math
from collections.abc import Collection
from collections.abc import Sequence as Seq
from typing import NamedTuple

from kvtransfer.common.group_shares import ShareClaim
from workers.config import EngineConfig
from workers.scheduler.block_tables import BlockDemand
from workers.scheduler.chunk_sizes import ChunkSizes
from workers.scheduler.isolation import Isolation
from workers.scheduler.lifecycle import Lifecycle
from workers.scheduler.micro_batches import BatchPause, MicroBatches
from workers.scheduler.offload import Offloader
from workers.scheduler.sequence import HeldBack, LandingState, Phase, Request, Sequence, StoreLoad
from workers.scheduler.step import StepBatch


class Planner:
    """Fills steps. If there are too few free blocks, blocks of running sequences move to host memory, if the
    ranks have any. If that is not enough, the sequence that is last in rank is preempted. When a sharing
    group has used up its share, only its own sequences are moved or preempted, and only its own waiting ones
    wait."""

    def __init__(
        self,
        config: EngineConfig,
        life: Lifecycle,
        micro: MicroBatches,
        isolation: Isolation,
        pause: BatchPause,
        sizes: ChunkSizes,
    ) -> None:
        self._life = life
        self._sizes = sizes
        self._isolation = isolation
        self._pause = pause
        self._pool = life.tables.pool
        self._micro = micro
        has_host = life.tables.host.num_total > 0
        self._offloader = Offloader(config, life.tables) if has_host else None

    def fill(self, batch: StepBatch, now: float, out: Collection[Request | None] = ()) -> None:
        """Put the tokens that can be computed now into the batch. `out` has, for each unreported plan, the
        suspect that is alone in it (None: it is a plan of others). A suspect is never out together with
        others, or with another suspect: the next one waits until the earlier plans are reported."""
        is_pausing = self._pause.begin(now)
        if is_pausing:
            self._free_paused_slots()
        is_first = self._isolation.is_next
        for is_isolated in (is_first, not is_first):
            suspect = self._isolation.current if is_isolated else None
            if any(request is not suspect for request in out):
                return
            if is_isolated:
                self._fill_from(batch, self._isolation.sequences)
            else:
                self._fill_with_others(batch, now, is_pausing)
            if batch.num_planned:
                batch.is_isolated = is_isolated
                self._isolation.planned(is_isolated)
                return

    def _fill_with_others(self, batch: StepBatch, now: float, is_pausing: bool) -> None:
        """Fill the batch with sequences that are no suspects. One suspect may be admitted here, so that it
        runs when its turn comes."""
        running: Seq[Sequence] = self._life.running
        if self._life.suspects:
            running = [sequence for sequence in running if not sequence.request.submission.suspect]
            self._life.num_reserved_slots = self._isolation.num_slots_needed
        if is_pausing:
            running = [sequence for sequence in running if not self._pause.is_left_out(sequence)]
        self._fill_from(batch, running)
        self._admit(batch, now, is_pausing=is_pausing)
        self._life.num_reserved_slots = 0
        if is_pausing and batch.num_planned:
            self._pause.planned(batch.planned)
        if self._offloader is not None and batch.num_planned:
            self._offloader.relieve(batch, self._life.running)
            if not (batch.has_copies or self._life.waiting):
                self._offloader.bring_back(batch, self._life.running)

    def _fill_from(self, batch: StepBatch, running: Seq[Sequence]) -> None:
        """Fill the batch with decodes in turn, then with prompt chunks."""
        decoding, chunks = _ready(running)
        decoding = self._life.with_slots(decoding)
        batch.delays_decodes = bool(decoding)
        num_turns = self._micro.num_turns(len(decoding), batch.step)
        for sequence in self._micro.in_turn(decoding, batch.step, batch.budget_tokens):
            if len(batch.entries) + len(batch.decodes) >= num_turns:
                break
            if not batch.add_decode(sequence):
                self._plan_sequence(batch, sequence)
        for sequence in chunks:
            self._plan_sequence(batch, sequence)

    def check(self) -> None:
        """Assert the invariants of the offloader."""
        if self._offloader is not None:
            self._offloader.check(self._life.running)

    def _plan_sequence(self, batch: StepBatch, sequence: Sequence) -> None:
        """Add the sequence's next chunk to the batch, as far as budgets, slots and blocks allow."""
        self._life.handled = sequence.request.key
        longest = self._micro.chunk_tokens(sequence.num_scheduled)
        num_tokens = min(sequence.num_plannable, longest, batch.most_tokens(sequence))
        num_tokens = self._sizes.most_tokens(batch, sequence.num_scheduled, num_tokens)
        if num_tokens <= 0 or sequence.phase is not Phase.RUNNING:
            return
        if sequence.slot < 0 and self._life.lacks_slots(sequence):
            return
        end = sequence.num_scheduled + num_tokens
        if sequence.group_tables:
            end = self._window_end(batch, sequence, end)
            num_tokens = end - sequence.num_scheduled
            if num_tokens <= 0 or sequence.phase is not Phase.RUNNING:
                return
        samplers = sequence.samplers
        starting = (samplers or (sequence,)) if sequence.slot < 0 else ()
        num_blocks = max(len(sequence.block_ids), self._num_blocks(end))
        if not batch.fits(sequence, num_tokens, num_blocks, starting):
            return
        is_short = self._life.tables.num_blocks_needed(sequence, end) > 0
        if is_short:
            end = self._free_blocks(batch, sequence, end)
            num_tokens = end - sequence.num_scheduled
            if num_tokens <= 0 or sequence.phase is not Phase.RUNNING:
                return
        if is_short or sequence.group_tables:
            self._life.tables.make_writable(batch, sequence, end)
        sequence.num_writable = self._num_blocks(end) * self._pool.block_tokens
        for sample in starting:
            self._life.take_slot(sample)
            batch.start(sample)
        is_last = num_tokens == sequence.num_remaining
        batch.add(sequence, num_tokens, samplers if is_last else ())
        if is_last and samplers and sequence.forks:
            self._life.fork(sequence)

    def _window_end(self, batch: StepBatch, sequence: Sequence, end: int) -> int:
        """Free blocks of groups with a window for the sequence's next token at least. Return the end, at most
        `end`, up to which there are blocks and a chunk may go; 0 if they will come back anyway or the
        sequence itself was preempted."""
        groups = self._life.tables.groups
        end = groups.end_of_chunk(sequence, end)
        while (fitting := groups.fitting_end(sequence, end)) <= sequence.num_scheduled:
            comes_back = groups.has_retired() or groups.frees_when_settled(self._life.running)
            if comes_back or self._life.blocks_come_back(None):
                return 0
            victim = self._victim(batch, sequence, None)
            if victim.request.decodes_remotely:
                return (
                    0  # a push may be reading its blocks: it waits for those of others that are handed over
                )
            self._life.preempt(victim)
            if victim is sequence:
                return 0
        return fitting

    def _victim(self, batch: StepBatch, sequence: Sequence, group: str | None) -> Sequence:
        """Return what is preempted for the sequence: the last in rank of a sharing group (None: of all) that
        is neither planned nor handed over, or the sequence itself."""
        planned = batch.planned
        for victim in reversed(self._running_of(group)):
            if victim is sequence or not (victim.request.decodes_remotely or victim in planned):
                break
        return victim

    def _free_blocks(self, batch: StepBatch, sequence: Sequence, end: int) -> int:
        """Free blocks for the sequence's tokens up to `end`. Return the end up to which there are blocks:
        less than `end` on a small device, 0 if blocks will come back anyway or the sequence itself was
        preempted.

        If moving blocks to host memory is not enough, other sequences are preempted, the last in rank first.
        """
        while (shortage := self._shortage(sequence, end)).num_blocks > 0:
            if self._move(batch, sequence, end, shortage):
                return end
            if self._life.blocks_come_back(shortage.group) or self._will_free_blocks(sequence, end):
                return 0
            shorter = self._shorter(batch, sequence, end)
            if shorter:
                return shorter
            if self._will_free_blocks(sequence, min(end, self._block_end(sequence.num_scheduled))):
                return 0
            victim = self._victim(batch, sequence, shortage.group)
            self._life.preempt(victim)
            if victim is sequence:
                return 0
        return end

    def _shortage(self, sequence: Sequence, end: int) -> BlockShortage:
        num_needed = self._life.tables.num_blocks_needed(sequence, end)
        num_left, num_free = self._pool.num_left(sequence.sharing_group), self._pool.num_free
        if num_needed > num_left:
            return BlockShortage(num_needed - min(num_left, num_free), sequence.sharing_group)
        return BlockShortage(num_needed - num_free, None)

    def _running_of(self, group: str | None) -> Seq[Sequence]:
        """Return the running sequences of a group by rank (None: of all groups)."""
        if group is None:
            return self._life.running
        return [sequence for sequence in self._life.running if sequence.sharing_group == group]

    def _num_blocks(self, end: int) -> int:
        return -(-end // self._pool.block_tokens)

    def _move(self, batch: StepBatch, sequence: Sequence, end: int, shortage: BlockShortage) -> bool:
        """Move blocks to host memory for the sequence; return whether any were moved."""
        if self._offloader is None:
            return False
        running, num_grown = self._running_of(shortage.group), self._num_blocks(end)
        return self._offloader.free_blocks(batch, running, shortage.num_blocks, sequence, num_grown)

    def _will_free_blocks(self, sequence: Sequence, end: int) -> bool:
        """Whether blocks can be moved to host memory when the plans that are out are reported."""
        if self._offloader is None:
            return False
        num_blocks, group = self._shortage(sequence, end)
        running, num_grown = self._running_of(group), self._num_blocks(end)
        return self._offloader.will_free_blocks(running, num_blocks, sequence, num_grown)

    def _block_end(self, num_tokens: int) -> int:
        """Return the end of the block that holds the token after `num_tokens` tokens."""
        return (num_tokens // self._pool.block_tokens + 1) * self._pool.block_tokens

    def _shorter(self, batch: StepBatch, sequence: Sequence, end: int) -> int:
        """Return the most of the chunk for which moving blocks to host memory frees enough; 0: nothing of
        it."""
        if self._offloader is None:
            return 0
        block_tokens = self._pool.block_tokens
        for shorter in range((end - 1) // block_tokens * block_tokens, sequence.num_scheduled, -block_tokens):
            shortage = self._shortage(sequence, shorter)
            if shortage.num_blocks <= 0 or self._move(batch, sequence, shorter, shortage):
                return shorter
        return 0

    def _admit(self, batch: StepBatch, now: float, *, is_pausing: bool) -> None:
        """Move waiting sequences into the batch, in the order of the line, while there are budget, slots and
        blocks. One suspect is admitted at a time, and waits for its turn. A sequence that waits for the share
        of its sharing group holds back only the sequences of that group behind it, and younger landings of
        the group. A paused sequence of the class `batch` holds back nobody."""
        held_groups: dict[str, ShareClaim] = {}
        self._pool.claim("sequences", held_groups)
        for sequence in list(self._life.waiting):
            request = sequence.request
            self._life.handled = request.key
            if is_pausing and self._pause.is_left_out(sequence):
                continue
            if sequence.holds_back is HeldBack.EVERYBODY:
                return
            if held_groups and sequence.sharing_group in held_groups:
                continue
            if sequence.holds_back is HeldBack.GROUP:
                held_groups[sequence.sharing_group] = self._claim(sequence)
                continue
            if request.landing is not LandingState.READY or sequence.load is not StoreLoad.DONE:
                continue
            is_suspect = request.submission.suspect
            if is_suspect and self._isolation.is_busy:
                continue
            if batch.budget_tokens <= 0 or self._sizes.is_full(batch):
                return
            if self._lacks_group_slots(sequence):
                held_groups[sequence.sharing_group] = self._claim(sequence)
                continue
            while self._life.num_free_slots < sequence.num_slots_needed:
                if not self._makes_way(sequence):
                    return
            most_tokens = min(sequence.num_tokens, batch.budget_tokens)
            num_blocks = self._num_blocks(sequence.num_tokens)
            if not batch.fits(sequence, most_tokens, num_blocks, sequence.samplers or (sequence,)):
                return
            demand = self._life.tables.demand(sequence)
            while lacks_share := self._lacks_share(sequence, demand):
                if not self._makes_way(sequence, sequence.sharing_group):
                    break
                demand = self._life.tables.demand(sequence)
            if lacks_share:
                held_groups[sequence.sharing_group] = self._claim(sequence)
                continue
            while not self._take_blocks(sequence, demand):
                if sequence.load is not StoreLoad.DONE or not self._makes_way(sequence):
                    return
                demand = self._life.tables.demand(sequence)
            if request.scheduled_at is None:
                request.scheduled_at = now
                request.num_cached_tokens = min(sequence.num_scheduled, request.num_prompt_tokens)
            self._life.run(sequence)
            if is_suspect:
                self._life.num_reserved_slots = self._isolation.num_slots_needed
            else:
                self._plan_sequence(batch, sequence)

    def _lacks_group_slots(self, sequence: Sequence) -> bool:
        """Whether its sharing group has too few slots left, also after paused ones have made way."""
        while self._life.lacks_group_slots(sequence):
            if not self._makes_way(sequence, sequence.sharing_group):
                return True
        return False

    def _free_paused_slots(self) -> None:
        """Preempt paused sequences for others that have joined without a slot."""
        running = self._life.running
        if self._pool.shares.is_limited:
            for needy in [it for it in running if it.slot < 0 and not self._pause.is_paused(it)]:
                for victim in reversed(self._running_of(needy.sharing_group)):
                    if not self._life.lacks_group_slots(needy):
                        break
                    if self._pause.is_paused(victim) and victim.slot >= 0:
                        self._life.preempt(victim)
        starting = [it for it in running if it.slot < 0 and not self._pause.is_paused(it)]
        num_wanted = sum(it.num_slots_needed for it in starting)
        for victim in [it for it in reversed(running) if self._pause.is_paused(it) and it.slot >= 0]:
            if num_wanted <= self._life.num_free_slots:
                return
            self._life.preempt(victim)

    def _makes_way(self, sequence: Sequence, group: str | None = None) -> bool:
        """Preempt a paused sequence (of this sharing group), which would not end, for this one; return
        whether one was preempted."""
        if not self._pause.is_active or self._pause.is_paused(sequence):
            return False
        for victim in reversed(self._running_of(group)):
            if self._pause.is_paused(victim) and not victim.request.decodes_remotely:
                self._life.preempt(victim)
                return True
        return False

    def _lacks_share(self, sequence: Sequence, demand: BlockDemand) -> bool:
        """Whether its sharing group has too little left of its share for a waiting sequence; see
        `_take_blocks`."""
        group = sequence.sharing_group
        if not self._pool.has_limit(group):
            return False
        running, num_left = self._running_of(group), self._pool.num_left(group)
        num_left -= self._pool.num_claimed("landings", group, _waits_since(sequence))
        num_spare = sum(not each.request.decodes_remotely for each in running)
        demand = demand._replace(num_idle=self._pool.num_to_use(demand.cached))
        num_new = demand.num_new
        if self._offloader is not None:
            if not self._offloader.admits(running, sequence, demand, num_spare, num_left):
                return True
            if not sequence.request.decodes_remotely:
                num_new = num_spare = 0
        return num_new + demand.num_idle + num_spare > num_left

    def _claim(self, sequence: Sequence) -> ShareClaim:
        demand = self._life.tables.demand(sequence)
        num_blocks = demand.num_new + self._pool.num_to_use(demand.cached)
        return ShareClaim(_waits_since(sequence), num_blocks)

    def _take_blocks(self, sequence: Sequence, demand: BlockDemand) -> bool:
        """Give a waiting sequence all its blocks at once or, if some of them may move to host memory later,
        only the cached ones: it takes the others chunk by chunk. Return False if there are too few free
        blocks, or if it must ask the store again."""
        tables = self._life.tables
        # One spare block is kept for each decoding sequence, or admission would soon cause preemptions.
        num_spare = sum(not running.request.decodes_remotely for running in self._life.running)
        num_new = demand.num_new
        if self._offloader is not None:
            running, num_free = self._life.running, self._pool.num_free
            if not self._offloader.admits(running, sequence, demand, num_spare, num_free):
                return False
            if not sequence.request.decodes_remotely:
                num_new = num_spare = 0
        if num_new + demand.num_idle + num_spare > self._pool.num_free:
            return False
        if demand.windows and not self._has_group_blocks(sequence, demand):
            return False
        if self._life.has_lost_blocks(sequence, len(demand.cached)):
            return False
        tables.fill(sequence, demand, num_new)
        return True

    def _has_group_blocks(self, sequence: Sequence, demand: BlockDemand) -> bool:
        """Whether groups with a window have blocks for the first chunk of a waiting sequence, and one for
        each that runs."""
        num_cached = len(demand.cached) * self._pool.block_tokens
        num_tokens = min(sequence.num_tokens - num_cached, self._micro.chunk_tokens(num_cached))
        return self._life.tables.groups.fit(demand.windows, num_tokens, len(self._life.running))


def _waits_since(sequence: Sequence) -> float:
    """Return the time since which the sequence waits. A preempted one comes before all that have not
    begun."""
    return -math.inf if sequence.preempted else sequence.request.arrived_at


class BlockShortage(NamedTuple):
    """The number of blocks that a running sequence lacks, and the sharing group whose blocks must become free
    (None: of any)."""

    num_blocks: int
    group: str | None


def _ready(running: Seq[Sequence]) -> tuple[list[Sequence], list[Sequence]]:
    """Return the sequences that another plan may name: those that decode, and those with more than one token
    to compute. This runs over all running sequences in every step, so it inlines `Sequence.is_plannable`."""
    decoding: list[Sequence] = []
    chunks: list[Sequence] = []
    for sequence in running:
        target = sequence.num_tokens + sequence.num_pending
        if target >= sequence.most_tokens or 0 < sequence.hold_at <= sequence.num_scheduled:
            continue
        num_remaining = sequence.num_remaining if sequence.forks else target - sequence.num_scheduled
        if num_remaining == 1:
            if sequence.awaits_grammar:
                continue
            decoding.append(sequence)
        elif num_remaining > 1:
            chunks.append(sequence)
    return decoding, chunks
