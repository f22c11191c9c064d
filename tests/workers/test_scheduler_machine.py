"""Whole lives of requests on a model of the stages that computes from the plans alone, each in its own time.

Every request must get exactly the tokens that it gets alone, whatever arrives, ends or fails around it.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import dataclass, field
from itertools import cycle

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from linear_costs import LinearCosts, Prices
from msgspec.structs import replace
from slow_cases import examples
from staged_engine import (
    BLOCK_TOKENS,
    END,
    ROOT_KEY,
    VOCABULARY,
    StagedEngine,
    alone,
    embedded,
    likelihood,
    pack,
    sample,
    unpack,
)

from kvtransfer.blocks.group_prefix import first_needed_block, match_prefix
from kvtransfer.blocks.keys import extend_keys
from kvtransfer.common.group_shares import GroupShares
from kvtransfer.messages import BlockSpan, ReplicaIdentity
from kvtransfer.request_facts import ServiceClass
from workers.config import EngineConfig
from workers.errors import OutOfBlocksError
from workers.messages.link import HandOverTarget, RequestFailed, SampleState, Submission, TokenDelta
from workers.messages.sampling import SamplingParams, TokenLogprob
from workers.scheduler.step import LandingNeed, PromptDone, StepOutcome

TARGET = HandOverTarget(ReplicaIdentity("decode", 1), "decode:1")


@dataclass
class Life:
    """What one submission must get, and what it got so far."""

    submission: Submission
    expected: list[list[int]]
    outputs: list[list[int]]
    finishes: list[str]
    deadline: float | None
    num_prompts_done: int = 0
    # Of the prompt's tokens but the first.
    read: list[TokenLogprob] = field(default_factory=list)

    @property
    def expected_read(self) -> list[TokenLogprob]:
        """What is to be read of the prompt before its first token."""
        num_top, prompt = self.submission.sampling.num_prompt_logprobs, unpack(self.submission.prompt)
        if num_top is None:
            return []
        read = [likelihood(prompt[:at], prompt[at]) for at in range(1, len(prompt))]
        return [TokenLogprob(it.logprob, it.top[:num_top]) for it in read]

    over: bool = False


@dataclass
class HandOver:
    """An outbound request between the two engines: its landing at the decode side."""

    need: LandingNeed
    granted: bool = False
    block_ids: list[int] = field(default_factory=list)
    num_held_tokens: int = 0
    num_moved_tokens: int = 0
    windows: list[BlockSpan] = field(default_factory=list)
    done: PromptDone | None = None


CONFIGS = st.builds(
    EngineConfig,
    block_tokens=st.just(16),  # the least that a cluster may set; the pools here have smaller ones
    max_batch_tokens=st.integers(1, 16),
    chunk_tokens=st.integers(1, 9),
    max_sequences=st.integers(2, 5),
    offload_at=st.sampled_from([0.95, 0.95, 0.5, 1.0]),
    offload_share=st.sampled_from([0.9, 0.9, 0.5, 1.0]),
)
# Stages, most plans out (fewer than stages and one more when so drawn), attention ratio.
SHAPES = st.tuples(st.integers(1, 3), st.integers(1, 4), st.sampled_from([0.0, 0.02, 0.5]))
# Blocks on the device, and in host memory.
SHARES = [GroupShares(), GroupShares(1.0, {"a": 0.5}), GroupShares(0.4), GroupShares(0.7, {"a": 0.3})]
SIZES = st.one_of(
    st.tuples(st.integers(4, 14), st.just(0)),
    st.tuples(st.integers(1, 9), st.integers(1, 12)),
)
# Windows, and what their groups have beside the blocks that one sequence needs.
WINDOWS = st.lists(st.tuples(st.integers(1, 14), st.integers(0, 8)), max_size=2)
# The blocks of groups with states.
STATES = st.lists(st.integers(3, 12), max_size=2)
# Of the sequences of each plan whose states a failed step may change, those whose states are lost.
LOSSES = st.lists(st.frozensets(st.integers(0, 3), max_size=2), min_size=10, max_size=30)
PROMPTS = st.builds(
    lambda base, num_shared, tail: [sample([at], base) for at in range(num_shared)] + tail,
    st.integers(0, 2),
    st.integers(0, 13),
    st.lists(st.integers(1, VOCABULARY - 1), min_size=1, max_size=5),
)


class Pair(RuleBasedStateMachine):
    """A prefill and a decode engine; local requests on both, outbound ones from the first to the second."""

    @initialize(
        configs=st.tuples(CONFIGS, CONFIGS),
        sizes=st.tuples(SIZES, SIZES),
        shapes=st.tuples(SHAPES, SHAPES),
        bad_tokens=st.lists(st.sampled_from([0, 0, 1, 7, 99]), min_size=1, max_size=4),
        shares=st.tuples(st.sampled_from(SHARES), st.sampled_from(SHARES)),
        windows=WINDOWS,
        states=STATES,
        snapshot_every_tokens=st.sampled_from([0, 0, 4, 7]),
        losses=LOSSES,
        tpot_objective_s=st.sampled_from([None, 0.01, 0.016, 1.0]),
    )
    def start(
        self,
        configs: tuple[EngineConfig, EngineConfig],
        sizes: tuple[tuple[int, int], tuple[int, int]],
        shapes: tuple[tuple[int, int, float], tuple[int, int, float]],
        bad_tokens: list[int],
        shares: tuple[GroupShares, GroupShares],
        windows: list[tuple[int, int]],
        states: list[int],
        snapshot_every_tokens: int,
        losses: list[Set[int]],
        tpot_objective_s: float | None,
    ) -> None:
        window_sizes = [(window, -(-window // BLOCK_TOKENS) + 5 + more) for window, more in windows]
        changes = {"snapshot_every_tokens": snapshot_every_tokens, "tpot_objective_s": tpot_objective_s}
        self.engines = [
            StagedEngine(
                config.model_copy(update=changes),
                num_blocks,
                num_stages,
                ratio,
                num_offload,
                shares=its,
                windows=window_sizes,
                states=states,
                costs=LinearCosts(Prices(token_s=2.0**-10)),
            )
            for config, (num_blocks, num_offload), (num_stages, _, ratio), its in zip(
                configs, sizes, shapes, shares, strict=True
            )
        ]
        self.prefill, self.decode = self.engines
        self.depths = [min(depth, num_stages + 1) for num_stages, depth, _ in shapes]
        self.bad_tokens = cycle(bad_tokens)
        self.losses = iter(losses)
        self.now = 0.0
        self.lives: dict[str, Life] = {}
        self.landings: dict[str, HandOver] = {}

    # ---------------------------------------------------------------------------------------- arrivals

    @rule(
        prompt=PROMPTS,
        num_samples=st.sampled_from([1, 1, 1, 2, 3]),
        num_resumed=st.sampled_from([0, 0, 0, 1, 5]),
        sampling=st.builds(
            SamplingParams,
            max_tokens=st.integers(1, 14),
            ignore_eos=st.booleans(),
            num_prompt_logprobs=st.sampled_from([None, None, 0, 2]),
        ),
        pools=st.sampled_from([False, False, False, True]),
        priority=st.sampled_from([0, 0, 0, 1]),
        service_class=st.sampled_from(["standard", "standard", "interactive", "batch", "batch"]),
        deadline_s=st.sampled_from([None, None, None, 1.5, 6.0]),
        where=st.sampled_from(["prefill", "decode", "outbound", "outbound"]),
        suspect=st.sampled_from([False, False, True]),
        group=st.sampled_from(["", "a", "a", "b"]),
        message_ends=st.sets(st.integers(1, 30), max_size=3),
    )
    def submit(
        self,
        prompt: list[int],
        num_samples: int,
        num_resumed: int,
        sampling: SamplingParams,
        pools: bool,
        priority: int,
        service_class: ServiceClass,
        deadline_s: float | None,
        where: str,
        suspect: bool,
        group: str,
        message_ends: set[int],
    ) -> None:
        if pools:
            where, num_samples, num_resumed = "decode" if where == "decode" else "prefill", 1, 0
            sampling = replace(sampling, max_tokens=1, num_prompt_logprobs=None)
        engine = self.decode if where == "decode" else self.prefill
        end = self.prefill if where == "prefill" else self.decode
        limit = min(sampling.max_tokens, end.max_local_tokens(group) - len(prompt))
        most = engine.max_local_tokens(group)
        if where == "outbound":
            most = min(engine.max_tokens(group), self.decode.max_tokens(group))
        most_samples = engine.scheduler._pool.shares.most_of(group, engine.config.max_sequences)
        if limit < 1 or len(prompt) + 1 > most or num_samples > most_samples:
            return
        seeds = [100 + index for index in range(num_samples)]
        expected = [[] if pools else alone(prompt, seed, limit, sampling) for seed in seeds]
        resumed = expected[0][:num_resumed] if num_samples == 1 else []
        if len(resumed) == len(expected[0]) or len(prompt) + len(resumed) > most:
            resumed = []
        root_key = ROOT_KEY + group.encode()
        submission = Submission(
            request_id=f"r{len(self.lives)}",
            attempt=1,
            tenant="",
            sharing_group=group,
            priority=priority,
            service_class=service_class,
            prompt=pack(prompt),
            root_key=root_key,
            block_keys=extend_keys(root_key, pack(prompt), BLOCK_TOKENS),
            samples=tuple(SampleState(index, seed, pack(resumed)) for index, seed in enumerate(seeds)),
            sampling=sampling,
            decode=TARGET if where == "outbound" else None,
            deadline_s=deadline_s,
            suspect=suspect,
            pooling="last" if pools else None,
            message_ends=tuple(sorted(end for end in message_ends if end <= len(prompt))),
        )
        engine.scheduler.submit(submission, self.now)
        self.lives[submission.request_id] = Life(
            submission,
            expected,
            outputs=[list(resumed) for _ in seeds],
            finishes=[""] * num_samples,
            deadline=None if deadline_s is None else self.now + deadline_s,
        )

    @precondition(lambda self: any(not life.over for life in self.lives.values()))
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from([name for name, life in self.lives.items() if not life.over]))
        found = [engine.scheduler.cancel(name, 1) for engine in self.engines]
        life = self.lives[name]
        if not any(found):  # it expired, and the outcome that says so is still to come
            assert self.is_late(life)
            return
        assert not any(engine.scheduler.cancel(name, 1) for engine in self.engines)
        life.over = True
        self.abort_landing(name)

    def is_late(self, life: Life) -> bool:
        return life.deadline is not None and life.deadline <= self.now

    @rule(number=st.integers(0, 1), is_paused=st.booleans())
    def pause_batch(self, number: int, is_paused: bool) -> None:
        self.engines[number].scheduler.pause.ask(is_paused)

    @rule(delta_s=st.sampled_from([0.1, 1.0]))
    def pass_time(self, delta_s: float) -> None:
        self.now += delta_s

    # ------------------------------------------------------------------------------------------- steps

    @rule(number=st.integers(0, 1), num_steps=st.integers(1, 5))
    def plan(self, number: int, num_steps: int) -> None:
        engine = self.engines[number]
        for _ in range(num_steps):
            if len(engine.steps) == self.depths[number]:
                self.settle(number)
            if not engine.plan(self.now):
                self.fail(engine.scheduler.take_failures())
                self.settle(number)
            engine.check()

    @precondition(lambda self: any(engine.steps for engine in self.engines))
    @rule(number=st.integers(0, 1), stage=st.integers(0, 2), num_steps=st.integers(1, 4))
    def compute(self, number: int, stage: int, num_steps: int) -> None:
        """One stage gets ahead, as far as the plans and the other stages let it."""
        engine = self.engines[number]
        for _ in range(num_steps):
            engine.advance(stage % engine.num_stages)

    @precondition(lambda self: any(engine.steps for engine in self.engines))
    @rule(number=st.integers(0, 1))
    def settle(self, number: int) -> None:
        """Settle the oldest plan. With it states are lost at times: their sequences begin again behind the
        last snapshots."""
        engine = self.engines[number]
        if engine.steps:
            losable = engine.losable_slots()
            lost = next(self.losses, frozenset()) if losable else frozenset()
            slots = [slot for place, slot in enumerate(losable) if place in lost]
            self.take(engine.settle(self.now, slots))

    def take(self, outcome: StepOutcome) -> None:
        self.fail(outcome.failures)
        for part in outcome.prompt_logprobs:
            life = self.lives[part.request_id]
            assert part.first_index == len(life.read) + 1
            life.read += part.logprobs.unpacked()
        for delta in outcome.tokens:
            self.take_delta(delta)
        for embedding in outcome.embeddings:
            life = self.lives[embedding.request_id]
            assert not life.over
            assert embedding.vector == embedded(unpack(life.submission.prompt))
            life.finishes, life.over = ["stop"], True
        for chunk in outcome.chunks:
            landing = self.landings[chunk.request_id]
            for position in range(landing.num_moved_tokens, chunk.num_computed_tokens):
                self.move(landing, chunk.block_ids, position)
                self.move_windows(landing, chunk.windows, position)
            landing.num_moved_tokens = chunk.num_computed_tokens
            if chunk.num_computed_tokens == landing.need.num_tokens:
                self.move_states(landing, chunk.windows)
        for done in outcome.prompts:
            life = self.lives[done.request_id]
            life.num_prompts_done += 1
            assert life.num_prompts_done == 1
            is_read = life.submission.sampling.num_prompt_logprobs is not None
            assert not (is_read and done.num_cached_tokens)
            assert done.all_finished == all(life.finishes)
            assert done.decodes_remotely == (life.submission.decode is not None)
            assert len(done.block_ids) * BLOCK_TOKENS >= done.num_computed_tokens
            if done.decodes_remotely and done.all_finished:
                self.abort_landing(done.request_id)
            elif done.decodes_remotely:
                self.landings[done.request_id].done = done

    def take_delta(self, delta: TokenDelta) -> None:
        life = self.lives[delta.request_id]
        output, expected = life.outputs[delta.sample], life.expected[delta.sample]
        assert not life.over
        assert not life.finishes[delta.sample]
        assert delta.first_index == len(output)
        assert life.read == life.expected_read
        output += unpack(delta.tokens)
        assert output == expected[: len(output)]
        life.finishes[delta.sample] = delta.finish
        if delta.finish:
            assert output == expected
            stopped = output[-1] == END and not life.submission.sampling.ignore_eos
            assert delta.finish == ("stop" if stopped else "length")
            life.over = all(life.finishes)
        else:
            assert len(output) < len(expected) or delta.request_id in self.landings

    def fail(self, failures: list[RequestFailed]) -> None:
        for failure in failures:
            life = self.lives[failure.request_id]
            assert not life.over
            assert (failure.code, self.is_late(life)) == ("deadline", True)
            life.over = True
            self.abort_landing(failure.request_id)

    # ---------------------------------------------------------------------------------------- hand-over

    @rule(grant=st.booleans())
    def ask_for_landings(self, grant: bool) -> None:
        for need in self.prefill.scheduler.landings_wanted(0.0):
            assert need.request_id not in self.landings
            self.landings[need.request_id] = HandOver(need)
        if grant:
            self.grant_landings()

    def grant_landings(self) -> None:
        pool = self.decode.pool
        for name, landing in self.landings.items():
            if landing.granted:
                continue
            group = landing.need.submission.sharing_group
            num_tokens, keys = landing.need.num_tokens, landing.need.submission.block_keys
            windows = [it for it in self.decode.group_pools if not it.has_states]
            states = self.decode.group_pools[len(windows) :]
            held, held_windows = match_prefix(pool, windows, keys, BLOCK_TOKENS, num_tokens)
            if pool.num_to_use(held) > pool.num_left(group):
                continue
            num_blocks = -(-num_tokens // BLOCK_TOKENS)
            pool.acquire(held)
            for each, its in zip(windows, held_windows, strict=True):
                each.acquire(its.block_ids)
            is_full = any(each.num_free < 1 for each in states) or any(
                each.num_free < num_blocks - it.first for each, it in zip(windows, held_windows, strict=True)
            )
            try:
                if is_full:
                    raise OutOfBlocksError("of a window")
                rest = pool.allocate(num_blocks - len(held), group)
            except OutOfBlocksError:
                pool.release(held)
                for each, its in zip(windows, held_windows, strict=True):
                    each.release(its.block_ids)
                continue
            for number, (each, its) in enumerate(zip(windows, held_windows, strict=True)):
                first = (
                    its.first if its.block_ids else first_needed_block(num_tokens, each.window, BLOCK_TOKENS)
                )
                first = max(first, its.first)
                num_new = num_blocks - first - len(its.block_ids)
                landing.windows.append(BlockSpan(first, (*its.block_ids, *each.allocate(num_new))))
                self.decode.group_blocks_of_landings[number] += num_blocks - first
            for number, each in enumerate(states, len(windows)):
                landing.windows.append(BlockSpan((num_tokens - 1) // BLOCK_TOKENS, tuple(each.allocate(1))))
                self.decode.group_blocks_of_landings[number] += 1
            landing.granted = True
            landing.block_ids = held + rest
            landing.num_held_tokens = len(held) * BLOCK_TOKENS
            self.decode.blocks_of_landings += landing.block_ids
            assert self.prefill.scheduler.grant_landing(name, 1) or self.is_late(self.lives[name])

    @rule()
    def hand_over(self) -> None:
        for name, landing in list(self.landings.items()):
            if landing.done is None:
                continue
            num_valid = max(landing.num_held_tokens, landing.done.num_computed_tokens - next(self.bad_tokens))
            for position in range(num_valid, len(landing.block_ids) * BLOCK_TOKENS):
                place = landing.block_ids[position // BLOCK_TOKENS], position % BLOCK_TOKENS
                for stage in self.decode.stages:
                    stage.kv[place] = VOCABULARY + 1
            del self.landings[name]
            self.drop_landing_blocks(landing)
            life = self.lives[name]
            rest_s = None if life.deadline is None else life.deadline - self.now
            submission = replace(landing.done.submission, samples=landing.done.samples, deadline_s=rest_s)
            windows: list[BlockSpan] = landing.windows
            if num_valid < landing.need.num_tokens and windows:
                num_valid, windows = 0, [BlockSpan(0, ()) for _ in windows]
                self.release_windows(landing)
            ends = self.decode.scheduler.adopt(submission, landing.block_ids, num_valid, self.now, windows)
            for delta in ends:
                self.take_delta(delta)
            assert self.prefill.scheduler.finish_hand_over(name, 1)

    def move(self, landing: HandOver, src_blocks: tuple[int, ...], position: int) -> None:
        if position >= landing.num_held_tokens:
            index, offset = divmod(position, BLOCK_TOKENS)
            (token,) = {stage.kv[src_blocks[index], offset] for stage in self.prefill.stages}
            for stage in self.decode.stages:
                stage.kv[landing.block_ids[index], offset] = token

    def move_windows(self, landing: HandOver, src: Sequence[BlockSpan], position: int) -> None:
        index, offset = divmod(position, BLOCK_TOKENS)
        for group, (its, there) in enumerate(zip(src, landing.windows, strict=True)):
            if self.decode.group_pools[group].has_states:
                continue
            if position < landing.num_held_tokens or index < there.first:
                continue
            place = its.block_ids[index - its.first], offset
            (token,) = {stage.groups[group].kv[place] for stage in self.prefill.stages}
            for stage in self.decode.stages:
                stage.groups[group].kv[there.block_ids[index - there.first], offset] = token

    def move_states(self, landing: HandOver, src: Sequence[BlockSpan]) -> None:
        for group, (its, there) in enumerate(zip(src, landing.windows, strict=True)):
            if self.decode.group_pools[group].has_states:
                assert (its.first, len(its.block_ids)) == (there.first, 1)
                (state,) = {stage.groups[group].kv[its.block_ids[0], 0] for stage in self.prefill.stages}
                for stage in self.decode.stages:
                    stage.groups[group].kv[there.block_ids[0], 0] = state

    def release_windows(self, landing: HandOver) -> None:
        for pool, blocks in zip(self.decode.group_pools, landing.windows, strict=True):
            pool.release(blocks.block_ids)

    def abort_landing(self, name: str) -> None:
        landing = self.landings.pop(name, None)
        if landing is not None and landing.granted:
            self.drop_landing_blocks(landing)
            self.decode.pool.release(landing.block_ids)
            self.release_windows(landing)

    def drop_landing_blocks(self, landing: HandOver) -> None:
        for block_id in landing.block_ids:
            self.decode.blocks_of_landings.remove(block_id)
        for number, blocks in enumerate(landing.windows):
            self.decode.group_blocks_of_landings[number] -= len(blocks.block_ids)

    # -------------------------------------------------------------------------------------------- ends

    @invariant()
    def sound(self) -> None:
        for engine in getattr(self, "engines", []):
            engine.check()

    def teardown(self) -> None:
        if not hasattr(self, "engines"):
            return
        for _ in range(3000):
            if all(life.over for life in self.lives.values()):
                break
            self.ask_for_landings(grant=True)
            self.plan(0, 1)
            self.plan(1, 1)
            self.hand_over()
        for number, engine in enumerate(self.engines):
            while engine.steps:
                self.settle(number)
            assert engine.scheduler.is_idle
            engine.check()
            assert engine.pool.num_referenced == 0
            assert engine.scheduler.life.tables.host.num_used == 0
            assert engine.pool.num_free == engine.num_blocks
            assert all(pool.num_free == pool.num_total for pool in engine.group_pools)
        assert all(life.over for life in self.lives.values())


Pair.TestCase.settings = settings(max_examples=examples(120), stateful_step_count=60, deadline=None)
TestPair = Pair.TestCase
