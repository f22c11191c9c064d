"""BlockPool against a naive model of it, and its promises one by one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from slow_cases import examples

from kvtransfer.common.group_shares import GroupShares
from workers.errors import OutOfBlocksError
from workers.scheduler.block_pool import ROOT, BlockPool

SHARES = [GroupShares(), GroupShares(1.0, {"a": 0.5}), GroupShares(0.4), GroupShares(0.7, {"b": 0.3})]


class NaivePool:
    """The same rules by brute force: a tree of keys, searched from scratch at every step."""

    def __init__(self, num_blocks: int, shares: GroupShares) -> None:
        self.shares = shares
        self.owner: dict[int, str] = {}
        self.copies = Counter[int]()
        self.refs = dict.fromkeys(range(num_blocks), 0)
        self.index: dict[bytes, tuple[int, bytes]] = {}  # key -> block, parent
        self.released: list[int] = []  # oldest first
        self.quarantined: set[int] = set()
        self.private: dict[bytes, int] = {}

    def key_of(self, block: int) -> bytes | None:
        return next((key for key, (other, _) in self.index.items() if other == block), None)

    def cached(self) -> list[bytes]:
        return [key for key, (block, _) in self.index.items() if self.refs[block] == 0]

    def free(self) -> set[int]:
        indexed = {block for block, _ in self.index.values()}
        return {block for block, refs in self.refs.items() if refs == 0} - indexed - self.quarantined

    def subtree(self, key: bytes) -> list[bytes]:
        children = [child for child, (_, parent) in self.index.items() if parent == key]
        return [key, *(below for child in children for below in self.subtree(child))]

    def limit(self, group: str) -> int:
        return int(len(self.refs) * self.shares.of(group))

    def is_used(self, block: int) -> bool:
        return self.refs[block] > self.copies[block] or block in self.quarantined

    def num_used(self, group: str) -> int:
        return sum(self.is_used(block) and self.owner[block] == group for block in self.refs)

    def num_held(self, group: str) -> int:
        return sum(self.owner[block] == group for block in self.refs.keys() - self.free())

    def groups(self) -> set[str]:
        return {self.owner[block] for block in self.refs.keys() - self.free()}

    def evict(self, group: str, num_blocks: int) -> None:
        """One of the group's own where it would hold more than its share, else one of the group that exceeds
        its share most, else anybody's."""
        order = sorted(self.groups(), key=lambda it: (self.limit(it) - self.num_held(it), it))
        victims = [it for it in order if self.num_held(it) > self.limit(it)]
        if self.num_held(group) + num_blocks > self.limit(group):
            victims.insert(0, group)
        owners = [self.owner[self.index[key][0]] for key in self.cached()]
        victim = next((it for it in victims if it in owners), None) if self.shares.is_limited else None
        cached = [key for key in self.cached() if victim in (None, self.owner[self.index[key][0]])]
        cached.sort(key=lambda key: self.released.index(self.index[key][0]))
        leaves = [key for key in cached if len(self.subtree(key)) == 1]
        for key in [leaves[0]] if leaves else self.subtree(cached[0]):
            del self.index[key]

    def remember(self, block: int, key: bytes) -> None:
        if key not in self.index and key not in self.private and block not in self.private.values():
            self.private[key] = block

    def forget(self, block: int) -> None:
        self.drop_private(block)
        key = self.key_of(block)
        for below in self.subtree(key) if key is not None else ():
            other, _ = self.index.pop(below)
            if other != block and self.refs[other]:
                self.remember(other, below)

    def drop_private(self, block: int) -> None:
        self.private = {key: other for key, other in self.private.items() if other != block}

    def release(self, blocks: list[int]) -> None:
        for block in reversed(blocks):
            self.refs[block] -= 1
            if self.refs[block] == 0:
                self.drop_private(block)
            if self.refs[block] == 0:
                self.released = [other for other in self.released if other != block] + [block]


