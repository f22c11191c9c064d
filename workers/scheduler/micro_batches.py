"""Which sequences a plan may name: with several pipeline stages, and while the class `batch` is paused.

A plan passes the stages one after another, so P stages are busy only while P plans are under way that do not
wait for each other. Decoding sequences are therefore divided over P plans in turn. The chunks of a prompt,
which wait for no token, go into one plan after another.

While the class `batch` is paused, plans leave its sequences out. The sequences keep their slots and blocks
unless others need these. Those that have waited for the time of their class get a tenth of the steps and of
the slots.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from collections.abc import Sequence as Seq

from workers.scheduler.lifecycle import Lifecycle
from workers.scheduler.sequence import Sequence

# While the class `batch` is paused, one in this many steps, and in this many places, is for sequences that
# have waited too long.
AGED_PERIOD = 10


class MicroBatches:
    """Decides whose turn it is to decode, and how long a prompt chunk may be.

    A chunk has at most `chunk_tokens` tokens. With several stages, all are as slow as the most expensive plan
    under way. The longer the prefix, the shorter is then the chunk, so that each costs as much as the first
    one of the prompt, down to `min_chunk_tokens`. `attention_ratio` is the cost of attending
    to one earlier token in units of the cost of one token's products.
    """

    def __init__(
        self, num_stages: int, chunk_tokens: int, min_chunk_tokens: int, attention_ratio: float
    ) -> None:
        self._num_stages = num_stages
        self._chunk_tokens = chunk_tokens
        self._min_chunk_tokens = min(min_chunk_tokens, chunk_tokens)
        self._ratio = attention_ratio if num_stages > 1 else 0.0
        self._chunk_cost = chunk_tokens * (1 + self._ratio * chunk_tokens / 2)

    def chunk_tokens(self, start: int) -> int:
        """Return the longest chunk behind `start` tokens: c with c * (1 + ratio * (start + c / 2)) as at
        0."""
        linear = 1 + self._ratio * start
        root = math.sqrt(linear * linear + 2 * self._ratio * self._chunk_cost)
        num_tokens = int(2 * self._chunk_cost / (linear + root) + 1e-6)
        return max(self._min_chunk_tokens, num_tokens)

    def num_turns(self, num_decoding: int, step: int) -> int:
        """Return how many of the decoding sequences the plan of `step` takes. P consecutive plans take all of
        them."""
        return max(1, (num_decoding + step % self._num_stages) // self._num_stages)

    def in_turn(self, decoding: Seq[Sequence], step: int, budget_tokens: int) -> list[Sequence]:
        """Return the sequences of `decoding` (by rank) that the plan of `step` may name, in the order of
        their turn.

        A sequence whose last token is not sampled yet would make the first stage, and all plans behind, wait
        for the last stage. By the P-th plan after the one that samples it, the token is there.
        """
        due = [it for it in decoding if not it.num_pending or it.last_step <= step - self._num_stages]
        num_turns = self.num_turns(len(decoding), step)
        if num_turns > budget_tokens:
            due.sort(key=_turn)
        elif num_turns < len(due):
            due.sort(key=lambda sequence: sequence.last_step)
            due[:num_turns] = sorted(due[:num_turns], key=lambda sequence: sequence.rank)
        return due


# Where not all sequences fit into a step, each level of priority has its turn this many steps earlier.
_STEPS_PER_PRIORITY = 4


def _turn(sequence: Sequence) -> int:
    return sequence.last_step - _STEPS_PER_PRIORITY * sequence.request.submission.facts.priority


class BatchPause:
    """Decides which sequences plans leave out while the class `batch` is paused: none, if there are no other
    requests."""

    def __init__(self, life: Lifecycle, max_sequences: int) -> None:
        self._life = life
        self._most_aged = max(1, max_sequences // AGED_PERIOD)
        # Whether a gateway asks for the pause.
        self._is_asked = False
        # The sequences that have waited too long, as of the last plan; and the steps since any of them was in
        # one.
        self._aged: frozenset[Sequence] = frozenset()
        self._num_steps_without = 0

    def ask(self, is_asked: bool) -> None:
        """Begin or end the pause of the class `batch`, as gateways ask."""
        self._is_asked = is_asked

    @property
    def is_active(self) -> bool:
        """Whether sequences are paused now."""
        if not self._is_asked:
            return False
        return any(
            request.submission.facts.service_class != "batch" and not request.is_held
            for request in self._life.requests.values()
        )

    def begin(self, now: float) -> bool:
        """Find the sequences that have waited too long, for the next plan. Return whether the pause is
        active."""
        if not self.is_active:
            self._aged = frozenset()
            return False
        here = (*self._life.running, *self._life.waiting)
        aged = [it for it in here if it.is_pausable and it.request.due_at <= now]
        aged.sort(key=lambda sequence: sequence.queue_rank)
        self._aged = frozenset(aged[: self._most_aged])
        return True

    def is_paused(self, sequence: Sequence) -> bool:
        """Whether an active pause concerns the sequence, so that it makes way for others."""
        return sequence.is_pausable and sequence not in self._aged

    def is_left_out(self, sequence: Sequence) -> bool:
        """Whether, during an active pause, the next plan must not name the sequence."""
        has_turn = self._num_steps_without >= AGED_PERIOD - 1
        return sequence.is_pausable and not (has_turn and sequence in self._aged)

    def planned(self, sequences: Collection[Sequence]) -> None:
        """Note which sequences are in the plan."""
        self._num_steps_without = self._num_steps_without + 1 if self._aged.isdisjoint(sequences) else 0
