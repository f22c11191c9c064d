"""One record for each request on a replica, which the stages of the request extend.

The record exists from the `Submission` (or from the hand-over that joined here) until the last sample ends,
the attempt fails or is cancelled, or the request continues at another replica. `Scheduler` keeps apart what
it computes, because the simulator runs it without a replica.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from typing import Protocol

from kvtransfer.blocks.keys import TOKEN_BYTES
from kvtransfer.messages import ReplicaIdentity
from kvtransfer.protocol.actions import Pushed, PushEnded
from workers.interfaces import EngineControl, GatewayNews
from workers.messages.link import (
    GatewayKey,
    HandOverTarget,
    News,
    PromptEmbedding,
    RequestFailed,
    RequestKey,
    Submission,
    TokenDelta,
)
from workers.messages.sampling import MAX_PROMPT_LOGPROBS, Grammar, SamplingParams


class Push(Protocol):
    """The transfer of one request's KV to another replica, and what follows from each of its events.

    `KvSender` owns every push. A `PromptPush` hands over a prompt, a `Migration` hands over a running stream.
    """

    @property
    def target(self) -> HandOverTarget:
        """The replica that receives the KV."""

    def peer_ready(self) -> None:
        """Take in that the path to the target is measured."""

    def peer_failed(self, reason: str) -> None:
        """Take in that there is no path to the target; called before pushes to it are stopped."""

    def granted(self) -> None:
        """Take in that the target has reserved blocks."""

    def pushed(self, pushed: Pushed) -> None:
        """Take in that every rank has written a chunk."""

    def handed_over(self) -> None:
        """Take in that all KV is written, and the state of the request is being sent."""

    def ended(self, ended: PushEnded) -> None:
        """Take in that the landing is over: joined at the target, or not."""


@dataclass(slots=True, eq=False)
class ActiveRequest:
    """A replica's record of one request, apart from what the scheduler computes of it."""

    key: RequestKey
    gateway: GatewayKey
    # Whether the prompt is handed over to another replica, which decodes.
    decodes_remotely: bool
    open_samples: set[int]
    push: Push | None = None
    # Named moments of the prompt's chunks and pushes, on this replica's clock.
    trace: list[tuple[str, float]] = field(default_factory=list)


class RequestTable:
    """All requests of one replica by (request id, attempt), and their news for the gateways."""

    def __init__(self, gateways: GatewayNews, control: EngineControl) -> None:
        self._gateways = gateways
        self._control = control
        self._records: dict[RequestKey, ActiveRequest] = {}

    def __len__(self) -> int:
        return len(self._records)

    def __contains__(self, key: RequestKey) -> bool:
        return key in self._records

    def __iter__(self) -> Iterator[ActiveRequest]:
        """Yield the requests of this moment; they may end while they are visited."""
        return iter(list(self._records.values()))

    def get(self, key: RequestKey) -> ActiveRequest | None:
        """Return the request, if it is still here."""
        return self._records.get(key)

    def pushing_to(self, peer: ReplicaIdentity) -> list[tuple[ActiveRequest, Push]]:
        """Return the requests whose KV goes to this replica."""
        return [
            (record, record.push)
            for record in self._records.values()
            if record.push is not None and record.push.target.identity == peer
        ]

    def add(self, submission: Submission, gateway: GatewayKey) -> ActiveRequest:
        """Enter a request that the scheduler has accepted."""
        key = submission.request_id, submission.attempt
        samples = {sample.index for sample in submission.samples}
        record = ActiveRequest(key, gateway, submission.decode is not None, samples)
        self._records[key] = record
        return record

    def remove(self, key: RequestKey) -> ActiveRequest | None:
        """Forget the request, which is over here or continues at another replica; return it if it was
        here."""
        record = self._records.pop(key, None)
        self._control.wake()
        return record

    def post(self, key: RequestKey, news: News) -> None:
        """Send news of a request to its gateway, if the request is still here."""
        record = self._records.get(key)
        if record is not None:
            self._gateways.post(record.gateway, news)

    def post_delta(self, delta: TokenDelta) -> ActiveRequest | None:
        """Send tokens of one sample. Return the request when that was the end of its last sample here."""
        key = delta.request_id, delta.attempt
        record = self._records.get(key)
        if record is None:
            return None
        self._gateways.post(record.gateway, delta)
        if delta.finish:
            record.open_samples.discard(delta.sample)
        if record.open_samples or record.decodes_remotely:
            return None
        del self._records[key]
        return record

    def post_embedding(self, embedding: PromptEmbedding) -> None:
        """Send the embedding of a prompt, which is the end of its request."""
        record = self._records.pop((embedding.request_id, embedding.attempt), None)
        if record is not None:
            self._gateways.post(record.gateway, embedding)

    def fail(self, failure: RequestFailed) -> None:
        """End the attempt and report the failure to its gateway."""
        record = self.remove((failure.request_id, failure.attempt))
        if record is not None:
            self._gateways.post(record.gateway, failure)

    def fail_all(self, reason: str, suspects: Collection[RequestKey]) -> None:
        """End every attempt; one of the `suspects` may have caused the fault."""
        for key, record in self._records.items():
            failure = RequestFailed(*key, "internal", reason, suspect=key in suspects)
            self._gateways.post(record.gateway, failure)
        self._records.clear()


