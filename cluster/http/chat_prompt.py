"""From the messages, tools and tool choice of a body to a `ChatPrompt`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from cluster.http.errors import bad_field
from cluster.http.request_parts import ChatMessage, ContentPart, NamedTool, ToolDefinition
from cluster.http.structured_outputs import schema_text
from cluster.proto.tandem.v1 import inference_pb2 as pb

ROLES: Mapping[str, pb.Role] = {
    "system": pb.ROLE_SYSTEM,
    "developer": pb.ROLE_DEVELOPER,
    "user": pb.ROLE_USER,
    "assistant": pb.ROLE_ASSISTANT,
    "tool": pb.ROLE_TOOL,
}


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
