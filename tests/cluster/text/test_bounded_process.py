"""Children for work on what strangers send, with bounded time and memory."""

from __future__ import annotations

import asyncio
from collections import Counter
from random import Random
from typing import Any

import pytest
from gateway_harness import until
from hypothesis import given
from hypothesis import strategies as st

from cluster.text.bounded_process import BoundedProcess, PartyTurns


async def test_a_child_whose_start_is_cancelled_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    children: list[asyncio.subprocess.Process] = []
    create = asyncio.create_subprocess_exec

    async def noted(*command: Any, **options: Any) -> asyncio.subprocess.Process:
        children.append(await create(*command, **options))
        return children[-1]

    monkeypatch.setattr(asyncio, "create_subprocess_exec", noted)
    process = BoundedProcess("cluster.text.chat_template", timeout_s=5.0)
    starting = asyncio.create_task(process.start())
    await until(lambda: bool(children), "the child runs")
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    assert children[0].returncode is not None
    await process.start()
    await process.close()
    assert [child.returncode is not None for child in children] == [True, True]


@given(
    st.lists(st.tuples(st.sampled_from("abc"), st.booleans()), min_size=1, max_size=20),
    st.randoms(use_true_random=False),
)
def test_parties_take_turns(orders: list[tuple[str, bool]], random: Random) -> None:
    """One holds the turn at a time, everybody who stays gets one, and no party waits for two of another."""

    async def scenario() -> None:
        turns, turn, begun, holding = PartyTurns(), asyncio.Lock(), list[tuple[int, str]](), 0
        may_end = asyncio.Semaphore(0)

        async def take(number: int, party: str) -> None:
            nonlocal holding
            async with turns.turn_of(party), turn:
                holding += 1
                assert holding == 1
                begun.append((number, party))
                try:
                    await may_end.acquire()
                finally:
                    holding -= 1

        tasks = [asyncio.create_task(take(number, party)) for number, (party, _) in enumerate(orders)]
        await asyncio.sleep(0)
        leaving = [task for task, (_, leaves) in zip(tasks, orders, strict=True) if leaves]
        random.shuffle(leaving)
        for task in leaving:
            if random.random() < 0.5:
                may_end.release()
                await asyncio.sleep(0)
            task.cancel()
        for _ in tasks:
            may_end.release()
        done = await asyncio.gather(*tasks, return_exceptions=True)
        assert all(result is None or isinstance(result, asyncio.CancelledError) for result in done)
        assert {number for number, _ in begun} >= {
            number for number, (_, leaves) in enumerate(orders) if not leaves
        }
        assert not any(lock.locked() for lock in turns._party_to_lock.values())
        if not leaving:
            for party in "abc":
                waited = [name for _, name in begun[1:]]
                own = [place for place, name in enumerate(waited) if name == party]
                for first, then in zip([-1, *own], own, strict=False):
                    between = Counter(waited[first + 1 : then])
                    assert all(num <= 1 for num in between.values()), begun

    asyncio.run(scenario())
