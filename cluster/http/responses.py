"""POST /v1/responses: OpenAI's newer API, from its request to a `GenerateRequest`. Nothing is kept: `store:
true` and fields that refer to an answer before are refused by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cluster.http.body_decoding import Body
from cluster.http.chat import Translated
from cluster.http.chat_prompt import ROLES, add_function, content_texts, set_tool_choice, template_args
from cluster.http.errors import bad_field
from cluster.http.field_names import NAMES, renamer
from cluster.http.field_types import Ignored, Int32
from cluster.http.request_parts import ContentPart, NamedTool, StreamOptions
from cluster.http.sampled_request import DEFAULT_TEMPERATURE, service_class, session_id
from cluster.http.structured_outputs import schema_text
from cluster.proto.tandem.v1 import inference_pb2 as pb

_NAMES: Mapping[str, str] = {
    **NAMES,
    "prompt": "input",
    "text": "input",
    "chat": "input",
    "chat.messages": "input",
    "chat.tools": "tools",
    "chat.tool_choice": "tool_choice",
    "chat.parallel_tool_calls": "parallel_tool_calls",
    "chat.template_args_json": "reasoning",
    "constraint": "text.format",
    "constraint.json_schema": "text.format.schema",
    "logprobs": "top_logprobs",
    "max_tokens": "max_output_tokens",
}
_LOGPROBS = "message.output_text.logprobs"
# Values of `include` that have nothing to include here.
_NOT_THERE = ("reasoning.encrypted_content",)


class InputItem(Body, kw_only=True):
    """A part of the conversation so far: a message, a tool call, its result, or reasoning."""

    type: str = "message"
    id: Ignored = None
    status: Ignored = None
    # A field of a message.
    role: str | None = None
    content: str | list[OutputPart] | None = None
    phase: Ignored = None
    # A field of a function_call and its output.
    call_id: str | None = None
    name: str | None = None
    namespace: None = None
    arguments: str | None = None
    output: str | list[OutputPart] | None = None
    # A field of reasoning.
    summary: list[OutputPart] | None = None
    encrypted_content: Ignored = None


class OutputPart(ContentPart, kw_only=True):
    """A part of a message, also as our own answers have it."""

    annotations: Ignored = None
    logprobs: Ignored = None
    detail: Ignored = None
    file_id: Ignored = None


class OfferedFunction(Body, kw_only=True):
    """A function that the model may call."""

    type: str
    name: str | None = None
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class TextFormat(Body, kw_only=True, omit_defaults=True):
    """The required form of the output."""

    type: str
    name: Ignored = None
    description: Ignored = None
    schema: dict[str, Any] | None = None
    strict: Ignored = None


class TextSettings(Body, kw_only=True, omit_defaults=True):
    format: TextFormat | None = None
    verbosity: str | None = None


class ReasoningSettings(Body, kw_only=True, omit_defaults=True):
    effort: str | None = None
    # The whole reasoning is returned.
    summary: Ignored = None
    generate_summary: Ignored = None


class ResponsesRequest(Body, kw_only=True):
    """POST /v1/responses."""

    input: str | list[InputItem]
    model: str | None = None
    instructions: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_output_tokens: Int32 | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_logprobs: Int32 | None = None
    include: list[str] | None = None
    tools: list[OfferedFunction] | None = None
    tool_choice: str | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    text: TextSettings | None = None
    reasoning: ReasoningSettings | None = None
    service_tier: str | None = None
    prompt_cache_key: str | None = None
    store: bool | None = None
    background: bool | None = None
    truncation: str | None = None
    # A field of vLLM.
    priority: Int32 | None = None
    request_id: str | None = None
    # Metadata that is returned unchanged.
    metadata: dict[str, str] | None = None
    # A field without effect.
    user: Ignored = None
    safety_identifier: Ignored = None
    prompt_cache_retention: Ignored = None


def translate(body: ResponsesRequest) -> Translated:
    """Return the call that answers the request; `InvalidRequestError` names fields that it cannot express."""
    _check_kept(body)
    request = pb.GenerateRequest(
        model=body.model or "",
        request_id=body.request_id or "",
        priority=body.priority or 0,
        service_class=service_class(body.service_tier),
        session_id=session_id(body.prompt_cache_key),
        temperature=DEFAULT_TEMPERATURE if body.temperature is None else body.temperature,
    )
    if body.max_output_tokens is not None:
        request.max_tokens = body.max_output_tokens
    if body.top_p is not None:
        request.top_p = body.top_p
    if wants_logprobs(body):
        request.logprobs = body.top_logprobs or 0
    if body.text is not None:
        _set_text(request.constraint if _is_constrained(body.text) else None, body.text)
    chat, names = request.chat, dict(_NAMES)
    if body.text is not None and body.text.format is not None and body.text.format.schema is not None:
        names["constraint"] = "text.format.schema"
    if body.instructions:
        names["chat.messages[0]"] = "instructions"
        chat.messages.add(role=pb.ROLE_SYSTEM).content.add(text=body.instructions)
    if isinstance(body.input, str):
        chat.messages.add(role=pb.ROLE_USER).content.add(text=body.input)
    else:
        for number, item in enumerate(body.input):
            _add_item(chat, item, f"input[{number}]", names)
    for number, tool in enumerate(body.tools or ()):
        if tool.type != "function":
            raise bad_field(f"tools[{number}].type", f"{tool.type[:50]!r} is not supported; send functions")
        if tool.name is None:
            raise bad_field(f"tools[{number}].name", "is missing")
        add_function(chat, tool.name, tool.description, tool.parameters, strict=bool(tool.strict))
    set_tool_choice(chat, body.tool_choice)
    if body.parallel_tool_calls is not None:
        chat.parallel_tool_calls = body.parallel_tool_calls
    chat.template_args_json = template_args(None, body.reasoning.effort if body.reasoning else None)
    return Translated([request], [renamer(names)])


def wants_logprobs(body: ResponsesRequest) -> bool:
    """Whether the answer has log-probabilities."""
    return body.top_logprobs is not None or _LOGPROBS in (body.include or ())


def _check_kept(body: ResponsesRequest) -> None:
    """Refuse fields that need answers to be kept."""
    if body.store:
        raise bad_field("store", "is served as false only: no answer is kept; send store: false")
    if body.background:
        raise bad_field("background", "is served as false only: no answer is kept; stream it")
    if body.truncation not in (None, "disabled"):
        raise bad_field("truncation", "is served as disabled only; send less input")
    for number, name in enumerate(body.include or ()):
        if name not in (_LOGPROBS, *_NOT_THERE):
            raise bad_field(f"include[{number}]", f"{name[:50]!r} is not supported; {_LOGPROBS} is")


def _is_constrained(text: TextSettings) -> bool:
    return text.format is not None and text.format.type != "text"


def _set_text(constraint: pb.Constraint | None, text: TextSettings) -> None:
    if text.verbosity not in (None, "medium"):
        raise bad_field("text.verbosity", "is served as medium only; ask for it in the instructions")
    if constraint is None or text.format is None:
        return
    if text.format.type == "json_object":
        constraint.json_object = True
    elif text.format.type != "json_schema":
        raise bad_field("text.format.type", "must be text, json_object or json_schema")
    elif text.format.schema is None:
        raise bad_field("text.format.schema", "is missing; send a JSON schema")
    else:
        constraint.json_schema = schema_text(text.format.schema)


def _add_item(chat: pb.ChatPrompt, item: InputItem, field: str, names: dict[str, str]) -> None:
    """Append an item; reasoning and calls belong to the assistant's turn that they are in."""
    names[f"chat.messages[{len(chat.messages)}]"] = field
    if item.type == "message":
        if item.role is None or item.role not in ROLES:
            raise bad_field(f"{field}.role", f"must be one of {', '.join(ROLES)}")
        if item.content is None:
            raise bad_field(f"{field}.content", "is missing; send text")
        turn = _own_turn(chat) if item.role == "assistant" else chat.messages.add(role=ROLES[item.role])
        for text in content_texts(item.content, f"{field}.content"):
            turn.content.add(text=text)
    elif item.type == "function_call":
        if not item.call_id or not item.name:
            raise bad_field(field, "needs call_id and name")
        turn = _own_turn(chat)
        names[f"chat.messages[{len(chat.messages) - 1}].tool_calls[{len(turn.tool_calls)}]"] = field
        call = turn.tool_calls.add(id=item.call_id, name=item.name)
        call.arguments = item.arguments or "{}"
    elif item.type == "function_call_output":
        if not item.call_id or item.output is None:
            raise bad_field(field, "needs call_id and output")
        turn = chat.messages.add(role=pb.ROLE_TOOL, tool_call_id=item.call_id)
        for text in content_texts(item.output, f"{field}.output"):
            turn.content.add(text=text)
    elif item.type == "reasoning":
        parts = item.content if isinstance(item.content, list) else []
        _own_turn(chat, is_new=True).reasoning = "".join(part.text or "" for part in parts)
    else:
        raise bad_field(
            f"{field}.type", f"{item.type[:50]!r} is not supported; send messages and function calls"
        )


def _own_turn(chat: pb.ChatPrompt, *, is_new: bool = False) -> pb.ChatMessage:
    """Return the assistant's turn that is being converted: the last one, where that is the assistant's."""
    if not is_new and chat.messages and chat.messages[-1].role == pb.ROLE_ASSISTANT:
        return chat.messages[-1]
    return chat.messages.add(role=pb.ROLE_ASSISTANT)
