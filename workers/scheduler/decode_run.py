"""Steps in a row that only decode the same sequences, of which many are done at once.

A scheduler makes such steps one by one, because it does not know what comes next. The simulator does: until
the next event nobody joins, ends or is cancelled, so every step changes the same few numbers by one.
`DecodeRun` finds how many steps that holds for, and changes the numbers by as many. Where a sequence fills a
block or needs another one, the block tables do what they do in a single step. After `end` the scheduler is as
if each step had been planned and settled.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import NamedTuple

from workers.messages.link import TokenDelta
from workers.scheduler.scheduler import Scheduler
from workers.scheduler.sequence import Sequence
from workers.scheduler.step import StepBatch

# The most steps of a run: those behind the next event are found in vain.
MOST_STEPS = 64


class _BlockStep(NamedTuple):
    """A step of a run, counted from 1, in which the sequence of a row of the plan fills a block or is given
    another; those that fill one come first."""

    step: int
    is_given: bool
    row: int


class DecodeRun:
    """The steps of one scheduler that can be done at once: `begin`, `advance` as often as time passes, and
    `end`, after which the scheduler continues with single steps."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._tables = scheduler.life.tables
        self._block_tokens = self._tables.pool.block_tokens
        # The sequences that decode, in the order of the plans, and the tokens before those that the oldest
        # unreported plan computes.
        self.sequences: Seq[Sequence] = ()
        self.num_context_tokens = 0
        # The steps that are done.
        self.num_done = 0
        # The steps in which blocks change, the latest first.
        self._block_steps: list[_BlockStep] = []

    def begin(self, depth: int) -> int:
        """Return how many reports change nothing but positions, tokens and blocks, if each is followed by
        another plan, and `depth` plans are unreported; 0: the next report may change more."""
        scheduler, life = self._scheduler, self._scheduler.life
        issued, running = scheduler.issued, life.running
        if len(issued) != depth or not self._is_steady or self._tables.host.num_total:
            return 0
        if any(plan.entries or plan.decodes != running or plan.is_isolated for plan in issued):
            return 0
        if self._tables.num_retired_references:
            return 0
        num_steps = MOST_STEPS
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
            # So many more may be planned before it has sampled its last token.
            left = sequence.most_tokens - sequence.num_tokens - sequence.num_pending
            if left < num_steps:
                num_steps = left
        if num_steps <= 0:
            return 0
        self.sequences, self.num_done = issued[0].decodes, 0
        self.num_context_tokens = sum(issued[0].decode_starts)
        return self._with_blocks(num_steps)

    def _with_blocks(self, num_steps: int) -> int:
        """Note in which steps blocks change. Return how many of the steps can be done so."""
        steps, block_tokens = [], self._block_tokens
        for row, sequence in enumerate(self.sequences):
            filled = block_tokens - sequence.num_settled % block_tokens
            steps += [_BlockStep(step, False, row) for step in range(filled, num_steps + 1, block_tokens)]
            given = sequence.num_writable - sequence.num_scheduled + 1
            if given <= num_steps and (
                sequence.num_writable != len(sequence.block_ids) * block_tokens or given < 1
            ):
                num_steps = given - 1  # it has the block already, or copies one
            steps += [_BlockStep(step, True, row) for step in range(given, num_steps + 1, block_tokens)]
        steps.sort()
        pool, num_given = self._tables.pool, 0
        for step, is_given, _ in steps:
            num_given += is_given
            # What is filled may go to the store, and a share may leave no block.
            is_single = pool.shares.is_limited if is_given else self._tables.has_store
            if step <= num_steps and (is_single or num_given > pool.num_free):
                num_steps = step - 1
        self._block_steps = [it for it in reversed(steps) if it.step <= num_steps]
        return num_steps

    @property
    def next_block_step(self) -> int | None:
        """The next step in which a sequence fills a block or is given one, if any: a step of which gateways
        hear."""
        return self._block_steps[-1].step if self._block_steps else None

    @property
    def is_intact(self) -> bool:
        """Whether nothing has come since `begin` that ends the run."""
        return self._is_steady and self._scheduler.life.running == self.sequences

    @property
    def _is_steady(self) -> bool:
        """Whether nobody waits, leaves or is paused, so that a plan names all that run."""
        life = self._scheduler.life
        return not (life.waiting or life.leaving or life.suspects or self._scheduler.pause.is_active)

    def advance(self, num_done: int, tokens: Seq[bytes]) -> None:
        """Do the steps up to this one: report the oldest plan, make another one, and again. In each, the
        sequences sample their token of `tokens`."""
        num_steps, self.num_done = num_done - self.num_done, num_done
        before = num_done - num_steps
        for sequence, token in zip(self.sequences, tokens, strict=True):
            sequence.tokens += num_steps * token
            sequence.num_tokens += num_steps
            sequence.num_scheduled += num_steps
            sequence.num_settled += num_steps
            sequence.slot_position += num_steps
            sequence.last_step += num_steps
        while self._block_steps and self._block_steps[-1].step <= num_done:
            step, is_given, row = self._block_steps.pop()
            assert step > before
            sequence, num_later = self.sequences[row], num_done - step
            if is_given:
                self._give_block(sequence, num_later)
            else:
                sequence.num_settled -= num_later
                self._tables.settled(sequence)
                sequence.num_settled += num_later

    def _give_block(self, sequence: Sequence, num_later: int) -> None:
        """Give the sequence the block of a token which was planned so many steps before the last one."""
        end = sequence.num_scheduled - num_later
        sequence.num_scheduled = end - 1
        batch = StepBatch(sequence.last_step - num_later, self._block_tokens)
        self._tables.make_writable(batch, sequence, end)
        assert not batch.has_copies, "a block that is new is its own"
        sequence.num_writable = len(sequence.block_ids) * self._block_tokens
        sequence.num_sent_blocks = len(sequence.block_ids)
        sequence.num_scheduled = end + num_later

    def end(self, tokens: Seq[bytes]) -> list[TokenDelta]:
        """End the run. Return what the sequences have sampled."""
        num_steps, deltas = self.num_done, []
        self._scheduler.skip(num_steps)
        for sequence, token in zip(self.sequences, tokens, strict=True):
            request = sequence.request
            first_index = sequence.num_output_tokens - num_steps
            deltas.append(TokenDelta(*request.key, sequence.index, first_index, num_steps * token, (), ""))
        self.sequences, self.num_done, self._block_steps = (), 0, []
        return deltas
