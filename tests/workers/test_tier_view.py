"""What an engine core knows of its node's store, and tells gateways, while the content comes in parts."""

from __future__ import annotations

from collections.abc import Iterable
from unittest import mock

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from slow_cases import examples

from kvtransfer.blocks.keys import state_key
from kvtransfer.kv_events import BlocksRemoved, BlocksStored
from kvtransfer.store.messages.engine_session import TierEvents, TierPart
from workers.store_connector import tier_view
from workers.store_connector.tier_view import TierView

KEYS = [bytes([number]) * 16 for number in range(1, 9)]
NUM_PARTS = 4
keys = st.sampled_from(KEYS)
tiers = st.sampled_from(["dram", "nvme"])


def single(key: bytes, tier: str) -> BlocksStored:
    return BlocksStored(b"", (key,), "dram" if tier == "dram" else "nvme")


class ViewAgainstOwner(RuleBasedStateMachine):
    """An owner whose content changes, a connection that ends and begins again, the view, and a gateway that
    applies the events of the view."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = [
            mock.patch.object(tier_view, "NUM_SLICES", 5),
            mock.patch.object(tier_view, "_COMPARED_AT_ONCE", 1),
        ]
        for patch in self.patches:
            patch.start()
        self.view = TierView()
        self.content: dict[bytes, str] = {}
        # The next part; None: the connection is lost.
        self.next_part: int | None = 0
        self.gateway: dict[bytes, str] = {}
        # What was there and is gone, by what the owner said since it is connected.
        self.reasons: dict[bytes, str] = {}

    def teardown(self) -> None:
        """Take in all that is left; then everybody knows the content."""
        self.next_part = self.next_part or 0
        self.part(is_first=True)
        while self.next_part:
            self.part()
        while self.view.forget_some():
            self.publish()
        self.publish()
        assert self.gateway == self.content
        assert self._held() == self.content
        assert self.view.take_events() == ((), ())
        for patch in self.patches:
            patch.stop()

    @rule(key=keys, tier=tiers)
    def store(self, key: bytes, tier: str) -> None:
        self.content[key] = tier
        if self.next_part is not None:
            self.view.apply(TierEvents((single(key, tier),), ()))

    @rule(key=keys, reason=st.sampled_from(["space", "purged"]))
    def remove(self, key: bytes, reason: str) -> None:
        if self.content.pop(key, None) is not None and self.next_part is not None:
            self.view.apply(TierEvents((), (key,), (reason,)))
            self.reasons[key] = reason

    @rule()
    def lose(self) -> None:
        self.view.restart()
        self.next_part = None

    @precondition(lambda self: self.next_part != 0)
    @rule()
    def part(self, is_first: bool = False) -> None:
        """Take the next part: of one that is connected again the first one."""
        number = 0 if is_first else self.next_part or 0
        mine = [key for key in self.content if KEYS.index(key) % NUM_PARTS == number]
        self.next_part = (number + 1) % NUM_PARTS
        stored = tuple(single(key, self.content[key]) for key in mine)
        self.view.apply_part(TierPart(stored, number, self.next_part))

    @rule()
    def forget(self) -> None:
        self.view.forget_some()

    @rule()
    def publish(self) -> None:
        stored, removed = self.view.take_events()
        for blocks in stored:
            for key in blocks.keys:
                self.gateway[key] = blocks.tier
        for each in removed:
            assert each.tier == "store"
            for key in each.keys:
                self.gateway.pop(key, None)
                if each.reason != "lost":
                    assert self.reasons[key] == each.reason

    @invariant()
    def a_new_gateway_sees_the_same(self) -> None:
        """The slices are what the view holds, at any time."""
        slices = [each for index in range(5) for each in self.view.snapshot_slice(index)]
        assert {key: each.tier for each in slices for key in each.keys} == self._held()

    @invariant()
    def known_blocks_are_not_hidden(self) -> None:
        """While the connection lives, what is there and was named counts."""
        if self.next_part == 0:
            assert self._held().items() >= self.content.items()

    def _held(self) -> dict[bytes, str]:
        return {key: each.tier for each in self.view.snapshot() for key in each.keys}


ViewAgainstOwner.TestCase.settings = settings(
    max_examples=examples(30), stateful_step_count=30, deadline=None
)
TestViewAgainstOwner = ViewAgainstOwner.TestCase


def names(removed: Iterable[BlocksRemoved]) -> dict[str, set[bytes]]:
    return {each.reason: set(each.keys) for each in removed}


def test_removals_have_their_reasons() -> None:
    view = TierView()
    view.apply_part(TierPart((BlocksStored(b"", tuple(KEYS), "dram"),), 0, 0))
    view.take_events()
    view.apply(TierEvents((), tuple(KEYS[:3]), ("space", "corrupt", "space")))
    view.apply(TierEvents((BlocksStored(b"", tuple(KEYS[:1]), "dram"),), ()))
    view.apply(TierEvents((), tuple(KEYS[3:4])))  # of an older owner
    view.restart()
    assert view.take_events() == (
        (BlocksStored(b"", tuple(KEYS[:1]), "dram"),),
        (
            BlocksRemoved((KEYS[1],), "store", "corrupt"),
            BlocksRemoved((KEYS[2],), "store", "space"),
            BlocksRemoved((KEYS[3],), "store", ""),
        ),
    )
    view.apply_part(TierPart((BlocksStored(b"", (KEYS[0],), "dram"),), 0, 7))
    assert view.take_events() == ((), ()), "the rest may be in the next part"
    view.apply_part(TierPart((BlocksStored(KEYS[4], (KEYS[5],), "dram"),), 7, 0))
    stored, removed = view.take_events()
    assert stored == (), "it was known"
    assert names(removed) == {"lost": {KEYS[4], KEYS[6], KEYS[7]}}


@pytest.mark.parametrize("has_states", [False, True])
def test_the_first_message_of_an_older_owner_is_the_whole_content(has_states: bool) -> None:
    view = TierView(has_states=has_states)
    states = tuple(map(state_key, KEYS[:2]))
    for number, count in enumerate((3, 1)):
        chains = [BlocksStored(b"", tuple(KEYS[:count]), "dram")]
        chains += [
            BlocksStored(key, (state,), "dram") for key, state in zip(KEYS[:count], states, strict=False)
        ]
        view.apply(TierEvents(tuple(chains), ()))
        view.apply(TierEvents((BlocksStored(b"", (KEYS[7],), "nvme"),), ()))
        marked = set(KEYS[: min(count, 2)]) if has_states else {*view._held}
        assert set(view.marked) == marked
        assert len(view) == count + 1 + (0 if has_states else min(count, 2))
        _, removed = view.take_events()
        lost = {*KEYS[1:3]} if has_states else {*KEYS[1:3], states[1]}
        assert names(removed) == ({"lost": lost} if number else {})
        view.restart()


def test_no_call_compares_more_than_some_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tier_view, "_COMPARED_AT_ONCE", 50)
    view = TierView()
    many = [number.to_bytes(16, "big") for number in range(1000)]
    view.apply_part(TierPart((BlocksStored(b"", tuple(many), "dram"),), 0, 0))
    while view.forget_some():
        assert view.take_events()[1] == ()
    assert len(view) == 1000
    view.restart()
    view.apply_part(TierPart((BlocksStored(b"", tuple(many[:100]), "dram"),), 0, 0))
    sizes = []
    is_left = True
    while is_left:
        is_left = view.forget_some()
        sizes.append(sum(len(each.keys) for each in view.take_events()[1]))
    assert sum(sizes) == 900
    assert max(sizes) < 150
    assert len(view) == 100
