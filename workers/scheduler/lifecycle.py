"""Lifecycle: every request and sequence of a replica from arrival to end, with its slot and its blocks.

The scheduler decides, this class carries out; every change of phase happens here.
"""

from __future__ import annotations

from bisect import insort
from collections import Counter
from collections.abc import Sequence as Seq
from operator import attrgetter
from typing import NamedTuple

from msgspec.structs import replace

from workers.messages.link import IsolationReport, RequestFailed, RequestKey, Submission
from workers.messages.rank_channel import FailedEntry
from workers.scheduler.block_pool import BlockPool
from workers.scheduler.block_tables import BlockTables
from workers.scheduler.needed_grammars import NeededGrammars
from workers.scheduler.sequence import Phase, Rank, Request, Sequence, StoreLoad
from workers.scheduler.step import IssuedPlan


class Lifecycle:
    """The states of a sequence::

        submit --> WAITING --run--> RUNNING --token: end, or limit--> ENDED --last plan reported--> gone
                      ^              |  ^ \\
                      |           no free space  \\--prompt handed over--> HELD --finish_hand_over--> gone
                      |              v   \\
                      +--reported-- PREEMPTING adopt

    A running sequence that migrates to another replica is HELD with its last token here, and runs again
    (`resume`) when the move does not come about.
    Cancel and deadline lead from every state to ENDED. A sequence that ends or is preempted while an
    unreported plan names it is `leaving`: it keeps blocks and slot until that plan is reported. A preempted
    one then waits before the others of its class and priority, with prompt and output as its tokens. The
    samples of a request start as the `forks` of the first one, which computes the prompt for all of them.
    """

    def __init__(self, pool: BlockPool, max_sequences: int, num_offload_blocks: int = 0) -> None:
        self.tables = BlockTables(pool, num_offload_blocks)
        self.grammars = NeededGrammars()
        self.requests: dict[RequestKey, Request] = {}
        # Of `requests`: those that run alone until they are cleared (`Isolation`).
        self.suspects: dict[RequestKey, Request] = {}
        # Whose request is being planned, settled or adopted, for the case that this fails.
        self.handled: RequestKey | None = None
        # Free ones that are not to be had now.
        self.num_reserved_slots = 0
        self.waiting: list[Sequence] = []  # by queue_rank
        self.running: list[Sequence] = []  # by rank
        self.leaving: list[Sequence] = []
        self.num_preemptions = 0
        # Whether blocks may be had from the store: then a sequence that begins to wait wants them.
        self.has_store = False
        # Whether a plan found out that more is wanted.
        self.has_new_load_needs = False
        self._pool = pool
        self._max_sequences = max_sequences
        self._free_slots = list(range(max_sequences - 1, -1, -1))
        self._slots_to_free: list[int] = []
        self._group_to_num_slots: Counter[str] = Counter()
        self._num_arrivals = 0
        self._settled_step = 0

    @property
    def num_free_slots(self) -> int:
        return max(0, len(self._free_slots) - self.num_reserved_slots)

    def lacks_slots(self, sequence: Sequence) -> bool:
        """Whether there are too few slots for a sequence that has none, free or left to its group."""
        return self.num_free_slots < sequence.num_slots_needed or self.lacks_group_slots(sequence)

    def lacks_group_slots(self, sequence: Sequence) -> bool:
        """Whether its sharing group has too few slots left of its share. Beyond the share are a suspect, of
        which there is one at a time, since others of its group may hold all and wait for its end; and a
        request that was admitted elsewhere, by a larger share, where it is the only one of its group."""
        if sequence.request.submission.suspect:
            return False
        num_taken = self._group_to_num_slots[sequence.sharing_group]
        limit = self.slot_limit(sequence.sharing_group)
        return num_taken > 0 and num_taken + sequence.num_slots_needed > limit

    def slot_limit(self, group: str) -> int:
        """The most slots that a sharing group may take."""
        return self._pool.shares.most_of(group, self._max_sequences)

    def blocks_come_back(self, group: str | None) -> bool:
        """Whether the reports of plans that are out will free blocks of this sharing group (None: of any) for
        certain."""
        return (
            self.tables.has_retired(group)
            or any(group in (None, sequence.sharing_group) for sequence in self.leaving)
            or any(
                sequence.is_finishing
                and not sequence.request.decodes_remotely
                and group in (None, sequence.sharing_group)
                for sequence in self.running
            )
        )

    # ----------------------------------------------------------------------------------------- requests

    def arrive(self, submission: Submission, now: float, output_limit: int) -> Request:
        """Enter a request; `ValueError` when this attempt is here already."""
        key = submission.request_id, submission.attempt
        if key in self.requests:
            raise ValueError(
                f"attempt {submission.attempt} of request {submission.request_id} is here already"
            )
        self._num_arrivals += 1
        request = Request(submission, self._num_arrivals, now, output_limit)
        self.requests[key] = request
        self.grammars.arrive(request)
        if submission.suspect:
            self.suspects[key] = request
        return request

    def clear(self, request: Request) -> None:
        """It is no suspect any more."""
        request.submission = replace(request.submission, suspect=False)
        del self.suspects[request.key]

    def keep_private(self, group: str | None) -> int:
        """KV of this group's requests (None: of all) is theirs alone from now on. How many there are."""
        chosen = [it for it in self.requests.values() if group in (None, it.submission.sharing_group)]
        for request in chosen:
            request.submission = replace(request.submission, is_private=True)
        return len(chosen)

    def drop(self, request: Request) -> None:
        """End all samples of the request."""
        for sequence in request.sequences:
            self.end(sequence)

    def fail(self, request: Request, failed: FailedEntry) -> RequestFailed:
        """End all samples of a request that a rank could not compute. Of the step that failed nothing is
        registered, and later plans that name the sequences are settled without effect."""
        self.drop(request)
        if failed.code == "grammar":
            return RequestFailed(*request.key, code="grammar", reason=failed.reason)
        why = f"a step failed: {failed.reason}"
        return RequestFailed(*request.key, code="internal", reason=why, suspect=True)

    def expire(self, now: float) -> list[RequestFailed]:
        """End every request whose deadline has passed, except those whose hand-over is under way."""
        expired = [
            request
            for request in self.requests.values()
            if request.deadline is not None and request.deadline <= now and not request.is_held
        ]
        failures = []
        for request in expired:
            reason = f"the deadline passed {now - request.arrived_at:.3f} s after arrival, {request.progress}"
            failures.append(RequestFailed(*request.key, code="deadline", reason=reason))
            self.drop(request)
        return failures

    # ------------------------------------------------------------------------------------------- phases

    def enqueue(self, sequence: Sequence) -> None:
        """It waits for a plan that has budget, a slot and blocks for it."""
        sequence.phase = Phase.WAITING
        sequence.load = StoreLoad.WANTED if self.has_store else StoreLoad.DONE
        sequence.num_expected_cached_tokens = self.tables.num_cached_tokens(sequence)
        insort(self.waiting, sequence, key=attrgetter("queue_rank"))

    def has_lost_blocks(self, sequence: Sequence, num_cached: int) -> bool:
        """Whether blocks that it could have reused were evicted while it waited: the store is asked again."""
        num_cached_tokens = num_cached * self._pool.block_tokens
        is_lost = self.has_store and num_cached_tokens < sequence.num_expected_cached_tokens
        if is_lost:
            sequence.load = StoreLoad.WANTED
            self.has_new_load_needs = True
        return is_lost

    def run(self, sequence: Sequence) -> None:
        """It has blocks for its tokens: plans may name it."""
        if sequence.phase is Phase.WAITING and sequence in self.waiting:
            self.waiting.remove(sequence)
        sequence.phase = Phase.RUNNING
        insort(self.running, sequence, key=_rank)

    def fork(self, leader: Sequence) -> None:
        """The prompt is planned to its end: from here every sample goes by itself, on shared blocks."""
        request = leader.request
        forks, leader.forks = leader.forks, []
        for fork in forks:
            if not request.decodes_remotely:
                self.tables.share(leader, fork, request.num_prompt_tokens)
            fork.num_scheduled = fork.num_settled = request.num_prompt_tokens
            self.run(fork)

    def preempt(self, sequence: Sequence) -> None:
        """Take back its blocks; it waits at the front and computes them again."""
        self.num_preemptions += 1
        self.running.remove(sequence)
        sequence.phase = Phase.PREEMPTING
        sequence.preempted = True
        sequence.hold_at = 0
        self._leave(sequence)

    def hold(self, sequence: Sequence) -> None:
        """A prompt is handed over, or a sequence migrates: no plan names it any more, its blocks stay for the
        hand-over."""
        self.running.remove(sequence)
        sequence.phase = Phase.HELD
        self._free_slot(sequence)

    def resume(self, sequence: Sequence) -> None:
        """Continue a held sequence here after all, where it was."""
        sequence.hold_at = 0
        self.run(sequence)

    def end(self, sequence: Sequence) -> None:
        """The sequence is over, in whatever phase it is; its request with its last sample."""
        phase, sequence.phase = sequence.phase, Phase.ENDED
        if phase is Phase.ENDED:
            return
        if phase is Phase.RUNNING:
            self.running.remove(sequence)
        elif phase is Phase.WAITING and sequence in self.waiting:
            self.waiting.remove(sequence)
        if phase is not Phase.PREEMPTING:  # that one is leaving already
            self._leave(sequence)
        request = sequence.request
        if all(sample.phase is Phase.ENDED for sample in request.sequences):
            del self.requests[request.key]
            self.grammars.leave(request)
            self.suspects.pop(request.key, None)
            # They name it, too: all of them are free at once, and not when the garbage collector finds them,
            # which in a process of so many objects takes hours.
            request.sequences = []

    def settle(self, step: int) -> None:
        """Plans up to `step` are reported: what only they still named is free."""
        self._settled_step, self.handled = step, None
        self.tables.settle(step)
        leaving, self.leaving = self.leaving, []
        for sequence in leaving:
            self._leave(sequence)

    def _leave(self, sequence: Sequence) -> None:
        if sequence.last_step > self._settled_step:
            self.leaving.append(sequence)
            return
        self.tables.give_back(sequence)
        for slotted in (sequence, *sequence.forks):
            self._free_slot(slotted)
        if sequence.phase is Phase.PREEMPTING:
            sequence.num_scheduled = sequence.num_settled = sequence.num_registered_blocks = 0
            self.enqueue(sequence)

    # -------------------------------------------------------------------------------------------- slots

    def with_slots(self, sequences: list[Sequence]) -> list[Sequence]:
        """Those that have a slot, and of the others as many, in order, as slots are free and left to their
        groups."""
        starting = [sequence for sequence in sequences if sequence.slot < 0]
        if not starting:
            return sequences
        if self._pool.shares.is_limited:
            num_more: Counter[str] = Counter()
            within = []
            for sequence in starting:
                group = sequence.sharing_group
                num_taken = self._group_to_num_slots[group] + num_more[group]
                if sequence.request.submission.suspect or num_taken < self.slot_limit(group):
                    num_more[group] += 1
                    within.append(sequence)
            beyond = set(starting).difference(within[: self.num_free_slots])
        else:
            beyond = set(starting[self.num_free_slots :])
        return [sequence for sequence in sequences if sequence not in beyond]

    def take_slot(self, sequence: Sequence) -> None:
        """The sequence gets a slot of the ranks' samplers; there must be a free one."""
        sequence.slot = self._free_slots.pop()
        self._group_to_num_slots[sequence.sharing_group] += 1

    def take_freed_slots(self) -> tuple[int, ...]:
        """Slots freed since the last plan: the next plan names them, before its starts."""
        freed, self._slots_to_free = tuple(self._slots_to_free), []
        return freed

    def _free_slot(self, sequence: Sequence) -> None:
        if sequence.slot >= 0:
            self._slots_to_free.append(sequence.slot)
            self._free_slots.append(sequence.slot)
            self._group_to_num_slots[sequence.sharing_group] -= 1
            sequence.forget_slot()

    # -------------------------------------------------------------------------------------------- check

    @property
    def num_references(self) -> int:
        """References of all sequences to blocks of the device."""
        num_held = sum(len(sequence.block_ids) - sequence.num_offloaded for sequence in self._sequences())
        return num_held + self.tables.num_retired_references

    def _sequences(self) -> set[Sequence]:
        here = {sequence for request in self.requests.values() for sequence in request.sequences}
        return here.union(self.leaving)

    def check(self, num_other_references: int) -> None:
        """Assert that pool, sequences and slots agree, and that nobody but sequences and the holders of
        `num_other_references` references a block."""
        self._pool.check()
        num_held = self.num_references
        assert self._pool.num_references == num_held + num_other_references, (
            f"{self._pool.num_references} references in the pool, {num_held} of sequences, "
            f"{num_other_references} of others"
        )
        self._check_offloaded()
        slots = [sequence.slot for sequence in self._sequences() if sequence.slot >= 0]
        assert sorted(slots + self._free_slots) == list(range(self._max_sequences))
        self._check_group_slots()
        for sequence in self.running:
            assert sequence.phase is Phase.RUNNING
            assert (
                sequence.num_settled <= sequence.num_scheduled <= sequence.num_tokens + sequence.num_pending
            )
            if sequence.block_ids:
                assert len(sequence.block_ids) * self._pool.block_tokens >= sequence.num_scheduled
                on_device, _ = self.tables.host.split(sequence.block_ids)
                assert all(self._pool.is_referenced(block_id) for block_id in on_device)
        for sequence in self.waiting:
            assert sequence.phase is Phase.WAITING
            assert not sequence.block_ids
            assert sequence.slot < 0
        if not self.requests and not self.leaving:
            assert num_held == self.tables.num_retired_references
            assert not self.running
            assert not self.waiting
            assert not len(self.grammars)

    def _check_group_slots(self) -> None:
        slotted = (sequence for sequence in self._sequences() if sequence.slot >= 0)
        assert Counter(sequence.sharing_group for sequence in slotted) == self._group_to_num_slots

    def _check_offloaded(self) -> None:
        """Blocks in host memory are used by the sequences whose tables name them, and by nobody else."""
        host = self.tables.host
        references: Counter[int] = Counter()
        for sequence in self._sequences():
            offloaded = [index for index, it in enumerate(sequence.block_ids) if host.holds(it)]
            assert len(offloaded) == sequence.num_offloaded
            assert not (offloaded and sequence.request.decodes_remotely), (
                "a prompt to hand over is not on the device"
            )
            settled = sequence.num_settled // self._pool.block_tokens
            assert all(index < settled for index in offloaded), "what is still computed has left the device"
            references.update(sequence.block_ids[index] for index in offloaded)
        host.check(references)


