"""Saving and loading of replicas with windows and states, against models of an owner and a rank: records come
and go, answers are late, copies fail, and nothing wrong is ever found."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Any

from engine_fakes import HALVES, FakeControl, FakeCounts
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from slow_cases import examples

from kvtransfer.blocks.group_prefix import Prefix, first_needed_block, match_prefix
from kvtransfer.blocks.keys import extend_keys, state_key
from kvtransfer.common.clock import ManualClock
from kvtransfer.messages import STATE_WINDOW
from kvtransfer.store.messages.engine_session import (
    HELD,
    REFUSED,
    FetchedBlocks,
    FetchRelease,
    FetchRequest,
    FindAnswer,
    FindRequest,
    PutCommit,
    PutGrant,
    PutRequest,
    Source,
)
from kvtransfer.store.messages.records import Tier
from kvtransfer.store.messages.store_orders import (
    StoreCopy,
    StoreGet,
    StoreGetDone,
    StorePut,
    StorePutDone,
    StoreRead,
)
from workers.scheduler.block_pool import ROOT, BlockPool
from workers.scheduler.group_pool import GroupPool
from workers.scheduler.step import FinishedBlock, LoadNeed, StepRates
from workers.store_connector.announced import AnnouncedPrompts
from workers.store_connector.block_loader import BlockLoader
from workers.store_connector.block_saver import BlockSaver, StateRecords
from workers.store_connector.engine_parts import EngineParts
from workers.store_connector.tier_costs import TierCosts

BLOCK_TOKENS, NUM_BLOCKS, NUM_OTHERS, WINDOW = 4, 24, 12, 10
SHARD = HALVES[0]
# What a block or a record holds: which group's, and of which block.
Content = tuple[int, bytes]
PROMPTS = tuple(
    extend_keys(
        b"r" * 16, b"".join(word.to_bytes(4, "little") * BLOCK_TOKENS for word in words), BLOCK_TOKENS
    )
    for words in ((1, 2, 3, 4, 5, 6, 7), (1, 2, 3, 8, 9, 10), (1, 2, 11, 12), (13, 14, 15))
)
prompts = st.sampled_from(PROMPTS)


@dataclass
class ModelOwner:
    """The owner: what each record holds, and what was granted."""

    records: dict[bytes, set[Content]] = field(default_factory=dict)
    granted: dict[int, bytes] = field(default_factory=dict)
    written: dict[int, set[Content]] = field(default_factory=dict)
    next_offset: int = 0

    def grant(self, request: PutRequest, refuses: bool) -> PutGrant:
        offsets = []
        for record in request.records:
            if record.key in self.records or record.key in self.granted.values():
                offsets.append(HELD)
            elif refuses:
                offsets.append(REFUSED)
            else:
                offsets.append(self.next_offset)
                self.granted[self.next_offset] = record.key
                self.next_offset += 4096
        return PutGrant(request.number, b"a", tuple(offsets))

    def commit(self, commit: PutCommit) -> None:
        """Keep what was written, unless the grant is void since."""
        for offset, _ in commit.written:
            if (key := self.granted.pop(offset, None)) is not None:
                self.records[key] = self.written[offset]
        for offset in commit.abandoned:
            self.granted.pop(offset, None)

    def find(self, request: FindRequest) -> FindAnswer:
        num_found = next(
            (index for index, key in enumerate(request.keys) if key not in self.records), len(request.keys)
        )
        states = {place: "dram" for place, key in enumerate(request.states) if key in self.records}
        return FindAnswer(request.number, ("dram",) * num_found, states)  # type: ignore[arg-type]

    def fetch(self, request: FetchRequest) -> FetchedBlocks:
        """Answer at once, with the leading ones that are still here."""
        keys = request.keys + request.states
        num_found = next((index for index, key in enumerate(keys) if key not in self.records), len(keys))
        blocks = []
        for key in keys[:num_found]:
            self.written[self.next_offset] = self.records[key]
            blocks.append((Source(0, self.next_offset, SHARD, SHARD, 512, 0),))
            self.next_offset += 4096
        tier: Tier = "dram"
        return FetchedBlocks(request.number, b"a", 0, tuple(blocks), (tier,) * num_found, True)


class StoreGroups(RuleBasedStateMachine):
    has_window = False

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(NUM_BLOCKS, BLOCK_TOKENS)
        self.windows = [GroupPool(WINDOW, NUM_OTHERS)] if self.has_window else []
        self.states = GroupPool(STATE_WINDOW, NUM_OTHERS, has_states=True)
        # The groups in their order: KV, windows, states.
        self.others = [*self.windows, self.states]
        self.pools: list[BlockPool | GroupPool] = [self.pool, *self.others]
        self.device: list[dict[int, Content]] = [{} for _ in range(1 + len(self.others))]
        self.owner, self.clock, self.counts = ModelOwner(), ManualClock(), FakeCounts()
        self.sent: deque[Any] = deque()
        self.orders: deque[StorePut | StoreGet] = deque()
        self.loading: set[str] = set()
        self.num_needs = 0
        fake: Any = self
        engine = EngineParts(self.pool, fake, fake, StepRates(), FakeControl(), self.windows, (self.states,))
        costs, announced = TierCosts(BLOCK_TOKENS, 512, 4096), AnnouncedPrompts()
        self.loader = BlockLoader(engine, costs, fake, announced, self.clock)
        states = StateRecords((self.states,), {SHARD: 4096})
        self.saver = BlockSaver(self.pool, {0: (SHARD, 512)}, 64, fake, fake, self.windows, states)

    # ----------------------------------------------------------- the store's client, ranks and scheduler

    def send(self, message: object) -> bool:
        self.sent.append(message)
        return True

    def send_to(self, rank: int, order: StorePut | StoreGet) -> None:
        self.orders.append(order)

    def hold_back(self, need: LoadNeed, whom: object) -> None:
        assert need.request_id in self.loading

    def end_load(self, need: LoadNeed, num_loaded_tokens: dict[str, int]) -> None:
        self.loading.remove(need.request_id)

    # ---------------------------------------------------------------------------------------------- rules

    @rule(keys=prompts, num_blocks=st.integers(1, 7), borders=st.sets(st.integers(1, 7)))
    def compute(self, keys: tuple[bytes, ...], num_blocks: int, borders: set[int]) -> None:
        """Compute a prompt from its start, with states behind some borders, and windows at its end."""
        keys = keys[:num_blocks]
        if self.pool.num_free < len(keys) or any(pool.num_free < len(keys) for pool in self.others):
            return
        block_ids = self.pool.allocate(len(keys))
        first = first_needed_block(len(keys) * BLOCK_TOKENS, WINDOW, BLOCK_TOKENS)
        finished, parent = [], ROOT
        for index, (block_id, key) in enumerate(zip(block_ids, keys, strict=True)):
            self.device[0][block_id] = (0, key)
            is_new = self.pool.register(block_id, parent, key, "g")
            if index >= first:
                for number, pool in enumerate(self.windows, 1):
                    self._keep(number, pool, key)
            if has_state := index + 1 in borders:
                self._keep(len(self.others), self.states, key)
            if (is_new or has_state) and (index >= first or not self.windows):
                finished.append(FinishedBlock(key, parent, keys[0], "g", has_state))
            parent = key
        self.saver.finished(finished)
        self.pool.release(block_ids)

    def _keep(self, number: int, pool: GroupPool, key: bytes) -> None:
        (block_id,) = pool.allocate(1)
        self.device[number][block_id] = (number, key)
        pool.register(block_id, key, "g")
        pool.release([block_id])

    @rule(number=st.integers(0, 2), num_blocks=st.integers(1, NUM_OTHERS))
    def evict(self, number: int, num_blocks: int) -> None:
        """Other sequences take blocks of a group, and write into them."""
        pool = self.pools[min(number, len(self.others))]
        if pool.num_free >= num_blocks:
            block_ids = pool.allocate(num_blocks)
            for block_id in block_ids:
                self.device[min(number, len(self.others))][block_id] = (-1, b"")
            pool.release(block_ids)

    @rule(keys=prompts, index=st.integers(0, 6), is_state=st.booleans())
    def lose(self, keys: tuple[bytes, ...], index: int, is_state: bool) -> None:
        """The store evicts a block or a state, the one without the other."""
        key = keys[min(index, len(keys) - 1)]
        self.owner.records.pop(state_key(key) if is_state else key, None)

    @rule(keys=prompts, num_blocks=st.integers(1, 7))
    def want(self, keys: tuple[bytes, ...], num_blocks: int) -> None:
        keys = keys[:num_blocks]
        num_held = len(self._match(keys).block_ids)
        if num_held < len(keys):
            self.num_needs += 1
            name = f"r{self.num_needs}"
            self.loading.add(name)
            self.loader.wanted(LoadNeed(name, 0, 0, "g", keys, num_held))

    @rule()
    def pump(self) -> None:
        self.saver.pump()
        self.loader.pump()

    @precondition(lambda self: self.sent)
    @rule(refuses=st.sampled_from([False, False, False, True]))
    def answer(self, refuses: bool) -> None:
        match self.sent.popleft():
            case PutRequest() as request:
                self.saver.granted(self.owner.grant(request, refuses))
            case PutCommit() as commit:
                self.owner.commit(commit)
            case FindRequest() as request:
                self.loader.found(self.owner.find(request))
            case FetchRequest() as request:
                self.loader.fetched(self.owner.fetch(request))
            case FetchRelease():
                pass

    @precondition(lambda self: self.orders)
    @rule(fails=st.sampled_from([False, False, False, False, True]), bad=st.integers(0, 12))
    def copy(self, fails: bool, bad: int) -> None:
        """The rank copies; one that fails has written, but nobody may believe it."""
        match self.orders.popleft():
            case StorePut(number=number, copies=copies):
                for copy in copies:
                    self.owner.written[copy.offset] = self._held(copy)
                sums = () if fails else (0,) * len(copies)
                self.saver.copied(0, StorePutDone(number, sums, 0, 0.0, "failed" if fails else ""))
            case StoreGet(number=number, reads=reads):
                for read in reads:
                    self._fill(read)
                wrong = (bad,) if fails and bad < len(reads) else ()
                for place in wrong:
                    self._fill(reads[place], is_good=False)
                self.loader.copied(0, StoreGetDone(number, wrong, 0, 0.0))

    def _groups(self, copy: StoreCopy | StoreRead) -> list[tuple[int, int]]:
        """Return the numbers of the groups that a record is of, with their blocks."""
        block_ids = (copy.block_id, *copy.windows)
        first = len(self.others) if copy.is_state else 0
        return [(first + number, block_id) for number, block_id in enumerate(block_ids)]

    def _held(self, copy: StoreCopy) -> set[Content]:
        return {self.device[number][block_id] for number, block_id in self._groups(copy)}

    def _fill(self, read: StoreRead, *, is_good: bool = True) -> None:
        record = dict(self.owner.written[read.offset])
        for number, block_id in self._groups(read):
            if block_id >= 0:
                self.device[number][block_id] = (number, record[number]) if is_good else (-1, b"")

    @rule(is_purge=st.booleans())
    def drop(self, is_purge: bool) -> None:
        """All of the group is deleted; or an owner does not answer for long."""
        if not is_purge:
            self.clock.advance(60.0)
            self.sent.clear()
            self.owner.granted.clear()
            self.saver.lost()
            self.loader.lost()
            return
        for pool in self.pools:
            pool.purge("g")
        self.saver.drop("g")
        self.loader.drop("g")
        self.owner.records.clear()
        self.owner.granted.clear()

    @rule(keys=prompts)
    def load_with_no_trouble(self, keys: tuple[bytes, ...]) -> None:
        """What a load makes whole is the longest prefix for which all is there."""
        self._settle()
        expected = self._longest(keys)
        self.want(keys, len(keys))
        self._settle()
        found = len(self._match(keys).block_ids)
        # What comes may join with what the device has of a window farther on.
        assert found == expected or (self.windows and found > expected)

    def _settle(self) -> None:
        while self.sent or self.orders or self.loading or not self.saver.is_idle:
            self.pump()
            while self.sent:
                self.answer(refuses=False)
            while self.orders:
                self.copy(fails=False, bad=0)

    def _longest(self, keys: tuple[bytes, ...]) -> int:
        """Try each length. The store's record of a block has the layers with a window, too."""
        num_held = len(self._match(keys).block_ids)
        num_here = num_held if self.windows else len(self.pool.match(keys))
        for end in range(len(keys), num_held, -1):
            is_stored = all(key in self.owner.records for key in keys[num_here:end])
            has_state = state_key(keys[end - 1]) in self.owner.records
            if is_stored and (has_state or self.states.find(keys[end - 1]) is not None):
                return end
        return num_held

    def _match(self, keys: tuple[bytes, ...]) -> Prefix:
        return match_prefix(self.pool, self.others, keys, BLOCK_TOKENS)

    # ----------------------------------------------------------------------------------------- invariants

    @invariant()
    def what_is_found_is_right(self) -> None:
        for keys in PROMPTS:
            for index, key in enumerate(keys):
                for number, pool in enumerate(self.pools):
                    if (block_id := pool.find(key)) is not None:
                        assert self.device[number][block_id] == (number, key)
                windows = {(number, key) for number in range(1, len(self.others))}
                assert self.owner.records.get(key, {(0, key)} | windows) == {(0, key)} | windows
                state = {(len(self.others), key)}
                assert self.owner.records.get(state_key(key), state) == state, f"of block {index}"

    @invariant()
    def references_are_known(self) -> None:
        for pool in self.pools:
            pool.check()
        assert self.pool.num_references == self.saver.num_references + self.loader.num_references
        held = zip(self.saver.num_group_references, self.loader.num_group_references, strict=True)
        assert [pool.num_references for pool in self.others] == [sum(both) for both in held]

    def teardown(self) -> None:
        self._settle()
        assert not self.pool.num_references
        assert not any(pool.num_references for pool in self.others)


class StoreThreeGroups(StoreGroups):
    has_window = True


StoreGroups.TestCase.settings = settings(max_examples=examples(100), stateful_step_count=40, deadline=None)
StoreThreeGroups.TestCase.settings = StoreGroups.TestCase.settings
TestStoreGroups = StoreGroups.TestCase
TestStoreThreeGroups = StoreThreeGroups.TestCase
