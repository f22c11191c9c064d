"""BlockTables: which blocks each sequence computes into. Sits between the scheduler and the block pool."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import NamedTuple

from kvtransfer.blocks.group_prefix import Prefix, match_prefix
from kvtransfer.messages import BlockSpan
from workers.scheduler.block_pool import ROOT, BlockPool
from workers.scheduler.copied_blocks import CopiedBlocks
from workers.scheduler.group_pool import GroupPool
from workers.scheduler.group_tables import GroupTables
from workers.scheduler.host_blocks import HostBlocks
from workers.scheduler.sequence import Sequence
from workers.scheduler.snapshot_counts import SnapshotCounts
from workers.scheduler.snapshot_policy import SnapshotPolicy
from workers.scheduler.step import FinishedBlock, StepBatch


class BlockDemand(NamedTuple):
    """The blocks that a sequence takes when it is admitted: blocks that are `cached`, `num_idle` of which
    nobody else references, and new ones; and what is cached for it in each group with a window."""

    cached: list[int]
    num_new: int
    num_idle: int
    windows: tuple[BlockSpan, ...] = ()


class BlockTables:
    """Fills, shares, copies and gives back the block tables of sequences: those of layers without a window,
    and those of the groups behind the first.

    A block that an unreported plan still reads (the source of a copy) is retired: it keeps its reference
    until that plan is settled. Full blocks may lie in the ranks' host memory: their ids are `host`'s.
    """

    def __init__(
        self,
        pool: BlockPool,
        snapshots: SnapshotPolicy,
        num_offload_blocks: int = 0,
        group_pools: Seq[GroupPool] = (),
    ) -> None:
        self.pool = pool
        self.groups = GroupTables(group_pools, pool.block_tokens, snapshots)
        self.host = HostBlocks(pool.num_total, num_offload_blocks)
        self._block_tokens = pool.block_tokens
        self._copied = CopiedBlocks(pool)
        self._at_hand: list[int] = []
        self.snapshot_counts = SnapshotCounts()
        # Whether `take_finished` is asked for.
        self.has_store = False
        self._finished: list[FinishedBlock] = []

    @property
    def num_retired_references(self) -> int:
        return self._copied.num_references

    def has_retired(self, group: str | None) -> bool:
        """Whether blocks of this group (None: of any) are retired."""
        return any(group is None or self.pool.is_of(block_id, group) for block_id in self._copied.retired())

    def num_cached_tokens(self, sequence: Sequence) -> int:
        """Return how many tokens of a waiting sequence the prefix index holds now; at least one is left to
        compute."""
        return len(self._match(sequence).block_ids) * self._block_tokens

    def wanted_keys(self, sequence: Sequence) -> tuple[list[bytes], int]:
        """Return the keys of all full blocks that a waiting sequence could reuse, and how many are here
        now."""
        return self._reusable_keys(sequence), len(self._match(sequence).block_ids)

    def demand(self, sequence: Sequence) -> BlockDemand:
        """Return the blocks that a waiting sequence would take for all its tokens."""
        cached, windows = self._match(sequence)
        num_blocks = -(-sequence.num_tokens // self._block_tokens)
        num_idle = sum(not self.pool.is_referenced(block_id) for block_id in cached)
        return BlockDemand(cached, num_blocks - len(cached), num_idle, windows)

    def fill(self, sequence: Sequence, demand: BlockDemand, num_new: int) -> None:
        """Give a waiting sequence the blocks that are cached for it, and `num_new` more that are free."""
        self.pool.acquire(demand.cached)
        num_cached = len(demand.cached)
        if demand.windows:
            self.groups.acquire(demand.windows)
            self.groups.give(sequence, demand.windows)
            keys = self._reusable_keys(sequence)
            self.groups.begin_prompt(sequence, num_cached, len(self.pool.match(keys)))
            evicted = self.groups.evicted_border(keys[: sequence.known_border], num_cached)
            borders = sequence.known_border, num_cached, evicted
            self.snapshot_counts.add(*(border * self._block_tokens for border in borders))
            self._offer_state(sequence, num_cached)
        sequence.block_ids = demand.cached + self.pool.allocate(num_new, sequence.sharing_group)
        sequence.num_scheduled = sequence.num_settled = len(demand.cached) * self._block_tokens
        sequence.num_registered_blocks = len(demand.cached)

    def num_blocks_needed(self, sequence: Sequence, end: int) -> int:
        """Return how many blocks to allocate before tokens [num_scheduled, end) can be written."""
        num_new = max(0, -(-end // self._block_tokens) - len(sequence.block_ids))
        return num_new + len(self._foreign(sequence, end))

    def make_writable(self, batch: StepBatch, sequence: Sequence, end: int) -> None:
        """Give a sequence private blocks for tokens [num_scheduled, end): `num_blocks_needed` are free or at
        hand, and windows have blocks up to there (`GroupTables.fitting_end`)."""
        self.groups.make_writable(batch, sequence, end)
        group = sequence.sharing_group
        for index in self._foreign(sequence, end):
            src_block = sequence.block_ids[index]
            (dst_block,) = self._allocate(1, group)
            sequence.replace_block(index, dst_block)
            if sequence.num_scheduled > index * self._block_tokens:
                batch.copy(src_block, dst_block)
                self._copied.note(src_block, batch.step)
            if self.pool.is_shared(src_block):
                self.pool.release([src_block])
            else:
                self._copied.give_back([src_block])
        num_blocks = -(-end // self._block_tokens)
        sequence.block_ids += self._allocate(max(0, num_blocks - len(sequence.block_ids)), group)
        assert not self._at_hand, "more was moved out for this than it takes"

    def _allocate(self, num_blocks: int, group: str) -> list[int]:
        at_hand, self._at_hand = self._at_hand[:num_blocks], self._at_hand[num_blocks:]
        if at_hand:
            self.pool.give(at_hand, group)
        return at_hand + self.pool.allocate(num_blocks - len(at_hand), group)

    def share(self, leader: Sequence, fork: Sequence, num_tokens: int) -> None:
        """Give the fork the leader's blocks of the first `num_tokens` tokens."""
        fork.block_ids = leader.block_ids[: -(-num_tokens // self._block_tokens)]
        on_device, offloaded = self.host.split(fork.block_ids)
        self.pool.acquire(on_device)
        self.host.acquire(offloaded)
        fork.num_offloaded = len(offloaded)
        leader.num_writable = fork.num_writable = 0
        fork.num_registered_blocks = min(leader.num_registered_blocks, num_tokens // self._block_tokens)
        self.groups.share(leader, fork)

    def covering(self, sequence: Sequence, num_tokens: int) -> tuple[int, ...]:
        """Return the blocks of the sequence's first `num_tokens` tokens."""
        return tuple(sequence.block_ids[: -(-num_tokens // self._block_tokens)])

    def settled(self, sequence: Sequence) -> None:
        """Make the sequence's full blocks findable, as far as their KV is in the pool, unless they are
        private; and release what has fallen behind its windows."""
        self._register(sequence)
        if sequence.group_tables:
            self.groups.slide(sequence)

    def _register(self, sequence: Sequence) -> None:
        num_full = sequence.num_settled // self._block_tokens
        first = sequence.num_registered_blocks
        submission = sequence.request.submission
        if num_full <= first or submission.facts.is_private:
            return
        group = submission.facts.sharing_group
        keys = sequence.block_keys(num_full, self._block_tokens)
        is_snapshot = self.groups.register(sequence, keys, group)
        has_host, register = self.host.num_total > 0, self.pool.register
        if not has_host and not self.has_store:
            parent_key = keys[first - 1] if first else ROOT
            self.pool.register_all(
                sequence.block_ids[first:num_full], parent_key, keys[first:num_full], group
            )
            sequence.num_registered_blocks = num_full
            return
        for index in range(first, num_full):
            block_id = sequence.block_ids[index]
            if has_host and self.host.holds(block_id):
                continue
            parent_key = keys[index - 1] if index else ROOT
            is_new = register(block_id, parent_key, keys[index], group)
            # Behind a block that was moved out none can be reached; the store gets it all the same.
            is_new = is_new or (has_host and self.pool.remember(block_id, keys[index]))
            has_state = is_snapshot and index == num_full - 1
            if (is_new or has_state) and self.has_store and self.groups.hold(sequence, index):
                self._finished.append(FinishedBlock(keys[index], parent_key, keys[0], group, has_state))
        sequence.num_registered_blocks = num_full

    def move_out(self, batch: StepBatch, sequence: Sequence, index: int, *, to_hand: bool) -> None:
        """Move a full, settled block that is the sequence's alone to host memory, in this step.

        With `to_hand` the next `make_writable` takes it, also in this step: what ranks compute, which they do
        after the copy, may overwrite it. Else it is free when the plan is settled.
        """
        block_id, host_id = sequence.block_ids[index], self.host.allocate()
        sequence.hold_at = 0  # what moves to another replica is read from the device
        sequence.replace_block(index, host_id)
        sequence.num_offloaded += 1
        batch.copy(block_id, host_id)
        self.pool.forget(block_id)
        if to_hand:
            self._at_hand.append(block_id)
        else:
            self._copied.note(block_id, batch.step)
            self._copied.give_back([block_id])

    def move_back(self, batch: StepBatch, sequence: Sequence, index: int) -> None:
        """Move a block that is the sequence's alone from host memory to a free block of the device. No block
        may be moved out later in this step: the place in host memory is free at once. The block of the device
        is not, whatever becomes of the sequence, until the plan is settled."""
        host_id, (block_id,) = sequence.block_ids[index], self.pool.allocate(1, sequence.sharing_group)
        sequence.replace_block(index, block_id)
        sequence.num_offloaded -= 1
        sequence.last_step = batch.step
        batch.copy(host_id, block_id)
        self.host.release([host_id])

    def take_finished(self) -> list[FinishedBlock]:
        """Return the blocks registered since the last call."""
        finished, self._finished = self._finished, []
        return finished

    def give_back(self, sequence: Sequence) -> None:
        """Empty the sequence's table: no unreported plan names the sequence."""
        on_device, offloaded = self.host.split(sequence.block_ids)
        sequence.block_ids, sequence.num_offloaded, sequence.num_writable = [], 0, 0
        self.host.release(offloaded)
        self._copied.give_back(on_device)
        self._offer_state(sequence, self.groups.give_back(sequence))

    def _offer_state(self, sequence: Sequence, border: int) -> None:
        """Let the store have the state behind so many blocks, if there is one: a sequence has begun there, or
        may."""
        is_private = sequence.request.submission.facts.is_private
        if self.has_store and border and self.groups.have_states and not is_private:
            keys = sequence.block_keys(border, self._block_tokens)
            parent_key = keys[-2] if border > 1 else ROOT
            self._finished.append(
                FinishedBlock(keys[-1], parent_key, keys[0], sequence.sharing_group, has_state=True)
            )

    def settle(self, step: int) -> None:
        """Release the blocks that only plans up to `step`, which are reported, still read."""
        self.groups.settle(step)
        self._copied.settle(step)

    def _match(self, sequence: Sequence) -> Prefix:
        keys = self._reusable_keys(sequence)
        return match_prefix(self.pool, self.groups.pools, keys, self._block_tokens)

    def _reusable_keys(self, sequence: Sequence) -> list[bytes]:
        # A leader with forks computes the prompt only; every sequence computes at least its last token.
        request = sequence.request
        num_tokens = (request.num_prompt_tokens if sequence.forks else sequence.num_tokens) - 1
        if (num_reusable := request.num_reusable_tokens) is not None:
            num_tokens = min(num_tokens, num_reusable)
        num_blocks = num_tokens // self._block_tokens
        return sequence.block_keys(num_blocks, self._block_tokens)

    def _foreign(self, sequence: Sequence, end: int) -> list[int]:
        """Return the table indices of blocks under [num_scheduled, end) that others use or can find."""
        block_ids = sequence.block_ids
        last = min(-(-end // self._block_tokens), len(block_ids))
        return [
            index
            for index in range(sequence.num_scheduled // self._block_tokens, last)
            if self.pool.is_shared(block_ids[index]) or self.pool.is_registered(block_ids[index])
        ]