# ----------------------------------------------------------------------------------------------
# What a submission must be, whoever sends it: a replica outlives a sender that
# knows the secret and is wrong.

_MAX_SEED = (1 << 64) - 1
_MAX_INT32 = (1 << 31) - 1
_MAX_TOKEN_ID = (1 << 32) - 1
# The largest number of single precision, in which tokens are chosen.
_MAX_FLOAT32 = 3.4e38
_FLOATS = (
    "temperature",
    "top_p",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
)


def find_problem(submission: Submission, vocab_size: int) -> str:
    """Return what is wrong with the submission, beginning with the field; "" where nothing is."""
    return next(_problems(submission, vocab_size), "")


def _problems(submission: Submission, vocab_size: int) -> Iterator[str]:
    samples = submission.samples
    yield from _token_problems("prompt", submission.prompt, vocab_size)
    for sample in samples:
        yield from _token_problems(f"samples[{sample.index}].output", sample.output, vocab_size)
        if not 0 <= sample.seed <= _MAX_SEED:
            yield f"samples[{sample.index}].seed: {sample.seed} is not from 0 to {_MAX_SEED}"
    if len({sample.index for sample in samples}) < len(samples):
        yield "samples: an index comes twice"
    if any(sample.index < 0 for sample in samples):
        yield "samples: an index is negative"
    if len(samples) > 1 and len({len(sample.output) for sample in samples}) > 1:
        yield "samples: their outputs differ in length"
    if abs(submission.facts.priority) > _MAX_INT32:
        yield f"priority: {submission.facts.priority} is beyond {_MAX_INT32}"
    for name, time_s in (("deadline_s", submission.deadline_s), ("due_s", submission.due_s)):
        if time_s is not None and not math.isfinite(time_s):
            yield f"{name}: {time_s} is no time"
    if submission.grammar is not None:
        yield from _grammar_problems(submission.grammar, submission.sampling)
    yield from _pooling_problems(submission)
    yield from _sampling_problems(submission.sampling, vocab_size)


def _pooling_problems(submission: Submission) -> Iterator[str]:
    """Yield the parameters with which an embedding of a prompt cannot be asked for."""
    if submission.facts.pooling is None:
        return
    if len(submission.samples) != 1 or submission.samples[0].output:
        yield "pooling: a prompt that is embedded has one sample, without output"
    if submission.decode is not None:
        yield "pooling: a prompt that is embedded is not handed over; leave out decode"
    if submission.grammar is not None:
        yield "pooling: a prompt that is embedded has no output that a grammar could describe"


def _token_problems(field: str, tokens: bytes, vocab_size: int) -> Iterator[str]:
    if len(tokens) % TOKEN_BYTES:
        yield f"{field}: {len(tokens)} bytes are no token ids"
    elif max(memoryview(tokens).cast("I"), default=0) >= vocab_size:
        yield f"{field}: a token id is not below {vocab_size}"


def _grammar_problems(grammar: Grammar, sampling: SamplingParams) -> Iterator[str]:
    if problem := grammar.find_problem():
        yield f"grammar.{problem}"
    if sampling.ignore_eos:
        yield "sampling.ignore_eos: not with a grammar, which says where the output ends"


def _sampling_problems(sampling: SamplingParams, vocab_size: int) -> Iterator[str]:
    for name in _FLOATS:
        value = getattr(sampling, name)
        if not abs(value) <= _MAX_FLOAT32:
            yield f"sampling.{name}: {value} is no number of single precision"
    if sampling.temperature < 0:
        yield f"sampling.temperature: {sampling.temperature} is below 0"
    if sampling.repetition_penalty <= 0:
        yield f"sampling.repetition_penalty: {sampling.repetition_penalty} is not above 0"
    for name in ("top_p", "min_p"):
        if not 0 <= getattr(sampling, name) <= 1:
            yield f"sampling.{name}: {getattr(sampling, name)} is not from 0 to 1"
    for name in ("top_k", "min_tokens"):
        if not 0 <= getattr(sampling, name) <= _MAX_INT32:
            yield f"sampling.{name}: {getattr(sampling, name)} is not from 0 to {_MAX_INT32}"
    if sampling.num_logprobs is not None and not 0 <= sampling.num_logprobs <= vocab_size:
        yield f"sampling.num_logprobs: {sampling.num_logprobs} is not from 0 to {vocab_size}"
    most = min(MAX_PROMPT_LOGPROBS, vocab_size)
    if sampling.num_prompt_logprobs is not None and not 0 <= sampling.num_prompt_logprobs <= most:
        yield f"sampling.num_prompt_logprobs: {sampling.num_prompt_logprobs} is not from 0 to {most}"
    # The vocabulary of a tokenizer may be larger than the model's.
    for token, bias in sampling.logit_bias.items():
        if not 0 <= token <= _MAX_TOKEN_ID or not abs(bias) <= _MAX_FLOAT32:
            yield f"sampling.logit_bias: {token}: {bias} is no bias of a token"
    for token in sampling.stop_token_ids:
        if not 0 <= token <= _MAX_TOKEN_ID:
            yield f"sampling.stop_token_ids: {token} is no token"
