"""Steps in a row that only decode the same sequences, of which many are done at once.

A scheduler makes such steps one by one, because it does not know what comes next. The simulator does: until
the next event nobody joins, ends, crosses a block or is cancelled, so every step changes the same few numbers
by one. `DecodeRun` finds how many steps that holds for, and changes the numbers by as many. Afterwards the
scheduler is as if each step had been planned and settled.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

from workers.messages.link import TokenDelta
from workers.scheduler.scheduler import Scheduler
from workers.scheduler.sequence import Sequence


class DecodeRun:
    """The steps of one scheduler that can be done at once."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler

    @property
    def sequences(self) -> Seq[Sequence]:
        """The sequences that decode, in the order of the plans."""
        return self._scheduler.issued[0].decodes

    @property
    def num_context_tokens(self) -> int:
        """The tokens before those that the oldest unreported plan computes, of all its sequences."""
        return sum(self._scheduler.issued[0].decode_starts)

    def num_steps(self, depth: int) -> int:
        """Return how many reports change nothing but positions and tokens, if each is followed by another
        plan, and `depth` plans are unreported; 0: the next report may change more."""
        scheduler, life = self._scheduler, self._scheduler.life
        issued = scheduler.issued
        if len(issued) != depth or life.waiting or life.leaving or life.suspects or scheduler.pause.is_active:
            return 0
        running = life.running
        if any(plan.entries or plan.decodes != running or plan.is_isolated for plan in issued):
            return 0
        block_tokens, least = life.tables.pool.block_tokens, 1 << 30
        for sequence in running:
            request = sequence.request
            if (
                sequence.group_tables
                or sequence.replaced
                or sequence.hold_at
                or sequence.num_offloaded
                or request.decodes_remotely
                or request.deadline is not None
                or not request.prompt_done
                or len(sequence.block_ids) != sequence.num_sent_blocks
            ):
                return 0
            settled = sequence.num_settled
            least = min(
                least,
                # So many more may be planned before it has sampled its last token, or needs a block,
                sequence.most_tokens - sequence.num_tokens - sequence.num_pending,
                sequence.num_writable - sequence.num_scheduled,
                # and settled before it fills one.
                block_tokens - 1 - settled % block_tokens,
            )
            if least <= 0:
                return 0
        return least

    def repeat(self, num_steps: int, tokens: Seq[bytes]) -> list[TokenDelta]:
        """Do so many steps, at most `num_steps()`: report the oldest plan, make another one, and again. In
        each, the sequences sample their token of `tokens`. Return what they have sampled."""
        scheduler = self._scheduler
        deltas = []
        for sequence, token in zip(self.sequences, tokens, strict=True):
            request, new = sequence.request, num_steps * token
            first_index = sequence.num_tokens - request.num_prompt_tokens
            sequence.tokens += new
            sequence.num_tokens += num_steps
            sequence.num_scheduled += num_steps
            sequence.num_settled += num_steps
            sequence.slot_position += num_steps
            sequence.last_step += num_steps
            deltas.append(TokenDelta(*request.key, sequence.index, first_index, new, (), ""))
        scheduler.skip(num_steps)
        return deltas
