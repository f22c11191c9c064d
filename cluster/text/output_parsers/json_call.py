"""Tool calls in JSON, read as their text arrives."""

from __future__ import annotations

import json
from enum import Enum, auto

_WHITESPACE = " \t\r\n"
_NAMES = ("name", "tool_name")
_ARGUMENT_KEYS = ("arguments", "parameters")
# Keys that some templates add; their values are left out.
_OTHER_KEYS = ("type", "id", "tool_call_id")


class ValueEnd:
    """Finds the end of one JSON object, list or text, character by character. The content of it is not
    checked."""

    def __init__(self) -> None:
        self._depth = 0
        self._is_in_text = False
        self._is_escaped = False

    def is_reached(self, char: str) -> bool:
        """Read the next character of the value, and return whether it is the last one."""
        if self._is_in_text:
            if self._is_escaped:
                self._is_escaped = False
            elif char == "\\":
                self._is_escaped = True
            elif char == '"':
                self._is_in_text = False
                return not self._depth
        elif char == '"':
            self._is_in_text = True
        elif char in "{[":
            self._depth += 1
        elif char in "}]":
            self._depth -= 1
            return self._depth <= 0
        return False


class _Place(Enum):
    OPEN = auto()  # the brace is to come
    KEY = auto()
    IN_KEY = auto()
    COLON = auto()
    VALUE = auto()  # a value is to begin
    IN_VALUE = auto()
    COMMA = auto()  # a comma, or the closing brace
    DONE = auto()
    BROKEN = auto()


class JsonCall:
    """Reads one call, {"name": ..., "arguments": {...}}, up to its closing brace.

    An object that cannot be a call is `is_broken`: another key, a name that is no text, arguments that are no
    object, no object at all.
    """

    def __init__(self, *, is_keyed: bool = False) -> None:
        """With `is_keyed`, the call is {name: {...}}."""
        self._is_keyed = is_keyed
        self.name = ""
        self.has_arguments = False
        self._arguments: list[str] = []
        self._place = _Place.OPEN
        self._key = ""
        self._token: list[str] = []
        self._end = ValueEnd()

    @property
    def is_done(self) -> bool:
        """Whether the closing brace was read."""
        return self._place is _Place.DONE

    @property
    def is_broken(self) -> bool:
        """Whether this can be no call."""
        return self._place is _Place.BROKEN

    def push(self, text: str) -> str:
        """Read text, and return the rest behind the call, or the character that broke it."""
        for index, char in enumerate(text):
            self._read(char)
            if self.is_done or self.is_broken:
                return text[index + 1 :]
        return ""

    def take_arguments(self) -> str:
        """Return the part of the arguments that has come since the last call."""
        taken, self._arguments = "".join(self._arguments), []
        return taken

    def _read(self, char: str) -> None:
        match self._place:
            case _Place.IN_KEY:
                self._read_key(char)
            case _Place.IN_VALUE:
                self._read_value(char)
            case _ if char in _WHITESPACE:
                return
            case _Place.OPEN if char == "{":
                self._place = _Place.KEY
            case _Place.KEY if char == '"':
                self._place, self._token, self._end = _Place.IN_KEY, [], ValueEnd()
                self._read_key(char)
            case _Place.COLON if char == ":":
                self._place = _Place.VALUE
            case _Place.VALUE:
                self._begin_value(char)
            case _Place.COMMA if char == "," and not self._is_keyed:
                self._place = _Place.KEY
            case _Place.COMMA if char == "}" and self.name:
                self._place = _Place.DONE
            case _:
                self._place = _Place.BROKEN

    def _read_key(self, char: str) -> None:
        self._token.append(char)
        if self._end.is_reached(char):
            self._key = _text("".join(self._token))
            keys = (*_NAMES, *_ARGUMENT_KEYS, *_OTHER_KEYS)
            is_known = bool(self._key) if self._is_keyed else self._key in keys
            self._place = _Place.COLON if is_known else _Place.BROKEN

    @property
    def _is_in_arguments(self) -> bool:
        return self._is_keyed or self._key in _ARGUMENT_KEYS

    def _begin_value(self, char: str) -> None:
        if self._is_in_arguments:
            fits = char == "{" and not self.has_arguments
            self.has_arguments = True
            if self._is_keyed and fits:
                self.name = self._key
        else:
            fits = char == '"' and not (self._key in _NAMES and self.name)
        if not fits:
            self._place = _Place.BROKEN
            return
        self._place, self._token, self._end = _Place.IN_VALUE, [], ValueEnd()
        self._read_value(char)

    def _read_value(self, char: str) -> None:
        (self._arguments if self._is_in_arguments else self._token).append(char)
        if self._end.is_reached(char):
            self._place = _Place.COMMA
            if self._key in _NAMES and not self._is_keyed:
                self.name = _text("".join(self._token))
                if not self.name:
                    self._place = _Place.BROKEN


def _text(token: str) -> str:
    """Return the text of a JSON string; "" where it is none."""
    try:
        value = json.loads(token)
    except ValueError:
        return ""
    return value if isinstance(value, str) else ""
