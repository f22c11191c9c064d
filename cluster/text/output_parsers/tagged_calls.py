"""Tool calls in tags, one or two for each parameter, whose values are plain text. They become JSON by the
schema of the tool, while they are written where that has strings."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from cluster.text.output_parsers.parameters import STRING, Kinds, as_json, in_json, kinds_of, resolved
from cluster.text.output_parsers.pieces import (
    MAX_WAITING_CHARS,
    CallIds,
    Content,
    Piece,
    ToolCallDelta,
    find_marker,
)
from cluster.text.output_parsers.tool_calls import HERMES_MARKS, CallMarks, MarkedCalls

_FUNCTION, _FUNCTION_END = "<function=", "</function>"
_PARAMETER, _PARAMETER_END = "<parameter=", "</parameter>"
# The length of the name of a function or a parameter.
_MAX_NAME_CHARS = 256
_NAME = re.compile(r"[A-Za-z0-9_.-]+")


class TaggedCallText:
    """A call as tags, behind `opening` (given back as content where there is no call). The notation's own
    `_next` finds the tags."""

    # What stands before the text of a value, and what behind.
    _value_start = ""
    _value_ends: tuple[str, ...] = ()

    def __init__(self, index: int, call_id: str, opening: str, tools: Mapping[str, str]) -> None:
        """`tools` are the JSON schemas of the arguments, by the names of the tools ("": any)."""
        self._index = index
        self._call_id = call_id
        self._opening = opening
        self._tools = tools
        self._held = ""
        self._schema: Any = None
        # "function" (its tag is to come), "between" parameters, "value" (of one).
        self._place = "function"
        self._num_values = 0
        self._kinds: Kinds = None
        self._is_first = False
        self.is_done = False
        self.is_broken = False

    def push(self, text: str) -> tuple[list[Piece], str]:
        """Return the pieces of the call, and the text behind it."""
        self._held += text
        pieces: list[Piece] = []
        while not (self.is_done or self.is_broken):
            if (found := self._value() if self._place == "value" else self._next()) is None:
                return pieces, ""
            pieces += found
        rest, self._held = self._held, ""
        return pieces, rest

    def flush(self, *, is_cut: bool) -> list[Piece]:
        """Return nothing: text that a marker began is no content."""
        return []

    def _next(self) -> list[Piece] | None:
        """Return the pieces that are certain from the held text outside of values, and drop that; None where
        more is needed."""
        raise NotImplementedError

    def _named(self, name: str) -> list[Piece]:
        self._schema = json.loads(self._tools.get(name) or "{}")
        self._place = "between"
        return [ToolCallDelta(self._index, self._call_id, name)]

    def _begun(self, name: str) -> list[Piece]:
        """Begin with the value of a parameter."""
        self._place, self._is_first = "value", True
        arguments = resolved(self._schema, self._schema)
        properties = arguments.get("properties") if isinstance(arguments, dict) else None
        known = properties.get(name) if isinstance(properties, dict) else None
        self._kinds = kinds_of(known, self._schema)
        opening = f"{', ' if self._num_values else '{'}{in_json(name)}: "
        self._num_values += 1
        return self._arguments(f'{opening}"' if self._is_text else opening)

    def _value(self) -> list[Piece] | None:
        if self._is_first:
            if not self._held:
                return None
            self._held, self._is_first = self._held.removeprefix(self._value_start), False
        text, marker, rest = find_marker(self._held, self._value_ends)
        if marker:
            self._place, self._held = "between", rest
            return self._arguments(f'{in_json(text)[1:-1]}"' if self._is_text else as_json(text, self._kinds))
        if not (self._is_text and text):
            return None
        self._held = rest
        return self._arguments(in_json(text)[1:-1])

    @property
    def _is_text(self) -> bool:
        """Whether the value is a string whatever its text is."""
        return self._kinds == frozenset((STRING,))

    def _arguments(self, text: str) -> list[Piece]:
        return [ToolCallDelta(self._index, arguments=text)]

    def _broke(self) -> list[Piece]:
        """End where no tag comes: with the call that there is, if any."""
        if self._place == "function":
            self.is_broken = True
            return [Content(self._opening)]
        return self._ended()

    def _ended(self) -> list[Piece]:
        self.is_done = True
        return self._arguments("}" if self._num_values else "{}")


class TaggedCalls(MarkedCalls):
    """Each call is tags between two markers: those of `notation`."""

    def __init__(
        self,
        ids: CallIds,
        tools: Mapping[str, str],
        notation: type[TaggedCallText],
        marks: CallMarks = HERMES_MARKS,
        *,
        allows_several: bool = True,
    ) -> None:
        """`tools` are the JSON schemas of the arguments, by the names of the tools ("": any)."""
        super().__init__(ids, marks, allows_several=allows_several)
        self._tools = tools
        self._notation = notation

    def _open(self, opening: str, names: frozenset[str] | None = None) -> None:
        self._call = self._notation(self._num_calls, self._ids.of(self._num_calls), opening, self._tools)


class FunctionTags(TaggedCallText):
    """A call as Qwen3-Coder and Seed-OSS write it: the names are in the tags of the function and of each
    parameter."""

    _value_start = "\n"
    _value_ends = (f"\n{_PARAMETER_END}", _PARAMETER_END)

    def _next(self) -> list[Piece] | None:
        is_function = self._place == "function"
        text = self._held.lstrip()
        if len(self._held) - len(text) > MAX_WAITING_CHARS:
            return self._broke()
        if not is_function and text.startswith(_FUNCTION_END):
            self._held = text[len(_FUNCTION_END) :]
            return self._ended()
        start = _FUNCTION if is_function else _PARAMETER
        if not text.startswith(start):
            may_come = start.startswith(text) or (not is_function and _FUNCTION_END.startswith(text))
            return None if may_come else self._broke()
        name, end, rest = text[len(start) :].partition(">")
        is_name = len(name) <= _MAX_NAME_CHARS and not any(char in name for char in "<\n")
        if not is_name or (end and is_function and not _NAME.fullmatch(name)):
            return self._broke()
        if not end:
            return None
        self._held = rest
        return self._named(name) if is_function else self._begun(name)


class KeyTags(TaggedCallText):
    """A call as GLM-4.5 writes it: the name, then a tag for the name of each parameter and one for its
    value."""

    _KEY, _KEY_END, _VALUE, _VALUE_END = "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"
    _value_ends = (_VALUE_END,)

    def _next(self) -> list[Piece] | None:
        text = self._held.lstrip()
        if len(self._held) - len(text) > MAX_WAITING_CHARS:
            return self._broke()
        if self._place == "function":
            return self._function(text)
        if not text.startswith(self._KEY):
            # At the end of the call, or at what is none.
            return None if self._KEY.startswith(text) else self._broke()
        name, end, rest = text[len(self._KEY) :].partition(self._KEY_END)
        behind = rest.lstrip()
        if len(name) > _MAX_NAME_CHARS or len(rest) - len(behind) > MAX_WAITING_CHARS:
            return self._broke()
        if end and behind.startswith(self._VALUE):
            self._held = behind[len(self._VALUE) :]
            return self._begun(name.strip())
        return None if not end or self._VALUE.startswith(behind) else self._broke()

    def _function(self, text: str) -> list[Piece] | None:
        found = _NAME.match(text)
        end = found.end() if found else 0
        if end > _MAX_NAME_CHARS or (not end and text):
            return self._broke()
        rest = text[end:]
        behind = rest.lstrip(" \t")
        if not behind and len(rest) <= MAX_WAITING_CHARS:
            return None
        if behind[:1] not in ("\n", "\r", "<"):
            return self._broke()
        self._held = behind
        return self._named(text[:end])
