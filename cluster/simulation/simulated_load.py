"""The load of a simulation: sessions of requests, from traces, conversations or drawn lengths.

Answers of the simulated cluster are one token again and again, another one for each request. The next prompt
of a session contains it, so that the KV of answers is found again as it would be.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np

from cluster.errors import BenchError
from cluster.simulation.simulated_call import CallRecord, SimulatedRequest
from cluster.simulation.simulated_cluster import SimulatedCluster
from cluster.simulation.trace_requests import TraceRequests
from kvtransfer.request_facts import ServiceClass

_BYTES_PER_TOKEN = 4
_VOCABULARY = 1 << 30
# Odd, so that multiplying by it modulo 2**32 takes no two numbers to one.
_SPREAD = np.uint32(0x9E3779B1)


class SimulatedTurn(NamedTuple):
    """One request of a session: what is new in its prompt, as token ids, made when its turn comes."""

    new: Callable[[], np.ndarray]
    num_output: int
    think_s: float = 0.0


class SimulatedSession(NamedTuple):
    """Requests of which each waits for the answer to the one before. The first arrives `at_s`."""

    at_s: float
    turns: Sequence[SimulatedTurn]
    tenant: str = "tenant"
    service_class: ServiceClass = "standard"

    def cut(self, most_output: int) -> SimulatedSession:
        """Return the session with answers of at most so many tokens."""
        turns = [turn._replace(num_output=min(turn.num_output, most_output)) for turn in self.turns]
        return self._replace(turns=turns)


class DrawnLengths(NamedTuple):
    """Tokens of prompts and of answers: lognormal with these means and this sigma of the logarithm (0:
    all alike), and at most ten times the mean."""

    input_tokens: int
    output_tokens: int
    sigma: float = 0.8

    def draw(self, source: np.random.Generator) -> tuple[int, int]:
        """Return the tokens of a prompt and of its answer."""
        lengths = []
        for mean in (self.input_tokens, self.output_tokens):
            drawn = mean * source.lognormal(-(self.sigma**2) / 2, self.sigma) if self.sigma else mean
            lengths.append(min(max(1, round(drawn)), 10 * mean))
        return lengths[0], lengths[1]


def drawn_sessions(
    lengths: DrawnLengths, rate_s: float, num_requests: int, seed: int, *, shared_tokens: int = 0
) -> Iterator[SimulatedSession]:
    """Yield requests that arrive at random (Poisson), `rate_s` a second. All prompts begin with the same
    `shared_tokens`."""
    source = np.random.default_rng(seed)
    at_s = 0.0
    for _ in range(num_requests):
        num_input, num_output = lengths.draw(source)
        new = partial(
            drawn_prompt, int(source.integers(1 << 62)), num_input, min(shared_tokens, num_input - 1)
        )
        yield SimulatedSession(at_s, (SimulatedTurn(new, num_output),))
        at_s += source.exponential(1 / rate_s)


def drawn_prompt(seed: int, num_tokens: int, num_shared: int = 0) -> np.ndarray:
    """Return the tokens of a prompt, of which the first `num_shared` are those of all others. With another
    seed (of 62 bits) the rest is another."""
    own = np.arange(num_tokens - num_shared, dtype=np.uint32)
    own += np.uint32(seed & 0x7FFFFFFF)
    own *= _SPREAD
    own ^= np.uint32(seed >> 31)
    own >>= np.uint32(2)
    return np.concatenate([np.arange(num_shared, dtype=np.uint32), own]) if num_shared else own


def trace_sessions(trace: TraceRequests) -> Iterator[SimulatedSession]:
    """Yield the requests of a trace at their times, whose blocks have the same tokens where their ids are
    equal."""
    for request in trace:
        new = partial(_repeated, request.ids, trace.block_tokens, request.num_input)
        turn = SimulatedTurn(new, max(1, request.num_output))
        yield SimulatedSession(request.at_s, (turn,), request.tenant, request.service_class)


def _repeated(ids: Sequence[int], block_tokens: int, num_tokens: int) -> np.ndarray:
    blocks = np.asarray(ids, dtype=np.uint64) % _VOCABULARY
    return np.repeat(blocks.astype(np.uint32), block_tokens)[:num_tokens]


def conversation_sessions(
    conversations: Iterable[Sequence[tuple[str, str]]], rate_s: float, seed: int, think_s: float
) -> Iterator[SimulatedSession]:
    """Yield conversations of (question, answer) in words, which begin at random, `rate_s` a second. A
    token is taken to be four bytes; equal texts have equal tokens."""
    source = np.random.default_rng(seed)
    at_s = 0.0
    for conversation in conversations:
        turns: list[SimulatedTurn] = []
        for question, answer in conversation:
            pause_s = source.exponential(think_s) if turns and think_s else 0.0
            turns.append(SimulatedTurn(partial(_of_text, question), _num_tokens(answer), pause_s))
        yield SimulatedSession(at_s, tuple(turns))
        at_s += source.exponential(1 / rate_s)


def _num_tokens(text: str) -> int:
    return max(1, len(text.encode(errors="surrogatepass")) // _BYTES_PER_TOKEN)


def _of_text(text: str) -> np.ndarray:
    seed = zlib.crc32(text.encode(errors="surrogatepass"))
    return np.random.default_rng(seed).integers(0, _VOCABULARY, _num_tokens(text), dtype=np.uint32)


class LoadDriver:
    """Lets the sessions of a load come and go."""

    def __init__(
        self, cluster: SimulatedCluster, sessions: Iterable[SimulatedSession], max_context_tokens: int
    ) -> None:
        """Requests longer than `max_context_tokens` with their answers are left out, with all that follow in
        their sessions."""
        self._cluster = cluster
        self._sessions = iter(sessions)
        self._begins_at = cluster.clock.now()
        self._max_context_tokens = max_context_tokens
        self._num_open = 0
        self._is_read = False
        self.num_left_out = 0
        # Whether all sessions have ended: looked at after every event.
        self.is_over = False

    def start(self) -> None:
        """Let the first session begin, and the others in their turn."""
        self._next()

    def _next(self) -> None:
        session = next(self._sessions, None)
        if session is None:
            self._is_read = True
            self.is_over = not self._num_open
            return
        self._num_open += 1

        def begin() -> None:
            self._next()
            self._ask(session, 0, b"")

        self._cluster.events.at(self._begins_at + session.at_s, begin)

    def _ask(self, session: SimulatedSession, number: int, before: bytes) -> None:
        turn = session.turns[number]
        prompt = before + turn.new().astype("<u4").tobytes()
        request = SimulatedRequest(prompt, turn.num_output, session.tenant, session.service_class)
        if request.num_prompt + turn.num_output > self._max_context_tokens:
            self.num_left_out += len(session.turns) - number
            self._close()
            return

        def ended(record: CallRecord) -> None:
            if not record.is_good or number + 1 == len(session.turns):
                self._close()
                return
            # The tokens of the answer, as its ranks have sampled them.
            said = prompt + (record.number + 1).to_bytes(4, "little") * record.num_output
            follow = partial(self._ask, session, number + 1, said)
            self._cluster.events.after(session.turns[number + 1].think_s, follow)

        self._cluster.arrive(request, ended)

    def _close(self) -> None:
        self._num_open -= 1
        self.is_over = self._is_read and not self._num_open


def prefill_token_s(trace: TraceRequests, num_replicas: int, utilization: float) -> float:
    """Return what a token of a prompt takes where replicas that compute all prompts of a trace, without any
    cache, are busy for this share of its time."""
    num_tokens, first_s, last_s = 0, math.inf, 0.0
    for request in trace:
        num_tokens += request.num_input
        first_s, last_s = min(first_s, request.at_s), max(last_s, request.at_s)
    if not num_tokens or last_s <= first_s:
        raise BenchError(
            "the trace has no two requests at different times, which would tell how fast prompts have to be "
            "computed: give --model and --hardware"
        )
    return utilization * num_replicas * (last_s - first_s) / num_tokens
