"""The answer of Anthropic's API, whole or as a stream of events."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
from msgspec import UNSET, UnsetType

from cluster.http.answers import Maker, encode
from cluster.http.call_output import CallOutput, SampleAnswer, matched_stop, split_calls
from cluster.http.errors import HttpProblem, anthropic_error
from cluster.http.logprobs import NoLogprobs
from cluster.http.messages_schemas import (
    MessagesRequest,
)
from cluster.http.sse import named_event
from cluster.http.usage import capped_max_tokens, num_cached
from cluster.proto.tandem.v1 import inference_pb2 as pb

_STOP_REASONS: Mapping[int, str] = {
    pb.FINISH_REASON_STOP: "end_turn",
    pb.FINISH_REASON_LENGTH: "max_tokens",
    pb.FINISH_REASON_TOOL_CALLS: "tool_use",
    pb.FINISH_REASON_CONTENT_FILTER: "refusal",
    pb.FINISH_REASON_ABORT: "end_turn",
}


class _Usage(msgspec.Struct):
    """Anthropic's: cached tokens are counted apart from `input_tokens`."""

    # The tokens of the prompt that were computed.
    input_tokens: int
    output_tokens: int
    # Always 0: caching costs nothing.
    cache_creation_input_tokens: int = 0
    # The tokens of the prompt that were not computed.
    cache_read_input_tokens: int = 0
    # The value to which max_tokens was cut, by the room in the context or because of the cluster's load.
    capped_max_tokens: int | UnsetType = UNSET


class _TextBlock(msgspec.Struct):
    text: str
    type: str = "text"


class _ThinkingBlock(msgspec.Struct):
    thinking: str
    # Always empty: nobody checks it.
    signature: str = ""
    type: str = "thinking"


class _ToolUseBlock(msgspec.Struct):
    id: str
    name: str
    input: msgspec.Raw
    type: str = "tool_use"


_Block = _TextBlock | _ThinkingBlock | _ToolUseBlock


class _Answer(msgspec.Struct):
    id: str
    model: str
    content: list[_Block]
    # One of end_turn, max_tokens, stop_sequence, tool_use and refusal.
    stop_reason: str | None
    # The stop sequence that ended the output.
    stop_sequence: str | None
    usage: _Usage
    type: str = "message"
    role: str = "assistant"


class _MessageStart(msgspec.Struct):
    message: _Answer
    type: str = "message_start"


class _BlockStart(msgspec.Struct):
    index: int
    content_block: _Block
    type: str = "content_block_start"


class _BlockDelta(msgspec.Struct):
    index: int
    # The `type`, and the addition to the text, the thinking, the signature or the JSON of a call's input.
    delta: dict[str, str]
    type: str = "content_block_delta"


class _BlockStop(msgspec.Struct):
    index: int
    type: str = "content_block_stop"


class _StopDelta(msgspec.Struct):
    stop_reason: str | None
    stop_sequence: str | None


class _MessageDelta(msgspec.Struct):
    delta: _StopDelta
    usage: _Usage
    type: str = "message_delta"


class _MessageStop(msgspec.Struct):
    type: str = "message_stop"


class TokenCount(msgspec.Struct):
    """The answer of /v1/messages/count_tokens."""

    input_tokens: int


_EMPTY = msgspec.Raw(b"{}")