def _rank(sequence: Sequence) -> Rank:
    return sequence.rank


# ----------------------------------------------------------------------------------------------
# Which sequences can migrate to another replica while they run, and how they stop and continue here.
#
# Part of the scheduler; `workers.disagg.migration` asks, so that nobody outside touches a sequence.


class Position(NamedTuple):
    """How far a sequence has come. Counts are tokens from the prompt's first one."""

    # Known, or sampled by plans that are out.
    num_tokens: int
    # Their KV is in the pool, in `block_ids`.
    num_settled: int
    # It ends here, at the latest, with so many.
    most_tokens: int
    block_ids: tuple[int, ...]


class SequenceMigration:
    """A sequence can move when it is the only one of its request, computes one token after another, and lies
    on the device as a whole. One that has blocks in host memory must wait until they have come back.

        RUNNING --hold_at(n)--> no plan beyond n tokens --settled--> HELD --finish_outbound--> gone
                                        |                             |
                                        +-- preempted, moved out -----+-- resume --> RUNNING
    """

    def __init__(self, life: Lifecycle) -> None:
        self._life = life

    def position(self, key: RequestKey) -> Position | None:
        """Of a sequence that can move now; None for any other."""
        sequence = self._movable(key)
        if sequence is None:
            return None
        request, num_settled = sequence.request, sequence.num_settled
        return Position(
            num_tokens=sequence.target,
            num_settled=num_settled,
            most_tokens=request.num_prompt_tokens + request.output_limit,
            block_ids=self._life.tables.covering(sequence, num_settled),
        )

    def block_keys(self, key: RequestKey) -> tuple[bytes, ...]:
        """Of the full blocks of its tokens, generated ones included; it can move."""
        sequence = self._movable(key)
        assert sequence is not None
        block_tokens = self._life.tables.pool.block_tokens
        num_blocks = sequence.num_tokens // block_tokens
        return tuple(sequence.block_keys(num_blocks, block_tokens))

    def submission(self, key: RequestKey) -> Submission:
        """As it came, of a request that is here."""
        return self._life.requests[key].submission

    def hold_at(self, key: RequestKey, num_tokens: int) -> bool:
        """Stop it with KV of exactly so many tokens; False when it is further, or cannot move any more."""
        sequence = self._movable(key)
        if sequence is None or num_tokens < sequence.target:
            return False
        sequence.hold_at = num_tokens
        return True

    def is_on_its_way(self, key: RequestKey) -> bool:
        """Whether `hold_at` still holds: it has been neither preempted nor moved out nor ended since."""
        sequence = self._only(key)
        return sequence is not None and sequence.hold_at > 0

    def resume(self, key: RequestKey) -> None:
        """Continue the sequence here, if it is still here: the migration has ended."""
        sequence = self._only(key)
        if sequence is None:
            return
        sequence.hold_at = 0
        if sequence.phase is Phase.HELD:
            self._life.resume(sequence)

    def waiting(self) -> list[RequestKey]:
        """Requests of which nothing is computed here: new ones, and those that were preempted."""
        return [
            key
            for key, request in self._life.requests.items()
            if all(sequence.phase is Phase.WAITING for sequence in request.sequences)
        ]

    def _only(self, key: RequestKey) -> Sequence | None:
        request = self._life.requests.get(key)
        if request is None or len(request.sequences) != 1:
            return None
        return request.sequences[0]

    def _movable(self, key: RequestKey) -> Sequence | None:
        sequence = self._only(key)
        if sequence is None or sequence.phase is not Phase.RUNNING or sequence.num_offloaded:
            return None
        request = sequence.request
        return (
            sequence if request.prompt_done and not request.decodes_remotely and not sequence.finish else None
        )


