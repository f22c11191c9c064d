"""Which blocks of running sequences lie in the ranks' host memory: the context beyond the device's.

Called by the planner before it preempts anyone. A moved block is read by every step of its sequence, so older
blocks go first (a sliding window never reads them again), and they come back when there is free space for
long.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

from workers.config import EngineConfig
from workers.scheduler.block_tables import BlockDemand, BlockTables
from workers.scheduler.sequence import Sequence
from workers.scheduler.step import StepBatch

# The number of blocks that come back in one step, which waits for their copies.
_MOST_BACK = 8
# Blocks come back while one in this many of the device's blocks stays free below the mark, so that they do
# not go and come by turns.
_CALM_PART = 16


class Offloader:
    """Moves blocks between device and host memory: blocks that belong to one running sequence alone and whose
    KV is settled, up to `offload_share` of a sequence's. Outbound sequences are pushed from the device and
    stay there."""

    def __init__(self, config: EngineConfig, tables: BlockTables) -> None:
        self._tables = tables
        self._pool = tables.pool
        self._host = tables.host
        self._share = config.offload_share
        self._num_used_at_mark = int(config.offload_at * tables.pool.num_total)
        self._block_tokens = tables.pool.block_tokens

    def free_blocks(
        self, batch: StepBatch, running: Seq[Sequence], num_blocks: int, growing: Sequence, num_grown: int
    ) -> bool:
        """Put `num_blocks` of the device at hand for `growing`, which takes them in this step and then has
        `num_grown`. False, and nothing is moved, when fewer can be had.

        The last in rank go first, but all may have to: what lies in host memory makes a step longer for every
        sequence in it, whose ever it is.
        """
        found = self._find(running, num_blocks, growing, num_grown, settled=True)
        if sum(len(indices) for _, indices in found) < num_blocks:
            return False
        for victim, indices in found:
            for index in indices:
                self._tables.move_out(batch, victim, index, to_hand=True)
        return True

    def will_free_blocks(
        self, running: Seq[Sequence], num_blocks: int, growing: Sequence, num_grown: int
    ) -> bool:
        """Whether `free_blocks` would succeed once the plans that are out are reported."""
        found = self._find(running, num_blocks, growing, num_grown, settled=False)
        return sum(len(indices) for _, indices in found) >= num_blocks

    def relieve(self, batch: StepBatch, running: Seq[Sequence]) -> None:
        """Move blocks to host memory above the mark, as far as they can be moved; they are free when the plan
        is settled."""
        num_used = self._pool.num_total - self._pool.num_free - self._tables.num_retired_references
        num_blocks = num_used - self._num_used_at_mark
        if num_blocks > 0:
            staying = [sequence for sequence in running if not sequence.hold_at]  # others leave by themselves
            for victim, indices in self._find(staying, num_blocks, None, 0, settled=True):
                for index in indices:
                    self._tables.move_out(batch, victim, index, to_hand=False)

    def bring_back(self, batch: StepBatch, running: Seq[Sequence]) -> None:
        """Move blocks back to the device far below the mark: the first in rank first, newest first."""
        num_used = self._pool.num_total - self._pool.num_free
        num_calm = max(self._pool.num_total // _CALM_PART, len(running))
        num_blocks = min(self._num_used_at_mark - num_calm - num_used, _MOST_BACK)
        for sequence in running:
            if num_blocks <= 0:
                return
            if not sequence.num_offloaded:
                continue
            if self._has_little_left(sequence, min(num_blocks, sequence.num_offloaded) + len(running)):
                continue
            for index in range(len(sequence.block_ids) - 1, -1, -1):
                block_id = sequence.block_ids[index]
                if num_blocks > 0 and self._host.holds(block_id) and not self._host.is_shared(block_id):
                    self._tables.move_back(batch, sequence, index)
                    num_blocks -= 1

    def admits(
        self,
        running: Seq[Sequence],
        sequence: Sequence,
        demand: BlockDemand,
        num_spare: int,
        num_free: int,
    ) -> bool:
        """Whether the device, with `num_free` blocks, and host memory together have space for a waiting
        sequence, as much as those that run will still take for the tokens that they have, and `num_spare`
        blocks more."""
        num_wanted = demand.num_new + demand.num_idle + num_spare
        num_wanted += sum(self._num_blocks(each) - len(each.block_ids) for each in running)
        if num_wanted <= num_free:
            return True
        num_shared = len(demand.cached) - demand.num_idle
        num_blocks = demand.num_new + len(demand.cached)
        num_movable = 0
        if not sequence.request.decodes_remotely:
            num_movable = self._most_movable(sequence, num_blocks, num_shared)
        for each in running:
            if not each.request.decodes_remotely:
                num_shared = sum(
                    not self._host.holds(block_id) and self._pool.is_shared(block_id)
                    for block_id in each.block_ids
                )
                num_movable += self._most_movable(each, self._num_blocks(each), num_shared)
        return num_wanted <= num_free + min(self._host.num_free, num_movable)

    def _has_little_left(self, sequence: Sequence, num_blocks: int) -> bool:
        """Whether its sharing group has a limit, and less than `num_blocks` blocks left of its share."""
        group = sequence.sharing_group
        return self._pool.has_limit(group) and self._pool.num_left(group) < num_blocks

    def check(self, running: Seq[Sequence]) -> None:
        """Assert that no sequence has more in host memory than it may."""
        for sequence in running:
            assert sequence.num_offloaded <= self._most(len(sequence.block_ids))

    def _find(
        self,
        running: Seq[Sequence],
        num_blocks: int,
        growing: Sequence | None,
        num_grown: int,
        *,
        settled: bool,
    ) -> list[tuple[Sequence, list[int]]]:
        """Return up to `num_blocks` blocks to move: sequences, the last in rank first, with table indices."""
        num_blocks = min(num_blocks, self._host.num_free)
        found: list[tuple[Sequence, list[int]]] = []
        for victim in reversed(running):
            if num_blocks <= 0:
                break
            if victim.request.decodes_remotely:
                continue
            count = num_grown if victim is growing else len(victim.block_ids)
            num_most = min(num_blocks, self._most(count) - victim.num_offloaded)
            num_tokens = victim.num_settled if settled else victim.num_scheduled
            indices = self._movable(victim, num_tokens // self._block_tokens, num_most)
            found.append((victim, indices))
            num_blocks -= len(indices)
        return found

    def _movable(self, sequence: Sequence, end: int, num_most: int) -> list[int]:
        """Return the first `num_most` indices below `end` of blocks on the device that are the sequence's
        alone."""
        indices: list[int] = []
        if num_most > 0:
            for index, block_id in enumerate(sequence.block_ids[:end]):
                if not self._host.holds(block_id) and not self._pool.is_shared(block_id):
                    indices.append(index)
                    if len(indices) == num_most:
                        break
        return indices

    def _num_blocks(self, sequence: Sequence) -> int:
        """Return how many blocks the tokens that the sequence has now take."""
        return max(len(sequence.block_ids), -(-sequence.num_tokens // self._block_tokens))

    def _most(self, num_blocks: int) -> int:
        """Return how many of a sequence's `num_blocks` blocks may lie in host memory."""
        return int(self._share * num_blocks)

    def _most_movable(self, sequence: Sequence, num_blocks: int, num_shared: int) -> int:
        """Return how many blocks of a sequence of `num_blocks` can leave the device in time; its last one
        cannot."""
        num_full = (sequence.num_tokens - 1) // self._block_tokens
        return max(0, min(self._most(num_blocks), num_full - num_shared) - sequence.num_offloaded)


def most_local_tokens(share: float, num_device_blocks: int, num_host_blocks: int, block_tokens: int) -> int:
    """Return the longest context of one sequence that has up to `share` of its blocks in host memory."""

    def num_on_device(num_blocks: int) -> int:
        return num_blocks - min(int(share * num_blocks), num_host_blocks)

    num_blocks = num_device_blocks + num_host_blocks
    while num_on_device(num_blocks) > num_device_blocks:
        num_blocks -= 1
    return num_blocks * block_tokens