class MessagesAnswer:
    """The answer to one request, as a stream of named events or as a whole."""

    def __init__(self, body: MessagesRequest, maker: Maker) -> None:
        self._maker = maker
        self._streams = bool(body.stream)
        self._output = CallOutput(NoLogprobs)
        self._stop_reason: str | None = None
        self._stop_sequence: str | None = None
        # The block that is being sent, by kind, and its number.
        self._open: str | None = None
        self._index = -1

    def take(self, number: int, response: pb.GenerateResponse) -> bytes:
        kind = response.WhichOneof("event")
        if kind == "delta":
            self._note_end(response.delta)
            if self._streams:
                return self._events_of(response.delta)
        self._output.add(response)
        if kind == "accepted":
            self._maker.request_id = response.accepted.request_id
        return b""

    def last(self) -> bytes:
        delta = _MessageDelta(_StopDelta(self._stop_reason, self._stop_sequence), self._usage())
        return self._closed() + _event(delta) + _event(_MessageStop())

    def failed(self, problem: HttpProblem) -> bytes:
        return named_event("error", anthropic_error(problem))

    def whole(self) -> bytes:
        answer = self._answer(_blocks(self._output.sample(0)))
        answer.stop_reason, answer.stop_sequence = self._stop_reason, self._stop_sequence
        return encode(answer)

    @property
    def num_kept_bytes(self) -> int:
        return self._output.num_bytes

    def _note_end(self, delta: pb.Delta) -> None:
        if not delta.finish_reason:
            return
        self._stop_reason = _STOP_REASONS[delta.finish_reason]
        stop = matched_stop(delta)
        if isinstance(stop, str):
            self._stop_sequence = stop
            if delta.finish_reason == pb.FINISH_REASON_STOP:  # else there are calls to answer
                self._stop_reason = "stop_sequence"

    def _events_of(self, delta: pb.Delta) -> bytes:
        events = []
        if self._index < 0:
            self._index = 0
            events.append(_event(_MessageStart(self._answer([]))))
        if delta.reasoning:
            events.append(
                self._part("thinking", _ThinkingBlock(""), "thinking_delta", "thinking", delta.reasoning)
            )
        continued, begun = split_calls(delta)
        events += map(self._call_part, continued)
        if delta.text:
            events.append(self._part("text", _TextBlock(""), "text_delta", "text", delta.text))
        events += map(self._call_part, begun)
        return b"".join(events)

    def _call_part(self, part: pb.ToolCallDelta) -> bytes:
        block = _ToolUseBlock(part.id, part.name, _EMPTY)
        return self._part(f"tool {part.index}", block, "input_json_delta", "partial_json", part.arguments)

    def _part(self, what: str, block: _Block, kind: str, field: str, text: str) -> bytes:
        """Return the events of a part of one block: it is opened, and the one before closed, where that is
        another."""
        events = b""
        if self._open != what:
            events = self._closed() + _event(_BlockStart(self._index, block))
            self._open = what
        return events + _event(_BlockDelta(self._index, {"type": kind, field: text})) if text else events

    def _closed(self) -> bytes:
        if self._open is None:
            return b""
        self._open = None
        self._index += 1
        return _event(_BlockStop(self._index - 1))

    def _answer(self, content: list[_Block]) -> _Answer:
        name = f"msg_{self._maker.request_id}"
        return _Answer(name, self._maker.model, content, None, None, self._usage())

    def _usage(self) -> _Usage:
        usage = self._output.usage
        cached = num_cached(usage)
        return _Usage(
            usage.prompt_tokens - cached,
            usage.completion_tokens,
            cache_read_input_tokens=cached,
            capped_max_tokens=capped_max_tokens(usage),
        )


def _blocks(sample: SampleAnswer[NoLogprobs]) -> list[_Block]:
    blocks: list[_Block] = []
    if sample.reasoning:
        blocks.append(_ThinkingBlock("".join(sample.reasoning)))
    if sample.text:
        blocks.append(_TextBlock(sample.text))
    for _, call in sorted(sample.tool_calls.items()):
        blocks.append(_ToolUseBlock(call.id, call.name, _arguments("".join(call.arguments))))
    return blocks


def _arguments(text: str) -> msgspec.Raw:
    """Return the arguments as JSON: as an empty object where the model has written none."""
    try:
        found = msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError):
        return _EMPTY
    return msgspec.Raw(text.encode()) if isinstance(found, dict) else _EMPTY


def _event(payload: Any) -> bytes:
    return named_event(payload.type, encode(payload))
