"""Checks of chats: turns, tools, and the arguments of the template."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

from cluster.errors import FieldViolation
from cluster.proto.enums import name_of
from cluster.proto.tandem.v1 import inference_pb2 as pb

MAX_CHAT_MESSAGES = 4096
MAX_TOOLS = 128
# The size of all tool definitions of a chat, and of the arguments of its template.
MAX_JSON_BYTES = 1 << 18
_TOOL_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
# Variables that the gateway itself gives to a template.
_OWN_ARGS = frozenset(("messages", "tools", "documents", "add_generation_prompt", "strftime_now"))


def chat_violations(chat: pb.ChatPrompt, max_bytes: int) -> Iterator[FieldViolation]:
    """Yield the violations of a chat, whose texts have at most `max_bytes` together."""
    turns = chat.messages
    if not turns:
        yield FieldViolation("chat", "has no messages; send at least one")
    if len(turns) > MAX_CHAT_MESSAGES:
        yield FieldViolation("chat", f"has {len(turns)} messages; at most {MAX_CHAT_MESSAGES} are accepted")
        return
    num_bytes = 0
    for index, turn in enumerate(turns):
        yield from _turn_violations(f"chat.messages[{index}]", turn)
        num_bytes += turn.ByteSize()
    if num_bytes > max_bytes:
        problem = f"has {num_bytes} bytes; at most {max_bytes} can fit the model's context; shorten it"
        yield FieldViolation("prompt", problem)
    if chat.continue_final_message:
        yield from _continued_violations(chat)
    yield from _tool_violations(chat)
    if chat.template_args_json:
        yield from _template_args_violations(chat.template_args_json)


def _turn_violations(field: str, turn: pb.ChatMessage) -> Iterator[FieldViolation]:
    role = name_of(pb.Role, turn.role)
    if role not in ("system", "developer", "user", "assistant", "tool"):
        yield FieldViolation(f"{field}.role", "use one of system, developer, user, assistant or tool")
    for number, part in enumerate(turn.content):
        if part.WhichOneof("part") != "text":
            yield FieldViolation(f"{field}.content[{number}]", "this model reads text alone")
    if role != "assistant" and (turn.tool_calls or turn.reasoning):
        yield FieldViolation(f"{field}.role", "only turns of the assistant have tool_calls and reasoning")
    if turn.tool_call_id and role != "tool":
        yield FieldViolation(f"{field}.tool_call_id", "belongs to turns of the role tool")
    for number, call in enumerate(turn.tool_calls):
        if not _TOOL_NAME.fullmatch(call.name):
            yield FieldViolation(f"{field}.tool_calls[{number}].name", _NAME_RULE)


_NAME_RULE = "must be 1 to 64 letters, digits, underscores, dots or dashes"


def _continued_violations(chat: pb.ChatPrompt) -> Iterator[FieldViolation]:
    field = "chat.continue_final_message"
    last = chat.messages[-1] if chat.messages else pb.ChatMessage()
    if last.role != pb.ROLE_ASSISTANT or last.tool_calls or not last.content:
        yield FieldViolation(field, "needs a last message of the assistant, with text and without tool calls")
    if chat.add_generation_prompt:
        yield FieldViolation(field, "and add_generation_prompt exclude each other; remove one")


def _tool_violations(chat: pb.ChatPrompt) -> Iterator[FieldViolation]:
    if len(chat.tools) > MAX_TOOLS:
        yield FieldViolation("chat.tools", f"has {len(chat.tools)} tools; at most {MAX_TOOLS} are accepted")
        return
    if sum(tool.ByteSize() for tool in chat.tools) > MAX_JSON_BYTES:
        yield FieldViolation("chat.tools", f"has more than {MAX_JSON_BYTES} bytes; shorten the definitions")
        return
    names: set[str] = set()
    for index, tool in enumerate(chat.tools):
        field = f"chat.tools[{index}]"
        if not _TOOL_NAME.fullmatch(tool.name):
            yield FieldViolation(f"{field}.name", _NAME_RULE)
        if tool.name in names:
            yield FieldViolation(f"{field}.name", f"{tool.name!r} is there twice; rename one")
        names.add(tool.name)
        if tool.parameters_json and not isinstance(parsed_json(tool.parameters_json), dict):
            yield FieldViolation(f"{field}.parameters_json", "is not a JSON object; send a JSON schema")
    choice = chat.tool_choice
    if choice.WhichOneof("choice") == "name" and choice.name not in names:
        yield FieldViolation("chat.tool_choice.name", f"{choice.name[:64]!r} is none of the tools")
    if choice.mode not in pb.ToolChoice.Mode.values():
        yield FieldViolation("chat.tool_choice.mode", "must be auto, none or required")
    if choice.mode == pb.ToolChoice.MODE_REQUIRED and not chat.tools:
        yield FieldViolation("chat.tool_choice", "requires a tool call, but there are no tools")


def _template_args_violations(text: str) -> Iterator[FieldViolation]:
    field = "chat.template_args_json"
    if len(text.encode()) > MAX_JSON_BYTES:
        yield FieldViolation(field, f"has more than {MAX_JSON_BYTES} bytes; shorten it")
        return
    args = parsed_json(text)
    if not isinstance(args, dict):
        yield FieldViolation(field, "is not a JSON object")
    elif taken := sorted(_OWN_ARGS & args.keys()):
        yield FieldViolation(field, f"may not set {', '.join(taken)}; use the fields of the request")


def parsed_json(text: str) -> Any:
    """Return the value of the text; None where the text is not JSON, or nested too deeply."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None
