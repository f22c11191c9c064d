"""Tool calls as Gemma 4 writes them, `call:name{key:value,...}` between two markers: strings stand between
quotation tokens, and keys have no quotation marks."""

from __future__ import annotations

import re

from cluster.text.output_parsers.json_call import ValueEnd
from cluster.text.output_parsers.literals import literal_json
from cluster.text.output_parsers.parameters import in_json
from cluster.text.output_parsers.pieces import CallIds, Content, Piece, ToolCallDelta, find_marker
from cluster.text.output_parsers.tool_calls import CallMarks, MarkedCalls

GEMMA4_MARKS = CallMarks("<|tool_call>", "<tool_call|>")
GEMMA4_QUOTE = '<|"|>'
_CALL = "call:"
# The length of a name, and of a key or a value that is no string.
_MAX_WORD_CHARS = 256
_NAME = re.compile(r"[A-Za-z0-9_.-]+")
_KEY_ENDS = re.compile(r"[:,{}\[\]]")
_VALUE_ENDS = re.compile(r"[,}\]]")
_CLOSED_BY = {"{": "}", "[": "]"}


class BraceCalls(MarkedCalls):
    """Each call is between two markers."""

    def __init__(self, ids: CallIds, *, allows_several: bool = True) -> None:
        super().__init__(ids, GEMMA4_MARKS, allows_several=allows_several)

    def _open(self, opening: str, names: frozenset[str] | None = None) -> None:
        self._call = _BraceCallText(self._num_calls, self._ids.of(self._num_calls), opening)


class _BraceCallText:
    """A call, behind `opening` (given back as content where there is no call). What it gives is JSON whatever
    the text is: a missing value is null, a bracket closes what is open, and all is closed where neither a
    comma nor a bracket follows a value."""

    def __init__(self, index: int, call_id: str, opening: str) -> None:
        self._index = index
        self._call_id = call_id
        self._opening = opening
        self._held = ""
        self._is_named = False
        # The brackets that are open.
        self._open: list[str] = []
        self._is_in_string = False
        # What the next key or value follows: a comma, unless it is the first.
        self._has_comma = False
        # Whether a key comes next, or the value of one, or whether a value has come.
        self._is_key = self._is_value = self._is_full = False
        self.is_done = False
        self.is_broken = False

    def push(self, text: str) -> tuple[list[Piece], str]:
        """Return the pieces of the call, and the text behind it."""
        self._held += text
        pieces: list[Piece] = []
        if not self._is_named:
            if (found := self._named()) is None:
                return [], ""
            pieces += found
        arguments: list[str] = []
        while not (self.is_done or self.is_broken) and (part := self._next()) is not None:
            arguments.append(part)
        if written := "".join(arguments):
            pieces.append(ToolCallDelta(self._index, arguments=written))
        rest = ""
        if self.is_done or self.is_broken:
            rest, self._held = self._held, ""
        return pieces, rest

    def flush(self, *, is_cut: bool) -> list[Piece]:
        """Return nothing: text that a marker began is no content."""
        return []

    def _named(self) -> list[Piece] | None:
        """Return the piece with the name; None while it is not complete."""
        text, brace, rest = self._held.partition("{")
        head = text.strip()
        name = head.removeprefix(_CALL).strip()
        may_come = _CALL.startswith(head) or (head.startswith(_CALL) and (not name or _NAME.fullmatch(name)))
        if len(text) > _MAX_WORD_CHARS or not may_come or (brace and not _NAME.fullmatch(name)):
            self.is_broken = True
            return [Content(self._opening)]
        if not brace:
            return None
        self._is_named, self._held = True, brace + rest
        return [ToolCallDelta(self._index, self._call_id, name)]

    def _next(self) -> str | None:
        """Return the JSON of the next part of the held text, and drop that; None where more is needed."""
        if self._is_in_string:
            return self._string()
        self._held = self._held.lstrip()
        if not self._held or (GEMMA4_QUOTE.startswith(self._held) and self._held != GEMMA4_QUOTE):
            return None
        if self._is_full and self._held[0] not in ",}]":
            return self._given_up()
        if self._held.startswith(GEMMA4_QUOTE):
            self._held, self._is_in_string = self._held[len(GEMMA4_QUOTE) :], True
            return f'{self._separator()}"'
        match self._held[0]:
            case "{" | "[":
                return self._opened()
            case "}" | "]":
                return self._closed()
            case ",":
                return self._comma()
            case ":" if self._open[-1] == "{" and not self._is_key:
                self._held = self._held[1:]
                return ""
            case '"':
                return self._quoted()
            case _:
                return self._word()

    def _string(self) -> str | None:
        text, marker, rest = find_marker(self._held, (GEMMA4_QUOTE,))
        self._held = rest
        if not marker:
            return in_json(text)[1:-1] if text else None
        self._is_in_string = False
        return f'{in_json(text)[1:-1]}"{self._after_key()}'

    def _separator(self) -> str:
        """Return what stands before the key or value that begins."""
        had_comma, self._has_comma = self._has_comma, False
        if not self._is_key:
            self._is_value = False
        return ", " if had_comma else ""

    def _after_key(self) -> str:
        """Return the colon behind a key, "" behind a value."""
        if not self._is_key:
            self._is_full = True
            return ""
        self._is_key, self._is_value = False, True
        return ": "

    def _missing(self) -> str:
        """Return null where a key has no value."""
        was_value, self._is_value = self._is_value, False
        return "null" if was_value else ""

    def _opened(self) -> str:
        bracket, self._held = self._held[0], self._held[1:]
        if self._is_key and self._open:  # no key: the bracket is dropped
            return ""
        opening = self._separator()
        self._open.append(bracket)
        self._is_key = bracket == "{"
        return opening + bracket

    def _closed(self) -> str:
        self._held = self._held[1:]
        written = self._missing() + _CLOSED_BY[self._open.pop()]
        self._has_comma = self._is_key = False
        self._is_full = True
        self.is_done = not self._open
        return written

    def _comma(self) -> str:
        self._held = self._held[1:]
        written = self._missing()
        self._has_comma = self._has_comma or self._is_full or bool(written)
        self._is_full = False
        self._is_key = self._open[-1] == "{"
        return written

    def _quoted(self) -> str | None:
        """Return a string of JSON, which some models write instead."""
        end = ValueEnd()
        for place, char in enumerate(self._held):
            if end.is_reached(char):
                text, self._held = self._held[: place + 1], self._held[place + 1 :]
                return self._separator() + literal_json(text) + self._after_key()
        return None

    def _word(self) -> str | None:
        """Return a key, or a value that is no string: a number, true, false or null."""
        found = (_KEY_ENDS if self._is_key else _VALUE_ENDS).search(self._held)
        place = found.start() if found else len(self._held)
        if place > _MAX_WORD_CHARS:
            return self._given_up()
        if found is None:
            return None
        word, self._held = self._held[:place].strip(), self._held[place:]
        if self._is_key:
            return self._separator() + in_json(word) + self._after_key()
        return self._separator() + literal_json(word) + self._after_key()

    def _given_up(self) -> str:
        """Return the end of the call, so that the held text is content."""
        closing = "".join(_CLOSED_BY[bracket] for bracket in reversed(self._open))
        self.is_done = True
        return self._missing() + closing
