"""Bytes of requests that are read: bounded for all callers and for each, whoever waits, gives up or passes
on."""

from __future__ import annotations

import asyncio

import pytest

from cluster.admission import read_budget
from cluster.admission.caller_limits import CallerLimits
from cluster.admission.read_budget import ReadBudget
from cluster.errors import OverloadedError


@pytest.fixture
def short_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(read_budget, "WAIT_S", 0.01)


async def test_a_party_and_all_together_are_bounded(short_wait: None) -> None:
    budget = ReadBudget(100, 60)
    with budget.open("a") as first, budget.open("b") as second:
        await first.take(60)
        with pytest.raises(OverloadedError, match=r"60 bytes of one caller's .*max_caller_reading_mb") as one:
            await first.take(1)
        assert one.value.retry_after_s > 0
        await second.take(40)
        with pytest.raises(OverloadedError, match=r"100 bytes of all callers' .*\(admission.max_reading_mb"):
            await second.take(1)
        assert (budget.num_bytes, budget.num_party_bytes("a"), budget.num_refused) == (100, 60, 2)
    assert (budget.num_bytes, budget.num_party_bytes("a")) == (0, 0)


async def test_calls_that_wait_are_read_once_others_end_and_small_ones_pass() -> None:
    budget = ReadBudget(100, 60)
    with budget.open("a") as first, budget.open("a") as large, budget.open("a") as small:
        await first.take(60)
        waiting = [
            asyncio.create_task(reservation.take(size)) for reservation, size in ((large, 50), (small, 20))
        ]
        await asyncio.sleep(0)
        first.shrink(40)
        await waiting[1]
        assert not waiting[0].done(), "there is no room for it yet"
        first.release()
        small.release()
        await waiting[0]
        assert budget.num_bytes == large.num_bytes == 50


async def test_a_call_that_ends_while_it_waits_leaves_nothing_behind() -> None:
    budget = ReadBudget(100, 100)
    with budget.open("a") as first, budget.open("a") as second:
        await first.take(100)
        waiting = asyncio.create_task(second.take(50))
        granted = asyncio.create_task(second.take(50))
        await asyncio.sleep(0)
        waiting.cancel()
        first.release()  # `granted` has its room, and does not know it yet
        granted.cancel()
        await asyncio.gather(waiting, granted, return_exceptions=True)
    assert budget.num_bytes == 0


async def test_requests_of_one_call_are_passed_on_one_by_one() -> None:
    budget = ReadBudget(100, 100)
    with budget.open("a") as reservation:
        await reservation.take(90)
        read_budget.divide(3)
        async with asyncio.TaskGroup() as group:
            for _ in range(2):
                group.create_task(passed_on())
        assert budget.num_bytes == 30
        read_budget.pass_on()
        assert budget.num_bytes == 0
        read_budget.pass_on()
    read_budget.pass_on()  # outside of a call: nothing
    assert budget.num_bytes == 0


async def passed_on() -> None:
    read_budget.pass_on()


async def test_what_was_paid_when_reading_began_is_used_once() -> None:
    budget = ReadBudget(100, 100)
    assert not read_budget.use_paid()
    with budget.open("a") as reservation:
        reservation.is_paid = True
        assert [read_budget.use_paid() for _ in range(2)] == [True, False]


def test_calls_and_connections_of_a_party_are_counted() -> None:
    limits = CallerLimits(max_calls=2, max_connections=1)
    with limits.call("a"), limits.call("a"):
        with pytest.raises(OverloadedError, match=r"2 calls .*admission.max_caller_calls"), limits.call("a"):
            pass
        with limits.call("b"):
            assert (limits.num_calls("a"), limits.num_calls("b")) == (2, 1)
    assert limits.num_calls("a") == 0
    limits.connect("a", 1)
    limits.connect("a", 1)
    with pytest.raises(OverloadedError, match=r"1 connections .*admission.max_caller_connections"):
        limits.connect("a", 2)
    limits.connect("b", 2)
    limits.disconnect("a", 1)
    assert limits.num_connections("a") == 1
    limits.disconnect("a", 1)
    limits.connect("a", 2)
    assert (limits.num_connections("a"), limits.num_connections("c")) == (1, 0)
