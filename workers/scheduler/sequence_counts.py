"""Count the sequences of a scheduler, their tokens and their blocks."""

from __future__ import annotations

from collections.abc import Sequence as Seq

from workers.scheduler.block_pool import BlockPool
from workers.scheduler.lifecycle import Lifecycle
from workers.scheduler.micro_batches import BatchPause
from workers.scheduler.sequence import Sequence


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
        return sum([sequence.num_scheduled for sequence in self._life.running])

    @property
    def num_unfilled_tokens(self) -> int:
        """KV slots that running sequences have and that no token was planned into yet."""
        block_tokens = self._pool.block_tokens
        return sum([len(it.block_ids) * block_tokens - it.num_scheduled for it in self._life.running])

    @property
    def num_backlog_tokens(self) -> int:
        """Prompt tokens accepted and not yet computed, also those of plans that are out. Those expected in
        the prefix cache and those of paused sequences are excluded: nobody waits for these."""
        waiting: Seq[Sequence] = self._life.waiting
        running: Seq[Sequence] = self._life.running
        if self._pause.is_active:
            waiting = [it for it in waiting if not self._pause.is_paused(it)]
            running = [it for it in running if not self._pause.is_paused(it)]
        num_tokens = sum([it.num_tokens - it.num_expected_cached_tokens for it in waiting])
        for it in running:
            known = it.request.num_prompt_tokens if it.forks else it.num_tokens
            # The last token is that which a decode computes.
            if (num_later := known - 1 - it.num_settled) > 0:
                num_tokens += num_later
        return num_tokens

    def num_blocks_awaited(self, group: str | None) -> int:
        """Return the most blocks that waiting sequences of this sharing group (None: of any) take."""
        return sum(
            -(-sequence.num_tokens // self._pool.block_tokens)
            for sequence in self._life.waiting
            if group in (None, sequence.sharing_group)
        )
