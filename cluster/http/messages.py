"""POST /v1/messages: Anthropic's API, from its request to a `GenerateRequest`, and from output to answer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from msgspec import UNSET, UnsetType

from cluster.http.answers import (
    CallOutput,
    Maker,
    SampleAnswer,
    capped_max_tokens,
    encode,
    matched_stop,
    num_cached,
    split_calls,
)
from cluster.http.chat import Translated
from cluster.http.errors import HttpProblem, Rename, anthropic_error, bad_field
from cluster.http.logprobs import NoLogprobs
from cluster.http.prompts import (
    DEFAULT_TEMPERATURE,
    add_function,
    renamer,
    schema_text,
    service_class,
    template_args,
)
from cluster.http.schemas import Body, Ignored, Int32, Refused
from cluster.http.sse import named_event
from cluster.proto.tandem.v1 import inference_pb2 as pb

_NAMES: Mapping[str, str] = {
    "prompt": "messages",
    "text": "messages",
    "chat": "messages",
    "chat.messages": "messages",
    "chat.tools": "tools",
    "chat.tool_choice": "tool_choice",
    "chat.template_args_json": "output_config.effort",
    "stop": "stop_sequences",
    "constraint": "output_config.format.schema",
    "constraint.json_schema": "output_config.format.schema",
}
_STOP_REASONS: Mapping[int, str] = {
    pb.FINISH_REASON_STOP: "end_turn",
    pb.FINISH_REASON_LENGTH: "max_tokens",
    pb.FINISH_REASON_TOOL_CALLS: "tool_use",
    pb.FINISH_REASON_CONTENT_FILTER: "refusal",
    pb.FINISH_REASON_ABORT: "end_turn",
}


# ---------------------------------------------------------------------------------------------- requests


class ContentBlock(Body, kw_only=True):
    """A part of a message, also as our own answers have it."""

    type: str
    text: str | None = None
    # A field of tool_use.
    id: str | None = None
    name: str | None = None
    input: dict[str, Any] | None = None
    # A field of tool_result.
    tool_use_id: str | None = None
    content: str | list[ContentBlock] | None = None
    is_error: bool | None = None
    # A field of thinking.
    thinking: str | None = None
    signature: Ignored = None
    data: Ignored = None
    # A field without effect.
    cache_control: Ignored = None
    citations: Ignored = None
    caller: Ignored = None
    source: Refused = None
    title: Refused = None
    context: Refused = None


class TurnMessage(Body, kw_only=True):
    """A turn of a chat."""

    role: str
    content: str | list[ContentBlock]


class OfferedTool(Body, kw_only=True):
    """A function that the model may call."""

    name: str
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    type: str | None = None
    strict: bool | None = None
    cache_control: Ignored = None
    eager_input_streaming: Ignored = None


class ChosenTool(Body, kw_only=True):
    type: str
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(Body, kw_only=True):
    """Whether the model is to think first, where its chat template can say so."""

    type: str
    budget_tokens: Ignored = None
    display: Ignored = None


class OutputFormat(Body, kw_only=True):
    """A schema that the output must follow."""

    type: str
    schema: dict[str, Any] | None = None


class OutputConfig(Body, kw_only=True):
    """The required form of the output, and the effort of the model for it."""

    effort: str | None = None
    format: OutputFormat | None = None


class CountTokensRequest(Body, kw_only=True):
    """POST /v1/messages/count_tokens."""

    messages: list[TurnMessage]
    model: str | None = None
    system: str | list[ContentBlock] | None = None
    tools: list[OfferedTool] | None = None
    tool_choice: ChosenTool | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    # A field without effect.
    cache_control: Ignored = None


class MessagesRequest(CountTokensRequest, kw_only=True):
    """POST /v1/messages."""

    max_tokens: Int32
    stream: bool | None = None
    stop_sequences: list[str] | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: Int32 | None = None
    service_tier: str | None = None
    # A field without effect.
    metadata: Ignored = None


def translate(body: MessagesRequest) -> Translated:
    """Return the call that answers the request; `InvalidRequestError` names fields that it cannot express."""
    request = pb.GenerateRequest(model=body.model or "", max_tokens=body.max_tokens)
    request.temperature = DEFAULT_TEMPERATURE if body.temperature is None else body.temperature
    if body.top_p is not None:
        request.top_p = body.top_p
    if body.top_k is not None:
        request.top_k = body.top_k
    request.stop.extend(body.stop_sequences or ())
    if body.service_tier not in (None, "auto", "standard_only"):
        raise bad_field("service_tier", "must be auto or standard_only, or absent")
    request.service_class = service_class(None)
    wanted = body.output_config.format if body.output_config is not None else None
    if wanted is not None:
        if wanted.type != "json_schema":
            raise bad_field("output_config.format.type", "must be json_schema")
        if wanted.schema is None:
            raise bad_field("output_config.format.schema", "is missing; send a JSON schema")
        request.constraint.json_schema = schema_text(wanted.schema)
    names = _fill_chat(request.chat, body)
    # Refused where it cannot be continued.
    request.chat.continue_final_message = _ends_with_assistant(request.chat)
    names["chat.continue_final_message"] = f"messages[{len(body.messages) - 1}]"
    return Translated([request], [renamer(names)])


def count_request(body: CountTokensRequest) -> tuple[pb.TokenizeRequest, Rename]:
    """Return the call that tokenizes the prompt of the request, and the names of its fields for errors."""
    request = pb.TokenizeRequest(model=body.model or "")
    names = _fill_chat(request.chat, body)
    if _ends_with_assistant(request.chat):
        last = request.chat.messages[-1]
        request.chat.continue_final_message = bool(last.content) and not last.tool_calls
    return request, renamer(names)


def _ends_with_assistant(chat: pb.ChatPrompt) -> bool:
    """Whether the assistant has begun with the answer."""
    return bool(chat.messages) and chat.messages[-1].role == pb.ROLE_ASSISTANT


def _fill_chat(chat: pb.ChatPrompt, body: CountTokensRequest) -> dict[str, str]:
    """Set the turns of the chat and its tools; return the names of fields for errors. The turns of the chat
    are not those of the request: there may be one of the system, and results of tools are turns as well."""
    names = dict(_NAMES)
    if body.system:
        names["chat.messages[0]"] = "system"
        turn = chat.messages.add(role=pb.ROLE_SYSTEM)
        for text in _texts(body.system, "system"):
            turn.content.add(text=text)
    for number, message in enumerate(body.messages):
        _add_turn(chat, message, f"messages[{number}]", names)
    for number, tool in enumerate(body.tools or ()):
        if tool.type not in (None, "custom"):
            raise bad_field(
                f"tools[{number}].type", f"{(tool.type or '')[:50]!r} is not supported; send custom tools"
            )
        add_function(chat, tool.name, tool.description, tool.input_schema, strict=bool(tool.strict))
    if body.tool_choice is not None:
        _set_choice(chat, body.tool_choice)
    arguments: dict[str, Any] = {}
    if body.thinking is not None:
        if body.thinking.type not in ("enabled", "disabled", "adaptive"):
            raise bad_field("thinking.type", "must be enabled, disabled or adaptive")
        arguments["enable_thinking"] = body.thinking.type != "disabled"
    effort = body.output_config.effort if body.output_config is not None else None
    chat.template_args_json = template_args(arguments, effort)
    return names


def _set_choice(chat: pb.ChatPrompt, choice: ChosenTool) -> None:
    modes = {
        "auto": pb.ToolChoice.MODE_AUTO,
        "any": pb.ToolChoice.MODE_REQUIRED,
        "none": pb.ToolChoice.MODE_NONE,
    }
    if choice.type == "tool" and choice.name:
        chat.tool_choice.name = choice.name
    elif choice.type in modes:
        chat.tool_choice.mode = modes[choice.type]
    else:
        raise bad_field("tool_choice.type", "must be auto, any, none, or tool with its name")
    if choice.disable_parallel_tool_use is not None:
        chat.parallel_tool_calls = not choice.disable_parallel_tool_use


def _add_turn(chat: pb.ChatPrompt, message: TurnMessage, field: str, names: dict[str, str]) -> None:
    """Append the content of a message: results of tools are turns of their own, before the rest of it."""
    names[f"chat.messages[{len(chat.messages)}]"] = field
    roles = {"user": pb.ROLE_USER, "assistant": pb.ROLE_ASSISTANT, "system": pb.ROLE_SYSTEM}
    if message.role not in roles:
        raise bad_field(f"{field}.role", f"must be one of {', '.join(roles)}")
    if isinstance(message.content, str):
        chat.messages.add(role=roles[message.role]).content.add(text=message.content)
        return
    turn = pb.ChatMessage(role=roles[message.role])
    is_result_alone = True
    called: dict[str, str] = {}
    for number, block in enumerate(message.content):
        place = f"{field}.content[{number}]"
        if block.type == "tool_result":
            names[f"chat.messages[{len(chat.messages)}]"] = place
            _add_result(chat, block, place)
            continue
        is_result_alone = False
        if block.type == "text":
            turn.content.add(text=_text(block, place))
        elif block.type == "thinking":
            turn.reasoning += block.thinking or ""
        elif block.type == "tool_use":
            if not block.id or not block.name:
                raise bad_field(place, "needs id and name")
            called[f"tool_calls[{len(turn.tool_calls)}]"] = place
            turn.tool_calls.add(id=block.id, name=block.name, arguments=schema_text(block.input or {}))
        elif block.type != "redacted_thinking":
            raise _unsupported(block, place)
    if not is_result_alone or not message.content:
        own = f"chat.messages[{len(chat.messages)}]"
        names |= {own: field} | {f"{own}.{call}": place for call, place in called.items()}
        chat.messages.append(turn)


def _add_result(chat: pb.ChatPrompt, block: ContentBlock, place: str) -> None:
    if not block.tool_use_id:
        raise bad_field(f"{place}.tool_use_id", "is missing")
    turn = chat.messages.add(role=pb.ROLE_TOOL, tool_call_id=block.tool_use_id)
    if block.is_error:  # templates know no other way to say it
        turn.content.add(text="Error: ")
    for text in _texts(block.content or "", f"{place}.content"):
        turn.content.add(text=text)


def _texts(content: str | Sequence[ContentBlock], field: str) -> list[str]:
    if isinstance(content, str):
        return [content]
    return [_text(block, f"{field}[{number}]") for number, block in enumerate(content)]


def _text(block: ContentBlock, field: str) -> str:
    if block.type != "text":
        raise _unsupported(block, field)
    if block.text is None:
        raise bad_field(f"{field}.text", "is missing")
    return block.text


def _unsupported(block: ContentBlock, field: str) -> Exception:
    problem = f"{block.type[:50]!r} is not supported: the model reads text alone; send text"
    return bad_field(f"{field}.type", problem)


# ----------------------------------------------------------------------------------------------- answers


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
