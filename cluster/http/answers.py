"""What answers to generating requests are made of: the output of each sample, usage, log-probabilities."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import msgspec

from cluster.http.errors import HttpProblem
from cluster.proto.tandem.v1 import inference_pb2 as pb

FINISH_NAMES: Mapping[int, str] = {
    pb.FINISH_REASON_STOP: "stop",
    pb.FINISH_REASON_LENGTH: "length",
    pb.FINISH_REASON_TOOL_CALLS: "tool_calls",
    pb.FINISH_REASON_CONTENT_FILTER: "content_filter",
    pb.FINISH_REASON_ABORT: "stop",
}

encode = msgspec.json.Encoder().encode


class Answer(Protocol):
    """Makes the body of one answer from what its calls of `Generate` bring. A request with several prompts
    has one call for each; `number` counts them."""

    def take(self, number: int, response: pb.GenerateResponse) -> bytes:
        """Take a message; return the events that it makes in a stream."""

    def last(self) -> bytes:
        """Return the events that end the stream, after the last message of all calls."""

    def failed(self, problem: HttpProblem) -> bytes:
        """Return the events of a stream that breaks off."""

    def whole(self) -> bytes:
        """Return the body of an answer that is no stream."""


class Maker(msgspec.Struct):
    """What an answer says of itself."""

    # "" until the request is accepted.
    request_id: str
    created: int
    model: str


# ----------------------------------------------------------------------------------------------- usage


class PromptDetails(msgspec.Struct):
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
    )


# ---------------------------------------------------------------------------------------------- output


@dataclass(slots=True)
class ToolCallOutput:
    """A tool call, as much as there is of it."""

    id: str = ""
    name: str = ""
    arguments: list[str] = field(default_factory=list)


@dataclass(slots=True)
class SampleAnswer:
    """What one sample has brought."""

    texts: list[str] = field(default_factory=list)
    reasoning: list[str] = field(default_factory=list)
    tool_calls: dict[int, ToolCallOutput] = field(default_factory=dict)
    logprobs: list[pb.TokenLogprob] = field(default_factory=list)
    finish: str = ""
    matched_stop: str | int | None = None

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
        self.logprobs.extend(delta.logprobs)
        if delta.finish_reason:
            self.finish = FINISH_NAMES[delta.finish_reason]
            self.matched_stop = matched_stop(delta)

    @property
    def text(self) -> str:
        return "".join(self.texts)


@dataclass(slots=True)
class CallOutput:
    """What one call of `Generate` has brought."""

    request_id: str = ""
    prompt: list[pb.PromptPart] = field(default_factory=list)
    samples: dict[int, SampleAnswer] = field(default_factory=dict)
    usage: pb.Usage = field(default_factory=pb.Usage)

    def add(self, response: pb.GenerateResponse) -> None:
        """Append a message."""
        kind = response.WhichOneof("event")
        if kind == "delta":
            self.sample(response.delta.sample).add(response.delta)
        elif kind == "accepted":
            self.request_id = response.accepted.request_id
            self.usage.prompt_tokens = response.accepted.num_prompt_tokens
        elif kind == "prompt":
            self.prompt.append(response.prompt)
        elif kind == "finished":
            self.usage = response.finished.usage

    def sample(self, index: int) -> SampleAnswer:
        """Return the output of a sample, empty where there is none yet."""
        return self.samples.setdefault(index, SampleAnswer())

    def in_order(self) -> list[tuple[int, SampleAnswer]]:
        """Return the samples by their numbers."""
        return sorted(self.samples.items())

    @property
    def prompt_text(self) -> str:
        return "".join(part.text for part in self.prompt)

    @property
    def prompt_logprobs(self) -> list[pb.TokenLogprob]:
        return [item for part in self.prompt for item in part.logprobs]


def split_calls(
    delta: pb.Delta,
) -> tuple[Sequence[pb.ToolCallDelta], Sequence[pb.ToolCallDelta]]:
    """Return the parts of a call that began in an earlier delta, which come before the text of this one, and
    those of calls that begin in this one, which come behind it."""
    calls = list(delta.tool_calls)
    num_continued = next((place for place, part in enumerate(calls) if part.name), len(calls))
    return calls[:num_continued], calls[num_continued:]


def matched_stop(delta: pb.Delta) -> str | int | None:
    """Return what of the request's stops ended the sample; None: the model's own end, or another reason."""
    if not delta.HasField("matched_stop"):
        return None
    stop = delta.matched_stop
    return str(stop.text) if stop.WhichOneof("stop") == "text" else int(stop.token_id)


# ------------------------------------------------------------------------------------- log-probabilities


class TopLogprob(msgspec.Struct):
    token: str
    logprob: float
    bytes: list[int] | None


class ContentLogprob(msgspec.Struct):
    """Of a token of a chat's answer."""

    token: str
    logprob: float
    bytes: list[int] | None
    top_logprobs: list[TopLogprob]


class RankedLogprob(msgspec.Struct):
    """vLLM's: of a token of a prompt; `rank` counts from 1, None: it is not among those that were asked."""

    logprob: float
    rank: int | None
    decoded_token: str


def content_logprobs(items: Iterable[pb.TokenLogprob]) -> list[ContentLogprob]:
    """Return the log-probabilities of output as chats have them."""
    return [
        ContentLogprob(
            token=item.text,
            logprob=item.logprob,
            bytes=list(item.token_bytes),
            top_logprobs=[TopLogprob(top.text, top.logprob, list(top.token_bytes)) for top in item.top],
        )
        for item in items
    ]


def ranked_logprobs(items: Sequence[pb.TokenLogprob]) -> list[dict[str, RankedLogprob] | None]:
    """Return the log-probabilities of a prompt as vLLM has them; the first token has none."""
    return [_ranked(item) if item.HasField("logprob") else None for item in items]


def _ranked(item: pb.TokenLogprob) -> dict[str, RankedLogprob]:
    ranked = {
        str(top.token_id): RankedLogprob(top.logprob, rank, top.text) for rank, top in enumerate(item.top, 1)
    }
    ranked.setdefault(str(item.token_id), RankedLogprob(item.logprob, None, item.text))
    return ranked
