"""The pool of a group of layers against a model that looks at every block: which is evicted, and when."""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from workers.scheduler.block_pool import ROOT, BlockPool
from workers.scheduler.group_pool import GroupPool

NUM_BLOCKS = 6
KEYS = [bytes([number]) for number in range(9)]


@dataclass
class Block:
    """What the model knows of a findable block: its references, and when it was released, and how."""

    key: bytes
    worth: int
    num_references: int = 1
    released_at: int = 0
    counts: int = 0
    is_passed: bool = False

    @property
    def order(self) -> tuple[bool, int, int]:
        """The least of idle blocks is evicted first."""
        return not self.is_passed, 0 if self.is_passed else self.counts, self.released_at


class PoolMachine(RuleBasedStateMachine):
    """Blocks are taken, made findable, released in both ways and taken again."""

    @initialize(has_states=st.booleans())
    def start(self, has_states: bool) -> None:
        self.kv = BlockPool(len(KEYS), 16)
        for block_id, key in zip(self.kv.allocate(len(KEYS)), KEYS, strict=True):
            self.kv.register(block_id, ROOT, key, "")
            self.kv.release([block_id])
        self.pool = GroupPool(2, NUM_BLOCKS, has_states=has_states, kv=self.kv)
        self.blocks: dict[int, Block] = {}
        self.private: list[int] = []
        self.evicted: set[bytes] = set()
        self.inflation = 0
        self.now = 0

    def idle(self) -> list[int]:
        return [block_id for block_id, block in self.blocks.items() if not block.num_references]

    def used(self) -> list[int]:
        return [block_id for block_id, block in self.blocks.items() if block.num_references]

    @precondition(lambda self: self.pool.num_free)
    @rule(data=st.data())
    def allocate(self, data: st.DataObject) -> None:
        num_taken = data.draw(st.integers(1, self.pool.num_free))
        num_free = NUM_BLOCKS - len(self.blocks) - len(self.private)
        for _ in range(num_taken - num_free):
            victim = min(self.idle(), key=lambda block_id: self.blocks[block_id].order)
            block = self.blocks.pop(victim)
            if not block.is_passed:
                self.inflation = block.counts
                self.evicted.add(block.key)
        self.private += self.pool.allocate(num_taken)

    @precondition(lambda self: self.private)
    @rule(key=st.sampled_from(KEYS), worth=st.integers(0, 5))
    def register(self, key: bytes, worth: int) -> None:
        block_id = self.private[0]
        is_new = all(block.key != key for block in self.blocks.values())
        assert self.pool.register(block_id, key, "", worth) == is_new
        if is_new:
            del self.private[0]
            self.evicted.discard(key)
            self.blocks[block_id] = Block(key, worth)

    @precondition(lambda self: self.private)
    @rule()
    def give_up(self) -> None:
        self.pool.release([self.private.pop()])

    @precondition(lambda self: self.blocks)
    @rule(data=st.data())
    def acquire(self, data: st.DataObject) -> None:
        block_id = data.draw(st.sampled_from(list(self.blocks)))
        assert self.pool.find(self.blocks[block_id].key) == block_id
        self.pool.acquire([block_id])
        self.blocks[block_id].num_references += 1

    @precondition(lambda self: self.used())
    @rule(data=st.data(), is_passed=st.booleans())
    def release(self, data: st.DataObject, is_passed: bool) -> None:
        block_id = data.draw(st.sampled_from(self.used()))
        self.pool.release([block_id], passed=is_passed)
        block = self.blocks[block_id]
        block.num_references -= 1
        if not block.num_references:
            self.release_idle(block, is_passed or self.kv.find(block.key) is None)

    def release_idle(self, block: Block, is_passed: bool) -> None:
        self.now += 1
        block.released_at, block.is_passed = self.now, is_passed
        block.counts = self.inflation + block.worth

    @rule(key=st.sampled_from(KEYS))
    def lose_kv(self, key: bytes) -> None:
        block_id = self.kv.find(key)
        if block_id is not None:
            self.kv.acquire([block_id])
            self.kv.forget(block_id)
            self.kv.release([block_id])
        for block in self.blocks.values():
            if block.key == key and not block.num_references and not block.is_passed:
                self.release_idle(block, is_passed=True)

    @rule(key=st.sampled_from(KEYS))
    def keep(self, key: bytes) -> None:
        self.pool.keep(key)
        for block in self.blocks.values():
            is_idle = block.is_passed and not block.num_references
            if block.key == key and is_idle and self.kv.find(key) is not None:
                self.release_idle(block, is_passed=False)

    @precondition(lambda self: self.blocks)
    @rule()
    def purge(self) -> None:
        assert self.pool.purge(None) == len(self.blocks)
        self.private += self.used()
        for block_id in self.used():
            for _ in range(self.blocks[block_id].num_references - 1):
                self.pool.release([block_id])
        self.blocks = {}

    @invariant()
    def agrees(self) -> None:
        if not hasattr(self, "pool"):
            return
        self.pool.check()
        assert {key: self.pool.find(key) for key in KEYS if self.pool.find(key) is not None} == {
            block.key: block_id for block_id, block in self.blocks.items()
        }
        assert {key for key in KEYS if self.pool.was_evicted(key)} == self.evicted
        assert self.pool.num_cached == len(self.idle())


PoolMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestPool = PoolMachine.TestCase
