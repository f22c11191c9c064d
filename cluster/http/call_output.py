"""Collect the output of a call of `Generate`, sample by sample."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from cluster.http.answers import FINISH_NAMES
from cluster.http.logprobs import KeptLogprobs
from cluster.proto.tandem.v1 import inference_pb2 as pb

# Bytes of a string besides its characters, in a list.
_PART_BYTES = 64


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
    """The output of one call of `Generate`. `logprobs` makes what collects a sample's log-probabilities,
    `of_prompt` are those of the prompt's."""

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