class Watcher:
    """What a router knows from events alone."""

    def __init__(self) -> None:
        self.key_to_parent: dict[bytes, bytes] = {}

    def take(self, pool: BlockPool) -> None:
        stored, removed = pool.take_events()
        for part in removed:
            for key in part.keys:
                del self.key_to_parent[key]
        for chain in stored:
            parent = chain.parent
            for key in chain.keys:
                assert parent == ROOT or parent in self.key_to_parent
                assert key not in self.key_to_parent
                self.key_to_parent[key] = parent
                parent = key


class PoolMachine(RuleBasedStateMachine):
    """Holders with chains of blocks, as sequences have them: a prefix that is matched, then own blocks."""

    @initialize(num_blocks=st.integers(1, 9), shares=st.sampled_from(SHARES))
    def start(self, num_blocks: int, shares: GroupShares) -> None:
        self.pool = BlockPool(num_blocks, 4, shares)
        self.model = NaivePool(num_blocks, shares)
        self.watcher = Watcher()
        self.holders: list[tuple[list[int], list[bytes]]] = []
        self.copied: list[list[int]] = []

    @rule(path=st.text("ab", max_size=5))
    def acquire_prefix(self, path: str) -> None:
        keys = [path[: end + 1].encode() for end in range(len(path))]
        blocks = self.pool.match(keys)
        expected = []
        for key in keys:
            if key not in self.model.index:
                break
            expected.append(self.model.index[key][0])
        assert blocks == expected
        num_to_use = sum(not self.model.is_used(block) for block in blocks)
        if self.model.shares.is_limited:
            assert self.pool.num_to_use(blocks) == num_to_use
        if num_to_use > self.pool.num_left(path[:1]):
            return
        self.pool.acquire(blocks)
        for block in blocks:
            self.model.refs[block] += 1
        self.holders.append((blocks, keys[: len(blocks)]))

    @precondition(lambda self: self.holders)
    @rule(data=st.data(), letters=st.text("ab", min_size=1, max_size=4))
    def grow(self, data: st.DataObject, letters: str) -> None:
        blocks, keys = data.draw(st.sampled_from(self.holders))
        num_free = len(self.model.free()) + len(self.model.cached())
        group = (keys[0].decode() if keys else letters)[0]
        num_left = self.model.limit(group) - self.model.num_used(group)
        if len(letters) > min(num_free, num_left):
            before = self.pool.snapshot()
            what = (
                f"{num_free} are free" if len(letters) > num_free else f"{num_left} are left of .* '{group}'"
            )
            with pytest.raises(OutOfBlocksError, match=f"{len(letters)} blocks .* {what}"):
                self.pool.allocate(len(letters), group)
            assert self.pool.snapshot() == before
            return
        while len(self.model.free()) < len(letters):
            self.model.evict(group, len(letters))
        new = self.pool.allocate(len(letters), group)
        assert set(new) <= self.model.free()
        for block, letter in zip(new, letters, strict=True):
            self.model.refs[block] = 1
            self.model.owner[block] = group
            blocks.append(block)
            keys.append((keys[-1] if keys else b"") + letter.encode())

    @precondition(lambda self: self.holders)
    @rule(data=st.data(), at_once=st.booleans())
    def register_all(self, data: st.DataObject, at_once: bool) -> None:
        blocks, keys = data.draw(st.sampled_from(self.holders))
        parent = ROOT
        if at_once and keys:
            begin = data.draw(st.integers(0, len(keys) - 1))
            before = keys[begin - 1] if begin else ROOT
            for block, key in zip(blocks[:begin], keys[:begin], strict=True):
                self.pool.register(block, key[:-1], key, keys[0].decode()[0])
            self.pool.register_all(blocks[begin:], before, keys[begin:], keys[0].decode()[0])
        for block, key in zip(blocks, keys, strict=True):
            known = key in self.model.index
            there = self.model.key_of(block) is not None
            expected = there or (not known and (parent == ROOT or parent in self.model.index))
            # Once more is the same.
            assert self.pool.register(block, parent, key, keys[0].decode()[0]) == expected
            if expected and not there:
                self.model.index[key] = (block, parent)
                self.model.drop_private(block)
            parent = key

    @precondition(lambda self: self.holders)
    @rule(data=st.data())
    def remember_all(self, data: st.DataObject) -> None:
        for block, key in zip(*data.draw(st.sampled_from(self.holders)), strict=True):
            if self.model.key_of(block) is None:
                self.model.remember(block, key)
                assert self.pool.remember(block, key) == (self.model.private.get(key) == block)

    @precondition(lambda self: self.holders)
    @rule(data=st.data(), number=st.integers(0, 3))
    def forget(self, data: st.DataObject, number: int) -> None:
        blocks, _ = data.draw(st.sampled_from(self.holders))
        if number < len(blocks):
            self.pool.forget(blocks[number])
            self.model.forget(blocks[number])

    @rule(group=st.sampled_from([None, "a", "b"]))
    def purge(self, group: str | None) -> None:
        """A chain is the group's that its first letter names."""
        gone = [key for key in self.model.index if group is None or key.decode()[0] == group]
        num_held = sum(self.model.refs[self.model.index[key][0]] > 0 for key in gone)
        assert self.pool.purge(group) == (len(gone), num_held)
        for key in gone:
            del self.model.index[key]

    @precondition(lambda self: self.holders)
    @rule(data=st.data(), keep=st.integers(0, 3))
    def release(self, data: st.DataObject, keep: int) -> None:
        number = data.draw(st.integers(0, len(self.holders) - 1))
        blocks, keys = self.holders.pop(number)
        self.pool.release(blocks[keep:])
        self.model.release(blocks[keep:])
        if blocks[:keep]:
            self.holders.append((blocks[:keep], keys[:keep]))

    @precondition(lambda self: self.holders)
    @rule(data=st.data())
    def quarantine(self, data: st.DataObject) -> None:
        blocks, keys = data.draw(st.sampled_from(self.holders))
        if blocks and self.model.refs[blocks[-1]] == 1 and self.model.key_of(blocks[-1]) is None:
            block = blocks.pop()
            keys.pop()
            self.pool.quarantine([block])
            self.model.refs[block] = 0
            self.model.drop_private(block)
            self.model.quarantined.add(block)

    @rule(path=st.text("ab", min_size=1, max_size=5))
    def begin_copies(self, path: str) -> None:
        blocks = self.pool.match([path[: end + 1].encode() for end in range(len(path))])
        self.pool.begin_copies(blocks)
        self.copied.append(blocks)
        for block in blocks:
            self.model.refs[block] += 1
            self.model.copies[block] += 1

    @precondition(lambda self: self.copied)
    @rule()
    def end_copies(self) -> None:
        blocks = self.copied.pop()
        self.pool.end_copies(blocks)
        self.model.copies.subtract(blocks)
        self.model.release(blocks)

    @rule()
    def release_quarantine(self) -> None:
        self.pool.release_quarantine(list(self.model.quarantined))
        self.model.quarantined.clear()

    @rule()
    def watch(self) -> None:
        self.watcher.take(self.pool)
        assert self.watcher.key_to_parent == {key: parent for key, (_, parent) in self.model.index.items()}

    @invariant()
    def agrees(self) -> None:
        if not hasattr(self, "pool"):
            return
        self.pool.check()
        model = self.model
        assert self.pool.num_cached == len(model.cached())
        assert self.pool.num_free == len(model.free()) + len(model.cached())
        assert self.pool.num_quarantined == len(model.quarantined)
        assert self.pool.num_referenced == sum(refs > 0 for refs in model.refs.values())
        assert self.pool.num_references == sum(model.refs.values())
        for block, refs in model.refs.items():
            assert self.pool.is_shared(block) == (refs > 1)
        for group in "ab":
            num_used = model.num_used(group)
            assert num_used <= model.limit(group)
            if model.shares.is_limited:
                assert self.pool.num_used_by(group) == num_used
            if self.pool.has_limit(group):
                assert self.pool.num_left(group) == model.limit(group) - num_used
        for key in {key for _, keys in self.holders for key in keys}:
            found = self.model.index[key][0] if key in self.model.index else self.model.private.get(key)
            assert self.pool.find(key) == found
        parents: dict[bytes, bytes] = {}
        for chain in self.pool.snapshot():
            parents.update(zip(chain.keys, (chain.parent, *chain.keys), strict=False))
        assert parents == {key: parent for key, (_, parent) in model.index.items()}


