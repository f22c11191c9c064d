"""A replica without an engine, in virtual time, with a plan of its own: a few lines beside which admission
and gateways are judged. `cluster.simulation` has the scheduler that serves.

It plans a step at a time, as replicas do: every sequence that decodes gets one token, and what is left of the
step's tokens computes prompts, the oldest first. A sequence needs a place and KV blocks; the youngest loses
them when they run out, and is computed again. With a role of its own it hands sequences over to its peers:
those reserve the blocks before the prompt is computed. A prefix cache knows a prompt's blocks from its
submission on, because who finds them is computed later.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from msgspec.structs import asdict

from benchmarks.virtual_prefix_cache import VirtualPrefixCache
from cluster.admission.flow import Flow
from cluster.simulation.virtual_time import EventQueue
from kvtransfer.common.moving_average import moving_average
from kvtransfer.kv_events import KvEvents
from kvtransfer.messages import ReplicaIdentity
from router.messages import QueueState, ReplicaLoad
from workers.scheduler.step_costs import FIRST_DECODE_RATIO, NonNegativeFit

# How often replicas report, and what crossing the network takes.
REPORT_S = 0.2
NETWORK_S = 0.001


class EngineModel(NamedTuple):
    """What steps take at a replica, and what it has. The default serves about one request a second.

    A step takes base + sequences x `sequence_s` + context tokens x `context_s` + prompt tokens x `token_s`.
    """

    base_s: float = 0.03
    sequence_s: float = 0.001
    context_s: float = 1e-6
    token_s: float = 0.00025
    # 0: not limited, and not reported.
    max_batch_tokens: int = 256
    max_sequences: int = 32
    num_blocks: int = 8000
    block_tokens: int = 16
    # Of the prefix cache, beside the others; 0: it has none.
    num_cached_blocks: int = 0
    # Of sending the KV of a token to another replica.
    transfer_s: float = 2e-5
    # A step computes one prompt, whole: a queue at a constant rate. A prompt waits until it is computed,
    # reports count the tokens of a step as it goes, and the rates are not measured but known.
    is_serial: bool = False

    def step_s(self, num_decodes: int, num_context_tokens: int, num_prompt_tokens: int) -> float:
        """Return what a step takes."""
        decode_s = num_decodes * self.sequence_s + num_context_tokens * self.context_s
        return self.base_s + decode_s + num_prompt_tokens * self.token_s

    def work_s(self, num_prompt: int, num_output: int) -> float:
        """Return what a request takes of a replica on which all sequences run."""
        each_s = self.base_s / self.max_sequences + self.sequence_s + num_prompt * self.context_s
        return num_prompt * self.token_s + num_output * each_s


def serial_model(tok_s: float, block_tokens: int, num_cached_blocks: int = 0) -> EngineModel:
    """Return a queue of prompts at a constant rate, with memory for all of them."""
    return EngineModel(
        base_s=0.0,
        sequence_s=0.03,
        context_s=0.0,
        token_s=1 / tok_s,
        max_batch_tokens=0,
        max_sequences=0,
        num_blocks=1_000_000,
        block_tokens=block_tokens,
        num_cached_blocks=num_cached_blocks,
        transfer_s=5e-6,
        is_serial=True,
    )


@dataclass(slots=True, eq=False)
class VirtualRequest:
    """One request and what became of it."""

    request_id: str
    flow: Flow
    num_prompt: int
    num_output: int
    arrived_at: float
    keys: tuple[bytes, ...] = ()
    released_at: float | None = None
    first_token_at: float | None = None
    ended_at: float | None = None
    # Why it was refused: "late", "aged" and so on.
    refusal: str = ""

    @property
    def ttft_s(self) -> float:
        return float("inf") if self.first_token_at is None else self.first_token_at - self.arrived_at

    @property
    def tpot_s(self) -> float:
        """Mean time of an output token after the first."""
        if self.ended_at is None or self.first_token_at is None:
            return float("inf")
        return (self.ended_at - self.first_token_at) / max(1, self.num_output - 1)


@dataclass(slots=True, eq=False)
class _Sequence:
    """A request at a replica. `num_known` tokens must be in the KV before it decodes."""

    request: VirtualRequest
    num_known: int
    decode_id: str = ""
    num_computed: int = 0
    num_sampled: int = 0
    num_blocks: int = 0

    @property
    def num_uncomputed(self) -> int:
        return max(0, self.num_known - self.num_computed)

    @property
    def is_prefilled(self) -> bool:
        return self.num_computed >= self.num_known


@dataclass(slots=True)
class StepNews:
    """What a step brought, for the gateway: requests with their first token, and with their last."""

    first: list[VirtualRequest] = field(default_factory=list)
    ended: list[VirtualRequest] = field(default_factory=list)


class _RunningStep(NamedTuple):
    """The step that runs, and what it computes."""

    began_at: float
    took_s: float
    num_prompt_tokens: int


class VirtualReplica:
    """A replica without an engine. `on_step` hears, when a step ends, of the queue as it is then and of what
    the step brought."""

    def __init__(
        self,
        name: str,
        model: EngineModel,
        events: EventQueue,
        on_step: Callable[[VirtualReplica, QueueState, StepNews], None],
        peers: Mapping[str, VirtualReplica],
    ) -> None:
        """`peers` are those that decode, by id."""
        self.identity = ReplicaIdentity(name, 1)
        self.model = model
        # Sequences of class batch make way for others.
        self.is_batch_paused = False
        # How many times as long steps take as the replica measures: disturbances.
        self.slowness = 1.0
        self.num_preemptions = 0
        self.num_submitted = 0
        # Of the prompts that were submitted: what was in the prefix cache, and what was not.
        self.num_cached_tokens = 0
        self.num_uncached_tokens = 0
        self._events = events
        self._on_step = on_step
        self._peers = peers
        self._cache = VirtualPrefixCache(self.identity, model.num_cached_blocks)
        self._waiting: deque[_Sequence] = deque()
        self._running: list[_Sequence] = []
        # Of class batch, paused: they keep their blocks while nobody else needs them.
        self._paused: list[_Sequence] = []
        # Accepted, and waiting for blocks at the replica that will decode.
        self._unlanded: set[_Sequence] = set()
        self._landing_queue: deque[tuple[_Sequence, Callable[[], None]]] = deque()
        self._landings: dict[_Sequence, int] = {}
        self._num_free_blocks = model.num_blocks
        self._backlog_tokens = 0
        self._step: _RunningStep | None = None
        self._prefill_tok_s = 1 / model.token_s if model.is_serial else 0.0
        self._decode_step_s = model.step_s(1, 0, 0) if model.is_serial else 0.0
        # Coefficients of steps, fitted as `workers.scheduler.step_costs.StepCosts` does.
        self._decode_fit = NonNegativeFit(FIRST_DECODE_RATIO)
        self._prefill_fit = NonNegativeFit((1.0,))

    def load(self) -> ReplicaLoad:
        """Return the report of this moment."""
        model = self.model
        base_s, sequence_s, context_s = self._decode_fit.coefficients or (0.0, 0.0, 0.0)
        (token_s,) = self._prefill_fit.coefficients or (model.token_s if model.is_serial else 0.0,)
        return ReplicaLoad(
            identity=self.identity,
            received_at=self._events.clock.now(),
            **asdict(self.queue_state()),
            num_total_blocks=model.num_blocks,
            prefill_tok_s=self._prefill_tok_s,
            decode_step_s=self._decode_step_s,
            transfer_tok_s=1 / model.transfer_s,
            prefill_token_s=token_s,
            decode_base_s=base_s,
            decode_sequence_s=sequence_s,
            decode_context_s=context_s,
            max_batch_tokens=model.max_batch_tokens,
            max_sequences=model.max_sequences,
        )

    def queue_state(self) -> QueueState:
        """Return what changes with every step."""
        num_computing = 0
        num_backlog_tokens = self._backlog_tokens - sum(it.num_uncomputed for it in self._paused)
        if self.model.is_serial:
            num_computing = sum(not it.is_prefilled for it in self._running)
            num_backlog_tokens -= self._num_tokens_so_far()
        return QueueState(
            num_running=len(self._running) - num_computing,
            num_waiting=len(self._waiting) + len(self._unlanded) + num_computing,
            num_landings=len(self._landings) + len(self._landing_queue),
            num_backlog_tokens=num_backlog_tokens,
            num_free_blocks=self._num_free_blocks,
            num_context_tokens=sum(it.num_computed for it in self._running),
        )

    def _num_tokens_so_far(self) -> int:
        """Return the prompt tokens that the step has computed, at a constant rate."""
        if self._step is None:
            return 0
        passed_s = self._events.clock.now() - self._step.began_at
        return math.ceil(self._step.num_prompt_tokens * min(1.0, passed_s / self._step.took_s))

    def submit(self, request: VirtualRequest, decode_id: str = "") -> KvEvents | None:
        """Take a request; with a `decode_id` it is handed over there after its first token. Returns what
        changed in the prefix cache."""
        sequence = _Sequence(request, request.num_prompt, decode_id)
        events = None
        if self.model.num_cached_blocks and request.keys:
            num_cached = self.model.block_tokens * self._cache.num_cached(request.keys)
            sequence.num_computed = min(num_cached, request.num_prompt - 1)
            events = self._cache.use(request.keys)
        self.num_submitted += 1
        self.num_cached_tokens += sequence.num_computed
        self.num_uncached_tokens += sequence.num_uncomputed
        self._backlog_tokens += sequence.num_uncomputed
        self._queue(sequence)
        return events

    def _queue(self, sequence: _Sequence) -> None:
        """Queue a sequence once its blocks are reserved where it will decode."""
        decode_id = sequence.decode_id
        if not decode_id:
            self._waiting.append(sequence)
            self._begin_step()
            return
        self._unlanded.add(sequence)

        def landed() -> None:
            self._unlanded.discard(sequence)
            self._waiting.append(sequence)
            self._begin_step()

        decode = self._peers[decode_id]
        self._events.after(NETWORK_S, lambda: decode.expect(sequence, landed))

    def expect(self, sequence: _Sequence, landed: Callable[[], None]) -> None:
        """Reserve blocks for a prompt that another replica computes, and then call `landed` there."""
        self._landing_queue.append((sequence, landed))
        self._grant()

    def join(self, sequence: _Sequence) -> None:
        """Decode a sequence whose KV has arrived in its landing."""
        sequence.num_blocks = self._landings.pop(sequence)
        self._waiting.appendleft(sequence)
        self._begin_step()

    def forget(self, sequence: _Sequence) -> None:
        """Free the landing of a request that ended with its first token."""
        self._num_free_blocks += self._landings.pop(sequence)
        self._grant()

    def _grant(self) -> None:
        while self._landing_queue:
            sequence, landed = self._landing_queue[0]
            num_blocks = self._blocks_of(sequence.num_known + 1)
            if not self._take_blocks(num_blocks) and (self._running or self._landings):
                return
            self._landing_queue.popleft()
            self._num_free_blocks -= num_blocks
            self._landings[sequence] = num_blocks
            self._events.after(NETWORK_S, landed)

    def _begin_step(self) -> None:
        """Begin a step, unless one runs or nothing is to do."""
        if self._step is not None:
            return
        self._pause()
        self._start_sequences()
        planned = list(self._running)
        decodes = [it for it in planned if it.is_prefilled]
        self._grow(decodes)
        decodes = [it for it in decodes if it.num_blocks]
        chunks = self._plan_chunks(planned, len(decodes))
        if not decodes and not chunks:
            return
        num_chunk_tokens = sum(num_tokens for _, num_tokens in chunks)
        num_context_tokens = sum(it.num_computed for it in decodes)
        step_s = self.model.step_s(len(decodes), num_context_tokens, num_chunk_tokens)
        self._measure(step_s, len(decodes), num_context_tokens, num_chunk_tokens)
        took_s = self.slowness * step_s
        self._step = _RunningStep(self._events.clock.now(), took_s, num_chunk_tokens)
        self._events.after(took_s, lambda: self._end_step(decodes, chunks))

    def _plan_chunks(self, planned: Iterable[_Sequence], num_decodes: int) -> list[tuple[_Sequence, int]]:
        """Divide what decodes leave of the step's tokens among the prompts, the oldest first."""
        prompts = [it for it in planned if it.num_blocks and not it.is_prefilled]
        if self.model.is_serial:
            return [(it, it.num_uncomputed) for it in prompts[:1]]
        budget = self.model.max_batch_tokens - num_decodes
        chunks = []
        for sequence in prompts:
            if budget <= 0:
                break
            num_tokens = min(budget, sequence.num_uncomputed)
            chunks.append((sequence, num_tokens))
            budget -= num_tokens
        return chunks

    def _measure(self, step_s: float, num_decodes: int, num_context_tokens: int, num_tokens: int) -> None:
        """Learn from a step what the replica reports."""
        if self.model.is_serial:
            return
        if not num_tokens:
            self._decode_step_s = moving_average(self._decode_step_s, step_s, 0.1)
            self._decode_fit.add((1.0, num_decodes, num_context_tokens), step_s)
            return
        self._prefill_tok_s = moving_average(self._prefill_tok_s, (num_tokens + num_decodes) / step_s, 0.2)
        if not num_decodes or self._decode_fit.coefficients:
            known_s = self._decode_fit.predict((0.0, num_decodes, num_context_tokens))
            self._prefill_fit.add((num_tokens,), step_s - known_s, 1.0 / num_tokens)

    def _pause(self) -> None:
        """Take batch sequences out while they are paused and others are there, or back in."""
        batch = [it for it in self._running if it.request.flow.service_class == "batch"]
        num_others = len(self._running) - len(batch)
        num_others += sum(it.request.flow.service_class != "batch" for it in self._waiting)
        if self.is_batch_paused and num_others:
            self._running = [it for it in self._running if it not in batch]
            self._paused += batch
        elif self._paused:
            self._waiting.extendleft(self._paused)
            self._paused.clear()

    def _take_blocks(self, num_blocks: int) -> bool:
        """Whether so many are free, at the cost of paused sequences."""
        while num_blocks > self._num_free_blocks and (kept := [it for it in self._paused if it.num_blocks]):
            self._evict(kept[-1])
        return num_blocks <= self._num_free_blocks

    def _evict(self, victim: _Sequence) -> None:
        """Free the sequence's blocks: it is computed again."""
        self._num_free_blocks += victim.num_blocks
        self._backlog_tokens += min(victim.num_computed, victim.num_known)
        victim.num_known = max(victim.num_known, victim.num_computed)
        victim.num_computed = victim.num_blocks = 0
        self.num_preemptions += 1

    def _start_sequences(self) -> None:
        """Move what waits to the running sequences, as far as slots and blocks allow."""
        while self._waiting and len(self._running) < (self.model.max_sequences or float("inf")):
            sequence = self._waiting[0]
            if not sequence.num_blocks:
                num_blocks = self._blocks_of(sequence.num_known + 1)
                if not self._take_blocks(num_blocks) and self._running:
                    return
                self._num_free_blocks -= num_blocks
                sequence.num_blocks = num_blocks
            self._running.append(self._waiting.popleft())

    def _grow(self, decodes: Iterable[_Sequence]) -> None:
        """Give each the block for its next token; the youngest sequences lose theirs when there is none."""
        for sequence in decodes:
            if not sequence.num_blocks or self._blocks_of(sequence.num_computed + 1) <= sequence.num_blocks:
                continue
            while not self._take_blocks(1) and self._running[-1] is not sequence:
                victim = self._running.pop()
                self._evict(victim)
                self._waiting.appendleft(victim)
            self._num_free_blocks -= 1
            sequence.num_blocks += 1

    def _end_step(self, decodes: list[_Sequence], chunks: list[tuple[_Sequence, int]]) -> None:
        self._step = None
        news = StepNews()
        for sequence in decodes:
            sequence.num_computed += 1
            self._sample(sequence, news)
        for sequence, num_tokens in chunks:
            sequence.num_computed += num_tokens
            self._backlog_tokens -= num_tokens
            if sequence.is_prefilled:
                self._sample(sequence, news)
        self._grant()
        self._begin_step()
        self._on_step(self, self.queue_state(), news)

    def _sample(self, sequence: _Sequence, news: StepNews) -> None:
        request = sequence.request
        sequence.num_sampled += 1
        if sequence.num_sampled == 1:
            news.first.append(request)
        if sequence.num_sampled >= request.num_output:
            news.ended.append(request)
            self._release(sequence)
            if sequence.decode_id:
                self._peers[sequence.decode_id].forget(sequence)
        elif sequence.decode_id:
            self._hand_over(sequence)

    def _hand_over(self, sequence: _Sequence) -> None:
        decode = self._peers[sequence.decode_id]
        sequence.decode_id = ""
        self._release(sequence)
        delay_s = NETWORK_S + sequence.num_known * self.model.transfer_s
        self._events.after(delay_s, lambda: decode.join(sequence))

    def _release(self, sequence: _Sequence) -> None:
        self._running.remove(sequence)
        self._num_free_blocks += sequence.num_blocks
        sequence.num_blocks = 0

    def _blocks_of(self, num_tokens: int) -> int:
        return -(-num_tokens // self.model.block_tokens)
