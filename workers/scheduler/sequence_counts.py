"""Count the sequences of a scheduler, their tokens and their blocks."""

from __future__ import annotations

from workers.scheduler.block_pool import BlockPool
from workers.scheduler.lifecycle import Lifecycle
from workers.scheduler.micro_batches import BatchPause


class SequenceCounts:
    """The counts of this moment, which loads, metrics and store look-ups read."""

    def __init__(self, life: Lifecycle, pause: BatchPause, pool: BlockPool) -> None:
        self._life = life
        self._pause = pause
        self._pool = pool

    @property
    def num_running(self) -> int:
        return len(self._life.running)

    def num_running_of(self, group: str) -> int:
        """Return how many sequences of a sharing group run."""
        return sum(sequence.sharing_group == group for sequence in self._life.running)

    @property
    def num_waiting(self) -> int:
        return len(self._life.waiting)

    def num_waiting_of(self, group: str) -> int:
        """Return how many sequences of a sharing group wait."""
        return sum(sequence.sharing_group == group for sequence in self._life.waiting)

    @property
    def num_paused(self) -> int:
        """Running sequences that are paused."""
        return sum(map(self._pause.is_paused, self._life.running)) if self._pause.is_active else 0

    @property
    def num_context_tokens(self) -> int:
        """The KV of running sequences, that of plans that are out included."""
        return sum(sequence.num_scheduled for sequence in self._life.running)

    @property
    def num_unfilled_tokens(self) -> int:
        """KV slots that running sequences have and that no token was planned into yet."""
        return sum(
            len(sequence.block_ids) * self._pool.block_tokens - sequence.num_scheduled
            for sequence in self._life.running
        )

    @property
    def num_backlog_tokens(self) -> int:
        """Prompt tokens accepted and not yet planned, those expected in the prefix cache and those of paused
        sequences excluded: nobody waits for these."""
        life, pause, is_pausing = self._life, self._pause, self._pause.is_active
        waiting = sum(
            it.num_tokens - it.num_expected_cached_tokens
            for it in life.waiting
            if not (is_pausing and pause.is_paused(it))
        )
        return waiting + sum(
            max(0, it.num_remaining - 1) for it in life.running if not (is_pausing and pause.is_paused(it))
        )

    def num_blocks_awaited(self, group: str | None) -> int:
        """Return the most blocks that waiting sequences of this sharing group (None: of any) take."""
        return sum(
            -(-sequence.num_tokens // self._pool.block_tokens)
            for sequence in self._life.waiting
            if group in (None, sequence.sharing_group)
        )
