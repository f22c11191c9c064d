"""A landing that needs much of the pool and small ones behind it: neither starves, whatever arrives."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from landing_world import BLOCK, PREFILL, SHARD, request

from kvtransfer.config import TransferConfig
from kvtransfer.peer_messages import LandingGrant
from kvtransfer.protocol.actions import LandingAction, ToWriter
from kvtransfer.protocol.landing_overtaking import FIRST_HOLD_S, MIN_SHARE, PASSING_S, may_pass
from kvtransfer.protocol.receiver import LandingTable
from workers.scheduler.block_pool import BlockPool

NUM_BLOCKS = 20
LARGE = 0
TICK_S = 1.0


class Replica:
    """A decode replica whose landings join at once and run for a while; time is the test's."""

    def __init__(self) -> None:
        self.pool = BlockPool(NUM_BLOCKS, BLOCK)
        self.book = LandingTable(TransferConfig(landing_queue=64), self.pool, BLOCK, 1)
        self.book.writer_joined(PREFILL, [[(0, SHARD)]])
        self.now = 0.0
        self.granted: dict[int, float] = {}
        self._run_s: dict[int, float] = {}
        self._ends: list[tuple[float, tuple[int, ...]]] = []

    def ask(self, number: int, num_blocks: int, run_s: float, priority: int = 0) -> None:
        self._run_s[number] = run_s
        wanted = request(
            0,
            num_blocks * BLOCK,
            landing_id=number.to_bytes(16, "big"),
            request_id=f"r{number}",
            priority=priority,
        )
        self._do(self.book.request(PREFILL, wanted, self.now, idle=not self._ends))

    def advance(self) -> None:
        """What has run long enough ends; then the book is asked again."""
        self.now += TICK_S
        for end in [end for end in self._ends if end[0] <= self.now]:
            self._ends.remove(end)
            self.pool.release(end[1])
        self._do(self.book.grant(self.now, idle=not self._ends))
        self.book.check()
        self.pool.check()

    def _do(self, actions: Sequence[LandingAction]) -> None:
        for action in actions:
            if not isinstance(action, ToWriter) or not isinstance(action.message, LandingGrant):
                continue
            landing_id = action.message.landing_id
            number = int.from_bytes(landing_id, "big")
            self.granted[number] = self.now
            self._ends.append((self.now + self._run_s[number], action.message.block_ids))
            num_tokens = len(action.message.block_ids) * BLOCK
            self.book.hand_over(PREFILL, landing_id, (f"r{number}", 0), num_tokens, self.now)


def crowded(large_blocks: int, small_blocks: int, run_s: float, every_s: float, duration_s: float) -> Replica:
    """One large landing, which comes when small ones run already, and small ones all the time."""
    replica = Replica()
    number = 1
    next_at = 0.0
    while replica.now < duration_s:
        if replica.now >= next_at:
            replica.ask(number, small_blocks, run_s)
            number, next_at = number + 1, next_at + every_s
        if number == 3 and LARGE not in replica._run_s:
            replica.ask(LARGE, large_blocks, run_s)
        replica.advance()
    return replica


def test_small_landings_pass_a_large_one_and_it_starts_all_the_same() -> None:
    """It needs 19 of 20 blocks, beside the reserve of 2: only an empty replica has that."""
    replica = crowded(19, 2, run_s=30.0, every_s=2.0, duration_s=300.0)
    large_at = replica.granted[LARGE]
    passed = [number for number, at in replica.granted.items() if number > 2 and at < large_at]
    assert passed, "nobody passed it: the replica drained for one landing"
    assert large_at < 120


@settings(max_examples=25, deadline=None)
@given(
    large_blocks=st.integers(6, NUM_BLOCKS - 1),
    small_blocks=st.integers(1, 4),
    run_s=st.floats(1.0, 60.0),
    every_s=st.floats(1.0, 10.0),
)
def test_neither_starves(large_blocks: int, small_blocks: int, run_s: float, every_s: float) -> None:
    """The large one starts in a hold that is longer than anything runs; the small ones never wait longer than
    the large one's wait and its own run, and the queue of what came meanwhile."""
    replica = crowded(large_blocks, small_blocks, run_s, every_s, duration_s=450.0)
    # Holds of 10, 20, ... up to one of at least `run_s`, with a time to pass before each.
    longest_s = 4 * max(run_s, FIRST_HOLD_S) + 4 * PASSING_S + 2 * run_s
    assert replica.granted[LARGE] <= longest_s
    until = replica.granted[LARGE]
    held_s, last = 0.0, 0.0
    for at in sorted(at for number, at in replica.granted.items() if number != LARGE and at <= until):
        held_s, last = max(held_s, at - last), at
    # Between two of the small ones never more than a hold that a sequence's run could not fill, and that run.
    assert held_s <= 2 * max(run_s, FIRST_HOLD_S) + run_s + every_s + TICK_S


def test_nobody_passes_a_small_landing() -> None:
    replica = Replica()
    replica.ask(1, 17, run_s=5.0)
    replica.ask(2, 4, run_s=5.0)  # 20 - 17 - 4 leaves no reserve
    replica.ask(3, 1, run_s=5.0)  # which would fit
    assert list(replica.granted) == [1]
    for _ in range(10):
        replica.advance()
    assert replica.granted == {1: 0.0, 2: 5.0, 3: 5.0}


def test_holds_grow_and_times_to_pass_come_again() -> None:
    phases = [may_pass(1.0, second + 0.5) for second in range(90)]
    lengths = [10, 10, 10, 20, 10, 30]
    expected = [phase % 2 == 0 for phase, length in enumerate(lengths) for _ in range(length)]
    assert phases == expected


@pytest.mark.parametrize("blocked_s", [0.0, 5.0, 15.0, 1e6])
def test_only_what_needs_much_is_passed(blocked_s: float) -> None:
    assert not may_pass(MIN_SHARE / 2, blocked_s)
    assert may_pass(1.0, 0.0)