PoolMachine.TestCase.settings = settings(max_examples=examples(150), stateful_step_count=40, deadline=None)
TestPoolMachine = PoolMachine.TestCase


def chain(pool: BlockPool, names: str) -> list[int]:
    blocks = pool.allocate(len(names))
    for index, block in enumerate(blocks):
        assert pool.register(block, names[:index].encode(), names[: index + 1].encode(), "t")
    return blocks


def test_eviction_takes_the_least_recent_chain_from_its_end() -> None:
    pool = BlockPool(6, 4)
    old, new = chain(pool, "abc"), chain(pool, "xyz")
    pool.release(old)
    pool.release(new)
    pool.allocate(2)
    assert pool.match([b"a", b"ab", b"abc"]) == old[:1]
    assert pool.match([b"x", b"xy", b"xyz"]) == new
    pool.acquire(pool.match([b"x"]))
    pool.allocate(2)
    assert pool.match([b"a"]) == []
    assert pool.match([b"x", b"xy", b"xyz"]) == new[:2]


def test_a_match_used_again_becomes_the_most_recent() -> None:
    pool = BlockPool(2, 4)
    first, second = chain(pool, "a"), chain(pool, "b")
    pool.release(first)
    pool.release(second)
    pool.acquire(first)
    pool.release(first)
    pool.allocate(1)
    assert pool.match([b"a"]) == first
    assert pool.match([b"b"]) == []


