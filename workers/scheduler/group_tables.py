"""GroupTables: which blocks sequences compute into in the groups of layers with a window or a recurrent
state, and which have fallen behind."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from collections.abc import Sequence as Seq

from kvtransfer.blocks.group_prefix import first_needed_block
from kvtransfer.messages import BlockSpan
from workers.scheduler.copied_blocks import CopiedBlocks
from workers.scheduler.group_pool import GroupPool
from workers.scheduler.group_table import GroupTable
from workers.scheduler.sequence import Sequence
from workers.scheduler.snapshot_policy import SnapshotPolicy
from workers.scheduler.state_table import StateTable
from workers.scheduler.step import StepBatch
from workers.scheduler.window_table import WindowTable


class GroupTables:
    """Fills, shares, copies and gives back the tables of sequences in every group behind the first.

    A table begins with the first block that the sequence still needs. What falls behind the window is
    released when the plan that moved it there is reported, since later plans read nothing of it; it can still
    be found by its key until its block is taken. So it is with states: a plan reads the one before it, and a
    state behind a border is left as a snapshot."""

    def __init__(self, pools: Seq[GroupPool], block_tokens: int, snapshots: SnapshotPolicy) -> None:
        self.pools = tuple(pools)
        self._block_tokens = block_tokens
        self._snapshots = snapshots
        self._copied = [CopiedBlocks(pool) for pool in self.pools]
        self.have_states = any(pool.has_states for pool in self.pools)

    @property
    def num_retired_references(self) -> list[int]:
        """References, in each group, of blocks that are retired."""
        return [copied.num_references for copied in self._copied]

    def has_retired(self) -> bool:
        """Whether blocks of any group are retired."""
        return any(self.num_retired_references)

    def blocks(self, sequence: Sequence) -> tuple[BlockSpan, ...]:
        """Return what the sequence has in each group to continue behind its settled tokens."""
        return tuple(table.passed_on(sequence.num_settled) for table in sequence.group_tables)

    def fit(self, held: Seq[BlockSpan], num_tokens: int, num_running: int) -> bool:
        """Whether each group has blocks for a chunk of `num_tokens` tokens behind cached ones, which are
        `held`, and one more for each of `num_running` sequences."""
        for pool, blocks in zip(self.pools, held, strict=True):
            num_idle = sum(not pool.is_referenced(block_id) for block_id in blocks.block_ids)
            num_new = self._table(pool, blocks).most_new_blocks(num_tokens)
            if num_new + num_running > pool.num_free - num_idle:
                return False
        return True

    def give(self, sequence: Sequence, held: Seq[BlockSpan]) -> None:
        """Give a sequence these blocks, whose references pass to it."""
        sequence.group_tables = [self._table(*each) for each in zip(self.pools, held, strict=True)]

    def _table(self, pool: GroupPool, held: BlockSpan) -> GroupTable:
        made = StateTable if pool.has_states else WindowTable
        return made(held.first, held.block_ids, self._block_tokens)

    def begin_prompt(self, sequence: Sequence, num_cached: int, known_border: int) -> None:
        """Note that a sequence, which is admitted, begins behind `num_cached` blocks, and how many were
        cached without what windows or states need behind them."""
        sequence.known_border = known_border
        if not self.have_states:
            return
        self._snapshots.note_divergence(sequence)
        is_kept = self._snapshots.keeps(sequence, num_cached)
        for _, pool, table in self._groups(sequence):
            if pool.has_states and num_cached:
                # Unless others begin there as well, this sequence passes what it begins behind.
                worth = pool.worth(table.block(num_cached - 1))
                table.kept_border = num_cached if is_kept else num_cached - worth

    def evicted_border(self, keys: Seq[bytes], first: int) -> int:
        """Return the last border behind which a group has lost a block that was kept for others, and which is
        behind `first` of the blocks with these keys; 0 if there is none."""
        for border in range(len(keys), first, -1):
            if any(pool.was_evicted(keys[border - 1]) for pool in self.pools):
                return border
        return 0

    def acquire(self, held: Seq[BlockSpan]) -> None:
        """Add one reference to each block."""
        for pool, blocks in zip(self.pools, held, strict=True):
            pool.acquire(blocks.block_ids)

    def end_of_chunk(self, sequence: Sequence, end: int) -> int:
        """Return where a chunk that may reach `end` ends, so that states are there that others start with."""
        return self._snapshots.end_of_chunk(sequence, end) if self.have_states else end

    def fitting_end(self, sequence: Sequence, end: int) -> int:
        """Return the most tokens, at most `end`, up to which there are blocks for the sequence to write into
        in every group; no more than it has scheduled if there are none."""
        for _, pool, table in self._groups(sequence):
            end = table.fitting_end(sequence.num_scheduled, end, pool.num_free, pool.is_foreign)
        return end

    def make_writable(self, batch: StepBatch, sequence: Sequence, end: int) -> None:
        """Give a sequence private blocks for tokens [num_scheduled, end), for which there are enough."""
        for group, pool, table in self._groups(sequence):
            for index in table.written(sequence.num_scheduled, end):
                if not table.has(index):
                    table.put(index, *pool.allocate(1))
                elif pool.is_foreign(table.block(index)):
                    self._replace(batch, sequence, group, index)

    def _replace(self, batch: StepBatch, sequence: Sequence, group: int, index: int) -> None:
        """Give a sequence a block of its own in place of one that others use or can find."""
        pool, table, copied = self.pools[group - 1], sequence.group_tables[group - 1], self._copied[group - 1]
        src_block, (dst_block,) = table.block(index), pool.allocate(1)
        table.put(index, dst_block)
        if sequence.num_scheduled > index * self._block_tokens:
            batch.copy(src_block, dst_block, group)
            copied.note(src_block, batch.step)
        if pool.is_shared(src_block):
            pool.release([src_block])
        else:
            copied.give_back([src_block])

    def share(self, leader: Sequence, fork: Sequence) -> None:
        """Give the fork the leader's blocks."""
        for _, pool, table in self._groups(leader):
            pool.acquire(table.block_ids)
        fork.group_tables = [table.copy() for table in leader.group_tables]

    def hold(self, sequence: Sequence, index: int) -> bool:
        """Whether the sequence has its block at this index in every group with a window."""
        return all(table.has(index) for _, pool, table in self._groups(sequence) if not pool.has_states)

    def register(self, sequence: Sequence, keys: Seq[bytes], sharing_group: str) -> bool:
        """Make the sequence's full blocks, which have these keys, findable. Return whether others may start
        with a state that is one of them."""
        is_snapshot = False
        for _, pool, table in self._groups(sequence):
            for index in table.completed(sequence.num_settled):
                border = index + 1
                worth = border - table.kept_border if pool.has_states else 0
                is_new = pool.register(table.block(index), keys[index], sharing_group, worth)
                if pool.has_states and self._snapshots.keeps(sequence, border):
                    table.kept_border = border
                    is_snapshot = is_snapshot or is_new
            table.num_registered = max(table.num_registered, len(keys))
        return is_snapshot

    def slide(self, sequence: Sequence) -> None:
        """Release the blocks behind the windows of what the sequence computes next."""
        for group, pool, table in self._groups(sequence):
            needed = self._first_needed(pool, table, sequence)
            if needed <= table.first:
                continue
            copied = self._copied[group - 1]
            for index, block_id in table.drop_before(needed).items():
                if self._is_kept_for_others(pool, sequence, index) or copied.is_read([block_id]):
                    copied.give_back([block_id])
                else:
                    pool.release([block_id], passed=True)

    def frees_when_settled(self, sequences: Iterable[Sequence]) -> bool:
        """Whether the reports of the plans that are out let one of these sequences release blocks."""
        return any(
            first_needed_block(it.num_scheduled, pool.window, self._block_tokens) > table.first
            for it in sequences
            if it.num_scheduled > it.num_settled and not it.hold_at
            for _, pool, table in self._groups(it)
        )

    def give_back(self, sequence: Sequence) -> int:
        """Empty the sequence's tables: no unreported plan names the sequence. The newest border that it
        passed is where it is continued: by itself, or by the next turn of a chat. Return the number of blocks
        before that border, if the state there can be found; 0: there is none."""
        border = 0
        for group, pool, table in self._groups(sequence):
            self._copied[group - 1].give_back(list(table.block_ids))
            if pool.has_states and table.num_registered:
                key = sequence.block_keys(table.num_registered, self._block_tokens)[-1]
                pool.keep(key)
                border = table.num_registered if pool.find(key) is not None else 0
        sequence.group_tables = []
        return border

    def settle(self, step: int) -> None:
        """Release the blocks that only plans up to `step`, which are reported, still read."""
        for copied in self._copied:
            copied.settle(step)

    def check(self, sequences: Collection[Sequence], num_other_references: Seq[int]) -> None:
        """Assert that pools and tables agree, and that nobody but these sequences and the holders of
        `num_other_references` in each group references a block."""
        held: Counter[int] = Counter()
        for sequence in sequences:
            for group, pool, table in self._groups(sequence):
                held[group] += len(table.block_ids)
                if not pool.has_states and table.block_ids:
                    assert table.first <= self._first_needed(pool, table, sequence)
                assert table.covers(sequence.num_settled)
                assert table.covers(sequence.num_scheduled)
        for group, (pool, copied) in enumerate(zip(self.pools, self._copied, strict=True), 1):
            pool.check()
            others = num_other_references[group - 1] if num_other_references else 0
            num_known = held[group] + copied.num_references + others
            assert pool.num_references == num_known, (
                f"group {group}: {pool.num_references} references in the pool, {num_known} are known"
            )

    def _groups(self, sequence: Sequence) -> Iterator[tuple[int, GroupPool, GroupTable]]:
        """Yield the number, pool and table of each group in which the sequence has a table."""
        return zip(range(1, len(self.pools) + 1), self.pools, sequence.group_tables, strict=False)

    def _first_needed(self, pool: GroupPool, table: GroupTable, sequence: Sequence) -> int:
        """Return the first block of the table that plans which are not reported may read, or a transfer."""
        if sequence.hold_at and not pool.has_states:
            return table.first  # it moves to another replica: transfers read them
        return min(first_needed_block(sequence.num_settled, pool.window, self._block_tokens), table.end)

    def _is_kept_for_others(self, pool: GroupPool, sequence: Sequence, index: int) -> bool:
        """Whether a prompt needs the block which leaves the sequence's where others will: of windows, where
        an earlier one has left."""
        if pool.has_states:
            return self._snapshots.keeps(sequence, index + 1)
        border = sequence.known_border
        return (
            first_needed_block(border * self._block_tokens, pool.window, self._block_tokens) <= index < border
        )
