"""Tool calls in the syntax of Python, `name(key=value, ...)`, between two markers, as OLMo 3 writes them, and
Gemma 3 in a block of code."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping

from cluster.text.output_parsers.literals import ArgumentEnd, literal_json
from cluster.text.output_parsers.parameters import in_json, resolved
from cluster.text.output_parsers.pieces import (
    MAX_WAITING_CHARS,
    CallIds,
    Content,
    Piece,
    ToolCallDelta,
    find_marker,
    without_end,
)
from cluster.text.output_parsers.tool_calls import CallMarks, Calls

# Characters that stand between calls, also where they are a list.
_SEPARATORS = " \t\r\n,;[]"
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]{0,255}")
_KEYWORD = re.compile(r"\s*([A-Za-z_][A-Za-z0-9_]*)\s*=(?!=)")


class PythonCalls(Calls):
    """Calls one after another between two markers. White space before the first marker and next to the
    markers belongs to nothing."""

    def __init__(
        self, ids: CallIds, tools: Mapping[str, str], marks: CallMarks, *, allows_several: bool = True
    ) -> None:
        """`tools` are the JSON schemas of the arguments, by the names of the tools ("": any)."""
        super().__init__(ids, allows_several=allows_several)
        self._tools = tools
        self._marks = marks
        self._is_inside = False
        # What is given back where no call follows the marker.
        self._opening = ""
        # The white space that comes now follows calls.
        self._follows = False

    def _between(self) -> list[Piece] | None:
        if not self._is_inside:
            return self._content()
        text = self._held.lstrip(_SEPARATORS)
        if text.startswith(self._marks.end):
            self._is_inside, self._held = False, text[len(self._marks.end) :]
            self._follows = not self._opening
            return [Content(f"{self._opening}{self._marks.end}")] if self._opening else []
        if len(self._held) - len(text) > MAX_WAITING_CHARS and self._opening:
            return self._no_call()
        if self._marks.end.startswith(text):
            self._held = self._held if self._opening else text
            return None
        found = _NAME.match(text)
        behind = text[found.end() :].lstrip(" ") if found else text
        if found and not behind and len(text) - found.end() <= MAX_WAITING_CHARS:
            return None  # the parenthesis may come
        if not found or behind[:1] != "(":
            return self._no_call()
        if not self._may_call:
            self._is_over = True
            return []
        name, index = found[0], self._num_calls
        self._held, self._opening = behind[1:], ""
        self._call = _PythonCallText(index, self._tools.get(name, ""))
        return [ToolCallDelta(index, self._ids.of(index), name)]

    def _no_call(self) -> list[Piece]:
        """Give back what is neither a call nor the end of calls."""
        opening, self._opening, self._is_inside = self._opening, "", False
        return [Content(opening)]

    def _content(self) -> list[Piece] | None:
        if self._follows:
            self._held = self._held.lstrip()
            if not self._held:
                return None
        before, marker, after = find_marker(self._held, (self._marks.start,))
        certain = without_end(before)
        if marker:
            self._is_inside, self._held, self._follows = True, after, False
            self._opening = marker
            return [Content(certain)]
        self._held = before[len(certain) :] + after
        if not certain:
            return None
        self._follows = False
        return [Content(certain)]

    def _last(self, held: str) -> list[Piece]:
        is_part_of_end = self._is_inside or (self._follows and not held.strip())
        return [] if is_part_of_end else [Content(held)]


class _PythonCallText:
    """The arguments of a call, behind its parenthesis. Each is given when it is complete."""

    is_broken = False

    def __init__(self, index: int, schema_json: str) -> None:
        """`schema_json` names arguments that the model gives by their positions."""
        self._index = index
        self._schema_json = schema_json
        self._argument: list[str] = []
        self._end = ArgumentEnd()
        self._num_arguments = 0
        self.is_done = False

    def push(self, text: str) -> tuple[list[Piece], str]:
        """Return the pieces of the call, and the text behind it."""
        found: list[str] = []
        for place, char in enumerate(text):
            if not self._end.is_reached(char):
                self._argument.append(char)
                continue
            found.append(self._taken())
            if char == ")":
                self.is_done = True
                found.append("}" if self._num_arguments else "{}")
                return self._pieces(found), text[place + 1 :]
        return self._pieces(found), ""

    def flush(self, *, is_cut: bool) -> list[Piece]:
        """Return nothing: an argument that is not complete has no value."""
        return []

    def _pieces(self, found: list[str]) -> list[Piece]:
        return [ToolCallDelta(self._index, arguments=text) for text in found if text]

    def _taken(self) -> str:
        """Return the JSON of the argument that has come; "" where there is none."""
        text, self._argument, self._end = "".join(self._argument), [], ArgumentEnd()
        if not text.strip():
            return ""
        keyword = _KEYWORD.match(text)
        name = keyword[1] if keyword else self._name_of(self._num_arguments)
        value = literal_json(text[keyword.end() :] if keyword else text)
        opening = ", " if self._num_arguments else "{"
        self._num_arguments += 1
        return f"{opening}{in_json(name)}: {value}"

    def _name_of(self, place: int) -> str:
        """Return the name of the parameter in this place; its number where the schema names none."""
        schema = json.loads(self._schema_json or "{}")
        arguments = resolved(schema, schema)
        properties = arguments.get("properties") if isinstance(arguments, dict) else None
        names = list(properties) if isinstance(properties, dict) else []
        return names[place] if place < len(names) else str(place)
