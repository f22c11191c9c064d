"""Tools in words, for models whose chat template has no notation for calls that is known."""

from __future__ import annotations

import json
from collections.abc import Collection

from msgspec import structs

from cluster.text.chat_template import NO_PARAMETERS, Chat, ChatTool, ChatTurn

_INTRODUCTION = "You answer by calling functions. These are the functions, one a line:"
_NOTATION = (
    "Answer with nothing but the calls, each a JSON object on a line of its own: "
    '{"name": "the name of a function", "arguments": {its arguments by its parameters}}'
)


def with_tools_shown(chat: Chat, names: Collection[str]) -> Chat:
    """Return the chat with the tools of these names in the system's turn, or else before the first text of
    the user: not every template has a system. The template gets no tools."""
    shown = "\n".join(_shown(tool) for tool in chat.tools if tool.name in names)
    text = f"{_INTRODUCTION}\n{shown}\n{_NOTATION}"
    turns = list(chat.turns)
    place = next((index for index, turn in enumerate(turns) if turn.role in ("system", "user")), None)
    if place is None:
        turns.insert(0, ChatTurn("user", text))
    elif turns[place].role == "system":
        turns[place] = structs.replace(turns[place], content=f"{turns[place].content}\n\n{text}")
    else:
        turns[place] = structs.replace(turns[place], content=f"{text}\n\n{turns[place].content}")
    return structs.replace(chat, turns=tuple(turns), tools=())


def _shown(tool: ChatTool) -> str:
    function = {
        "name": tool.name,
        "description": tool.description,
        "parameters": json.loads(tool.parameters_json) if tool.parameters_json else NO_PARAMETERS,
    }
    return json.dumps(function, ensure_ascii=False)
