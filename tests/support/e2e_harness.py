"""A harness in one process: real engine cores on loopback, real rank processes, a bare Link in place of a
gateway, and the migration of a stream between two of its replicas."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import numpy as np
import pytest
from patience import WAIT_S
from rank_processes import NurseryLauncher
from store_harness import StoreHarness

from benchmarks.drawn_trust import draw_trust
from kvtransfer.blocks.keys import extend_keys
from kvtransfer.common.clock import SystemClock
from kvtransfer.common.faults import FaultRule
from kvtransfer.common.group_shares import GroupShares
from kvtransfer.config import TransferConfig
from kvtransfer.kv_events import KvEvents
from kvtransfer.messages import ReplicaIdentity
from kvtransfer.rpc.stream import FrameStream, open_link
from kvtransfer.rpc.trust import Trust, TrustFiles
from workers.config import EngineConfig, Parallel
from workers.messages.link import (
    LINK_DOWN_CODEC,
    LINK_UP_CODEC,
    Announce,
    Cancel,
    GatewayHello,
    HandOverReport,
    HandOverTarget,
    IsolationReport,
    LoadReport,
    Move,
    MoveEnded,
    PrefillReport,
    PurgeCache,
    ReplicaHello,
    RequestFailed,
    SampleState,
    StepFrame,
    Submission,
)
from workers.messages.sampling import SamplingParams, TokenLogprob
from workers.replica.engine_core import EngineCore
from workers.replica.partition import ReplicaSpec

BLOCK_TOKENS = 16
ROOT_KEY = b"root"
SINGLE = Parallel()
NO_LIMITS = GroupShares()
# The shapes of the replicas in tests of faults.
SHAPES = [
    pytest.param(SINGLE, id="1x1"),
    pytest.param(Parallel(tp=2), id="2x1", marks=pytest.mark.slow),
]


async def until(condition: Callable[[], bool], what: str, wait_s: float = WAIT_S) -> None:
    """Return when `condition` holds; fail with `what` after `wait_s`."""
    clock = SystemClock()
    end = clock.now() + wait_s
    while not condition():
        assert clock.now() < end, f"not within {wait_s} s: {what}"
        await clock.sleep(0.01)


def ids(tokens: bytes) -> list[int]:
    return [int(token) for token in np.frombuffer(tokens, dtype="<u4")]


def raw(tokens: Sequence[int]) -> bytes:
    return np.asarray(tokens, dtype="<u4").tobytes()


@dataclass
class Heard:
    """All that came up for one attempt of a request."""

    tokens: dict[int, dict[int, int]] = field(default_factory=dict)
    finish: dict[int, str] = field(default_factory=dict)
    prefill: PrefillReport | None = None
    hand_over: HandOverReport | None = None
    failure: RequestFailed | None = None
    # Terminal messages: the ends of samples, and failures.
    num_ends: int = 0
    # The log-probabilities of the first sample, by output index.
    logprobs: dict[int, TokenLogprob] = field(default_factory=dict)
    moves: list[MoveEnded] = field(default_factory=list)
    isolations: list[IsolationReport] = field(default_factory=list)
    num_stalls: int = 0

    def sequence(self, sample: int = 0) -> list[int]:
        indices = sorted(self.tokens.get(sample, {}))
        assert indices == list(range(len(indices))), f"a gap in the output indices: {indices}"
        return [self.tokens[sample][index] for index in indices]


class Replica:
    """An engine core, with the bare Link of a gateway to it."""

    def __init__(self, core: EngineCore, heard: dict[tuple[str, int], Heard]) -> None:
        self.core = core
        self.load: LoadReport | None = None
        self.events: list[KvEvents] = []
        self._heard = heard
        self._stream: FrameStream
        self._task: asyncio.Task[None] | None = None

    @property
    def target(self) -> HandOverTarget:
        return HandOverTarget(self.core.identity, self.core.address)

    async def connect(self, trust: TrustFiles) -> None:
        self._stream = await open_link(self.core.address, "link", Trust.read(trust), "walk")
        self._stream.send(LINK_DOWN_CODEC.encode(GatewayHello("walk", 1)))
        hello = await self._stream.receive()
        assert hello is not None
        assert isinstance(LINK_UP_CODEC.decode(hello), ReplicaHello)
        self._task = asyncio.create_task(self._listen())

    def send(self, message: Announce | Submission | Cancel | Move | PurgeCache) -> None:
        self._stream.send(LINK_DOWN_CODEC.encode(message))

    async def close(self) -> None:
        if self._task is not None:
            self._stream.close()
            await self._task

    async def _listen(self) -> None:
        while (frame := await self._stream.receive()) is not None:
            message = LINK_UP_CODEC.decode(frame)
            if isinstance(message, StepFrame):
                self._take(message)
            elif isinstance(message, KvEvents):
                self.events.append(message)

    def _take(self, frame: StepFrame) -> None:
        self.load = frame.load or self.load
        for delta in frame.deltas:
            heard = self._heard.setdefault((delta.request_id, delta.attempt), Heard())
            sample = heard.tokens.setdefault(delta.sample, {})
            for offset, token in enumerate(ids(delta.tokens)):
                assert delta.first_index + offset not in sample, "an output index was sent twice"
                sample[delta.first_index + offset] = token
            if delta.sample == 0:
                heard.logprobs.update(enumerate(delta.logprobs, delta.first_index))
            if delta.finish:
                heard.finish[delta.sample] = delta.finish
                heard.num_ends += 1
        for prefill in frame.prefills:
            self._heard.setdefault((prefill.request_id, prefill.attempt), Heard()).prefill = prefill
        for hand_over in frame.hand_overs:
            self._heard.setdefault((hand_over.request_id, hand_over.attempt), Heard()).hand_over = hand_over
        for isolation in frame.isolations:
            heard = self._heard.setdefault((isolation.request_id, isolation.attempt), Heard())
            heard.isolations.append(isolation)
        for stall in frame.stalls:
            self._heard.setdefault((stall.request_id, stall.attempt), Heard()).num_stalls += 1
        for failure in frame.failures:
            heard = self._heard.setdefault((failure.request_id, failure.attempt), Heard())
            heard.failure = failure
            heard.num_ends += 1
        for ended in frame.moves:
            self._heard.setdefault((ended.request_id, ended.attempt), Heard()).moves.append(ended)


class E2eHarness:
    """Replicas by name; `submit` and `run` speak to them as a gateway would."""

    def __init__(self, model_dir: Path, parallel: Parallel = SINGLE) -> None:
        """`parallel` is the shape of replicas that are given none."""
        self._model_dir = model_dir
        self._parallel = parallel
        self.trust = draw_trust()
        self.heard: dict[tuple[str, int], Heard] = {}
        self.replicas: dict[str, Replica] = {}

    async def add(
        self,
        name: str,
        role: str = "both",
        *,
        engine: dict[str, Any] | None = None,
        transfer: dict[str, Any] | None = None,
        faults: Sequence[FaultRule] = (),
        parallel: Parallel | None = None,
        store: str | None = None,
        store_kv_dtype: str = "auto",
        dtype: str = "float32",
        epoch: int = 1,
        shares: GroupShares = NO_LIMITS,
        frees_windows: bool = False,
    ) -> Replica:
        settings = {"block_tokens": BLOCK_TOKENS, "kv_tokens": 2048, "chunk_tokens": 32, **(engine or {})}
        spec = ReplicaSpec(
            identity=ReplicaIdentity(name, epoch),
            pool=role,
            role=role,
            model_dir=str(self._model_dir),
            dtype=dtype,
            parallel=parallel or self._parallel,
            engine=EngineConfig(**settings),
            transfer=TransferConfig(**(transfer or {})),
            trust=self.trust,
            host="127.0.0.1",
            store=store,
            store_kv_dtype=store_kv_dtype,
            group_shares=shares,
            faults=faults,
            frees_windows=frees_windows,
        )
        core = await EngineCore.launch(spec, NurseryLauncher(), SystemClock())
        replica = self.replicas[name] = Replica(core, self.heard)
        await replica.connect(self.trust)
        return replica

    async def add_all(self, name_to_role: dict[str, str], **how: Any) -> list[Replica]:
        """Add replicas with the same settings at once; if one cannot start, none stays half started."""
        async with asyncio.TaskGroup() as starts:
            added = [starts.create_task(self.add(name, role, **how)) for name, role in name_to_role.items()]
        return [each.result() for each in added]

    def submission(
        self,
        request_id: str,
        prompt: Sequence[int],
        *,
        decode: Replica | None = None,
        attempt: int = 0,
        output: Sequence[int] = (),
        num_samples: int = 1,
        seed: int = 7,
        deadline_s: float | None = None,
        **sampling: Any,
    ) -> Submission:
        return Submission(
            request_id=request_id,
            attempt=attempt,
            tenant="",
            sharing_group="",
            priority=0,
            prompt=raw(prompt),
            root_key=ROOT_KEY,
            block_keys=extend_keys(ROOT_KEY, raw(prompt), BLOCK_TOKENS),
            samples=tuple(SampleState(i, seed + i, raw(output)) for i in range(num_samples)),
            sampling=SamplingParams(**{"max_tokens": 8, "ignore_eos": True, **sampling}),
            decode=None if decode is None else decode.target,
            deadline_s=deadline_s,
        )

    async def run(self, at: Replica, submission: Submission) -> Heard:
        """Submit and wait for the end of every sample, or the failure of the attempt."""
        at.send(submission)
        return await self.ended(submission)

    async def ended(self, submission: Submission) -> Heard:
        heard = self.heard.setdefault((submission.request_id, submission.attempt), Heard())
        await until(
            lambda: heard.failure is not None or len(heard.finish) == len(submission.samples),
            f"end of {submission.request_id} attempt {submission.attempt}",
        )
        return heard

    async def quiet(self, *replicas: Replica) -> None:
        """Wait until nothing is referenced, quarantined or landing anywhere, then check the books."""
        for replica in replicas or self.replicas.values():
            core = replica.core

            def is_quiet(core: EngineCore = core) -> bool:
                pool = core.pool
                books = core.kv_receiver.landings.num_open + core.kv_receiver.landings.num_waiting
                busy = books + core.kv_sender.sends.num_active + len(core.table)
                if core.connector is not None:
                    busy += not core.connector.is_idle
                return pool.num_referenced == 0 and pool.num_quarantined == 0 and busy == 0

            await until(is_quiet, f"every reference of {core.identity.replica_id} is 0")
            core.pool.check()
            core.scheduler.check()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.wake_all()
        await self.close()

    async def close(self) -> None:
        """End all replicas, also after one whose end fails."""
        async with contextlib.AsyncExitStack() as ends:
            for replica in reversed(self.replicas.values()):
                ends.push_async_callback(replica.core.stop)
                ends.push_async_callback(replica.close)

    def wake_all(self) -> None:
        """Continue every rank that a test stopped, so that it can end."""
        for replica in self.replicas.values():
            for process_id in replica.core.rank_process_ids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process_id, signal.SIGCONT)


NUM_TOKENS = 160


def prompt(seed: int, num_tokens: int = 100) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(3, 190) for _ in range(num_tokens)]


async def started(harness: E2eHarness, at: Replica, submission: Submission, num_tokens: int = 5) -> Heard:
    """Send the request and wait until it runs there and has reported `num_tokens` tokens."""
    at.send(submission)
    heard = harness.heard.setdefault((submission.request_id, submission.attempt), Heard())
    await until(lambda: len(heard.tokens.get(0, {})) >= num_tokens, f"{num_tokens} tokens")
    return heard


async def joined(source: Replica, target: Replica) -> None:
    """Wait until the path is measured: a short stream would end before that on a busy machine."""
    source.core.join_peers([target.target])
    name = target.core.identity
    await until(lambda: source.core.peers.connection(name) is not None, f"a path to {name.replica_id}")


def move(submission: Submission, source: Replica, target: Replica) -> None:
    source.send(Move(submission.request_id, submission.attempt, target.target))


def rule(point: str, action: str, folder: Path, after: int = 1) -> FaultRule:
    return FaultRule(point, action, str(folder / f"{point}.{action}"), after)


def fired(fault: FaultRule) -> bool:
    return Path(fault.marker).exists() and Path(fault.marker).read_text() != ""


async def moved_and_right(
    harness: E2eHarness, heard: Heard, submission: Submission, num_moves: int = 1
) -> None:
    """Check that the stream ended well after `num_moves` moves, with the output that one engine gives."""
    await harness.ended(submission)
    assert heard.failure is None, heard.failure
    assert [ended.error for ended in heard.moves] == [""] * num_moves
    assert heard.hand_over is not None
    sampling = {name: getattr(submission.sampling, name) for name in submission.sampling.__struct_fields__}
    alone = harness.submission(
        f"{submission.request_id}-alone",
        [int(it) for it in memoryview(submission.prompt).cast("I")],
        seed=submission.samples[0].seed,
        **sampling,
    )
    wanted = await harness.run(harness.replicas["b0"], alone)
    assert heard.sequence() == wanted.sequence()
    assert heard.logprobs.keys() == wanted.logprobs.keys()
    for index, logprob in wanted.logprobs.items():
        assert heard.logprobs[index].logprob == pytest.approx(logprob.logprob, abs=1e-4)
        assert [token for token, _ in heard.logprobs[index].top] == [token for token, _ in logprob.top]


async def add_with_store(
    harness: E2eHarness, store: StoreHarness, name: str, role: str = "both", **how: Any
) -> Replica:
    """Add a replica; return when its store is open."""
    replica = await harness.add(name, role, store=store.settings.name, **how)
    tiers = replica.core.connector
    assert tiers is not None
    await until(lambda: tiers.is_open, f"the store of {name} is open")
    return replica


async def stored_blocks(replica: Replica, num_blocks: int) -> None:
    """Wait until so many blocks of the replica were written through, and no more are under way."""
    tiers = replica.core.connector
    assert tiers is not None
    await until(
        lambda: tiers.saver.num_stored >= num_blocks and tiers.saver.is_idle, f"{num_blocks} are stored"
    )
