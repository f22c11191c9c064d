"""Clients and faults, drawn by one seed, over replicas whose models keep states: ranks die, pieces are
spoiled, streams move and clients go, while little memory makes replicas evict and preempt."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from e2e_harness import E2eHarness, Heard, Replica, move, raw, until
from msgspec.structs import replace

from kvtransfer.common.clock import SystemClock
from kvtransfer.common.faults import FaultRule
from workers.errors import RankDiedError
from workers.messages.link import Cancel, SampleState, Submission

# KV for two or three sequences, and states for four; no more than a few snapshots.
SMALL = {"kv_tokens": 400, "max_sequences": 4, "state_snapshots": 3, "max_batch_tokens": 64}
ROLES = {"p0": "prefill", "p1": "prefill", "d0": "decode", "d1": "decode"}
SAMPLED: dict[str, Any] = {"temperature": 1.0}
_FAULTS = (
    ("rank.step.decode", "kill", 60),
    ("rank.step.prefill", "kill", 30),
    ("push.half", "kill", 20),
    ("verify", "kill", 20),
    ("push.corrupt", "corrupt", 20),
    ("store.copy.put", "kill", 40),
    ("store.copy.get", "kill", 20),
)
_RETRIED = ("refused", "peer", "internal", "leaving", "crowded")
_MAX_ATTEMPTS = 60


@dataclass(frozen=True)
class Question:
    """A prompt with the outputs that are right: greedy ones, and those of each of three seeds."""

    prompt: list[int]
    greedy: list[int]
    sampled: list[list[int]]


@dataclass
class _Outputs:
    """The tokens of each sample so far, and how many attempts there were."""

    tokens: list[list[int]]
    done: set[int] = field(default_factory=set)
    num_attempts: int = 0


@dataclass
class _Attempt:
    """What was submitted, what came up for it, and the replicas that may have it, the newest last."""

    submission: Submission
    heard: Heard
    involved: list[Replica]
    # Those that have died.
    gone: list[Replica]

    def has_ended(self) -> bool:
        return len(self.heard.finish) == len(self.submission.samples)

    def is_over(self) -> bool:
        is_lost = any(it in self.gone for it in self.involved)
        return self.heard.failure is not None or self.has_ended() or is_lost

    def has_heard(self, num_tokens: int) -> bool:
        return self.is_over() or any(len(it) >= num_tokens for it in self.heard.tokens.values())


class Chaos:
    """Replicas that are replaced when they die, and clients that retry as a gateway does."""

    def __init__(self, harness: E2eHarness, store: str, seed: int, folder: Path, num_faults: int) -> None:
        self._harness = harness
        self._store = store
        self._draw = random.Random(seed)
        self._folder = folder
        self._num_faults_left = num_faults
        self._epochs = dict.fromkeys(ROLES, 0)
        self._live: dict[str, Replica] = {}
        self._gone: list[Replica] = []
        self._is_over = False
        self._clock = SystemClock()
        self.num_replaced = 0
        self.counts: dict[str, int] = {}

    async def start(self) -> None:
        """Start the replicas, at once."""
        async with asyncio.TaskGroup() as starts:
            for name in ROLES:
                starts.create_task(self._add(name))

    async def run(self, questions: Sequence[Question], num_clients: int, num_requests: int) -> None:
        """Let all clients ask; replace replicas that die meanwhile."""
        nurse = asyncio.create_task(self._replace_dead())
        killer = asyncio.create_task(self._kill_at_times())
        try:
            async with asyncio.TaskGroup() as clients:
                for client in range(num_clients):
                    clients.create_task(self._ask_all(client, questions, num_requests))
        finally:
            killer.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await killer
            self._is_over = True
            await nurse  # which may be starting a replica

    def check_ends(self) -> None:
        """Assert that no attempt ended twice."""
        for (name, attempt), heard in self._harness.heard.items():
            is_over = heard.failure is not None
            assert heard.num_ends <= max(1, len(heard.tokens)), (name, attempt, heard)
            assert not is_over or heard.num_ends == 1 + len(heard.finish), (
                f"{name} attempt {attempt}: {heard}"
            )

    # ------------------------------------------------------------------------------------- replicas

    async def _add(self, name: str) -> None:
        self._epochs[name] += 1
        faults: list[FaultRule] = []
        if self._num_faults_left > 0 and self._draw.random() < 0.7:
            self._num_faults_left -= 1
            point, action, most = self._draw.choice(_FAULTS)
            marker = self._folder / f"{name}-{self._epochs[name]}.{point}.{action}"
            faults.append(FaultRule(point, action, str(marker), self._draw.randint(1, most)))
        added = await self._harness.add(
            name, ROLES[name], engine=SMALL, faults=faults, store=self._store, epoch=self._epochs[name]
        )
        self._live[name] = added

    async def heal(self) -> None:
        """Replace the replicas that have died."""
        for name, replica in list(self._live.items()):
            try:
                replica.core.check_health()
            except RankDiedError:
                await self._replace(name, replica)

    async def _replace_dead(self) -> None:
        while not self._is_over:
            await self.heal()
            await self._clock.sleep(0.1)

    def num_preemptions(self) -> int:
        """Return how often replicas that live have preempted sequences."""
        return sum(it.core.scheduler.life.num_preemptions for it in self._live.values())

    async def _replace(self, name: str, dead: Replica) -> None:
        del self._live[name]
        self._gone.append(dead)
        await dead.core.stop()
        await dead.close()
        self.num_replaced += 1
        await self._add(name)

    async def _kill_at_times(self) -> None:
        """Kill ranks at moments that no point in the protocol has."""
        while self._num_faults_left > 0:
            await self._clock.sleep(self._draw.uniform(4.0, 12.0))
            self._num_faults_left -= 1
            victims = list(self._live.values())
            for process_id in self._draw.choice(victims).core.rank_process_ids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process_id, signal.SIGKILL)

    async def _at(self, role: str) -> Replica:
        """Return a replica of the role, when there is one."""

        def found() -> list[Replica]:
            return [replica for name, replica in self._live.items() if ROLES[name] == role]

        await until(lambda: bool(found()), f"a {role} replica is there")
        return self._draw.choice(found())

    # -------------------------------------------------------------------------------------- clients

    async def _ask_all(self, client: int, questions: Sequence[Question], num_requests: int) -> None:
        for number in range(num_requests):
            question = self._draw.choice(questions)
            name = f"c{client}-{number}"
            if self._draw.random() < 0.4:
                num_samples = self._draw.randint(2, 3)
                await self._ask(name, question.prompt, question.sampled[:num_samples], SAMPLED)
            else:  # perhaps the next turn, whose prompt has a part of the answer
                known = self._draw.choice([0, 0, 7, 16, 33])
                prompt = [*question.prompt, *question.greedy[:known]]
                await self._ask(name, prompt, [question.greedy[known:]], {})

    async def _ask(
        self, name: str, prompt: list[int], expected: Sequence[list[int]], sampling: dict[str, Any]
    ) -> None:
        """Ask until every sample has all of its tokens, or the client has gone."""
        goes_after = self._draw.randint(1, 20) if self._draw.random() < 0.15 else None
        outputs = _Outputs([[] for _ in expected])
        while len(outputs.done) < len(expected):
            assert outputs.num_attempts < _MAX_ATTEMPTS, f"{name} does not come to an end"
            fresh = [it for it in range(len(expected)) if it not in outputs.done and not outputs.tokens[it]]
            begun = [it for it in range(len(expected)) if it not in outputs.done and outputs.tokens[it]]
            samples = fresh or begun[:1]
            outputs.num_attempts += 1
            is_gone = await self._attempt(name, prompt, samples, outputs, expected, sampling, goes_after)
            for sample in samples:
                tokens = outputs.tokens[sample]
                assert tokens == expected[sample][: len(tokens)], f"{name}, sample {sample}, are wrong"
            if is_gone:
                self._count("gone")
                return
        self._count("ended")

    async def _attempt(
        self,
        name: str,
        prompt: list[int],
        samples: Sequence[int],
        outputs: _Outputs,
        expected: Sequence[list[int]],
        sampling: dict[str, Any],
        goes_after: int | None,
    ) -> bool:
        """Submit these samples once, and take what comes. Return whether the client has gone."""
        decode = await self._at("decode")
        target = decode if self._draw.random() < 0.7 else None
        at = decode if target is None else await self._at("prefill")
        states = [SampleState(it, 7 + it, raw(outputs.tokens[it])) for it in samples]
        number, most = outputs.num_attempts, len(expected[0])
        made = self._harness.submission(
            name, prompt, decode=target, attempt=number, max_tokens=most, **sampling
        )
        heard = self._harness.heard.setdefault((name, number), Heard())
        attempt = _Attempt(replace(made, samples=tuple(states)), heard, [at, decode], self._gone)
        at.send(attempt.submission)
        is_gone = await self._disturb(attempt, goes_after)
        if not is_gone:
            await until(attempt.is_over, f"the end of {name}, attempt {number}")
        self._take(heard, samples, outputs)
        if not is_gone and heard.failure is None and not attempt.has_ended():
            self._count("lost")
            self._cancel(attempt.submission)
        if heard.failure is not None:
            self._count(heard.failure.code)
            assert heard.failure.code in _RETRIED, heard.failure
            await self._clock.sleep(self._draw.uniform(0.05, 0.5))
        return is_gone

    async def _disturb(self, attempt: _Attempt, goes_after: int | None) -> bool:
        """Perhaps move an attempt to another decode replica, or let its client go. Return whether
        the client has gone."""
        moves_after = self._draw.randint(2, 30) if self._draw.random() < 0.6 else None
        for after in sorted(it for it in (goes_after, moves_after) if it is not None):
            await until(partial(attempt.has_heard, after), f"{after} tokens of an attempt")
            if attempt.is_over():
                return False
            if after == goes_after:
                self._cancel(attempt.submission)
                return True
            source, target = attempt.involved[-1], await self._at("decode")
            if target is not source and len(attempt.submission.samples) == 1:
                move(attempt.submission, source, target)
                attempt.involved.append(target)
                self._count("moved")
        return False

    def _take(self, heard: Heard, samples: Sequence[int], outputs: _Outputs) -> None:
        for sample in samples:
            index_to_token, tokens = heard.tokens.get(sample, {}), outputs.tokens[sample]
            assert sorted(index_to_token) == list(range(len(tokens), len(tokens) + len(index_to_token)))
            tokens += [index_to_token[index] for index in sorted(index_to_token)]
            if sample in heard.finish:
                outputs.done.add(sample)

    def _cancel(self, submission: Submission) -> None:
        """Cancel an attempt wherever it may be."""
        for replica in self._live.values():
            replica.send(Cancel(submission.request_id, submission.attempt))

    def _count(self, what: str) -> None:
        self.counts[what] = self.counts.get(what, 0) + 1


def under_way(replica: Replica) -> dict[str, Any]:
    """Return what is under way at a replica, for the message of a failed test."""
    core = replica.core
    life, connector = core.scheduler.life, core.connector
    return {
        "referenced": core.pool.num_referenced,
        "quarantined": core.pool.num_quarantined,
        "landings": (core.kv_receiver.landings.num_open, core.kv_receiver.landings.num_waiting),
        "sends": core.kv_sender.sends.num_active,
        "requests": [*life.requests],
        "sequences": [(it.phase, it.request.key) for it in (*life.waiting, *life.running, *life.leaving)],
        "table": len(core.table),
        "store is idle": connector is None or connector.is_idle,
        "store is open": connector is None or connector.is_open,
    }


def nothing_is_left(replica: Replica) -> Callable[[], bool]:
    """Return whether a replica references no block of any group."""
    scheduler = replica.core.scheduler
    return lambda: scheduler.is_idle and scheduler.life.num_group_references == 0
