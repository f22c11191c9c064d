"""The datasets of `tandem bench serve`: recorded conversations, traces, drawn sessions and drawn lengths.

Files are read as far as requests are wanted of them, line by line; a line that cannot be used is named by its
number.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

import numpy as np

from cluster.api.generate_options import Turn
from cluster.bench.conversations import QuestionAnswer, read_conversations
from cluster.bench.request_lengths import Lengths, read_lengths
from cluster.bench.serving_load import PlannedTurn, Session, poisson_arrivals_s
from cluster.bench.trace_file import MAX_LENGTH_TOKENS, TRACE_BLOCK_TOKENS, read_trace
from cluster.errors import BenchError

Kind = Literal["sharegpt", "mooncake", "sessions", "lengths"]
_FILE_KINDS: dict[str, Kind] = {"sharegpt": "sharegpt", "mooncake": "mooncake", "lengths": "lengths"}
LengthKind = Literal["fixed", "uniform", "lognormal"]
# Of a text whose tokens are not counted: about what English has.
BYTES_PER_TOKEN = 4

# What numbers are drawn for; each has a seed of its own.
_PREFIX, _PROMPT, _ANSWER, _LENGTHS, _THINK, _BLOCK = range(6)


class Dataset(NamedTuple):
    """What `--dataset` names."""

    kind: Kind
    # A file, or of `lengths` a distribution.
    name: str = ""

    @property
    def is_file(self) -> bool:
        """Whether `name` is a file's."""
        return self.kind in ("sharegpt", "mooncake") or self.is_table

    @property
    def is_table(self) -> bool:
        """Whether lengths come from a file."""
        return self.kind == "lengths" and self.name not in get_args(LengthKind)


