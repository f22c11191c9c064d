"""BlockTables: which blocks each sequence computes into. Sits between the scheduler and the block pool."""

from __future__ import annotations

from workers.engine.batch import Batch
from workers.engine.blocks import ROOT, BlockPool
from workers.engine.sequence import Sequence


class BlockTables:
    """Fills, shares, copies and gives back the block tables of sequences.

    A block that an unreported plan still reads (the source of a copy) is retired: it keeps its reference
    until that plan is settled.
    """

    def __init__(self, pool: BlockPool, fingerprint: bytes) -> None:
        self.pool = pool
        self._block_tokens = pool.block_tokens
        self._fingerprint = fingerprint
        self._copy_src_to_step: dict[int, int] = {}
        self._retired: list[list[int]] = []

    @property
    def num_retired_references(self) -> int:
        return sum(map(len, self._retired))

    def num_cached_tokens(self, sequence: Sequence) -> int:
        """Tokens of a waiting sequence that the prefix index holds now; at least one is left to compute."""
        return len(self._match(sequence)) * self._block_tokens

    def fill(self, sequence: Sequence, num_spare: int) -> bool:
        """Give a waiting sequence blocks for all its tokens, cached ones first.

        False, taking nothing, when that would leave fewer than `num_spare` free blocks.
        """
        cached = self._match(sequence)
        num_new = -(-sequence.num_tokens // self._block_tokens) - len(cached)
        num_idle = sum(not self.pool.is_referenced(block_id) for block_id in cached)
        if num_new + num_idle + num_spare > self.pool.num_free:
            return False
        self.pool.acquire(cached)
        sequence.block_ids = cached + self.pool.allocate(num_new)
        sequence.num_scheduled = sequence.num_settled = len(cached) * self._block_tokens
        sequence.num_registered_blocks = len(cached)
        return True

    def num_blocks_needed(self, sequence: Sequence, end: int) -> int:
        """Blocks to allocate before tokens [num_scheduled, end) can be written."""
        num_new = max(0, -(-end // self._block_tokens) - len(sequence.block_ids))
        return num_new + len(self._foreign(sequence, end))

    def make_writable(self, batch: Batch, sequence: Sequence, end: int) -> None:
        """Private blocks for tokens [num_scheduled, end): the pool has `num_blocks_needed` free ones."""
        for index in self._foreign(sequence, end):
            src_block = sequence.block_ids[index]
            (dst_block,) = self.pool.allocate(1)
            sequence.block_ids[index] = dst_block
            if sequence.num_scheduled > index * self._block_tokens:
                batch.copy(src_block, dst_block)
                self._copy_src_to_step[src_block] = batch.step
            if self.pool.is_shared(src_block):
                self.pool.release([src_block])
            else:
                self._give_back([src_block])
        num_blocks = -(-end // self._block_tokens)
        sequence.block_ids += self.pool.allocate(max(0, num_blocks - len(sequence.block_ids)))

    def share(self, leader: Sequence, fork: Sequence, num_tokens: int) -> None:
        """The fork gets the leader's blocks of the first `num_tokens` tokens."""
        fork.block_ids = leader.block_ids[: -(-num_tokens // self._block_tokens)]
        self.pool.acquire(fork.block_ids)
        fork.num_registered_blocks = min(leader.num_registered_blocks, num_tokens // self._block_tokens)

    def covering(self, sequence: Sequence, num_tokens: int) -> tuple[int, ...]:
        """The blocks of the sequence's first `num_tokens` tokens."""
        return tuple(sequence.block_ids[: -(-num_tokens // self._block_tokens)])

    def register(self, sequence: Sequence) -> None:
        """Make the sequence's full blocks findable, as far as their KV is in the pool."""
        num_full = sequence.num_settled // self._block_tokens
        first = sequence.num_registered_blocks
        if num_full <= first:
            return
        keys = sequence.block_keys(num_full, self._block_tokens, self._fingerprint)
        for index in range(first, num_full):
            parent_key = keys[index - 1] if index else ROOT
            self.pool.register(sequence.block_ids[index], parent_key, keys[index])
        sequence.num_registered_blocks = num_full

    def give_back(self, sequence: Sequence) -> None:
        """Empty the sequence's table: no unreported plan names the sequence."""
        block_ids, sequence.block_ids = sequence.block_ids, []
        self._give_back(block_ids)

    def settle(self, step: int) -> None:
        """Plans up to `step` are reported: release what only they still read."""
        self._copy_src_to_step = {
            block_id: copy_step for block_id, copy_step in self._copy_src_to_step.items() if copy_step > step
        }
        retired, self._retired = self._retired, []
        for block_ids in retired:  # each may have been copied again since
            self._give_back(block_ids)

    def _give_back(self, block_ids: list[int]) -> None:
        if self._copy_src_to_step.keys().isdisjoint(block_ids):
            self.pool.release(block_ids)
        else:
            self._retired.append(block_ids)

    def _match(self, sequence: Sequence) -> list[int]:
        # A leader with forks computes the prompt only; every sequence computes at least its last token.
        num_tokens = sequence.request.num_prompt_tokens if sequence.forks else sequence.num_tokens
        num_blocks = (num_tokens - 1) // self._block_tokens
        return self.pool.match(sequence.block_keys(num_blocks, self._block_tokens, self._fingerprint))

    def _foreign(self, sequence: Sequence, end: int) -> list[int]:
        """Table indices of blocks under [num_scheduled, end) that others use or can find."""
        block_ids = sequence.block_ids
        last = min(-(-end // self._block_tokens), len(block_ids))
        return [
            index
            for index in range(sequence.num_scheduled // self._block_tokens, last)
            if self.pool.is_shared(block_ids[index]) or self.pool.is_registered(block_ids[index])
        ]
