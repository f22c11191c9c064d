"""Replicas of the bundled model that stay for a module of tests, guests that come for one, and gateways."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Self

from e2e_front import Call, Front, copy_tiny, prompt, tokens_alone
from e2e_harness import SINGLE, E2eHarness, Replica

from kvtransfer.common.faults import FaultRule
from workers.config import Parallel

SEEDED: dict[str, Any] = {"temperature": 1.0, "top_p": 0.95, "repetition_penalty": 1.1}
SAMPLINGS: tuple[dict[str, Any], ...] = ({}, SEEDED)


class Stage:
    """Replicas that stay (p0 prefill, d0 decode, b0 alone), and guests."""

    def __init__(self, harness: E2eHarness, model_dir: Path, engine: dict[str, Any]) -> None:
        self.harness = harness
        self.model_dir = model_dir
        self._engine = engine
        self._num_guests = 0

    @classmethod
    @asynccontextmanager
    async def opened(
        cls, folder: Path, engine: dict[str, Any], parallel: Parallel = SINGLE
    ) -> AsyncIterator[Self]:
        """A stage whose replicas have these settings of the engine, and this shape; b0 has one rank."""
        model_dir = copy_tiny(folder)
        async with E2eHarness(model_dir, parallel) as harness:
            async with asyncio.TaskGroup() as starts:
                starts.create_task(harness.add("p0", "prefill", engine=engine))
                starts.create_task(harness.add("d0", "decode", engine=engine))
                starts.create_task(harness.add("b0", "both", engine=engine, parallel=SINGLE))
            yield cls(harness, model_dir, engine)

    @property
    def p0(self) -> Replica:
        return self.harness.replicas["p0"]

    @property
    def d0(self) -> Replica:
        return self.harness.replicas["d0"]

    async def guest(
        self, role: str, *faults: FaultRule, transfer: dict[str, Any] | None = None, **engine: Any
    ) -> Replica:
        """A new replica, with changed settings."""
        self._num_guests += 1
        name, settings = f"guest{self._num_guests}", {**self._engine, **engine}
        return await self.harness.add(name, role, engine=settings, transfer=transfer or {}, faults=faults)

    @asynccontextmanager
    async def front(self, *replicas: Replica) -> AsyncIterator[Front]:
        """A gateway over these replicas; guests end with it."""
        front = Front(self.harness, self.model_dir)
        await front.open()
        try:
            await front.register(*replicas)
            yield front
        finally:
            self.harness.wake_all()
            await front.close()
            for name in [name for name in self.harness.replicas if name.startswith("guest")]:
                replica = self.harness.replicas.pop(name)
                await replica.close()
                await replica.core.stop()

    async def wanted(self, tokens: list[int], seed: int, num_tokens: int, **sampling: Any) -> list[int]:
        """What follows on the prompt `tokens`, from one engine without any hand-over."""
        return await tokens_alone(
            self.harness.replicas["b0"], self.harness, tokens, seed, num_tokens, **sampling
        )

    def calls(self, front: Front, seed: int, count: int, num_tokens: int, **options: Any) -> list[Call]:
        """So many streams, greedy and seeded ones by turns."""
        return [
            front.call(
                prompt(seed + i, 40 + 7 * i),
                seed=seed + i,
                max_tokens=num_tokens,
                **SAMPLINGS[i % 2],
                **options,
            )
            for i in range(count)
        ]

    async def all_right(self, calls: list[Call], seed: int, num_tokens: int) -> None:
        """Every stream of `calls` ends well, with the tokens that one engine gives."""
        for call in calls:
            await call.done()
        wanted = await asyncio.gather(
            *(
                self.wanted(prompt(seed + i, 40 + 7 * i), seed + i, num_tokens, **SAMPLINGS[i % 2])
                for i in range(len(calls))
            )
        )
        for i, call in enumerate(calls):
            assert call.sequence == wanted[i], f"stream {i}"


def decoding(calls: list[Call], num_tokens: int = 6) -> Callable[[], bool]:
    """Whether all streams have so many tokens."""
    return lambda: all(len(call.sequence) >= num_tokens for call in calls)