def parse_dataset(text: str) -> Dataset:
    """Return what the text names: `sharegpt:FILE`, `mooncake:FILE`, `sessions`, `lengths:KIND` or
    `lengths:FILE`; `ValueError` says what is expected."""
    kind, _, name = text.partition(":")
    if kind == "sessions" and not name:
        return Dataset("sessions")
    if name and (known := _FILE_KINDS.get(kind)) is not None:
        dataset = Dataset(known, name)
        if dataset.is_table and name.isalpha() and not Path(name).exists():
            raise ValueError(f"{name[:200]!r} is none of {', '.join(get_args(LengthKind))}, and no file")
        return dataset
    raise ValueError(
        "expected sharegpt:FILE, mooncake:FILE, sessions, or lengths:KIND with fixed, uniform, lognormal or "
        f"a CSV file, not {text[:200]!r}"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class DatasetSettings:
    """What is wanted of a dataset. Which settings a kind uses: `bench_serve.py` refuses the others."""

    num_requests: int = 64
    input_tokens: int = 256
    # Of recorded answers: the most.
    output_tokens: int | None = None
    shared_prefix_tokens: int = 0
    num_groups: int = 1
    # Of `uniform`: lengths are up to so much of the mean away; of `lognormal`: sigma.
    length_spread: float = 0.5
    num_sessions: int = 8
    num_turns: int | None = None
    think_s: float = 0.0
    time_scale: float = 1.0


class RunSettings(NamedTuple):
    """Of one run, of which a sweep has several."""

    rate_per_s: float
    seed: int
    vocab_size: int
    # Of the model; 0: not known.
    context_tokens: int


class Load(NamedTuple):
    """What a run sends."""

    sessions: Sequence[Session]
    # Requests that do not fit into the model's context.
    num_left_out: int = 0

    @property
    def num_requests(self) -> int:
        """Of all sessions."""
        return sum(len(session.turns) for session in self.sessions)


def open_dataset(dataset: Dataset, settings: DatasetSettings) -> Callable[[RunSettings], Load]:
    """Return what makes the load of a run. The runs of a sweep read on in the file of conversations;
    `BenchError` names a file or a line that cannot be read."""
    if dataset.kind == "sharegpt":
        conversations = read_conversations(Path(dataset.name))
        return partial(_recorded, dataset.name, conversations, settings)
    if dataset.kind == "mooncake":
        return partial(_traced, Path(dataset.name), settings)
    if dataset.kind == "sessions":
        return partial(_drawn_sessions, settings)
    return partial(_of_lengths, dataset, settings)


def drawn_tokens(num: int, vocab_size: int, *key: int) -> list[int]:
    """Draw token ids; equal keys give equal ids."""
    return list(np.random.default_rng(key).integers(0, vocab_size, num).tolist())


# ----------------------------------------------------------------------------------------------
# Recorded conversations.


def _recorded(
    name: str, conversations: Iterator[list[QuestionAnswer]], settings: DatasetSettings, run: RunSettings
) -> Load:
    """Return the next conversations. A prompt has the recorded answers to the turns before it, so that the
    load is the same whatever the model says."""
    plans: list[list[PlannedTurn]] = []
    num_wanted, num_left_out = settings.num_requests, 0
    generator = np.random.default_rng((run.seed, _THINK))
    while num_wanted > 0 and (exchanges := next(conversations, None)) is not None:
        plan, num_past = _plan(exchanges[: settings.num_turns][:num_wanted], settings, run, generator)
        num_left_out += num_past
        num_wanted -= len(plan)
        if plan:
            plans.append(plan)
    if not plans:
        raise BenchError(f"{name} has no conversation for this run: too few, or none fits into the context")
    arrivals = poisson_arrivals_s(len(plans), run.rate_per_s, run.seed)
    return Load([Session(plan, at) for plan, at in zip(plans, arrivals, strict=True)], num_left_out)


def _plan(
    exchanges: Sequence[QuestionAnswer],
    settings: DatasetSettings,
    run: RunSettings,
    generator: np.random.Generator,
) -> tuple[list[PlannedTurn], int]:
    """Return the turns of a conversation that fit into the context, and how many do not."""
    turns: list[PlannedTurn] = []
    before: list[Turn] = []
    num_tokens = 0
    for exchange in exchanges:
        num_output = _num_tokens(exchange.answer)
        num_tokens += sum(_num_tokens(turn.content) for turn in exchange.asked) + num_output
        if run.context_tokens and num_tokens > run.context_tokens:
            break
        num_output = min(num_output, settings.output_tokens or num_output)
        think_s = float(generator.exponential(settings.think_s)) if turns and settings.think_s else 0.0
        turns.append(PlannedTurn(partial(list, [*before, *exchange.asked]), num_output, think_s))
        before = [Turn("assistant", exchange.answer)]
    return turns, len(exchanges) - len(turns)


def _num_tokens(text: str) -> int:
    return max(1, len(text.encode(errors="surrogatepass")) // BYTES_PER_TOKEN)


# ----------------------------------------------------------------------------------------------
# Traces.


def _traced(path: Path, settings: DatasetSettings, run: RunSettings) -> Load:
    """Return the trace's first requests, at their times."""
    sessions: list[Session] = []
    first_ms: float | None = None
    num_left_out = 0
    for request in read_trace(path):
        num_output = max(1, min(request.output_length, settings.output_tokens or request.output_length))
        if run.context_tokens and request.input_length + num_output > run.context_tokens:
            num_left_out += 1
            continue
        first_ms = request.timestamp_ms if first_ms is None else first_ms
        at_s = max(0.0, request.timestamp_ms - first_ms) / 1e3 * settings.time_scale
        make = partial(block_tokens, request.hash_ids, request.input_length, run.vocab_size, run.seed)
        sessions.append(Session((PlannedTurn(make, num_output),), at_s))
        if len(sessions) == settings.num_requests:
            break
    if not sessions:
        raise BenchError(f"{path} has no request that fits into the model's context")
    return Load(sessions, num_left_out)


def block_tokens(hash_ids: Sequence[int], num_tokens: int, vocab_size: int, seed: int) -> list[int]:
    """Return a prompt of so many tokens whose blocks are equal where their ids are."""
    blocks = (drawn_tokens(TRACE_BLOCK_TOKENS, vocab_size, seed, _BLOCK, block) for block in hash_ids)
    return list(itertools.islice(itertools.chain.from_iterable(blocks), num_tokens))


# ----------------------------------------------------------------------------------------------
# Drawn sessions.


def _drawn_sessions(settings: DatasetSettings, run: RunSettings) -> Load:
    """Return sessions of users who say `input_tokens` in each turn, after a system prompt that those of a
    group share."""
    num_turns = settings.num_turns or 4
    num_output = settings.output_tokens or 32
    most = settings.shared_prefix_tokens + num_turns * (settings.input_tokens + num_output)
    if run.context_tokens and most > run.context_tokens:
        raise BenchError(
            f"a session of {num_turns} turns has up to {most} tokens, the model's context "
            f"{run.context_tokens}: lower --turns, --input-tokens, --output-tokens or --shared-prefix"
        )
    think = np.random.default_rng((run.seed, _THINK))
    sessions = []
    for number, at in enumerate(poisson_arrivals_s(settings.num_sessions, run.rate_per_s, run.seed)):
        turns = []
        for turn in range(num_turns):
            new = partial(_new_tokens, settings, run, number, turn)
            think_s = float(think.exponential(settings.think_s)) if turn and settings.think_s else 0.0
            turns.append(PlannedTurn(new, num_output, think_s))
        sessions.append(Session(turns, at, partial(_stand_in, run, number)))
    return Load(sessions)


def _new_tokens(settings: DatasetSettings, run: RunSettings, session: int, turn: int) -> list[int]:
    tokens = drawn_tokens(settings.input_tokens, run.vocab_size, run.seed, _PROMPT, session, turn)
    if turn > 0:
        return tokens
    return [*_shared_prefix(settings, run, session, settings.shared_prefix_tokens), *tokens]


def _stand_in(run: RunSettings, session: int, num_tokens: int) -> list[int]:
    return drawn_tokens(num_tokens, run.vocab_size, run.seed, _ANSWER, session)


def _shared_prefix(settings: DatasetSettings, run: RunSettings, number: int, num_tokens: int) -> list[int]:
    return drawn_tokens(num_tokens, run.vocab_size, run.seed, _PREFIX, number % settings.num_groups)


# ----------------------------------------------------------------------------------------------
# Lengths.


def _of_lengths(dataset: Dataset, settings: DatasetSettings, run: RunSettings) -> Load:
    """Return requests of drawn tokens, whose lengths are drawn or read."""
    lengths: Iterable[Lengths]
    if dataset.is_table:
        lengths = itertools.islice(_repeated(Path(dataset.name)), settings.num_requests)
    else:
        lengths = drawn_lengths(dataset.name, settings, run.seed)
    turns = []
    num_left_out = 0
    for number, (num_input, num_output) in enumerate(lengths):
        if run.context_tokens and num_input + num_output > run.context_tokens:
            num_left_out += 1
            continue
        make = partial(_prompt_of_length, settings, run, number, num_input)
        turns.append(PlannedTurn(make, num_output))
    if not turns:
        raise BenchError("no request fits into the model's context: lower the lengths")
    arrivals = poisson_arrivals_s(len(turns), run.rate_per_s, run.seed)
    return Load([Session((turn,), at) for turn, at in zip(turns, arrivals, strict=True)], num_left_out)


def _prompt_of_length(settings: DatasetSettings, run: RunSettings, number: int, num_tokens: int) -> list[int]:
    prefix = _shared_prefix(settings, run, number, min(settings.shared_prefix_tokens, num_tokens))
    rest = drawn_tokens(num_tokens - len(prefix), run.vocab_size, run.seed, _PROMPT, number)
    return [*prefix, *rest]


def drawn_lengths(kind: str, settings: DatasetSettings, seed: int) -> list[Lengths]:
    """Draw the lengths of all requests; their means are those of the settings."""
    generator = np.random.default_rng((seed, _LENGTHS))
    num, spread = settings.num_requests, settings.length_spread

    def draw(mean: int) -> Any:
        if kind == "fixed":
            return np.full(num, mean)
        if kind == "uniform":
            return generator.uniform(mean * (1 - min(spread, 1.0)), mean * (1 + spread), num)
        return generator.lognormal(math.log(mean) - spread**2 / 2, spread, num)

    inputs, outputs = draw(settings.input_tokens), draw(settings.output_tokens or 32)
    both = np.clip(np.rint(np.stack([inputs, outputs], axis=1)), 1, MAX_LENGTH_TOKENS).astype(int)
    return [Lengths(*row) for row in both.tolist()]


def _repeated(path: Path) -> Iterator[Lengths]:
    """Yield the lengths of the file, again and again."""
    while True:
        found = False
        for lengths in read_lengths(path):
            found = True
            yield lengths
        if not found:
            raise BenchError(f"{path} has no lengths: expected lines of INPUT,OUTPUT")
