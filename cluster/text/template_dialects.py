"""Chats for templates that show tools, calls or results in another way than most, or not at all.

Most templates read the list `tools`, `tool_calls` of the assistant, and turns of the role `tool`. Where a
family's template does not, or drops or refuses a part of that, the same is written here in the words of that
family.
"""

from __future__ import annotations

import json
import re
from typing import Any

from cluster.text.output_parsers.choose import marked_tool_parser

_Message = dict[str, Any]
# The list of tools is a text in the system's turn there.
_TOOLS_IN_SYSTEM = re.compile(r"""['"]tools['"]\s+in\s+message\b""")
_INSTRUCTING = "system", "developer"
_SYSTEM_WITH_TOOLS = "You are a helpful assistant with some tools."
_TOOL_CODE = (
    "You can call functions. These are the functions, one a line:\n{}\n"
    "To call some of them, write a block of code in which each line is one call, with all arguments by their "
    "names, and then stop:\n```tool_code\nname(argument=value)\n```\n"
    "You then get a block of their results, ```tool_output."
)


def in_dialect(
    messages: list[_Message], tools: list[_Message] | None, source: str
) -> tuple[list[_Message], list[_Message] | None]:
    """Return messages and tools as the template with this source shows them; the same for most."""
    if marked_tool_parser(source) == "harmony":
        return _with_single_calls(_with_thinking(_instructed(messages))), tools
    if tools and _TOOLS_IN_SYSTEM.search(source):
        messages = _with_tools_in_system(messages, tools)
    if "tool_calls" in source:
        return messages, tools
    match marked_tool_parser(source):
        case "glm4":
            return [it for message in messages for it in _observed(message)], tools
        case "gemma3":
            return _merged(_with_tool_code(messages, tools)), None
        case "granite":
            return [_with_listed_calls(message, "") for message in messages], tools
        case "phi4":
            return [_with_listed_calls(message, "<|/tool_call|>") for message in messages], tools
        case "hermes":
            return [_with_marked_calls(message) for message in messages], tools
        case _:
            return messages, tools


def _with_tools_in_system(messages: list[_Message], tools: list[_Message]) -> list[_Message]:
    shown = json.dumps([tool["function"] for tool in tools], ensure_ascii=False)
    if not messages or messages[0]["role"] != "system":
        messages = [{"role": "system", "content": _SYSTEM_WITH_TOOLS}, *messages]
    return [{**messages[0], "tools": shown}, *messages[1:]]


def _observed(message: _Message) -> list[_Message]:
    """Return the turns in which GLM-4 has the name of a call as `metadata`, and its result as
    `observation`."""
    if message["role"] == "tool":
        return [{**message, "role": "observation"}]
    if not (calls := message.get("tool_calls")):
        return [message]
    said = [_without_calls(message)] if message["content"] else []
    called = [
        {"role": message["role"], "metadata": name, "content": arguments}
        for name, arguments in map(_name_and_arguments, calls)
    ]
    return [*said, *called]


def _with_listed_calls(message: _Message, end: str) -> _Message:
    """Return the message with its calls as a list in its text."""
    if not (calls := message.get("tool_calls")):
        return message
    listed = ", ".join(map(_json_call, calls))
    return _with_text(message, f"<|tool_call|>[{listed}]{end}")


def _with_marked_calls(message: _Message) -> _Message:
    """Return the message with its calls in its text, each between markers."""
    if not (calls := message.get("tool_calls")):
        return message
    marked = "\n".join(f"<tool_call>\n{_json_call(call)}\n</tool_call>" for call in calls)
    return _with_text(message, f"\n{marked}" if message["content"] else marked)


