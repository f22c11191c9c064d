"""Error budget and cool-down against a naive reading of their definition, over any history."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtransfer.agent.path_health import PathHealth, PathKey
from kvtransfer.common.health import JITTER, spread_s
from kvtransfer.common.moving_average import kept_share
from kvtransfer.messages import ReplicaIdentity

SHM = PathKey(ReplicaIdentity("d", 1), 0, "shm")
TCP = PathKey(ReplicaIdentity("d", 1), 0, "tcp")
EVENTS = st.lists(
    st.one_of(
        st.tuples(st.just("fail"), st.sampled_from([SHM, TCP])),
        st.tuples(st.just("succeed"), st.sampled_from([SHM, TCP])),
        st.tuples(st.just("pass"), st.sampled_from([0.5, 1.0, 3.0, 20.0])),
    ),
    max_size=40,
)


@dataclass
class NaivePath:
    """The whole history since the last success: when the path failed."""

    failures: list[float] = field(default_factory=list)

    def cooling_s(self, budget: int, first_s: float, most_s: float, now: float) -> float:
        ends_at = 0.0
        for number, at in enumerate(self.failures[budget - 1 :]):
            ends_at = at + min(first_s * 2**number, most_s)
        return max(0.0, ends_at - now)


@given(st.integers(1, 4), EVENTS)
def test_any_history(budget: int, events: list[tuple[str, object]]) -> None:
    health = PathHealth(budget, cool_down_s=1.0, max_cool_down_s=1000.0)
    naive = {SHM: NaivePath(), TCP: NaivePath()}
    now = 0.0
    for name, value in events:
        if isinstance(value, float):
            now += value
        elif isinstance(value, PathKey) and name == "fail":
            health.failed(value, f"at {now}", now)
            naive[value].failures.append(now)
        elif isinstance(value, PathKey):
            health.succeeded(value)
            naive[value].failures.clear()
        for key, path in naive.items():
            cooling_s = path.cooling_s(budget, 1.0, 1000.0, now)
            assert health.cooling_s(key, now) == cooling_s
            assert health.reason(key) == (f"at {path.failures[-1]}" if path.failures else "")
            assert health.is_due(key, now) is (bool(path.failures) and cooling_s == 0)


def test_the_cool_down_doubles_up_to_its_limit() -> None:
    health = PathHealth(error_budget=2, cool_down_s=1.0, max_cool_down_s=5.0)
    lengths = []
    for _ in range(6):
        health.failed(SHM, "", now=10.0)
        lengths.append(health.cooling_s(SHM, now=10.0))
    assert lengths == [0.0, 1.0, 2.0, 4.0, 5.0, 5.0]


def test_another_life_of_the_peer_starts_afresh() -> None:
    health = PathHealth(error_budget=1, cool_down_s=1.0, max_cool_down_s=5.0)
    health.failed(SHM, "killed", now=0.0)
    assert health.cooling_s(SHM._replace(peer=ReplicaIdentity("d", 2)), now=0.0) == 0.0


def test_paths_of_peers_that_are_gone_are_forgotten() -> None:
    health = PathHealth(error_budget=1, cool_down_s=1.0, max_cool_down_s=5.0)
    gone = [SHM._replace(rank=number) for number in range(100)]
    for key in gone:
        health.failed(key, "killed", now=0.0)
    health.failed(TCP, "lost", now=19.0)
    assert all(health.reason(key) for key in gone)
    health.failed(TCP, "lost", now=21.0)
    assert not any(health.reason(key) for key in gone)
    assert health.reason(TCP)


@given(st.floats(0.01, 1e4), st.lists(st.integers(-(1 << 63), 1 << 63), min_size=1, max_size=50))
def test_a_spread_pause_is_never_shorter_and_at_most_the_jitter_longer(
    pause_s: float, drawn: list[int]
) -> None:
    spread = [spread_s(pause_s, number) for number in drawn]
    assert all(pause_s <= each <= pause_s * (1 + JITTER) * (1 + 1e-12) for each in spread)
    assert len({spread_s(1.0, number) for number in range(2000)}) > 1000


@given(st.floats(0, 100), st.floats(0, 100), st.floats(0.1, 100))
def test_what_is_kept_in_two_spans_is_what_is_kept_in_both(
    first: float, second: float, memory: float
) -> None:
    both = kept_share(first + second, memory)
    assert kept_share(first, memory) * kept_share(second, memory) == pytest.approx(both, rel=1e-9, abs=1e-300)
    assert kept_share(0.0, memory) == 1.0
    assert kept_share(memory, memory) == pytest.approx(1 / math.e)