def test_a_free_parent_of_a_used_child_can_still_be_had() -> None:
    pool = BlockPool(3, 4)
    (parent,) = chain(pool, "a")
    duplicate, child = pool.allocate(2)
    assert not pool.register(duplicate, ROOT, b"a", "t")
    assert pool.register(child, b"a", b"ab", "t")
    pool.release([parent])
    assert pool.num_free == 1
    assert pool.allocate(1) == [parent]
    assert pool.match([b"a", b"ab"]) == []
    assert not pool.register(child, b"a", b"ab", "t")
    pool.release([duplicate, child, parent])
    assert (pool.num_free, pool.num_cached) == (3, 0)
    pool.check()


def test_a_group_above_its_share_gives_way_before_others_and_at_its_share_to_itself() -> None:
    pool = BlockPool(8, 4, GroupShares(1.0, {"greedy": 0.5}))

    def cached(name: str, count: int, group: str) -> None:
        blocks = pool.allocate(count, group)
        for number, block in enumerate(blocks):
            assert pool.register(block, ROOT, f"{name}{number}".encode(), group)
        pool.release(blocks)

    def num_found(name: str) -> int:
        return sum(bool(pool.match([f"{name}{number}".encode()])) for number in range(8))

    cached("old", 2, "other")
    cached("x", 3, "greedy")
    cached("y", 3, "greedy")
    assert (num_found("old"), num_found("x"), num_found("y")) == (2, 3, 3), "nobody wanted the space"
    pool.release(pool.allocate(2, "other"))
    assert (num_found("old"), num_found("x"), num_found("y")) == (2, 1, 3)
    cached("z", 2, "greedy")
    assert (num_found("old"), num_found("x") + num_found("y") + num_found("z")) == (2, 6), "free ones first"
    cached("v", 1, "greedy")
    assert (num_found("old"), num_found("v")) == (2, 1), "it evicts its own"
    with pytest.raises(OutOfBlocksError, match="4 are left of the share of 'greedy'"):
        pool.allocate(5, "greedy")
    pool.check()