def _with_tool_code(messages: list[_Message], tools: list[_Message] | None) -> list[_Message]:
    """Return the messages with tools, calls and results as text."""
    found: list[_Message] = []
    shown = "\n".join(json.dumps(tool["function"], ensure_ascii=False) for tool in tools or ())
    for message in messages:
        if message["role"] == "tool":
            message = {"role": "user", "content": f"```tool_output\n{message['content']}\n```"}
        elif calls := message.get("tool_calls"):
            code = "\n".join(map(_python_call, calls))
            text = f"```tool_code\n{code}\n```"
            message = _with_text(message, f"\n{text}" if message["content"] else text)
        elif shown and message["role"] == "user":
            message = {**message, "content": f"{_TOOL_CODE.format(shown)}\n\n{message['content']}"}
            shown = ""
        found.append(message)
    return found


def _merged(messages: list[_Message]) -> list[_Message]:
    """Return the messages with neighboring ones of the user as one: roles alternate there."""
    found: list[_Message] = []
    for message in messages:
        if found and found[-1]["role"] == message["role"] == "user":
            found[-1] = {**found[-1], "content": f"{found[-1]['content']}\n{message['content']}"}
        else:
            found.append(message)
    return found


def _instructed(messages: list[_Message]) -> list[_Message]:
    """Return the messages with all instructions in the first one: the template of gpt-oss shows no others."""
    given = [message for message in messages if message["role"] in _INSTRUCTING]
    if not given:
        return messages
    others = [message for message in messages if message["role"] not in _INSTRUCTING]
    return [{**given[0], "content": "\n\n".join(message["content"] for message in given)}, *others]


def _with_thinking(messages: list[_Message]) -> list[_Message]:
    """Return the messages with reasoning under the name that the template of gpt-oss has for it. That refuses
    a call with other text beside reasoning, so the text becomes a part of the reasoning."""
    found: list[_Message] = []
    for message in messages:
        if thinking := message.get("reasoning_content"):
            if message.get("tool_calls") and message["content"]:
                thinking = f"{thinking}\n{message['content']}"
                message = {**message, "content": "", "reasoning_content": thinking}
            message = {**message, "thinking": thinking}
        found.append(message)
    return found


def _with_single_calls(messages: list[_Message]) -> list[_Message]:
    """Return the messages with each call in a turn of its own, followed by its result: the template of
    gpt-oss shows one call a turn, and takes a result for one of the last call."""
    found: list[_Message] = []
    place = 0
    while place < len(messages):
        message = messages[place]
        place += 1
        if len(message.get("tool_calls") or ()) < 2:
            found.append(message)
            continue
        end = place
        while end < len(messages) and messages[end]["role"] == "tool":
            end += 1
        found += _with_own_results(message, messages[place:end])
        place = end
    return found


def _with_own_results(message: _Message, results: list[_Message]) -> list[_Message]:
    """Return the calls of a message as turns, each with its results behind it; those that belong to none of
    them come last."""
    silent = {key: value for key, value in message.items() if key not in ("reasoning_content", "thinking")}
    found: list[_Message] = []
    for number, call in enumerate(message["tool_calls"]):
        found.append({**(message if not number else {**silent, "content": ""}), "tool_calls": [call]})
        found += [result for result in results if result.get("tool_call_id") == call["id"]]
        results = [result for result in results if result.get("tool_call_id") != call["id"]]
    return found + results


def _without_calls(message: _Message) -> _Message:
    return {key: value for key, value in message.items() if key != "tool_calls"}


def _with_text(message: _Message, text: str) -> _Message:
    return {**_without_calls(message), "content": f"{message['content']}{text}"}


def _name_and_arguments(call: _Message) -> tuple[str, str]:
    """Return the name of a call and the JSON of its arguments, or the text that a limit cut."""
    function = call["function"]
    arguments = function["arguments"]
    is_cut = isinstance(arguments, str)
    return function["name"], arguments if is_cut else json.dumps(arguments, ensure_ascii=False)


def _json_call(call: _Message) -> str:
    name, arguments = _name_and_arguments(call)
    return f'{{"name": {json.dumps(name, ensure_ascii=False)}, "arguments": {arguments}}}'


def _python_call(call: _Message) -> str:
    function = call["function"]
    arguments = function["arguments"]
    if isinstance(arguments, str):
        return f"{function['name']}({arguments}"
    return f"{function['name']}({', '.join(f'{name}={value!r}' for name, value in arguments.items())})"
