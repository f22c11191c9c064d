"""Lifecycle: every request and sequence of a replica from arrival to end, with its slot and its blocks.

The scheduler decides, and this class carries the decisions out: every change of phase happens here. Blocks
are freed in `_leave`, through `BlockTables.give_back`.
"""

from __future__ import annotations

from bisect import insort
from collections import Counter
from collections.abc import Collection
from collections.abc import Sequence as Seq
from operator import attrgetter

from msgspec.structs import replace

from workers.messages.link import RequestFailed, RequestKey, Submission
from workers.messages.rank_channel import STATE_LOST, FailedEntry
from workers.scheduler.block_pool import BlockPool
from workers.scheduler.block_tables import BlockTables
from workers.scheduler.group_pool import GroupPool
from workers.scheduler.needed_grammars import NeededGrammars
from workers.scheduler.sequence import Phase, Rank, Request, Sequence, StoreLoad
from workers.scheduler.snapshot_policy import SnapshotPolicy

# Whoever loses so many states is suspected of being the cause.
_MOST_LOST_STATES = 2


class Lifecycle:
    """The states of a sequence::

        submit --> WAITING --run--> RUNNING --token: end, or limit--> ENDED --last plan reported--> gone
                      ^              |  ^ \\
                      |           no free space  \\--prompt handed over--> HELD --finish_hand_over--> gone
                      |              v   \\
                      +--reported-- PREEMPTING adopt

    A running sequence that moves to another replica is HELD after its last token here, and runs again
    (`resume`) if the move fails. Cancel and deadline lead from every state to ENDED. A sequence that ends or
    is preempted while an unreported plan names it is `leaving`: it keeps blocks and slot until that plan is
    reported. After that, a preempted one waits at the front (`Sequence.queue_rank`), with prompt and output
    as its tokens. The samples of a request start as the `forks` of the first one, which computes the prompt
    for all of them.
    """

    def __init__(
        self,
        pool: BlockPool,
        max_sequences: int,
        snapshots: SnapshotPolicy,
        num_offload_blocks: int = 0,
        group_pools: Seq[GroupPool] = (),
    ) -> None:
        self.tables = BlockTables(pool, snapshots, num_offload_blocks, group_pools)
        self.grammars = NeededGrammars()
        self.requests: dict[RequestKey, Request] = {}
        # The suspects among `requests`, which run alone until they are cleared (`Isolation`).
        self.suspects: dict[RequestKey, Request] = {}
        # The request that is being planned, settled or adopted now: the suspect, if that raises.
        self.handled: RequestKey | None = None
        # The number of free slots that are reserved for a suspect.
        self.num_reserved_slots = 0
        self.waiting: list[Sequence] = []  # by queue_rank
        self.running: list[Sequence] = []  # by rank
        self.leaving: list[Sequence] = []
        self.num_preemptions = 0
        # Whether there is a store: then a sequence that begins to wait first asks the store for blocks.
        self.has_store = False
        # Whether a plan has made a waiting sequence ask the store again.
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
        """Whether a sequence without a slot cannot get one: too few are free, or left of its group's
        share."""
        return self.num_free_slots < sequence.num_slots_needed or self.lacks_group_slots(sequence)

    def lacks_group_slots(self, sequence: Sequence) -> bool:
        """Whether the sharing group of the sequence has too few slots left. Two kinds of requests may exceed
        the share: a suspect (one at a time), since the others of its group may have all slots and wait for
        its end, and the only request of its group, which another replica may have admitted by a larger
        share."""
        if sequence.request.submission.suspect:
            return False
        num_taken = self._group_to_num_slots[sequence.sharing_group]
        limit = self.slot_limit(sequence.sharing_group)
        return num_taken > 0 and num_taken + sequence.num_slots_needed > limit

    def slot_limit(self, group: str) -> int:
        """Return the most slots that a sharing group may take."""
        return self._pool.shares.most_of(group, self._max_sequences)

    def blocks_come_back(self, group: str | None) -> bool:
        """Whether the reports of unreported plans are certain to free blocks of this sharing group (None: of
        any)."""
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
        """Add a request. Raises `ValueError` if this attempt of the request is here already."""
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
        """Note that the request is no suspect any more."""
        request.submission = replace(request.submission, suspect=False)
        del self.suspects[request.key]

    def keep_private(self, group: str | None) -> int:
        """From now on let no other request reuse the KV of this group's requests (None: of all). Return the
        number of requests."""
        chosen = [it for it in self.requests.values() if group in (None, it.submission.facts.sharing_group)]
        for request in chosen:
            request.submission = request.submission.made_private()
        return len(chosen)

    def drop(self, request: Request) -> None:
        """End all samples of the request."""
        for sequence in request.sequences:
            self.end(sequence)

    def fail(self, sequence: Sequence, samplers: Seq[Sequence], failed: FailedEntry) -> list[RequestFailed]:
        """Take in that a rank could not compute a sequence, for which `samplers` would have sampled. Return
        the failure of its request, of which all samples end: no block of the failed step is registered, and
        later plans that name the sequences have no effect when they are settled. If only its state was lost,
        it is computed again instead."""
        request = sequence.request
        if failed.code == STATE_LOST and not request.decodes_remotely:
            self._lose_state(sequence, samplers)
            return []
        self.drop(request)
        if failed.code == "grammar":
            return [RequestFailed(*request.key, code="grammar", reason=failed.reason)]
        why = f"a step failed: {failed.reason}"
        return [RequestFailed(*request.key, code="internal", reason=why, suspect=True)]

    def _lose_state(self, sequence: Sequence, samplers: Seq[Sequence]) -> None:
        """Let sequences start over from their last snapshots. Whoever loses a state again may be the cause,
        which no search has found, and runs alone until it has proved harmless."""
        for sampler in samplers:
            sampler.num_pending -= 1
        for lost in dict.fromkeys((sequence, *samplers)):
            if lost.phase is Phase.RUNNING:
                lost.num_lost_states += 1
                self.preempt(lost)

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
        """Let the sequence wait until a plan has budget, a slot and blocks for it."""
        sequence.phase = Phase.WAITING
        sequence.load = StoreLoad.WANTED if self.has_store else StoreLoad.DONE
        sequence.num_expected_cached_tokens = self.tables.num_cached_tokens(sequence)
        insort(self.waiting, sequence, key=attrgetter("queue_rank"))

    def has_lost_blocks(self, sequence: Sequence, num_cached: int) -> bool:
        """Whether blocks that the sequence could have reused were evicted while it waited. If so, it asks the
        store again."""
        num_cached_tokens = num_cached * self._pool.block_tokens
        is_lost = self.has_store and num_cached_tokens < sequence.num_expected_cached_tokens
        if is_lost:
            sequence.load = StoreLoad.WANTED
            self.has_new_load_needs = True
        return is_lost

    def run(self, sequence: Sequence) -> None:
        """Let plans name the sequence. It must have blocks for its tokens."""
        if sequence.phase is Phase.WAITING and sequence in self.waiting:
            self.waiting.remove(sequence)
        sequence.phase = Phase.RUNNING
        insort(self.running, sequence, key=_rank)

    def fork(self, leader: Sequence) -> None:
        """Start the leader's forks on shared blocks: from here on each sample runs by itself. All of the
        prompt is planned, and the forks sample in its last step, which they lose with the leader where it
        fails. Where all were handed over with their first tokens nothing samples there, so that the step is
        settled by now."""
        request = leader.request
        forks, leader.forks = leader.forks, []
        for fork in forks:
            if not request.decodes_remotely:
                self.tables.share(leader, fork, request.num_prompt_tokens)
            fork.num_scheduled = fork.num_settled = request.num_prompt_tokens
            self.run(fork)

    def preempt(self, sequence: Sequence) -> None:
        """Take the sequence's blocks back. It waits at the front, and computes them again."""
        self.num_preemptions += 1
        self.running.remove(sequence)
        sequence.phase = Phase.PREEMPTING
        sequence.preempted = True
        sequence.hold_at = 0
        self._leave(sequence)

    def hold(self, sequence: Sequence) -> None:
        """Hold a sequence that is handed over or moves: no plan names it any more, and its blocks stay until
        the transfer has ended."""
        self.running.remove(sequence)
        sequence.phase = Phase.HELD
        self._free_slot(sequence)

    def resume(self, sequence: Sequence) -> None:
        """Continue a held sequence here, since its move failed."""
        sequence.hold_at = 0
        self.run(sequence)

    def end(self, sequence: Sequence) -> None:
        """End the sequence, in whatever phase it is. The request ends with its last sample."""
        phase, sequence.phase = sequence.phase, Phase.ENDED
        if phase is Phase.ENDED:
            return
        if phase is Phase.RUNNING:
            self.running.remove(sequence)
        elif phase is Phase.WAITING and sequence in self.waiting:
            self.waiting.remove(sequence)
        if phase is not Phase.PREEMPTING:  # a preempted one is leaving already
            self._leave(sequence)
        request = sequence.request
        if all(sample.phase is Phase.ENDED for sample in request.sequences):
            del self.requests[request.key]
            self.grammars.leave(request)
            self.suspects.pop(request.key, None)
            # Break the cycle of request and sequences, so that their memory is freed at once. In a process
            # with this many objects the garbage collector might find them only after hours.
            request.sequences = []

    def settle(self, step: int) -> None:
        """Free the blocks and slots that no plan after `step` names, now that all plans up to `step` are
        reported."""
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
            if sequence.num_lost_states >= _MOST_LOST_STATES:
                self._suspect(sequence)
            sequence.num_scheduled = sequence.num_settled = sequence.num_registered_blocks = 0
            self.enqueue(sequence)

    def _suspect(self, sequence: Sequence) -> None:
        """Let the sequence's request run alone until it is cleared."""
        request, sequence.num_lost_states = sequence.request, 0
        if not request.submission.suspect:
            request.submission = replace(request.submission, suspect=True)
            request.num_survived_steps = None
            self.suspects[request.key] = request

    # -------------------------------------------------------------------------------------------- slots

    def with_slots(self, sequences: list[Sequence]) -> list[Sequence]:
        """Return the sequences that have a slot, and the first of the others, as many as slots are free and
        left to their groups. The order stays."""
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
        """Give the sequence a slot. There must be a free one."""
        sequence.slot = self._free_slots.pop()
        self._group_to_num_slots[sequence.sharing_group] += 1

    def take_freed_slots(self) -> tuple[int, ...]:
        """Return the slots that were freed since the last call. The next plan names them before its
        starts."""
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
        """The number of references of all sequences to blocks of the device."""
        num_held = sum([len(sequence.block_ids) - sequence.num_offloaded for sequence in self._sequences()])
        return num_held + self.tables.num_retired_references

    @property
    def num_group_references(self) -> int:
        """The number of references of all sequences to blocks of groups with a window."""
        if not self.tables.groups.pools:
            return 0
        num_held = sum(len(table.block_ids) for it in self._sequences() for table in it.group_tables)
        return num_held + sum(self.tables.groups.num_retired_references)

    def _sequences(self) -> Collection[Sequence]:
        """Return all sequences that are here, each once."""
        here = [sequence for request in self.requests.values() for sequence in request.sequences]
        return {*here, *self.leaving} if self.leaving else here

    def check(self, num_other_references: int, num_other_group_references: Seq[int] = ()) -> None:
        """Assert that pools, sequences and slots agree, and that nobody but sequences and the holders of
        `num_other_references`, and of as many in each group with a window, references a block."""
        self._pool.check()
        self.tables.groups.check(self._sequences(), num_other_group_references)
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
            assert self.num_group_references == sum(self.tables.groups.num_retired_references)
            assert num_held == self.tables.num_retired_references
            assert not self.running
            assert not self.waiting
            assert not len(self.grammars)

    def _check_group_slots(self) -> None:
        slotted = (sequence for sequence in self._sequences() if sequence.slot >= 0)
        assert Counter(sequence.sharing_group for sequence in slotted) == self._group_to_num_slots

    def _check_offloaded(self) -> None:
        """Assert that blocks in host memory are used by the sequences whose tables name them, and by nobody
        else."""
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