def test_a_group_that_comes_to_its_share_evicts_its_own_before_what_is_older() -> None:
    pool = BlockPool(8, 4, GroupShares(1.0, {"a": 0.5}))
    others = pool.allocate(4, "b")
    own = pool.allocate(3, "a")
    for block in (*others, *own):
        assert pool.register(block, ROOT, bytes([block]), "b" if block in others else "a")
    pool.release(others)
    pool.release(own)
    pool.allocate(2, "a")
    assert [bool(pool.match([bytes([block])])) for block in others] == [True] * 4
    assert sum(bool(pool.match([bytes([block])])) for block in own) == 2
    pool.check()


def test_the_heaps_of_groups_stay_small_and_go_with_their_last_cached_block() -> None:
    pool = BlockPool(4, 4, GroupShares(0.5))
    groups = pool._groups
    assert groups is not None
    (block,) = pool.allocate(1, "t")
    assert pool.register(block, ROOT, b"a", "t")
    (other,) = pool.allocate(1, "t")
    assert pool.register(other, b"a", b"ab", "t")
    pool.release([block, other])
    for _ in range(1000):
        pool.acquire([other])
        pool.release([other])
    assert len(list(groups.entries())) <= 2 * pool.num_total + 65
    pool.acquire([block, other])
    assert list(groups.entries()) == []
    pool.release([block, other])
    pool.check()


def test_events_are_net_and_name_chains_once() -> None:
    pool = BlockPool(4, 4)
    abc = chain(pool, "abc")
    branch = pool.allocate(1)
    pool.register(branch[0], b"a", b"az", "t")
    stored, removed = pool.take_events()
    assert [(part.parent, part.keys) for part in stored] == [(b"", (b"a", b"ab", b"abc")), (b"a", (b"az",))]
    assert removed == ()
    pool.release(abc)
    pool.release(branch)
    pool.release(pool.allocate(4))
    again = chain(pool, "ab")
    stored, removed = pool.take_events()
    assert stored == ()
    assert {key for part in removed for key in part.keys} == {b"abc", b"az"}
    assert pool.match([b"a", b"ab"]) == again


def test_removed_blocks_have_their_reasons() -> None:
    pool = BlockPool(4, 4)
    pool.release(chain(pool, "abcd"))
    pool.take_events()
    (kept,) = pool.allocate(1)
    taken = pool.match([b"a", b"ab"])
    pool.acquire(taken)
    pool.forget(taken[1])
    pool.purge(None)
    _, removed = pool.take_events()
    assert [(part.keys, part.reason) for part in removed] == [
        ((b"abcd",), "space"),
        ((b"abc", b"ab"), "offloaded"),
        ((b"a",), "purged"),
    ]
    pool.release([kept, *taken])
    pool.check()


def test_blocks_above_a_share_are_removed_for_it() -> None:
    pool = BlockPool(4, 4, GroupShares(by_group={"t": 0.5}))
    blocks = pool.allocate(2, "t")
    pool.register(blocks[0], ROOT, b"a", "t")
    pool.register(blocks[1], b"a", b"ab", "t")
    pool.release(blocks)
    others = pool.allocate(2, "u")
    pool.take_events()
    pool.release(pool.allocate(1, "t"))
    _, removed = pool.take_events()
    assert [(part.keys, part.reason) for part in removed] == [((b"ab",), "share")]
    pool.release(others)


def test_the_heap_of_evictable_blocks_stays_small() -> None:
    pool = BlockPool(4, 4)
    blocks = chain(pool, "abcd")
    pool.release(blocks)
    for _ in range(1000):
        pool.acquire(blocks)
        pool.release(blocks)
    assert len(pool._evictable) <= 2 * pool.num_total + 65
    pool.check()


