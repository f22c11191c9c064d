"""From fields of OpenAI's API to a `GenerateRequest`: prompts, sampling, the required form of the output."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from cluster.http.errors import Rename, bad_field
from cluster.http.request_parts import (
    ChatMessage,
    ContentPart,
    NamedTool,
    ResponseFormat,
    StructuredOutputs,
    TagStructure,
    ToolDefinition,
)
from cluster.http.schemas import SampledRequest
from cluster.proto.tandem.v1 import inference_pb2 as pb

ROLES: Mapping[str, pb.Role] = {
    "system": pb.ROLE_SYSTEM,
    "developer": pb.ROLE_DEVELOPER,
    "user": pb.ROLE_USER,
    "assistant": pb.ROLE_ASSISTANT,
    "tool": pb.ROLE_TOOL,
}
# OpenAI's default; the engine's own is 0.
DEFAULT_TEMPERATURE = 1.0
# The names over HTTP of the fields of `GenerateRequest`, by the beginnings of their paths.
NAMES: Mapping[str, str] = {
    "include_stop": "include_stop_str_in_output",
    "keep_special_tokens": "skip_special_tokens",
    "text": "prompt",
    "token_ids": "prompt",
    "service_class": "service_tier",
    "session_id": "prompt_cache_key",
    "separate_reasoning": "include_reasoning",
}
_MASK = (1 << 64) - 1
_SESSION = re.compile(r"[A-Za-z0-9._:-]{1,128}")
# Fields that are sent unchanged where they are given.
_SAME = (
    "n",
    "max_tokens",
    "top_p",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "min_tokens",
    "ignore_eos",
    "truncate_prompt_tokens",
    "prompt_logprobs",
)
_SERVICE_TIERS: Mapping[str, pb.ServiceClass] = {
    "auto": pb.SERVICE_CLASS_UNSPECIFIED,
    "default": pb.SERVICE_CLASS_UNSPECIFIED,
    "flex": pb.SERVICE_CLASS_BATCH,
    "priority": pb.SERVICE_CLASS_INTERACTIVE,
}


def renamer(names: Mapping[str, str]) -> Rename:
    """Return the function that gives a field of a gRPC message its name over HTTP; the longest beginning that
    is known decides."""

    def rename(field: str) -> str:
        ends = [index for index, char in enumerate(field) if char in ".["]
        for end in (len(field), *reversed(ends)):
            if field[:end] in names:
                return (names[field[:end]] + field[end:]).removeprefix(".")
        return field

    return rename


# A function of a chat's tools or tool calls, whose fields stand one level deeper over HTTP.
_FUNCTION = re.compile(r"^(chat\.(?:tools|messages\[\d+\]\.tool_calls)\[\d+\])\.")


def chat_renamer(names: Mapping[str, str]) -> Rename:
    """Return the same for chats as OpenAI's API has them."""
    rename = renamer(names)

    def rename_in_chat(field: str) -> str:
        return rename(_FUNCTION.sub(r"\1.function.", field)).replace("parameters_json", "parameters")

    return rename_in_chat


# --------------------------------------------------------------------------------------------- sampling


def sampled_request(body: SampledRequest) -> tuple[pb.GenerateRequest, dict[str, str]]:
    """Return a request with all that chats and completions have in common, and the names of its fields."""
    request = pb.GenerateRequest(model=body.model or "", request_id=body.request_id or "")
    names = dict(NAMES)
    for name in _SAME:
        if (value := getattr(body, name)) is not None:
            setattr(request, name, value)
    request.temperature = DEFAULT_TEMPERATURE if body.temperature is None else body.temperature
    if body.top_k is not None:
        request.top_k = 0 if body.top_k == -1 else body.top_k  # off, as vLLM says it
    if body.seed is not None:
        if not -(1 << 63) <= body.seed <= _MASK:
            raise bad_field("seed", "does not fit 64 bits; send a smaller one")
        request.seed = body.seed & _MASK
    if isinstance(body.stop, str):
        request.stop.append(body.stop)
        names["stop[0]"] = "stop"
    else:
        request.stop.extend(body.stop or ())
    request.stop_token_ids.extend(body.stop_token_ids or ())
    for token, bias in (body.logit_bias or {}).items():
        request.logit_bias[_token_id(token)] = bias
    request.include_stop = bool(body.include_stop_str_in_output)
    request.keep_special_tokens = body.skip_special_tokens is False
    request.priority = body.priority or 0
    request.service_class = service_class(body.service_tier)
    if body.spaces_between_special_tokens is False:
        raise bad_field("spaces_between_special_tokens", "is served as true only; remove it")
    if body.stream_options is not None:
        if not body.stream:
            raise bad_field("stream_options", "is for streams; set stream: true, or remove it")
        request.include_usage = bool(body.stream_options.continuous_usage_stats)
    set_constraint(request, body, names)
    return request, names


