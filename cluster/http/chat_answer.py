"""The answer of a chat completion, whole or as a stream of events."""

from __future__ import annotations

import msgspec
from msgspec import UNSET, UnsetType

from cluster.http.answers import FINISH_NAMES, Maker, encode
from cluster.http.call_output import CallOutput, SampleAnswer, matched_stop
from cluster.http.chat_prompt import content_texts
from cluster.http.errors import HttpProblem, openai_error
from cluster.http.logprobs import (
    ContentLogprob,
    ContentLogprobs,
    NoLogprobs,
    RankedLogprob,
    RankedLogprobs,
    content_logprobs,
)
from cluster.http.schemas import ChatRequest
from cluster.http.sse import DONE, event
from cluster.http.usage import Usage, openai_usage
from cluster.proto.tandem.v1 import inference_pb2 as pb


class _Function(msgspec.Struct, omit_defaults=True):
    name: str | UnsetType = UNSET
    arguments: str | UnsetType = UNSET


class _ToolCall(msgspec.Struct):
    id: str
    function: _Function
    type: str = "function"


class _ToolCallDelta(msgspec.Struct):
    index: int
    function: _Function
    id: str | UnsetType = UNSET
    type: str | UnsetType = UNSET


class _Message(msgspec.Struct):
    role: str
    # Null where there are calls alone.
    content: str | None
    refusal: None = None
    tool_calls: list[_ToolCall] | UnsetType = UNSET
    # A field of vLLM: the model's reasoning, where its output shows that.
    reasoning_content: str | UnsetType = UNSET


class _Logprobs(msgspec.Struct):
    content: list[ContentLogprob]
    refusal: None = None


class _Choice(msgspec.Struct):
    index: int
    message: _Message
    logprobs: _Logprobs | None
    # One of stop, length, tool_calls and content_filter.
    finish_reason: str
    # A field of vLLM: the entry of `stop` or `stop_token_ids` that ended the output.
    stop_reason: str | int | UnsetType = UNSET


class _Completion(msgspec.Struct):
    # An id that ends with the id of the request.
    id: str
    # The time in seconds of Unix time.
    created: int
    model: str
    choices: list[_Choice]
    usage: Usage
    object: str = "chat.completion"
    # A field of vLLM: log-probabilities of each token of the prompt, by the ids of tokens.
    prompt_logprobs: list[dict[str, RankedLogprob] | None] | UnsetType = UNSET


class _Delta(msgspec.Struct, omit_defaults=True):
    role: str | UnsetType = UNSET
    content: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[_ToolCallDelta] | UnsetType = UNSET


class _ChunkChoice(msgspec.Struct):
    index: int
    delta: _Delta
    logprobs: _Logprobs | None = None
    finish_reason: str | None = None
    stop_reason: str | int | UnsetType = UNSET


class _Chunk(msgspec.Struct):
    id: str
    created: int
    model: str
    choices: list[_ChunkChoice]
    object: str = "chat.completion.chunk"
    # With include_usage, in the last chunk; with continuous_usage_stats, so far, in each.
    usage: Usage | UnsetType | None = UNSET
    # A field of vLLM, in the first chunk.
    prompt_logprobs: list[dict[str, RankedLogprob] | None] | UnsetType = UNSET


