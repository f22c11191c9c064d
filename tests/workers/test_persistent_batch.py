"""Whole lives of requests on real models whose ranks know only what plans have changed: every request has the
tokens of a runner that forgets everything after each of them and recomputes the request alone.

After every step each rank's tables and positions are compared with the scheduler's (`LocalEngine`)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from local_engine import BLOCK, LocalEngine, draw, entry, packed, step
from runner_parts import ON_CPU

from benchmarks.random_checkpoint import write_random_checkpoint
from kvtransfer.blocks.keys import extend_keys
from kvtransfer.common.clock import ManualClock
from workers.config import EngineConfig
from workers.messages.link import SampleState, Submission
from workers.messages.rank_channel import SlotSample, SlotStart
from workers.messages.sampling import SamplingParams
from workers.rank.model_runner import ModelRunner
from workers.rank.runner_settings import CheckpointFolder, RankCapacity

CONFIG = EngineConfig(
    block_tokens=BLOCK, max_batch_tokens=48, chunk_tokens=32, max_sequences=5, offload_at=0.7
)
SAMPLINGS = (
    SamplingParams(ignore_eos=True),
    SamplingParams(temperature=1.2, ignore_eos=True),
    SamplingParams(temperature=1.1, repetition_penalty=1.2, top_k=20, ignore_eos=True),
)


class Alone:
    """The reference: every token from a prompt of all tokens before it, in a slot of its own."""

    def __init__(self, model_dir: Path) -> None:
        self._runner = ModelRunner(
            CheckpointFolder(model_dir), ON_CPU, RankCapacity(BLOCK, 40 * BLOCK), ManualClock(0.0)
        )
        self._outputs: dict[tuple[bytes, int, int], list[int]] = {}

    def output(self, prompt: bytes, seed: int, kind: int, num_tokens: int) -> bytes:
        known = self._outputs.setdefault((prompt, seed, kind), [])
        while len(known) < num_tokens:
            known.append(self._next(prompt, packed(known), seed, SAMPLINGS[kind]))
        return packed(known[:num_tokens])

    def _next(self, prompt: bytes, output: bytes, seed: int, sampling: SamplingParams) -> int:
        tokens = list(memoryview(prompt + output).cast("I"))
        sample = SlotSample(3, seed, tokens[-1], len(output) // 4, output)
        start = SlotStart(sampling, (sample,), prompt if sampling.penalizes_prompt else b"")
        blocks = range(-(-len(tokens) // BLOCK))
        report = self._runner.steps.run(step(entry(3, 0, tokens, blocks, [3]), starts=[start]))
        self._runner.steps.run(step(frees=[3]))
        return int.from_bytes(report.tokens, "little")

    def close(self) -> None:
        self._runner.close()


@dataclass
class Life:
    """A request: what it asks, where it runs, what it got."""

    submission: Submission
    kind: int
    engine: int
    outputs: list[bytes]
    is_cancelled: bool = False
    # While it migrates: with so many tokens it is held.
    held_at: int = 0
    is_held: bool = False

    @property
    def name(self) -> str:
        return self.submission.request_id

    @property
    def is_over(self) -> bool:
        most = 4 * self.submission.sampling.max_tokens
        return self.is_cancelled or all(len(output) == most for output in self.outputs)


@dataclass(repr=False)
class World:
    """Two engines, one of them with a small device and blocks in host memory, and their requests."""

    engines: list[LocalEngine]
    alone: Alone
    lives: dict[str, Life] = field(default_factory=dict)
    num_asked: int = 0
    num_moved: int = 0

    def submit(
        self, number: int, base: int, num_tokens: int, n: int, kind: int, most: int, rank: int
    ) -> None:
        """A request that shares its first tokens with others of its `base`."""
        self.num_asked += 1
        prompt = packed([*draw(90, seed=base)[:num_tokens], self.num_asked % 256])
        sampling = SAMPLINGS[kind]
        submission = Submission(
            request_id=f"r{self.num_asked}",
            attempt=1,
            tenant="",
            sharing_group="",
            priority=rank,
            prompt=prompt,
            root_key=b"root",
            block_keys=extend_keys(b"root", prompt, BLOCK),
            samples=tuple(SampleState(index, 31 + index) for index in range(n)),
            sampling=SamplingParams(
                temperature=sampling.temperature,
                repetition_penalty=sampling.repetition_penalty,
                top_k=sampling.top_k,
                ignore_eos=True,
                max_tokens=most,
            ),
            decode=None,
            deadline_s=None,
        )
        self.engines[number].scheduler.submit(submission, 0.0)
        life = Life(submission, kind, number, [b""] * n)
        self.lives[life.name] = life

    def cancel(self, place: int) -> None:
        open_lives = [life for life in self.lives.values() if not life.is_over]
        if open_lives:
            life = open_lives[place % len(open_lives)]
            life.is_cancelled = True
            assert self.engines[life.engine].scheduler.cancel(life.name, 1)

    def migrate(self, place: int) -> None:
        """Begin to move a stream to the other engine."""
        for life in list(self.lives.values())[place:]:
            migration = self.engines[life.engine].scheduler.migration
            position = None if life.is_over or life.held_at else migration.position((life.name, 1))
            if position is not None and position.num_tokens < position.most_tokens:
                if migration.hold_at((life.name, 1), position.num_tokens):
                    life.held_at = position.num_tokens
                return

    def step(self, number: int) -> bool:
        """One step of an engine; False when it has nothing to do."""
        engine = self.engines[number]
        outcome = engine.step()
        if outcome is not None:
            assert not outcome.failures
            for delta in outcome.tokens:
                life = self.lives[delta.request_id]
                assert delta.first_index == len(life.outputs[delta.sample]) // 4
                life.outputs[delta.sample] += delta.tokens
            for chunk in outcome.migrating:
                life = self.lives[chunk.request_id]
                life.is_held = life.held_at == chunk.num_computed_tokens
        for life in [it for it in self.lives.values() if it.engine == number and it.held_at]:
            if life.is_over or not engine.scheduler.migration.is_on_its_way((life.name, 1)):
                life.held_at, life.is_held = 0, False  # it ended, was preempted, or left the device
            elif life.is_held:
                self._move(life)
        return outcome is not None

    def _move(self, life: Life) -> None:
        """Move the KV of a held stream, and its state."""
        num_tokens, life.held_at, life.is_held = life.held_at, 0, False
        if self.engines[life.engine].move(life.name, num_tokens, self.engines[1 - life.engine]):
            life.engine = 1 - life.engine
            self.num_moved += 1

    def clear(self) -> None:
        """Forget what an example that failed has left."""
        for life in self.lives.values():
            self.engines[life.engine].scheduler.cancel(life.name, 1)
        self._run_out()
        self.lives = {}

    def _run_out(self) -> None:
        while not all(engine.scheduler.is_idle for engine in self.engines):
            for number in range(2):
                self.step(number)

    def finish(self) -> None:
        """Run all to their ends, then compare every token."""
        self._run_out()
        assert all(life.is_over for life in self.lives.values())
        for life in self.lives.values():
            for sample, output in zip(life.submission.samples, life.outputs, strict=True):
                prompt, num_tokens = life.submission.prompt, len(output) // 4
                assert output == self.alone.output(prompt, sample.seed, life.kind, num_tokens), life.name
        for engine in self.engines:
            assert engine.scheduler.is_idle
            assert engine.pool.num_referenced == 0
            engine.pool.purge(None)
        self.lives = {}


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    num_threads = torch.get_num_threads()
    model_dir = tmp_path_factory.mktemp("model")
    write_random_checkpoint(model_dir, "llama", seed=3)
    engines = [LocalEngine(model_dir, CONFIG, 9, 12), LocalEngine(model_dir, CONFIG, 14)]
    made = World(engines, Alone(model_dir))
    yield made
    for engine in engines:
        engine.close()
    made.alone.close()
    torch.set_num_threads(num_threads)


NUMBERS = st.integers(0, 1)
ACTIONS = st.one_of(
    st.tuples(
        st.just("submit"),
        st.tuples(
            NUMBERS,
            st.integers(0, 1),
            st.integers(0, 80),
            st.sampled_from([1, 1, 1, 2, 3]),
            st.integers(0, len(SAMPLINGS) - 1),
            st.integers(1, 40),
            st.integers(0, 1),
        ),
    ),
    st.tuples(st.just("cancel"), st.tuples(st.integers(0, 4))),
    st.tuples(st.just("migrate"), st.tuples(st.integers(0, 3))),
    st.tuples(st.just("step"), st.tuples(NUMBERS)),
    st.tuples(st.just("step"), st.tuples(NUMBERS)),
)


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(actions=st.lists(ACTIONS, min_size=10, max_size=60))
def test_every_request_has_the_tokens_that_it_has_alone(
    world: World, actions: list[tuple[str, tuple[int, ...]]]
) -> None:
    world.clear()
    for name, arguments in actions:
        getattr(world, name)(*arguments)
    world.finish()


def test_a_busy_day_has_everything(world: World) -> None:
    """Arrivals beyond the device, forks, preemptions, moves to host memory, and migrations both ways."""
    world.clear()
    world.num_moved = 0
    for turn in range(12):
        number = turn % 2
        world.submit(number, turn % 3 % 2, 7 * turn, 1 + turn % 3 % 2, turn % 3, 36 - turn, turn % 5 % 2)
        for place in range(6):
            world.step(place % 2)
        world.migrate(turn % 3)
        if turn % 6 == 5:
            world.cancel(turn)
    num_moved = world.num_moved
    world.finish()
    for turn in range(5):  # they fit as they arrive, and not as they grow
        world.submit(1, 0, 20, 1, turn % 3, 60, 0)
    world.finish()
    assert num_moved > 0
    assert world.engines[0].most_offloaded > 0
    assert sum(engine.scheduler.life.num_preemptions for engine in world.engines) > 0