def session_id(key: str | None) -> str:
    """Return OpenAI's `prompt_cache_key`, which is any text, as the name of a session."""
    if not key or _SESSION.fullmatch(key):
        return key or ""
    return hashlib.sha256(key.encode()).hexdigest()


def service_class(tier: str | None) -> pb.ServiceClass:
    """Return the class of OpenAI's `service_tier`."""
    if tier is None:
        return pb.SERVICE_CLASS_UNSPECIFIED
    if tier not in _SERVICE_TIERS:
        raise bad_field("service_tier", f"must be one of {', '.join(_SERVICE_TIERS)}, or absent")
    return _SERVICE_TIERS[tier]


def _token_id(text: str) -> int:
    if not (text.isascii() and text.isdecimal() and len(text) <= 10 and int(text) < 1 << 32):
        raise bad_field(f"logit_bias[{text[:50]}]", "must be a token id, such as 42")
    return int(text)


# ------------------------------------------------------------------------------------------ constraints


def set_constraint(request: pb.GenerateRequest, body: SampledRequest, names: dict[str, str]) -> None:
    """Set the required form of the output, from the one field that names it."""
    given = {
        "response_format": body.response_format,
        "structured_outputs": body.structured_outputs,
        "guided_json": body.guided_json,
        "guided_regex": body.guided_regex,
        "guided_choice": body.guided_choice,
        "guided_grammar": body.guided_grammar,
    }
    if body.response_format is not None and body.response_format.type == "text":
        del given["response_format"]
    said = [name for name, value in given.items() if value is not None]
    if not said:
        return
    if len(said) > 1:
        raise bad_field(said[1], f"cannot be combined with {said[0]}; keep one of them")
    constraint, path = request.constraint, said[0]
    if body.response_format is not None:
        path = _set_format(constraint, body.response_format)
    elif body.structured_outputs is not None:
        path = _set_structured(constraint, body.structured_outputs)
    elif body.guided_json is not None:
        constraint.json_schema = schema_text(body.guided_json)
    elif body.guided_regex is not None:
        constraint.regex = body.guided_regex
    elif body.guided_choice is not None:
        constraint.choice.choices.extend(body.guided_choice)
    else:
        constraint.grammar = body.guided_grammar or ""
    names["constraint"] = names[f"constraint.{constraint.WhichOneof('kind')}"] = path


def schema_text(schema: Mapping[str, Any] | str | bool) -> str:
    """Return a JSON schema as text."""
    return schema if isinstance(schema, str) else msgspec.json.encode(schema).decode()


def _set_format(constraint: pb.Constraint, wanted: ResponseFormat) -> str:
    """Set the format, and return the path of the field that demands it."""
    if wanted.type == "json_object":
        constraint.json_object = True
    elif wanted.type == "json_schema":
        if wanted.json_schema is None or wanted.json_schema.schema is None:
            raise bad_field("response_format.json_schema.schema", "is missing; send a JSON schema")
        constraint.json_schema = schema_text(wanted.json_schema.schema)
        return "response_format.json_schema.schema"
    elif wanted.type == "structural_tag":
        if not wanted.structures or not wanted.triggers:
            raise bad_field("response_format", "of the type structural_tag needs structures and triggers")
        _set_tags(constraint, wanted.structures, wanted.triggers)
    else:
        raise bad_field("response_format.type", "must be text, json_object, json_schema or structural_tag")
    return "response_format"


def _set_tags(constraint: pb.Constraint, tags: Sequence[TagStructure], triggers: Sequence[str]) -> None:
    for tag in tags:
        schema = "" if tag.schema is None else schema_text(tag.schema)
        constraint.structural_tags.tags.add(begin=tag.begin, json_schema=schema, end=tag.end)
    constraint.structural_tags.triggers.extend(triggers)


def _set_structured(constraint: pb.Constraint, wanted: StructuredOutputs) -> str:
    """Set the requested structure, and return its path."""
    kinds = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")
    given = [kind for kind in kinds if getattr(wanted, kind) not in (None, False)]
    if len(given) != 1:
        raise bad_field("structured_outputs", f"needs exactly one of {', '.join(kinds)}")
    if wanted.whitespace_pattern is not None:
        raise bad_field("structured_outputs.whitespace_pattern", "is not supported; remove it")
    if wanted.json is not None:
        constraint.json_schema = schema_text(wanted.json)
    elif wanted.regex is not None:
        constraint.regex = wanted.regex
    elif wanted.choice is not None:
        constraint.choice.choices.extend(wanted.choice)
    elif wanted.grammar is not None:
        constraint.grammar = wanted.grammar
    elif wanted.json_object:
        constraint.json_object = True
    else:
        _set_structural_text(constraint, wanted.structural_tag or "")
    return f"structured_outputs.{given[0]}"


