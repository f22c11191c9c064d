"""WindowTables: which blocks sequences compute into in the groups of layers with a window, and which have
fallen behind it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from collections.abc import Sequence as Seq

from kvtransfer.blocks.windows import first_needed_block
from kvtransfer.messages import WindowBlocks
from workers.scheduler.copied_blocks import CopiedBlocks
from workers.scheduler.sequence import Sequence
from workers.scheduler.step import StepBatch
from workers.scheduler.window_pool import WindowPool
from workers.scheduler.window_table import WindowTable


class WindowTables:
    """Fills, shares, copies and gives back the tables of sequences in every group with a window.

    A table begins with the first block that the sequence still needs. What falls behind the window is
    released when the plan that moved it there is reported, since later plans read nothing of it; it can still
    be found by its key until its block is taken."""

    def __init__(self, pools: Seq[WindowPool], block_tokens: int) -> None:
        self.pools = tuple(pools)
        self._block_tokens = block_tokens
        self._copied = [CopiedBlocks(pool) for pool in self.pools]

    @property
    def num_retired_references(self) -> list[int]:
        """References, in each group, of blocks that are retired."""
        return [copied.num_references for copied in self._copied]

    def has_retired(self) -> bool:
        """Whether blocks of any group are retired."""
        return any(self.num_retired_references)

    def blocks(self, sequence: Sequence) -> tuple[WindowBlocks, ...]:
        """Return what the sequence has in each group."""
        return tuple(WindowBlocks(table.first, tuple(table.block_ids)) for table in sequence.windows)

    def num_free_beside(self, held: Seq[WindowBlocks]) -> int:
        """Return how many blocks are free, in the group with the fewest, once cached ones are `held`."""
        return min(
            pool.num_free - sum(not pool.is_referenced(block_id) for block_id in blocks.block_ids)
            for pool, blocks in zip(self.pools, held, strict=True)
        )

    def give(self, sequence: Sequence, held: Seq[WindowBlocks]) -> None:
        """Give a sequence these blocks, whose references pass to it."""
        assert len(held) == len(self.pools)
        sequence.windows = [WindowTable(it.first, it.block_ids) for it in held]

    def acquire(self, held: Seq[WindowBlocks]) -> None:
        """Add one reference to each block."""
        for pool, blocks in zip(self.pools, held, strict=True):
            pool.acquire(blocks.block_ids)

    def fitting_end(self, sequence: Sequence, end: int) -> int:
        """Return the most tokens, at most `end`, up to which there are blocks for the sequence to write into
        in every group; no more than it has scheduled if there are none."""
        for _, pool, table in self._groups(sequence):
            num_free = pool.num_free - len(self._foreign(pool, table, sequence.num_scheduled, end))
            end = min(end, (table.end + num_free) * self._block_tokens)
            if num_free < 0:
                end = min(end, sequence.num_scheduled)
        return end

    def make_writable(self, batch: StepBatch, sequence: Sequence, end: int) -> None:
        """Give a sequence private blocks for tokens [num_scheduled, end), for which there are enough."""
        for group, pool, table in self._groups(sequence):
            copied = self._copied[group - 1]
            for index in self._foreign(pool, table, sequence.num_scheduled, end):
                src_block, (dst_block,) = table.block(index), pool.allocate(1)
                table.replace(index, dst_block)
                if sequence.num_scheduled > index * self._block_tokens:
                    batch.copy(src_block, dst_block, group)
                    copied.note(src_block, batch.step)
                if pool.is_shared(src_block):
                    pool.release([src_block])
                else:
                    copied.give_back([src_block])
            num_new = -(-end // self._block_tokens) - table.end
            table.block_ids += pool.allocate(max(0, num_new))

    def share(self, leader: Sequence, fork: Sequence) -> None:
        """Give the fork the leader's blocks."""
        held = self.blocks(leader)
        self.acquire(held)
        self.give(fork, held)
        for table, its in zip(fork.windows, leader.windows, strict=True):
            table.num_registered = its.num_registered

    def hold(self, sequence: Sequence, index: int) -> bool:
        """Whether the sequence has its block at this index in every group."""
        return all(table.first <= index < table.end for table in sequence.windows)

    def register(self, sequence: Sequence, keys: Seq[bytes], sharing_group: str) -> None:
        """Make the sequence's full blocks, which have these keys, findable."""
        for _, pool, table in self._groups(sequence):
            first = max(table.num_registered, table.first)
            for index in range(first, min(len(keys), table.end)):
                pool.register(table.block(index), keys[index], sharing_group)
            table.num_registered = max(table.num_registered, len(keys))

    def slide(self, sequence: Sequence) -> None:
        """Release the blocks behind the windows of what the sequence computes next."""
        for group, pool, table in self._groups(sequence):
            needed = self._first_needed(pool, table, sequence)
            if needed > table.first:
                kept = self._kept_for_others(pool, sequence)
                dropped = table.drop_before(needed)
                copied = self._copied[group - 1]
                for index, block_id in enumerate(dropped, needed - len(dropped)):
                    if index in kept or copied.is_read([block_id]):
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

    def give_back(self, sequence: Sequence) -> None:
        """Empty the sequence's tables: no unreported plan names the sequence."""
        for group, _, table in self._groups(sequence):
            self._copied[group - 1].give_back(table.block_ids)
        sequence.windows = []

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
                assert table.first <= self._first_needed(pool, table, sequence) or not table.block_ids
                assert table.end * self._block_tokens >= sequence.num_scheduled
        for group, (pool, copied) in enumerate(zip(self.pools, self._copied, strict=True), 1):
            pool.check()
            others = num_other_references[group - 1] if num_other_references else 0
            num_known = held[group] + copied.num_references + others
            assert pool.num_references == num_known, (
                f"group {group}: {pool.num_references} references in the pool, {num_known} are known"
            )

    def _groups(self, sequence: Sequence) -> Iterator[tuple[int, WindowPool, WindowTable]]:
        """Yield the number, pool and table of each group in which the sequence has a table."""
        return zip(range(1, len(self.pools) + 1), self.pools, sequence.windows, strict=False)

    def _first_needed(self, pool: WindowPool, table: WindowTable, sequence: Sequence) -> int:
        """Return the first block of the table that plans which are not reported may read, or a transfer."""
        if sequence.hold_at:  # it moves to another replica: transfers read them
            return table.first
        return min(first_needed_block(sequence.num_settled, pool.window, self._block_tokens), table.end)

    def _kept_for_others(self, pool: WindowPool, sequence: Sequence) -> range:
        """Return the blocks that a prompt needs which leaves the sequence's where an earlier one has left."""
        border = sequence.known_border
        return range(first_needed_block(border * self._block_tokens, pool.window, self._block_tokens), border)

    def _foreign(self, pool: WindowPool, table: WindowTable, start: int, end: int) -> list[int]:
        """Return the indices of blocks under tokens [start, end) that others use or can find."""
        last = min(-(-end // self._block_tokens), table.end)
        return [
            index
            for index in range(max(start // self._block_tokens, table.first), last)
            if pool.is_shared(table.block(index)) or pool.is_registered(table.block(index))
        ]
