"""What is written to NVMe: the policies by hand, their bounds, and replays against naive models."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from slow_cases import examples

from kvtransfer.config import Admission as PolicyName
from kvtransfer.messages import Shard
from kvtransfer.store.messages.records import RecordId, RecordInfo
from kvtransfer.store.policy.nvme_admission import (
    MAX_SEEN,
    MIN_SEEN,
    MIN_TRIALS,
    SAMPLED,
    SEEN_FACTOR,
    Admission,
)
from kvtransfer.store.policy.trace_simulation import (
    POLICIES,
    PlainLru,
    Policy,
    SegmentLog,
    TierSizes,
    simulate,
)

SHARD = Shard(0, 2, 0, 4)
POLICY_NAMES: tuple[PolicyName, ...] = ("adaptive", "all", "seen_twice")


def record(number: int, parent: int | None = None, num_bytes: int = 100) -> RecordInfo:
    key = number.to_bytes(16, "big")
    parent_key = b"" if parent is None else parent.to_bytes(16, "big")
    return RecordInfo(RecordId(b"space", key, SHARD), parent_key, key, "t", b"m", num_bytes, 0)


class StoreNode:
    """A policy and the NVMe tier that does as it says; records are numbered and may be of chains."""

    def __init__(self, policy: PolicyName = "adaptive") -> None:
        self.admission = Admission(policy, 1000 * 100)
        self.num_records = 0

    def chain(self, num_blocks: int, after: RecordInfo | None = None) -> list[RecordInfo]:
        """New records, each the child of the one before."""
        made: list[RecordInfo] = []
        parent = None if after is None else int.from_bytes(after.id.key, "big")
        for _ in range(num_blocks):
            self.num_records += 1
            made.append(record(self.num_records, parent))
            parent = self.num_records
        return made

    def put(self, *infos: RecordInfo) -> list[bool]:
        """Whether each was written."""
        answers = [self.admission.put(info, True) for info in infos]
        for info, is_worth in zip(infos, answers, strict=True):
            if is_worth:
                self.admission.written(info)
        return answers

    def teach(self, num_trials: int, *, is_read: bool, via_dram: bool = False) -> None:
        """Records seen once, each of a chain of its own, come and go."""
        for _ in range(num_trials):
            (info,) = self.chain(1)
            self.admission.put(info, False)
            self.admission.written(info)
            if is_read:
                self.admission.nvme_hit(info.id)
            elif via_dram:
                assert not self.admission.hit(info, True)
            self.admission.forgotten(info.id)
            if not (is_read or via_dram):
                self.admission.written(info)
                self.admission.dropped(info.id)

    def share(self, num_chains: int = 10 * SAMPLED) -> float:
        """Part of new chains of one block that would be written now."""
        return sum(self.admission.put(self.chain(1)[0], True) for _ in range(num_chains)) / num_chains


# ------------------------------------------------------------------------------------ the plain policies


def test_all_is_all_that_is_not_there() -> None:
    node = StoreNode("all")
    assert node.put(record(1), record(2)) == [True, True]
    assert not node.admission.hit(record(1), True)
    node.admission.dropped(record(1).id)
    assert node.admission.hit(record(1), True)


def test_seen_twice() -> None:
    node = StoreNode("seen_twice")
    assert node.put(record(1), record(2)) == [False, False]
    assert node.put(record(2)) == [True], "computed again, as it was in no tier any more"
    assert node.admission.hit(record(1), False), "found in the host tier"
    assert not node.admission.hit(record(2), False), "it is there"
    assert not node.admission.put(record(3), False), "with free space or without"


# ------------------------------------------------------------------------------------------- adaptive


def test_everything_is_written_while_there_is_space() -> None:
    node = StoreNode()
    node.teach(2 * MIN_TRIALS, is_read=False)
    assert all(node.admission.put(info, False) for info in node.chain(50))


def test_what_is_never_read_is_sampled_only() -> None:
    node = StoreNode()
    assert node.share() == 1.0, "nothing is known yet"
    node.teach(MIN_TRIALS, is_read=False)
    assert node.share() == pytest.approx(1 / SAMPLED)


def test_what_is_found_in_the_host_tier_need_not_have_been_written() -> None:
    node = StoreNode()
    node.teach(MIN_TRIALS, is_read=False, via_dram=True)
    assert node.share() == pytest.approx(1 / SAMPLED)


def test_it_changes_its_mind_by_its_samples() -> None:
    node = StoreNode()
    node.teach(500, is_read=False)
    num_chains = 0
    while node.share(SAMPLED) < 1.0:
        (info,) = node.chain(1)
        if node.put(info) == [True]:
            node.admission.nvme_hit(info.id)
        num_chains += 1
        assert num_chains < 500 * SAMPLED
    assert num_chains > 10 * SAMPLED, "not by the first ones"


def test_purged_and_damaged_records_teach_nothing() -> None:
    node = StoreNode()
    for info in node.chain(3 * MIN_TRIALS):
        node.admission.put(info, True)
        node.admission.written(info)
        node.admission.forgotten(info.id)
        node.admission.dropped(info.id)
    assert node.share() == 1.0


def test_chains_are_sampled_whole() -> None:
    node = StoreNode()
    for _ in range(MIN_TRIALS):  # so that every depth is known to be worth nothing
        for info in node.chain(40):
            node.admission.put(info, False)
            node.admission.written(info)
            node.admission.dropped(info.id)
    written = [node.put(*node.chain(40)) for _ in range(4 * SAMPLED)]
    assert all(len(set(answers)) == 1 for answers in written)
    assert sum(answers[0] for answers in written) == 4


def test_what_is_seen_again_is_written_though_what_is_new_is_not() -> None:
    node = StoreNode()
    node.teach(500, is_read=False)
    seen = [info for info in node.chain(1) + node.chain(1) + node.chain(1) if node.put(info) == [False]]
    assert len(seen) >= 2
    assert node.put(seen[0]) == [True]
    assert node.admission.hit(seen[1], True)


def test_old_conversations_are_told_from_new_ones() -> None:
    """The first two turns are read again, the third ones never: only these are left out."""
    node = StoreNode()
    for _ in range(2 * MIN_TRIALS):
        (first,) = node.chain(1)
        (second,) = node.chain(1, after=first)
        (third,) = node.chain(1, after=second)
        node.put(first)
        node.admission.nvme_hit(first.id)
        node.put(second)
        node.admission.nvme_hit(second.id)
        if node.put(third) == [True]:
            node.admission.dropped(third.id)
    answers = []
    for _ in range(SAMPLED):
        chain = node.chain(1)
        chain += node.chain(1, after=chain[0])
        answers += node.put(chain[0])
        node.admission.hit(chain[0], True)
        answers += node.put(chain[1])
        node.admission.hit(chain[1], True)
        answers += node.put(*node.chain(1, after=chain[1]))
    assert all(answers[0::3])
    assert all(answers[1::3])
    assert sum(answers[2::3]) <= 2


def test_the_memory_is_bounded_by_the_tier() -> None:
    admission = Admission("seen_twice", 3000 * 100)
    for number in range(20_000):
        admission.put(record(number), True)
    assert admission.num_remembered == SEEN_FACTOR * 3000
    assert not admission.put(record(0), True), "forgotten"
    assert admission.put(record(19_000), True)
    small, huge = Admission("adaptive", 0), Admission("adaptive", 1 << 50)
    for number in range(MAX_SEEN // 100):
        small.put(record(number), True)
        huge.put(record(number), True)
    assert (small.num_remembered, huge.num_remembered) == (MIN_SEEN, MAX_SEEN // 100)


calls = st.sampled_from(["put", "hit", "written", "nvme_hit", "dropped", "forgotten"])


@given(
    policy=st.sampled_from(POLICY_NAMES),
    steps=st.lists(st.tuples(calls, st.integers(0, 5), st.booleans()), max_size=200),
)
@settings(max_examples=examples(80), deadline=None)
def test_any_order_of_events_is_taken(policy: PolicyName, steps: list[tuple[str, int, bool]]) -> None:
    """Events come late or twice from a tier that works in the background."""
    admission = Admission(policy, 10)
    on_nvme: set[int] = set()
    for call, number, is_full in steps:
        info = record(number, number - 1 if number else None)
        if call == "put":
            admission.put(info, is_full)
        elif call == "hit":
            assert not (admission.hit(info, is_full) and number in on_nvme)
        elif call == "written":
            admission.written(info)
            on_nvme.add(number)
        elif call == "nvme_hit":
            admission.nvme_hit(info.id)
        else:
            (admission.dropped if call == "dropped" else admission.forgotten)(info.id)
            on_nvme.discard(number)
    assert admission.num_remembered <= 6


# ------------------------------------------------------------------------------------------- the replay


def test_a_segment_log_moves_what_was_used() -> None:
    log = SegmentLog(4)
    ids = [record(number).id for number in range(8)]
    assert [log.write(each) for each in ids[:4]] == [[], [], [], []]
    assert log.is_full
    log.use(ids[0])
    assert log.write(ids[4]) == [ids[1]]
    assert (ids[0] in log, log.num_moved) == (True, 1)
    assert [log.write(each) for each in ids[5:]] == [[ids[2]], [ids[3]], [ids[4]]], "moved behind 4"
    assert ids[0] in log


uses = st.lists(st.tuples(st.integers(0, 12), st.booleans()), max_size=120)


@given(uses=uses, capacity=st.integers(1, 6))
def test_plain_lru_against_a_list(uses: list[tuple[int, bool]], capacity: int) -> None:
    lru, naive = PlainLru(capacity), list[RecordId]()
    for number, _ in uses:
        record_id = record(number).id
        assert (record_id in lru) == (record_id in naive)
        if record_id in naive:
            lru.use(record_id)
            naive.remove(record_id)
            naive.append(record_id)
        else:
            naive.append(record_id)
            assert lru.write(record_id) == naive[:-capacity]
            naive = naive[-capacity:]


@given(uses=uses, capacity=st.integers(1, 8))
def test_a_segment_log_against_a_list(uses: list[tuple[int, bool]], capacity: int) -> None:
    """A small log has a record in each segment: a queue whose head goes back to its end if it was used."""
    log, queue, used = SegmentLog(capacity), list[RecordId](), set[RecordId]()
    for number, is_used in uses:
        record_id = record(number).id
        assert (record_id in log) == (record_id in queue)
        if record_id not in queue:
            queue.append(record_id)
            dropped = []
            while len(queue) > capacity:
                head = queue.pop(0)
                if head in used:
                    used.remove(head)
                    queue.append(head)
                else:
                    dropped.append(head)
            assert log.write(record_id) == dropped
        if is_used and record_id in queue:
            log.use(record_id)
            used.add(record_id)


@st.composite
def traces(draw: st.DrawFn) -> list[list[int]]:
    """Prompts over a small tree: the number of a block is its path."""
    prompts = draw(st.lists(st.lists(st.integers(1, 3), max_size=5), min_size=1, max_size=40))
    return [[_number(prompt[: end + 1]) for end in range(len(prompt))] for prompt in prompts]


def _number(path: Sequence[int]) -> int:
    return sum(step * 4**place for place, step in enumerate(path))


@given(trace=traces(), policy=st.sampled_from(POLICIES), sizes=st.tuples(*[st.integers(0, 8)] * 3))
@settings(max_examples=examples(150), deadline=None)
def test_no_replay_beats_the_ideal(
    trace: list[list[int]], policy: Policy, sizes: tuple[int, int, int]
) -> None:
    outcome = simulate(trace, TierSizes(*sizes), policy)
    assert outcome.num_blocks == sum(map(len, trace))
    assert 0.0 <= outcome.hit_rate <= outcome.ideal_hit_rate
    if sizes[2] == 0:
        assert outcome.num_nvme_hits == outcome.num_written == outcome.num_moved == 0
    if sizes[1:] == (0, 0):
        assert outcome.num_device_hits == naive_device_hits(trace, sizes[0])


def naive_device_hits(trace: list[list[int]], capacity: int) -> int:
    """Least recently used first, of one prompt the last block first."""
    device: list[int] = []
    num_hits = 0
    for blocks in trace:
        for block in blocks:
            if block not in device:
                break
            num_hits += 1
        device = [block for block in device if block not in blocks] + blocks[::-1]
        device = device[-capacity:] if capacity else []
    return num_hits


@given(trace=traces(), large=st.integers(0, 2))
@settings(max_examples=examples(60), deadline=None)
def test_any_tier_with_space_for_all_is_ideal(trace: list[list[int]], large: int) -> None:
    sizes = [3, 3, 3]
    sizes[large] = 2000
    policies: tuple[Policy, ...] = ("lru", "all", "adaptive") if large == 2 else POLICIES
    for policy in policies:
        outcome = simulate(trace, TierSizes(*sizes), policy)
        assert outcome.hit_rate == outcome.ideal_hit_rate


def conversations(num_requests: int) -> Iterator[list[int]]:
    """A shared system prompt of two blocks; three requests of four are documents asked about once (20
    blocks), the others turns of 60 conversations, which grow by 4 blocks a turn and end after 6."""
    generator = np.random.default_rng(5)
    numbers = iter(range(10, 10**9))
    running: list[list[int]] = [[] for _ in range(60)]
    for _ in range(num_requests):
        if generator.random() < 0.75:
            yield [0, 1, *(next(numbers) for _ in range(20))]
            continue
        which = int(generator.integers(60))
        if len(running[which]) >= 24:
            running[which] = []
        running[which] += [next(numbers) for _ in range(4)]
        yield [0, 1, *running[which]]


def test_adaptive_is_on_the_frontier() -> None:
    """More hits than the seen-twice filter; at a part of the bytes, about the hits of writing all where there
    is space for what is reused, and far more where there is not."""
    trace = list(conversations(1500))
    for num_nvme, share_of_all in ((600, 2.0), (4000, 1.0)):
        sizes = TierSizes(60, 300, num_nvme)
        every, twice, adaptive = (
            simulate(trace, sizes, policy) for policy in ("all", "seen_twice", "adaptive")
        )
        assert adaptive.hit_rate > twice.hit_rate
        assert adaptive.num_nvme_hits > share_of_all * every.num_nvme_hits
        assert adaptive.num_written < 0.5 * every.num_written