def _set_structural_text(constraint: pb.Constraint, text: str) -> None:
    field = "structured_outputs.structural_tag"
    try:
        wanted = msgspec.json.decode(text, type=ResponseFormat)
    except (msgspec.DecodeError, RecursionError) as error:
        raise bad_field(field, f"cannot be read: {str(error)[:200]}") from error
    if not wanted.structures or not wanted.triggers:
        raise bad_field(field, "needs structures and triggers")
    _set_tags(constraint, wanted.structures, wanted.triggers)


# ------------------------------------------------------------------------------------------------ chats


def add_messages(chat: pb.ChatPrompt, messages: Sequence[ChatMessage]) -> None:
    """Append the turns of a chat."""
    for number, message in enumerate(messages):
        field = f"messages[{number}]"
        role = ROLES.get(message.role)
        if role is None:
            raise bad_field(f"{field}.role", f"must be one of {', '.join(ROLES)}")
        if role != pb.ROLE_ASSISTANT and message.content is None:
            raise bad_field(f"{field}.content", "is missing; send text")
        turn = chat.messages.add(
            role=role,
            name=message.name or "",
            tool_call_id=message.tool_call_id or "",
            reasoning=message.reasoning or message.reasoning_content or "",
        )
        for text in content_texts(message.content, f"{field}.content"):
            turn.content.add(text=text)
        if message.refusal:
            turn.content.add(text=message.refusal)
        for place, call in enumerate(message.tool_calls or ()):
            if call.type != "function":
                raise bad_field(f"{field}.tool_calls[{place}].type", "must be function")
            turn.tool_calls.add(id=call.id, name=call.function.name, arguments=call.function.arguments)


def content_texts(content: str | Sequence[ContentPart] | None, field: str) -> list[str]:
    """Return the texts of a message's content."""
    if content is None:
        return []
    if isinstance(content, str):
        return [content]
    return [_part_text(part, f"{field}[{number}]") for number, part in enumerate(content)]


def _part_text(part: ContentPart, field: str) -> str:
    if part.type in ("text", "input_text", "output_text"):
        if part.text is None:
            raise bad_field(f"{field}.text", "is missing")
        return part.text
    if part.type == "refusal":
        return part.refusal or ""
    raise bad_field(
        f"{field}.type", f"{part.type[:50]!r} is not supported: the model reads text alone; send text"
    )


def add_tools(chat: pb.ChatPrompt, tools: Sequence[ToolDefinition], field: str = "tools") -> None:
    """Append the functions that the model may call."""
    for number, tool in enumerate(tools):
        if tool.type != "function":
            raise bad_field(f"{field}[{number}].type", f"{tool.type[:50]!r} is not supported; send functions")
        if tool.function is None:
            raise bad_field(f"{field}[{number}].function", "is missing; send its name and parameters")
        add_function(
            chat,
            tool.function.name,
            tool.function.description,
            tool.function.parameters,
            strict=bool(tool.function.strict),
        )


def add_function(
    chat: pb.ChatPrompt,
    name: str,
    description: str | None,
    parameters: Mapping[str, Any] | None,
    *,
    strict: bool,
) -> None:
    """Append one function."""
    chat.tools.add(
        name=name,
        description=description or "",
        parameters_json="" if parameters is None else schema_text(parameters),
        strict=strict,
    )


_MODES: Mapping[str, pb.ToolChoice.Mode] = {
    "auto": pb.ToolChoice.MODE_AUTO,
    "none": pb.ToolChoice.MODE_NONE,
    "required": pb.ToolChoice.MODE_REQUIRED,
}


def set_tool_choice(chat: pb.ChatPrompt, choice: str | NamedTool | None) -> None:
    """Set which tool is to be called."""
    if choice is None:
        return
    if isinstance(choice, str):
        if choice not in _MODES:
            raise bad_field("tool_choice", f"must be {', '.join(_MODES)}, or a function by its name")
        chat.tool_choice.mode = _MODES[choice]
        return
    name = choice.function.name if choice.function is not None else choice.name
    if choice.type != "function" or not name:
        raise bad_field("tool_choice.type", "must be function, with its name")
    chat.tool_choice.name = name


def template_args(arguments: Mapping[str, Any] | None, reasoning_effort: str | None) -> str:
    """Return further variables of the chat template, as JSON text; "" where there are none."""
    found = dict(arguments or {})
    if reasoning_effort is not None:
        found.setdefault("reasoning_effort", reasoning_effort)
    return msgspec.json.encode(found).decode() if found else ""