class ChatAnswer:
    """The answer to one chat, as a stream of chunks or as a whole."""

    def __init__(self, body: ChatRequest, maker: Maker) -> None:
        self._maker = maker
        self._has_logprobs = bool(body.logprobs)
        self._of_prompt = None if body.prompt_logprobs is None else RankedLogprobs()
        kept = () if self._of_prompt is None else (self._of_prompt,)
        self._output: CallOutput[ContentLogprobs | NoLogprobs] = CallOutput(
            ContentLogprobs if self._has_logprobs else NoLogprobs, *kept
        )
        self._streams = bool(body.stream)
        options = body.stream_options
        self._include_usage = options is not None and bool(options.include_usage)
        self._echoed = _echoed(body)
        # Samples whose first chunk was sent.
        self._begun: set[int] = set()

    def take(self, number: int, response: pb.GenerateResponse) -> bytes:
        kind = response.WhichOneof("event")
        if kind == "delta" and self._streams:
            return self._chunk_of(response.delta)
        self._output.add(response)
        if kind == "accepted":
            self._maker.request_id = response.accepted.request_id
        return b""

    def last(self) -> bytes:
        chunks = [DONE]
        if self._include_usage:
            chunk = self._chunk([])
            chunk.usage = openai_usage([self._output.usage])
            chunks.insert(0, event(encode(chunk)))
        return b"".join(chunks)

    def failed(self, problem: HttpProblem) -> bytes:
        return event(openai_error(problem))

    def whole(self) -> bytes:
        completion = _Completion(
            id=self._id,
            created=self._maker.created,
            model=self._maker.model,
            choices=[self._choice(index, sample) for index, sample in self._output.in_order()],
            usage=openai_usage([self._output.usage]),
        )
        if self._of_prompt is not None:
            completion.prompt_logprobs = self._of_prompt.items
        return encode(completion)

    @property
    def num_kept_bytes(self) -> int:
        return self._output.num_bytes

    @property
    def _id(self) -> str:
        return f"chatcmpl-{self._maker.request_id}"

    def _chunk_of(self, delta: pb.Delta) -> bytes:
        """Return the events of a delta: none where it brings nothing to see."""
        finish = FINISH_NAMES.get(delta.finish_reason)
        first = b""
        if delta.sample not in self._begun:
            self._begun.add(delta.sample)
            begin = self._chunk([_ChunkChoice(delta.sample, _Delta(role="assistant", content=self._echoed))])
            if self._of_prompt is not None:
                begin.prompt_logprobs = self._of_prompt.items
            first = event(encode(begin))
        shown = _Delta()
        if delta.text:
            shown.content = delta.text
        if delta.reasoning:
            shown.reasoning_content = delta.reasoning
        if delta.tool_calls:
            shown.tool_calls = [_tool_call_delta(part) for part in delta.tool_calls]
        has_logprobs = self._has_logprobs and len(delta.logprobs) > 0
        if finish is None and not (delta.text or delta.reasoning or delta.tool_calls or has_logprobs):
            return first
        choice = _ChunkChoice(delta.sample, shown, finish_reason=finish)
        if has_logprobs:
            choice.logprobs = _Logprobs(content_logprobs(delta.logprobs))
        if (stop := matched_stop(delta)) is not None:
            choice.stop_reason = stop
        chunk = self._chunk([choice])
        if delta.HasField("usage"):
            chunk.usage = openai_usage([delta.usage])
        return first + event(encode(chunk))

    def _chunk(self, choices: list[_ChunkChoice]) -> _Chunk:
        chunk = _Chunk(self._id, self._maker.created, self._maker.model, choices)
        if self._include_usage:
            chunk.usage = None
        return chunk

    def _choice(self, index: int, sample: SampleAnswer[ContentLogprobs | NoLogprobs]) -> _Choice:
        text = self._echoed + sample.text
        message = _Message("assistant", text if text or not sample.tool_calls else None)
        if sample.tool_calls:
            message.tool_calls = [
                _ToolCall(call.id, _Function(call.name, "".join(call.arguments)))
                for _, call in sorted(sample.tool_calls.items())
            ]
        if sample.reasoning:
            message.reasoning_content = "".join(sample.reasoning)
        logprobs = None
        if isinstance(sample.logprobs, ContentLogprobs):
            logprobs = _Logprobs(sample.logprobs.items)
        choice = _Choice(index, message, logprobs, sample.finish)
        if sample.matched_stop is not None:
            choice.stop_reason = sample.matched_stop
        return choice


def _tool_call_delta(part: pb.ToolCallDelta) -> _ToolCallDelta:
    function = _Function(arguments=part.arguments)
    if part.name:
        function.name = part.name
    delta = _ToolCallDelta(part.index, function)
    if part.id:
        delta.id, delta.type = part.id, "function"
    return delta


def _echoed(body: ChatRequest) -> str:
    """Return the text that `echo` puts before the answer: the last message, where it is the assistant's."""
    if not body.echo or not body.messages or body.messages[-1].role != "assistant":
        return ""
    return "".join(content_texts(body.messages[-1].content, "messages"))
