"""Isolation: requests that were in flight when a replica broke run alone until they have proved harmless."""

from __future__ import annotations

from collections.abc import Sequence as Seq

from workers.messages.link import IsolationReport, RequestKey
from workers.scheduler.lifecycle import Lifecycle
from workers.scheduler.sequence import Phase, Request, Sequence
from workers.scheduler.step import IssuedPlan

# A suspect is cleared after this many steps alone with a token each: the end of its prompt, and two more.
# A prompt that is handed over is computed alone and cleared by the decode replica.
NUM_STEPS_TO_CLEAR = 3


class Isolation:
    """Decides whose turn it is among the suspects, and clears them. At most one suspect runs or is handed
    over at a time.

    A suspect is alone in its plans, and no other plan is out at the same time. A fault is then due to this
    suspect, and a request that only ran next to the culprit is soon cleared::

        WAITING --blocks, no other suspect--> RUNNING --its turn--> alone in its plans --survived--> cleared
                                                                        |
             the next suspect <--- ended, preempted, handed over -------+

    Suspects and the others take turns of a few plans while both have work, so neither waits long for the
    other.
    """

    def __init__(self, life: Lifecycle, num_stages: int) -> None:
        self._life = life
        self._num_in_turn = num_stages + 1
        self._num_left = self._num_in_turn
        self._is_suspects_turn = True
        self._current: Request | None = None
        self._reports: list[IsolationReport] = []

    @property
    def current(self) -> Request | None:
        """The suspect that runs or is held; of several that were adopted, the first in rank."""
        suspects = self._life.suspects
        if not suspects:
            self._current = None
            return None
        current = self._current
        if current is None or current.key not in suspects or not _is_active(current):
            running = (it.request for it in self._life.running if it.request.key in suspects)
            self._current = next(running, None)
        return self._current

    @property
    def sequences(self) -> Seq[Sequence]:
        """The running sequences of the current suspect."""
        request = self.current
        sequences = () if request is None else request.sequences
        return [sequence for sequence in sequences if sequence.phase is Phase.RUNNING]

    @property
    def is_busy(self) -> bool:
        """Whether a suspect runs or is being handed over: no other is admitted."""
        return self.current is not None

    @property
    def is_next(self) -> bool:
        """Whether the suspect comes before the others."""
        if not (self._life.suspects and self._is_suspects_turn):
            return False
        return any(it.is_plannable and it.num_plannable > 0 for it in self.sequences)

    @property
    def num_slots_needed(self) -> int:
        """The slots that the current suspect lacks. Other requests leave these slots free."""
        return sum(sequence.num_slots_needed for sequence in self.sequences if sequence.slot < 0)

    def planned(self, is_isolated: bool) -> None:
        """Note that a plan was made for the suspect, or for the others."""
        if is_isolated != self._is_suspects_turn:
            self._is_suspects_turn, self._num_left = is_isolated, self._num_in_turn
        self._num_left -= 1
        if not self._num_left:
            self._is_suspects_turn, self._num_left = not is_isolated, self._num_in_turn
        request = self._current
        if is_isolated and request is not None and request.num_survived_steps is None:
            request.num_survived_steps = 0
            self._reports.append(IsolationReport(*request.key, is_cleared=False))

    def settled(self, issued: IssuedPlan) -> None:
        """Note that the sequences of a reported plan have survived it."""
        request = issued.suspect
        if request is None or request.key not in self._life.suspects or not issued.samples:
            return
        assert request.num_survived_steps is not None
        request.num_survived_steps += 1
        if request.num_survived_steps >= NUM_STEPS_TO_CLEAR and not request.decodes_remotely:
            self._life.clear(request)
            self._reports.append(IsolationReport(*request.key, is_cleared=True))

    def in_flight(self, plans: Seq[IssuedPlan]) -> set[RequestKey]:
        """Return the requests that may have caused a fault in one of these plans: those that the plans name,
        and those whose KV is being handed over (a suspect of these only if no plan names a request)."""
        named = {sequence.request.key for plan in plans for sequence in plan.sequences}
        held = (request for request in self._life.requests.values() if request.is_held)
        return named.union(it.key for it in held if not (named and it.submission.suspect))

    @property
    def handled(self) -> RequestKey | None:
        """The request that was being planned, settled or adopted when that failed; None otherwise."""
        return self._life.handled

    def take_reports(self) -> list[IsolationReport]:
        """Return the reports about suspects since the last call."""
        reports, self._reports = self._reports, []
        return reports


def _is_active(request: Request) -> bool:
    return any(sequence.phase in (Phase.RUNNING, Phase.HELD) for sequence in request.sequences)
