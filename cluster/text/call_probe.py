"""How a model's chat template writes tool calls: found by letting it render some.

Marks in the source say little: families share `<tool_call>` and write different things behind it. What the
template makes of a past call is what the model was trained to write.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Mapping
from dataclasses import replace

from cluster.text.bounded_process import BoundsBrokenError
from cluster.text.chat_template import CalledTool, Chat, ChatRenderer, ChatTool, ChatTurn, Rendered
from cluster.text.output_parsers.choose import OutputParsers

_NAME, _KEY = "probe_tool", "probe_key"
# Ids of nine letters and digits, as some families demand.
_IDS, _VALUES = ("probe0001", "probe0002"), ("first value", "second value")
_QUESTION = "probe question"
_MAX_CHARS = 1 << 18

_ARGUMENTS = rf'\{{\s*"{_KEY}": ?"{_VALUES[0]}"\s*\}}'
# The keys of a listed call come in any order.
_LISTED = (
    rf'\{{\s*("name": ?"{_NAME}",\s*"arguments": ?{_ARGUMENTS}'
    rf'|"arguments": ?{_ARGUMENTS},\s*"name": ?"{_NAME}")'
)
_OBJECT = rf'\{{\s*"name": ?"{_NAME}", ?"%s": ?{_ARGUMENTS}'
# The form of the first call, by the name of the parser.
_NOTATIONS: Mapping[str, re.Pattern[str]] = {
    "hermes": re.compile(rf"<tool_call>\s*{_OBJECT % 'arguments'}\s*\}}\s*</tool_call>"),
    "llama3": re.compile(rf"{_OBJECT % 'parameters'}\s*\}}"),
    "mistral": re.compile(rf"\[TOOL_CALLS\]\s*\[\s*{_OBJECT % 'arguments'}"),
    "mistral_args": re.compile(
        rf"\[TOOL_CALLS\]\s*{_NAME}\s*(\[CALL_ID\]\s*{_IDS[0]}\s*)?\[ARGS\]\s*{_ARGUMENTS}"
    ),
    "qwen3_coder": re.compile(
        rf"<tool_call>\s*<function={_NAME}>\s*<parameter={_KEY}>\s*{_VALUES[0]}\s*</parameter>\s*"
        r"</function>\s*</tool_call>"
    ),
    "seed_oss": re.compile(
        rf"<seed:tool_call>\s*<function={_NAME}>\s*<parameter={_KEY}>\s*{_VALUES[0]}\s*</parameter>\s*"
        r"</function>\s*</seed:tool_call>"
    ),
    "glm45": re.compile(
        rf"<tool_call>\s*{_NAME}\s*<arg_key>\s*{_KEY}\s*</arg_key>\s*<arg_value>\s*{_VALUES[0]}\s*"
        r"</arg_value>\s*</tool_call>"
    ),
    "phi4": re.compile(rf"<\|tool_call\|>\s*\[\s*{_LISTED}.*<\|/tool_call\|>", re.DOTALL),
    "granite": re.compile(rf"(<\|tool_call\|>|<tool_call>)\s*\[\s*{_LISTED}"),
    "apertus": re.compile(rf'<\|tools_prefix\|>\s*\[\s*\{{\s*"{_NAME}": ?{_ARGUMENTS}'),
    "cohere2": re.compile(
        rf'<\|START_ACTION\|>\s*\[\s*\{{"tool_call_id": ?"0",\s*"tool_name": ?"{_NAME}",'
        rf'\s*"parameters": ?{_ARGUMENTS}'
    ),
    "olmo3": re.compile(rf'<function_calls>\s*{_NAME}\({_KEY} ?= ?"{_VALUES[0]}"\)'),
    "gemma3": re.compile(rf"```tool_code\s*{_NAME}\({_KEY}='{_VALUES[0]}'\)"),
    "gemma4": re.compile(
        rf'<\|tool_call>call:{_NAME}\{{\s*{_KEY}:<\|"\|>{_VALUES[0]}<\|"\|>\s*\}}\s*<tool_call\|>'
    ),
    "harmony": re.compile(rf"to=functions\.{_NAME}\b[^{{]*<\|message\|>\s*{_ARGUMENTS}"),
    "glm4": re.compile(rf"{_NAME} *\n\s*{_ARGUMENTS}"),
}


class CallProbe:
    """Finds out how the answers of one model have tool calls. The template is tried once, when that is first
    needed; until then the parsers are those that its marks name."""

    def __init__(
        self, parsers: OutputParsers, renderer: ChatRenderer | None, *, finds_notation: bool
    ) -> None:
        """Without `finds_notation`, the notation is that of `parsers`."""
        self._parsers = parsers
        self._renderer = renderer
        self._finds_notation = finds_notation
        self._turn = asyncio.Lock()
        self._is_done = renderer is None

    async def parsers(self, wall_s: float) -> OutputParsers:
        """Return the parsers of answers that may call tools; `wall_s` is the time that a template has for a
        date."""
        if self._is_done:
            return self._parsers
        async with self._turn:
            if not self._is_done:
                try:
                    self._parsers = await self._probed(wall_s)
                except BoundsBrokenError:  # another time the host may be less busy
                    return self._parsers
                self._is_done = True
        return self._parsers

    async def _probed(self, wall_s: float) -> OutputParsers:
        one, two = [await self._rendered(num_calls, wall_s) for num_calls in (1, 2)]
        if _VALUES[0] not in one:
            return self._parsers  # it shows no calls, or refuses this chat
        parsers = replace(self._parsers, allows_several=all(value in two for value in _VALUES))
        return parsers.with_notation(notation_in(one)) if self._finds_notation else parsers

    async def _rendered(self, num_calls: int, wall_s: float) -> str:
        """Return the output of the template for a chat with this many calls, behind the question; "" where it
        refuses that."""
        assert self._renderer is not None
        result = await self._renderer.try_render(_probe_chat(num_calls), wall_s=wall_s, max_chars=_MAX_CHARS)
        return result.text.rpartition(_QUESTION)[2] if isinstance(result, Rendered) else ""


def notation_in(text: str) -> str | None:
    """Return the parser for the probe's first call, or `mistral_args`; None where it is not known."""
    return next((name for name, pattern in _NOTATIONS.items() if pattern.search(text)), None)


def _probe_chat(num_calls: int) -> Chat:
    schema = {
        "type": "object",
        "properties": {_KEY: {"type": "string", "description": "a key"}},
        "required": [_KEY],
    }
    calls = [
        CalledTool(call_id, _NAME, json.dumps({_KEY: value}))
        for call_id, value in zip(_IDS[:num_calls], _VALUES, strict=False)
    ]
    results = [ChatTurn("tool", "a result", tool_call_id=call.id, name=_NAME) for call in calls]
    turns = (ChatTurn("user", _QUESTION), ChatTurn("assistant", "", tool_calls=tuple(calls)), *results)
    return Chat(turns, (ChatTool(_NAME, "a tool", json.dumps(schema)),))
