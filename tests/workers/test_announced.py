"""Prompts that gateways announce: kept in order, bounded, forgotten."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from slow_cases import examples

from workers.store_connector import announced
from workers.store_connector.announced import ANNOUNCED_S, AnnouncedPrompts

GATEWAY = "g", 1
GATEWAYS = st.sampled_from([GATEWAY, ("g", 2), ("h", 1)])
IDS = st.sampled_from(["a", "b", "c", "d", "e", "f"])
GROUPS = st.sampled_from(["t", "u"])
MAX_PROMPTS = 4
MAX_KEY_BYTES = 200


class AnnouncedMachine(RuleBasedStateMachine):
    """Against a list of what was announced: (id, group, bytes of keys, time, number of blocks), and by which
    gateway."""

    def __init__(self) -> None:
        super().__init__()
        self.prompts = AnnouncedPrompts()
        self.now = 0.0
        self.model: dict[str, tuple[str, int, float]] = {}
        self.pending: list[str] = []
        self.num_blocks: dict[str, int] = {}
        self.id_to_gateway: dict[str, tuple[str, int]] = {}

    def _gone(self, request_id: str) -> None:
        del self.model[request_id]
        self.num_blocks.pop(request_id, None)
        if request_id in self.pending:
            self.pending.remove(request_id)

    @rule(gateway=GATEWAYS, request_id=IDS, group=GROUPS, num_keys=st.integers(1, 5))
    def add(self, gateway: tuple[str, int], request_id: str, group: str, num_keys: int) -> None:
        num_bytes = sum(size for _, size, _ in self.model.values()) + 20 * num_keys
        fits = len(self.model) < MAX_PROMPTS and num_bytes <= MAX_KEY_BYTES
        is_new = fits and request_id not in self.model
        assert self.prompts.add(gateway, request_id, group, (b"k" * 20,) * num_keys, self.now) is is_new
        self.id_to_gateway[request_id] = gateway
        if is_new:
            self.model[request_id] = group, 20 * num_keys, self.now
            self.pending.append(request_id)
        elif request_id in self.model:  # it is kept for longer
            self.model[request_id] = *self.model.pop(request_id)[:2], self.now

    @rule(request_id=IDS)
    def forget(self, request_id: str) -> None:
        prompt = self.prompts.forget(request_id)
        assert (prompt is not None) is (request_id in self.model)
        if prompt is not None:
            self._gone(request_id)

    @rule(group=st.one_of(st.none(), GROUPS))
    def drop(self, group: str | None) -> None:
        gone = [name for name, (its, _, _) in self.model.items() if group in (None, its)]
        assert [it.request_id for it in self.prompts.drop(group)] == gone
        for name in gone:
            self._gone(name)

    @rule(gateway=GATEWAYS)
    def drop_gateway(self, gateway: tuple[str, int]) -> None:
        gone = [name for name in self.model if self.id_to_gateway[name] == gateway]
        assert [it.request_id for it in self.prompts.drop_gateway(gateway)] == gone
        for name in gone:
            self._gone(name)

    @rule()
    def take(self) -> None:
        prompt = self.prompts.next
        assert (None if prompt is None else prompt.request_id) == (self.pending[0] if self.pending else None)
        if prompt is not None:
            self.prompts.take()
            self.pending.pop(0)

    @rule(request_id=IDS, num_blocks=st.integers(0, 9))
    def begin(self, request_id: str, num_blocks: int) -> None:
        self.prompts.begin(request_id, 2, num_blocks)
        if request_id in self.model:
            self.num_blocks[request_id] = num_blocks

    @rule(request_id=IDS, num_blocks=st.integers(0, 9))
    def loaded(self, request_id: str, num_blocks: int) -> None:
        self.prompts.loaded(request_id, ["dram"] * num_blocks)
        if request_id in self.model:
            self.num_blocks[request_id] = num_blocks

    @rule(seconds=st.sampled_from([1.0, ANNOUNCED_S / 2, ANNOUNCED_S]))
    def wait(self, seconds: float) -> None:
        self.now += seconds
        gone = [name for name, (_, _, since) in self.model.items() if self.now >= since + ANNOUNCED_S]
        assert [it.request_id for it in self.prompts.expire(self.now)] == gone
        for name in gone:
            self._gone(name)

    @invariant()
    def agree(self) -> None:
        self.prompts.check()
        assert len(self.prompts) == len(self.model)
        assert self.prompts.num_blocks() == sum(self.num_blocks.values())
        for group in ("t", "u"):
            its = [count for name, count in self.num_blocks.items() if self.model[name][0] == group]
            assert self.prompts.num_blocks(group) == sum(its)


@pytest.fixture(autouse=True)
def _small_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(announced, "MAX_PROMPTS", MAX_PROMPTS)
    monkeypatch.setattr(announced, "MAX_KEY_BYTES", MAX_KEY_BYTES)


AnnouncedMachine.TestCase.settings = settings(
    deadline=None, max_examples=examples(80), stateful_step_count=40
)
TestAnnounced = AnnouncedMachine.TestCase


def test_what_was_loaded_counts_as_far_as_it_is_still_there() -> None:
    prompts = AnnouncedPrompts()
    assert prompts.add(GATEWAY, "a", "t", (b"1", b"2", b"3", b"4", b"5"), 0.0)
    prompts.begin("a", 1, 3)
    prompt = prompts.forget("a")
    assert prompt is not None
    assert prompt.num_loaded_blocks(5) == {}, "it is only on its way: others have computed these"
    assert prompts.add(GATEWAY, "a", "t", (b"1", b"2", b"3", b"4", b"5"), 0.0)
    prompts.begin("a", 1, 3)
    prompts.loaded("a", ["dram", "nvme", "nvme"])
    prompt = prompts.forget("a")
    assert prompt is not None
    assert prompt.num_loaded_blocks(5) == {"dram": 1, "nvme": 2}
    assert prompt.num_loaded_blocks(3) == {"dram": 1, "nvme": 1}, "the last was evicted"
    assert prompt.num_loaded_blocks(0) == {}
    assert prompts.num_loaded_blocks == 3