def test_what_was_reached_through_a_forgotten_block_is_found_by_its_key_while_it_is_used() -> None:
    pool = BlockPool(5, 4)
    abc = chain(pool, "abc")
    (branch,) = pool.allocate(1)
    assert pool.register(branch, b"a", b"az", "t")
    pool.release([branch])
    pool.forget(abc[0])
    assert pool.match([b"a", b"ab"]) == []
    assert [pool.find(key) for key in (b"a", b"ab", b"abc", b"az")] == [None, abc[1], abc[2], None]
    assert pool.num_free == 2
    (later,) = pool.allocate(1)
    assert not pool.register(later, b"abc", b"abcd", "t")
    assert pool.remember(later, b"abcd")
    assert pool.find(b"abcd") == later
    pool.release([*abc, later])
    assert [pool.find(key) for key in (b"ab", b"abcd")] == [None, None]
    assert pool.num_free == 5
    pool.check()


@pytest.mark.parametrize(
    "misuse",
    [
        pytest.param(lambda pool, block: pool.release([block, block]), id="release"),
        pytest.param(lambda pool, block: pool.quarantine([block]), id="quarantine"),
        pytest.param(lambda pool, block: pool.acquire([1 - block]), id="acquire"),
        pytest.param(lambda pool, block: pool.register(block, ROOT, b"b", "t"), id="rename"),
    ],
)
def test_misuse_is_an_assertion(misuse: Callable[[BlockPool, int], object]) -> None:
    pool = BlockPool(2, 4)
    (block,) = chain(pool, "a")
    with pytest.raises(AssertionError):
        misuse(pool, block)


def test_blocks_that_must_not_be_registered_are_not_together_either() -> None:
    pool = BlockPool(3, 4)
    _, second, third = chain(pool, "abc")
    with pytest.raises(AssertionError, match="registered under another key"):
        pool.register_all([third], b"abc", [b"abcd"], "t")
    pool.release([third])
    pool.forget(second)
    pool.release([second])
    with pytest.raises(AssertionError, match="not referenced"):
        pool.register_all([second], b"a", [b"ab"], "t")


class _ChainStep(NamedTuple):
    """A prompt comes, finds what is there, computes the rest and registers it from a block on; then what runs
    may be released, and all that is cached of its first letter purged or its first block forgotten."""

    path: str
    begin: int
    is_taken: bool
    ends: bool
    then: str


_CHAIN_STEPS = st.builds(
    _ChainStep,
    st.text("ab", min_size=1, max_size=6),
    st.integers(0, 2),
    st.booleans(),
    st.booleans(),
    st.sampled_from(["", "", "purge", "forget"]),
)


@settings(max_examples=examples(600))
@given(st.lists(_CHAIN_STEPS, max_size=8), st.sampled_from(SHARES[:2]))
def test_blocks_that_are_registered_together_are_as_if_one_by_one(
    steps: list[_ChainStep], shares: GroupShares
) -> None:
    pools = [BlockPool(9, 4, shares) for _ in range(2)]
    for step in steps:
        keys = [step.path[: end + 1].encode() for end in range(len(step.path))]
        outcomes = []
        for pool, together in zip(pools, (True, False), strict=True):
            found = pool.match(keys[:-1])
            pool.acquire(found)
            if len(keys) - len(found) > min(pool.num_free, pool.num_left(step.path[0])):
                pool.release(found)
                continue
            blocks = [*found, *pool.allocate(len(keys) - len(found), step.path[0])]
            begin = min(step.begin, len(keys) - 1)
            parent = keys[begin - 1] if begin else ROOT
            if together:
                pool.register_all(blocks[begin:], parent, keys[begin:], step.path[0])
            else:
                for block, key in zip(blocks[begin:], keys[begin:], strict=True):
                    pool.register(block, parent, key, step.path[0])
                    parent = key
            if step.then == "forget":
                pool.forget(blocks[0])
            if step.ends:
                pool.release(blocks)
            if step.then == "purge":
                pool.purge(step.path[0])
            events = pool.take_events() if step.is_taken else None
            pool.check()
            outcomes.append((blocks, pool.snapshot(), events, pool.num_free, pool.num_references))
        assert outcomes[:1] == outcomes[1:]
    assert pools[0].take_events() == pools[1].take_events()
