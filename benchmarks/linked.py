"""Whole replicas without a gateway, for benchmarks: engine cores in this process, their ranks as processes,
and a bare Link to each. Used by `overlap` and `warm_start`."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from pathlib import Path

from kvtransfer.blocks.keys import extend_keys
from kvtransfer.common.clock import SystemClock
from kvtransfer.config import TransferConfig
from kvtransfer.messages import ReplicaIdentity
from kvtransfer.rpc.stream import FrameStream, open_link
from kvtransfer.rpc.trust import Trust, TrustFiles
from workers.config import EngineConfig, Parallel
from workers.messages.link import (
    LINK_DOWN_CODEC,
    LINK_UP_CODEC,
    GatewayHello,
    HandOverReport,
    HandOverTarget,
    PrefillReport,
    SampleState,
    StepFrame,
    Submission,
)
from workers.messages.sampling import SamplingParams
from workers.replica.engine_core import EngineCore
from workers.replica.partition import ReplicaSpec
from workers.replica.rank_group import ProcessLauncher

CLOCK = SystemClock()
_ROOT_KEY = bytes(16)


@dataclass
class Heard:
    """The messages that came up for a request; times are this process's monotonic clock."""

    submitted_at: float
    token_times: list[float] = field(default_factory=list)
    tokens: bytes = b""
    is_finished: bool = False
    prefill: PrefillReport | None = None
    hand_over: HandOverReport | None = None

    @property
    def ttft_s(self) -> float:
        return self.token_times[0] - self.submitted_at


class LinkedReplicas:
    """Replicas of one model and secret; `stop` ends them."""

    def __init__(self, model_dir: Path, dtype: str, trust: TrustFiles) -> None:
        self._model_dir = model_dir
        self._dtype = dtype
        self._trust = trust
        self._cores: dict[str, tuple[EngineCore, FrameStream]] = {}
        self._heard: dict[str, Heard] = {}
        self._changed = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []

    async def add(
        self,
        name: str,
        role: str,
        parallel: Parallel,
        engine: EngineConfig,
        transfer: TransferConfig | None = None,
        store: str | None = None,
    ) -> EngineCore:
        """Start a replica and open a Link to it."""
        spec = ReplicaSpec(
            identity=ReplicaIdentity(name, 1),
            pool=role,
            role=role,
            model_dir=str(self._model_dir),
            dtype=self._dtype,
            parallel=parallel,
            engine=engine,
            transfer=transfer or TransferConfig(),
            trust=self._trust,
            host="127.0.0.1",
            store=store,
        )
        core = await EngineCore.launch(spec, ProcessLauncher(), CLOCK)
        stream = await open_link(core.address, "link", Trust.read(self._trust), "benchmark")
        stream.send(LINK_DOWN_CODEC.encode(GatewayHello("benchmark", 1)))
        self._cores[name] = core, stream
        self._tasks.append(asyncio.create_task(self._listen(stream)))
        return core

    async def run(
        self, at: str, request_id: str, prompt: bytes, *, decode: str = "", max_tokens: int = 4
    ) -> Heard:
        """Submit to the replica `at`; wait for the last token, and for the hand-over to `decode`, if any."""
        core, stream = self._cores[at]
        target = self._cores[decode][0] if decode else None
        compatibility = core.compatibility
        submission = Submission(
            request_id=request_id,
            attempt=0,
            tenant="",
            sharing_group="",
            priority=0,
            prompt=prompt,
            root_key=_ROOT_KEY,
            block_keys=extend_keys(_ROOT_KEY, prompt, compatibility.block_tokens),
            samples=(SampleState(0, 1),),
            sampling=SamplingParams(max_tokens=max_tokens, ignore_eos=True),
            decode=HandOverTarget(target.identity, target.address) if target else None,
            deadline_s=None,
        )
        heard = self._heard[request_id] = Heard(CLOCK.now())
        stream.send(LINK_DOWN_CODEC.encode(submission))
        while not heard.is_finished or (target is not None and heard.hand_over is None):
            self._changed.clear()
            await self._changed.wait()
        return heard

    async def stop(self) -> None:
        for _, stream in self._cores.values():
            stream.close()
        await asyncio.gather(*self._tasks)
        for core, _ in self._cores.values():
            await core.stop()

    async def _listen(self, stream: FrameStream) -> None:
        while (frame := await stream.receive()) is not None:
            message = LINK_UP_CODEC.decode(frame)
            if isinstance(message, StepFrame):
                self._take(message)
                self._changed.set()

    def _take(self, frame: StepFrame) -> None:
        assert not frame.failures, frame.failures
        now = CLOCK.now()
        for delta in frame.deltas:
            heard = self._heard[delta.request_id]
            heard.token_times += [now] * (len(delta.tokens) // 4)
            heard.tokens += delta.tokens
            heard.is_finished |= bool(delta.finish)
        for prefill in frame.prefills:
            self._heard[prefill.request_id].prefill = prefill
        for hand_over in frame.hand_overs:
            self._heard[hand_over.request_id].hand_over = hand_over
