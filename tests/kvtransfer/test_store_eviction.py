"""The order in which blocks leave: against a naive list, and the rows that matter by name."""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from slow_cases import examples

from kvtransfer.store.dram.chain_lru import ChainKey, ChainLru

SPACE = b"space"


def key(name: str) -> ChainKey:
    return ChainKey(SPACE, name.encode())


def leaving(lru: ChainLru, group: str | None = None) -> list[str]:
    """Take everything that may leave, in order."""
    names = []
    while (oldest := lru.oldest(group)) is not None:
        names.append(oldest.key.decode())
        lru.remove(oldest)
        lru.check()
    return names


def chain(lru: ChainLru, *names: str, group: str = "t") -> None:
    parent = b""
    for name in names:
        lru.add(key(name), parent, group)
        parent = name.encode()


# ------------------------------------------------------------------------------------ by name


def test_a_chain_leaves_from_its_end_and_before_later_ones() -> None:
    lru = ChainLru()
    chain(lru, "a1", "a2", "a3")
    chain(lru, "b1", "b2")
    assert leaving(lru) == ["a3", "a2", "a1", "b2", "b1"]


def test_a_touched_chain_leaves_last() -> None:
    lru = ChainLru()
    chain(lru, "a1", "a2")
    chain(lru, "b1", "b2")
    for name in ("a1", "a2"):
        lru.touch(key(name))
    assert leaving(lru) == ["b2", "b1", "a2", "a1"]


def test_a_shared_root_outlives_every_branch() -> None:
    lru = ChainLru()
    chain(lru, "root", "x1", "x2")
    lru.add(key("y1"), b"root", "t")
    for name in ("root", "x1", "x2"):
        lru.touch(key(name))
    assert leaving(lru) == ["y1", "x2", "x1", "root"]


def test_a_held_leaf_keeps_what_it_follows() -> None:
    lru = ChainLru()
    chain(lru, "a1", "a2", "a3")
    chain(lru, "b1")
    lru.hold(key("a2"))
    assert leaving(lru) == ["a3", "b1"]
    lru.release(key("a2"))
    assert leaving(lru) == ["a2", "a1"]


def test_a_block_whose_parent_comes_later_or_never_is_a_block_like_others() -> None:
    lru = ChainLru()
    lru.add(key("child"), b"parent", "t")
    lru.add(key("orphan"), b"nobody", "t")
    lru.add(key("parent"), b"", "t")
    lru.check()
    assert leaving(lru) == ["child", "orphan", "parent"]


def test_a_block_that_claims_to_follow_itself_can_leave() -> None:
    lru = ChainLru()
    lru.add(key("a"), b"a", "t")
    assert leaving(lru) == ["a"]


def test_a_block_is_there_until_its_last_record() -> None:
    lru = ChainLru()
    lru.add(key("a"), b"", "t")
    lru.add(key("a"), b"", "t")
    lru.remove(key("a"))
    assert key("a") in lru
    lru.remove(key("a"))
    assert key("a") not in lru
    assert lru.oldest() is None


def test_the_same_key_in_another_space_is_another_block() -> None:
    lru = ChainLru()
    lru.add(ChainKey(b"one", b"k"), b"", "t")
    lru.add(ChainKey(b"two", b"child"), b"k", "t")
    assert lru.oldest() == ChainKey(b"one", b"k")


def test_one_tenants_blocks_in_their_own_order() -> None:
    lru = ChainLru()
    chain(lru, "a1", "a2", group="a")
    chain(lru, "b1", "b2", group="b")
    assert leaving(lru, "b") == ["b2", "b1"]
    assert leaving(lru, "nobody") == []
    assert leaving(lru) == ["a2", "a1"]


# ---------------------------------------------------------------------------------- any order


@dataclass
class Block:
    parent: str
    group: str
    tick: int
    num_records: int = 1
    num_holds: int = 0


NAMES = [f"{group}{number}" for group in "xy" for number in range(6)]
names = st.sampled_from(NAMES)


class ChainMachine(RuleBasedStateMachine):
    """A tree per group: block n follows block (n - 1) // 2; block 0 is the root."""

    def __init__(self) -> None:
        super().__init__()
        self.lru = ChainLru()
        self.blocks: dict[str, Block] = {}
        self.tick = 0

    @rule(name=names)
    def add(self, name: str) -> None:
        group, number = name[0], int(name[1:])
        parent = f"{group}{(number - 1) // 2}" if number else ""
        self.tick += 1
        self.lru.add(key(name), parent.encode(), group)
        block = self.blocks.setdefault(name, Block(parent, group, 0, num_records=0))
        block.num_records += 1
        block.tick = self.tick

    @precondition(lambda self: self.blocks)
    @rule(data=st.data())
    def touch(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.blocks)))
        self.tick += 1
        self.lru.touch(key(name))
        self.blocks[name].tick = self.tick

    @precondition(lambda self: self.blocks)
    @rule(data=st.data())
    def hold(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.blocks)))
        self.lru.hold(key(name))
        self.blocks[name].num_holds += 1

    @precondition(lambda self: any(block.num_holds for block in self.blocks.values()))
    @rule(data=st.data())
    def let_go(self, data: st.DataObject) -> None:
        held = sorted(name for name, block in self.blocks.items() if block.num_holds)
        name = data.draw(st.sampled_from(held))
        self.lru.release(key(name))
        self.blocks[name].num_holds -= 1

    @precondition(lambda self: any(not block.num_holds for block in self.blocks.values()))
    @rule(data=st.data())
    def remove(self, data: st.DataObject) -> None:
        """Also from the middle of a chain: a purge, a bad sum."""
        free = sorted(name for name, block in self.blocks.items() if not block.num_holds)
        self.drop(data.draw(st.sampled_from(free)))

    @rule(group=st.sampled_from([None, "x", "y"]))
    def evict(self, group: str | None) -> None:
        expected = self.expected(group)
        found = self.lru.oldest(group)
        assert (None if found is None else found.key.decode()) == expected
        if expected is not None:
            self.drop(expected)

    def drop(self, name: str) -> None:
        self.lru.remove(key(name))
        self.blocks[name].num_records -= 1
        if not self.blocks[name].num_records:
            del self.blocks[name]

    def expected(self, group: str | None) -> str | None:
        parents = {block.parent for block in self.blocks.values()}
        leaves = [
            (block.tick, name)
            for name, block in self.blocks.items()
            if name not in parents and not block.num_holds and group in (None, block.group)
        ]
        return min(leaves)[1] if leaves else None

    @invariant()
    def what_leaves_next_is_known(self) -> None:
        self.lru.check()
        assert self.lru.num_resident == len(self.blocks)
        found = self.lru.oldest()
        assert (None if found is None else found.key.decode()) == self.expected(None)


TestChain = ChainMachine.TestCase
TestChain.settings = settings(max_examples=examples(80), stateful_step_count=50, deadline=None)


def test_a_block_touched_ever_so_often_takes_one_place_in_the_queue() -> None:
    """100 000 blocks, used at random: finding the next to leave stays cheap, or this does not end in time."""
    lru = ChainLru()
    for number in range(100_000):
        lru.add(key(str(number)), b"", "t")
    for number in range(300_000):
        lru.touch(key(str(number * 7919 % 100_000)))
    last = 300_000 - 100_000
    expected = [str(number * 7919 % 100_000) for number in range(last, last + 100_000)]
    found = []
    while (oldest := lru.oldest()) is not None:
        found.append(oldest.key.decode())
        lru.remove(oldest)
    assert found == expected
