"""A replica without Links, for benchmarks that look at its steps: real ranks as processes of this host, and
in this process the scheduler and the step loop that an engine core has.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import NamedTuple

import numpy as np

from benchmarks.drawn_trust import draw_trust
from kvtransfer.blocks.keys import extend_keys
from kvtransfer.common.clock import SystemClock
from kvtransfer.config import TransferConfig
from kvtransfer.messages import ReplicaIdentity
from kvtransfer.rpc.trust import Trust
from workers.config import EngineConfig, Parallel
from workers.messages.link import SampleState, Submission
from workers.messages.rank_channel import RankUp, StepPlan, StepReport
from workers.messages.sampling import SamplingParams
from workers.model.model_config import read_model_config
from workers.replica.partition import ReplicaSpec, Shape
from workers.replica.rank_group import ProcessLauncher, RankGroup
from workers.replica.step_loop import StepLoop
from workers.scheduler.block_pool import BlockPool
from workers.scheduler.scheduler import Scheduler

CLOCK = SystemClock()
_ROOT_KEY = bytes(16)


class Span(NamedTuple):
    """A rank was busy with a step; times are this host's monotonic clock, which its ranks share."""

    rank: int
    step: int
    started_at: float
    finished_at: float


class BareReplica:
    """Runs what is submitted; `plans`, `spans` and `token_times` record it."""

    def __init__(self, model_dir: Path, dtype: str, parallel: Parallel, engine: EngineConfig) -> None:
        self.parallel = parallel
        self.plans: dict[int, StepPlan] = {}
        self.spans: list[Span] = []
        # When each token of a request was known here.
        self.token_times: dict[str, list[float]] = {}
        self.finished: set[str] = set()
        # The ratio by which prefill chunks shrink.
        self.attention_ratio = 0.0
        self._model_dir = model_dir
        self._engine = engine
        self._draw = np.random.default_rng(0)
        self._vocab_size = read_model_config(model_dir).vocab_size
        self._death = ""
        self._changed = asyncio.Event()
        self._num_requests = 0
        trust = draw_trust()
        self._group = RankGroup(Trust.read(trust), ProcessLauncher(), self._take, self._died)
        spec = ReplicaSpec(
            pool="both",
            identity=ReplicaIdentity("bench", 1),
            role="both",
            model_dir=str(model_dir),
            dtype=dtype,
            parallel=parallel,
            engine=engine,
            transfer=TransferConfig(),
            trust=trust,
        )
        self._shape = Shape(spec)

    async def start(self, attention_ratio: float | None = None) -> None:
        """Start the replica; `attention_ratio` is used instead of the measured one."""
        ready = (await self._group.start(self._shape.specs, "127.0.0.1", self._shape.plan_stages))[0]
        self.attention_ratio = self._shape.attention_ratio if attention_ratio is None else attention_ratio
        self.pool = BlockPool(ready.num_blocks, self._engine.block_tokens)
        self.scheduler = Scheduler(
            self._engine,
            self.pool,
            eos_token_ids=ready.eos_token_ids,
            max_context_tokens=ready.max_context_tokens,
            num_stages=self.parallel.pp,
            attention_ratio=self.attention_ratio,
        )
        self.steps = StepLoop(self.scheduler, self._send, CLOCK, self.parallel.tp, self.parallel.pp)

    async def stop(self) -> None:
        await self._group.stop()

    def submit(self, num_prompt_tokens: int, max_tokens: int) -> str:
        """Submit a prompt that was never seen before; it ends after `max_tokens`. Return its name."""
        tokens = self._draw.integers(2, self._vocab_size, num_prompt_tokens, dtype="<u4").tobytes()
        self._num_requests += 1
        name = f"r{self._num_requests}"
        submission = Submission(
            request_id=name,
            attempt=1,
            tenant="",
            sharing_group="",
            priority=0,
            prompt=tokens,
            root_key=_ROOT_KEY,
            block_keys=extend_keys(_ROOT_KEY, tokens, self._engine.block_tokens),
            samples=(SampleState(0, self._num_requests),),
            sampling=SamplingParams(max_tokens=max_tokens, ignore_eos=True),
            decode=None,
            deadline_s=None,
        )
        self.token_times[name] = []
        self.scheduler.submit(submission, CLOCK.now())
        self.steps.feed()
        return name

    def cancel_all(self) -> None:
        for name in self.token_times.keys() - self.finished:
            self.scheduler.cancel(name, 1)
            self.finished.add(name)

    async def until(self, is_reached: Callable[[], bool]) -> None:
        """Wait for the results of the next steps; `RuntimeError` when a rank dies before."""
        while not is_reached():
            self._changed.clear()
            await self._changed.wait()
            if self._death:
                raise RuntimeError(self._death)

    def _send(self, plan: StepPlan) -> None:
        self.plans[plan.step] = plan
        self._group.send(plan)

    def _take(self, rank: int, message: RankUp) -> None:
        assert isinstance(message, StepReport), message
        self.spans.append(Span(rank, message.step, message.started_at, message.finished_at))
        outcome = self.steps.settle(rank, message)
        if outcome is None:
            return
        self.steps.feed()
        now = CLOCK.now()
        for delta in outcome.tokens:
            self.token_times[delta.request_id].append(now)
            if delta.finish:
                self.finished.add(delta.request_id)
        self._changed.set()

    def _died(self, reason: str) -> None:
        self._death = reason
        self._changed.set()


@asynccontextmanager
async def bare_replica(
    model_dir: Path,
    dtype: str,
    parallel: Parallel,
    engine: EngineConfig,
    attention_ratio: float | None = None,
) -> AsyncIterator[BareReplica]:
    """Start a replica, and stop it at the end."""
    replica = BareReplica(model_dir, dtype, parallel, engine)
    await replica.start(attention_ratio)
    try:
        yield replica
    finally:
        await replica.stop()
