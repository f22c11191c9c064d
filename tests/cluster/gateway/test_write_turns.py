"""Turns to write: who goes next, how long output waits while the gateway is busy, and what is merged."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
from gateway_harness import until
from hypothesis import given
from hypothesis import strategies as st

from cluster.gateway.frame_parts import PART_DELTAS, step_parts
from cluster.gateway.output_buffer import OutputBuffer, UnreadOutput
from cluster.gateway.sample_output import OutputDelta
from cluster.gateway.write_turns import AT_ONCE, MOST_PAUSE_S, WritePause, WriteTurns
from cluster.metrics.ended_request import Summary
from kvtransfer.common.clock import ManualClock
from workers.messages.link import PrefillReport, RequestFailed, StageTimes, StepFrame, TokenDelta


class Load:
    """A thread whose use of its core a test decides, and the pause that follows from it."""

    def __init__(self) -> None:
        self.clock = ManualClock()
        self.cpu_s = 0.0
        self.pause = WritePause(self.clock, lambda: self.cpu_s)
        self.pause.look()

    def run(self, seconds: float, share: float) -> float:
        """Look once after so many seconds with this share of a core used; return the pause."""
        self.clock.advance(seconds)
        self.cpu_s += share * seconds
        self.pause.look()
        return self.pause.pause_s


class Waiting:
    """A stream that notes when it had its turn."""

    def __init__(self, number: int, order: list[int]) -> None:
        self.number = number
        self.order = order

    def give_turn(self) -> None:
        self.order.append(self.number)


def output(first: int, count: int = 1, finish: str = "") -> OutputDelta:
    return OutputDelta(0, first, np.arange(first, first + count, dtype="<u4").tobytes(), "", (), finish)


def test_output_waits_only_while_the_thread_is_busy() -> None:
    load = Load()
    assert [load.run(0.06, 0.8) for _ in range(3)] == [0, 0, 0]
    growing = [load.run(0.06, 1.0) for _ in range(12)]
    assert growing == sorted(growing)
    assert 0 < growing[0] <= 0.01
    assert growing[-1] == MOST_PAUSE_S
    shrinking = [load.run(0.06, 0.5) for _ in range(30)]
    assert shrinking == sorted(shrinking, reverse=True)
    assert shrinking[-1] == 0


def test_the_pause_is_over_after_a_long_time_without_output() -> None:
    load = Load()
    for _ in range(12):
        load.run(0.06, 1.0)
    assert load.run(60.0, 0.1) == 0


def test_a_span_is_long_enough_to_be_measured() -> None:
    load = Load()
    assert [load.run(0.001, 1.0) for _ in range(40)] == [0] * 40


async def test_turns_come_in_the_order_in_which_they_were_asked_for() -> None:
    load, order = Load(), list[int]()
    turns = WriteTurns(load.pause, load.clock)
    for number in range(3 * AT_ONCE):
        turns.ask(Waiting(number, order))
    assert order == []
    await asyncio.sleep(0)
    assert order == list(range(AT_ONCE)), "other work of the loop comes before the next turns"
    await until(lambda: len(order) == 3 * AT_ONCE, "all had their turns")
    assert order == list(range(3 * AT_ONCE))
    turns.ask(Waiting(99, order))
    await until(lambda: order[-1] == 99, "turns begin again")


async def test_a_busy_gateway_spreads_the_turns_over_the_pause() -> None:
    load, order = Load(), list[int]()
    while load.pause.pause_s < MOST_PAUSE_S:
        load.run(0.06, 1.0)
    turns = WriteTurns(load.pause, load.clock)
    for number in range(100):
        turns.ask(Waiting(number, order))
    await asyncio.sleep(0)
    assert order == [0, 1], "a tick of 5 ms is a fiftieth of the pause"
    await until(lambda: len(order) > 2, "the next tick")
    turns.ask(Waiting(100, order))  # is of the next round
    load.run(0.099, 1.0)  # the event loop is late
    num_before = len(order)
    await until(lambda: len(order) > num_before, "another tick")
    assert len(order) == num_before + 40, "as many as a round gives in that time"
    load.run(1.0, 1.0)
    await until(lambda: len(order) == 101, "all had their turns")
    assert order == list(range(101))


async def test_the_first_output_of_a_stream_does_not_wait_and_the_rest_is_merged() -> None:
    load = Load()
    while load.pause.pause_s < MOST_PAUSE_S:
        load.run(0.06, 1.0)
    unread = UnreadOutput(1e9, WriteTurns(load.pause, load.clock))
    others = [OutputBuffer(unread, lambda: None) for _ in range(20)]
    for buffer in others:  # they have begun, and wait for their turns
        buffer.put(output(0))
        await buffer.get()
        buffer.put(output(1))
    buffer = OutputBuffer(unread, lambda: None)
    buffer.put(output(0))
    assert await buffer.get() == output(0)
    for index in range(1, 6):
        buffer.put(output(index))
    merged = await buffer.get()
    assert merged == output(1, 5)
    buffer.put(output(6, 1, "length"))
    end = Summary.__new__(Summary)
    buffer.close(end)
    assert await buffer.get() == output(6, 1, "length")
    assert await buffer.get() is end
    assert await buffer.get() is end, "the end is there again and again"


async def test_nothing_waits_for_its_turn_where_unread_output_nears_its_bound() -> None:
    load = Load()
    while load.pause.pause_s < MOST_PAUSE_S:
        load.run(0.06, 1.0)
    turns, behind = WriteTurns(load.pause, load.clock), list[int]()
    unread = UnreadOutput(40_000, turns)
    hanging, reading = (OutputBuffer(unread, lambda: None) for _ in range(2))
    for buffer in (hanging, reading):
        buffer.put(output(0))
        assert await buffer.get() == output(0)
    reading.put(output(1))
    taking = asyncio.create_task(reading.get())
    hanging.put(output(1, 2600))
    reading.put(output(2))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert taking.done(), "it waits for no turn"
    assert taking.result() == output(1, 2)
    # The turn that it had asked for comes all the same, when nothing is there to be written.
    taking = asyncio.create_task(reading.get())
    turns.ask(Waiting(1, behind))
    await until(lambda: behind == [1], "all turns before this one have come")
    assert not taking.done()
    reading.put(output(3))
    assert await taking == output(3)


@pytest.mark.parametrize("num_deltas", [0, 1, PART_DELTAS, PART_DELTAS + 1, 5 * PART_DELTAS])
@given(data=st.data())
def test_the_parts_of_a_frame_are_the_frame(num_deltas: int, data: st.DataObject) -> None:
    samples = data.draw(st.lists(st.integers(0, 3), min_size=num_deltas, max_size=num_deltas))
    deltas = tuple(TokenDelta("r", 1, it, at, b"\0" * 4, (), "") for at, it in enumerate(samples))
    frame = StepFrame(
        deltas=deltas,
        prefills=(PrefillReport("r", 1, 1, 0, StageTimes()),),
        failures=(RequestFailed("q", 1, "internal", "broke"),),
    )
    parts = step_parts(frame)
    assert all(len(part.deltas) <= PART_DELTAS for part in parts)
    assert tuple(delta for part in parts for delta in part.deltas) == deltas
    assert parts[0].prefills == frame.prefills
    assert parts[-1].failures == frame.failures
    assert not any(part.prefills for part in parts[1:])
    assert not any(part.failures for part in parts[:-1])
    named = {name for name in StepFrame.__struct_fields__ if any(getattr(part, name) for part in parts)}
    assert named == {name for name in StepFrame.__struct_fields__ if getattr(frame, name)}
