"""The parts of answers to generating requests: the output of each sample, and usage."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

import msgspec
from msgspec import UNSET, UnsetType

from cluster.http.errors import HttpProblem
from cluster.http.logprobs import KeptLogprobs
from cluster.proto.tandem.v1 import inference_pb2 as pb

FINISH_NAMES: Mapping[int, str] = {
    pb.FINISH_REASON_STOP: "stop",
    pb.FINISH_REASON_LENGTH: "length",
    pb.FINISH_REASON_TOOL_CALLS: "tool_calls",
    pb.FINISH_REASON_CONTENT_FILTER: "content_filter",
    pb.FINISH_REASON_ABORT: "stop",
}

encode = msgspec.json.Encoder().encode
# Bytes of a string besides its characters, in a list.
_PART_BYTES = 64


class Answer(Protocol):
    """Makes the body of one answer from the output of its calls of `Generate`. A request with several prompts
    has one call for each; `number` counts them."""

    def take(self, number: int, response: pb.GenerateResponse) -> bytes:
        """Take a message; return the events that it makes in a stream."""

    def last(self) -> bytes:
        """Return the events that end the stream, after the last message of all calls."""

    def failed(self, problem: HttpProblem) -> bytes:
        """Return the events of a stream that breaks off."""

    def whole(self) -> bytes:
        """Return the body of an answer that is no stream."""

    @property
    def num_kept_bytes(self) -> int:
        """The bytes that the answer holds of its calls' output."""


class Maker(msgspec.Struct):
    """The facts that an answer states about itself."""

    # "" until the request is accepted.
    request_id: str
    created: int
    model: str


# ----------------------------------------------------------------------------------------------- usage


class PromptDetails(msgspec.Struct):
    # Not computed: the caches of all tiers had them.
    cached_tokens: int


class CompletionDetails(msgspec.Struct):
    reasoning_tokens: int


class Usage(msgspec.Struct):
    """OpenAI's."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails
    completion_tokens_details: CompletionDetails
    # What the maximum of tokens was cut to, by the room in the context or because of the cluster's load.
    capped_max_tokens: int | UnsetType = UNSET


def capped_max_tokens(usage: pb.Usage) -> int | UnsetType:
    """Return the value to which `max_tokens` was cut; `UNSET`: it was not."""
    return usage.capped_max_tokens or UNSET


def num_cached(usage: pb.Usage) -> int:
    """Return the prompt's tokens that were not computed."""
    cached = usage.cached
    return int(cached.device + cached.dram + cached.nvme + cached.remote)


def openai_usage(usages: Iterable[pb.Usage]) -> Usage:
    """Return the usage of all calls together."""
    listed = list(usages)
    prompt = sum(it.prompt_tokens for it in listed)
    completion = sum(it.completion_tokens for it in listed)
    return Usage(
        prompt_tokens=prompt,
        completion_tokens=completion,
        total_tokens=prompt + completion,
        prompt_tokens_details=PromptDetails(sum(map(num_cached, listed))),
        completion_tokens_details=CompletionDetails(sum(it.reasoning_tokens for it in listed)),
        capped_max_tokens=next((it.capped_max_tokens for it in listed if it.capped_max_tokens), UNSET),
    )


# ---------------------------------------------------------------------------------------------- output


@dataclass(slots=True)
class ToolCallOutput:
    """A tool call, as much as there is of it."""

    id: str = ""
    name: str = ""
    arguments: list[str] = field(default_factory=list)


K = TypeVar("K", bound=KeptLogprobs)


class SampleAnswer(Generic[K]):
    """The output of one sample."""

    def __init__(self, logprobs: K) -> None:
        self.texts: list[str] = []
        self.reasoning: list[str] = []
        self.tool_calls: dict[int, ToolCallOutput] = {}
        self.logprobs = logprobs
        self.finish = ""
        self.matched_stop: str | int | None = None

    def add(self, delta: pb.Delta) -> None:
        """Append what is new."""
        if delta.text:
            self.texts.append(delta.text)
        if delta.reasoning:
            self.reasoning.append(delta.reasoning)
        for part in delta.tool_calls:
            call = self.tool_calls.setdefault(part.index, ToolCallOutput())
            call.id = call.id or part.id
            call.name = call.name or part.name
            call.arguments.append(part.arguments)
        self.logprobs.add(delta.logprobs)
        if delta.finish_reason:
            self.finish = FINISH_NAMES[delta.finish_reason]
            self.matched_stop = matched_stop(delta)

    @property
    def text(self) -> str:
        return "".join(self.texts)


class CallOutput(Generic[K]):
    """The output of one call of `Generate`. `logprobs` makes the keeper of a sample's log-probabilities,
    `of_prompt` are the keepers of the prompt's."""

    def __init__(self, logprobs: Callable[[], K], *of_prompt: KeptLogprobs) -> None:
        self.request_id = ""
        self.samples: dict[int, SampleAnswer[K]] = {}
        self.usage = pb.Usage()
        self._make_logprobs = logprobs
        self._of_prompt = of_prompt
        self._prompt_texts: list[str] = []
        # The bytes that are kept.
        self.num_bytes = 0

    def add(self, response: pb.GenerateResponse) -> None:
        """Append a message."""
        kind = response.WhichOneof("event")
        if kind == "delta":
            sample = self.sample(response.delta.sample)
            num_before = sample.logprobs.num_bytes
            sample.add(response.delta)
            self.num_bytes += num_text_bytes(response.delta) + sample.logprobs.num_bytes - num_before
        elif kind == "accepted":
            self.request_id = response.accepted.request_id
            self.usage.prompt_tokens = response.accepted.num_prompt_tokens
        elif kind == "prompt":
            self._prompt_texts.append(response.prompt.text)
            self.num_bytes += len(response.prompt.text)
            for kept in self._of_prompt:
                num_before = kept.num_bytes
                kept.add(response.prompt.logprobs)
                self.num_bytes += kept.num_bytes - num_before
        elif kind == "finished":
            self.usage = response.finished.usage

    def sample(self, index: int) -> SampleAnswer[K]:
        """Return the output of a sample, empty where there is none yet."""
        if index not in self.samples:
            self.samples[index] = SampleAnswer(self._make_logprobs())
        return self.samples[index]

    def in_order(self) -> list[tuple[int, SampleAnswer[K]]]:
        """Return the samples by their numbers."""
        return sorted(self.samples.items())

    @property
    def prompt_text(self) -> str:
        return "".join(self._prompt_texts)


def num_text_bytes(delta: pb.Delta) -> int:
    """Return the bytes that are kept of a delta, apart from its log-probabilities: a string for each text."""
    calls = sum(_PART_BYTES + len(part.arguments) for part in delta.tool_calls)
    texts = sum(_PART_BYTES + len(text) for text in (delta.text, delta.reasoning) if text)
    return calls + texts


def split_calls(
    delta: pb.Delta,
) -> tuple[Sequence[pb.ToolCallDelta], Sequence[pb.ToolCallDelta]]:
    """Return the parts of a call that began in an earlier delta, which come before the text of this one, and
    those of calls that begin in this one, which come behind it."""
    calls = list(delta.tool_calls)
    num_continued = next((place for place, part in enumerate(calls) if part.name), len(calls))
    return calls[:num_continued], calls[num_continued:]


def matched_stop(delta: pb.Delta) -> str | int | None:
    """Return the stop of the request that ended the sample; None: the model's own end, or another reason."""
    if not delta.HasField("matched_stop"):
        return None
    stop = delta.matched_stop
    return str(stop.text) if stop.WhichOneof("stop") == "text" else int(stop.token_id)