# ----------------------------------------------------------------------------------------------
# Isolation: requests that were in flight when a replica broke run alone until they have proved harmless.

# Steps with a token of its own, alone, after which a suspect is cleared: the end of its prompt and two more.
# A prompt that is handed over is computed alone and cleared by the decode replica.
NUM_STEPS_TO_CLEAR = 3


class Isolation:
    """Whose turn it is, and who is cleared. At most one suspect is in plans or handed over at a time.

    Each suspect is in plans by itself, and no other plan is out beside them: what breaks then is due to it,
    and a neighbour of the culprit is soon cleared::

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
        """Running ones of the suspect whose trial it is."""
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
        """Slots that the suspect lacks, which the others leave to it."""
        return sum(sequence.num_slots_needed for sequence in self.sequences if sequence.slot < 0)

    def planned(self, is_isolated: bool) -> None:
        """A plan was made for the suspect, or for the others."""
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
        """A plan is reported: whom it names has survived it."""
        request = issued.suspect
        if request is None or request.key not in self._life.suspects or not issued.samples:
            return
        assert request.num_survived_steps is not None
        request.num_survived_steps += 1
        if request.num_survived_steps >= NUM_STEPS_TO_CLEAR and not request.decodes_remotely:
            self._life.clear(request)
            self._reports.append(IsolationReport(*request.key, is_cleared=True))

    def in_flight(self, plans: Seq[IssuedPlan]) -> set[RequestKey]:
        """Requests that a fault in one of these plans may be due to: those that they name, and those whose KV
        is being handed over meanwhile (a suspect only when no plan is to blame)."""
        named = {sequence.request.key for plan in plans for sequence in plan.sequences}
        held = (request for request in self._life.requests.values() if request.is_held)
        return named.union(it.key for it in held if not (named and it.submission.suspect))

    @property
    def handled(self) -> RequestKey | None:
        """Whose request was being planned, settled or adopted when that failed; None otherwise."""
        return self._life.handled

    def take_reports(self) -> list[IsolationReport]:
        """What became of suspects since the last call."""
        reports, self._reports = self._reports, []
        return reports


def _is_active(request: Request) -> bool:
    return any(sequence.phase in (Phase.RUNNING, Phase.HELD) for sequence in request.sequences)
