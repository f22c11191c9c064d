"""POST /v1/messages: turn a request to Anthropic's API into a `GenerateRequest`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from cluster.http.chat import Translated
from cluster.http.chat_prompt import add_function, template_args
from cluster.http.errors import Rename, bad_field
from cluster.http.field_names import renamer
from cluster.http.messages_schemas import (
    ChosenTool,
    ContentBlock,
    CountTokensRequest,
    MessagesRequest,
    TurnMessage,
)
from cluster.http.sampled_request import DEFAULT_TEMPERATURE, service_class
from cluster.http.structured_outputs import schema_text
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
