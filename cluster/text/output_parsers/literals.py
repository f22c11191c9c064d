"""Literals of Python, which are JSON in another spelling."""

from __future__ import annotations

import ast
import json
import warnings
from typing import Any, NoReturn

_OPENING, _CLOSING = "([{", ")]}"
# Names that JSON has for values, which models write among Python's.
_NAMES = {"true": True, "false": False, "null": None}


class ArgumentEnd:
    """Finds the end of one argument of a call, character by character. The content of it is not checked."""

    def __init__(self) -> None:
        self._depth = 0
        # The quotation mark of the string that is being read ("": none), the number of them at its beginning,
        # and of those that have come in a row: at the beginning, while nothing else has come, or in the text.
        self._quote = ""
        self._num_quotes = 0
        self._num_in_row = 0
        self._is_opening = False
        self._is_escaped = False

    def is_reached(self, char: str) -> bool:
        """Read the next character, and return whether it is the comma or parenthesis behind the argument."""
        if self._quote and not self._is_quoted(char):
            return False
        if char in "'\"":
            self._quote, self._num_quotes, self._num_in_row, self._is_opening = char, 1, 1, True
        elif char in _OPENING:
            self._depth += 1
        elif char in _CLOSING and self._depth:
            self._depth -= 1
        else:
            return char in ",)" and not self._depth
        return False

    def _is_quoted(self, char: str) -> bool:
        """Read a character behind a quotation mark, and return whether it is outside of the string."""
        if self._is_opening:
            if char == self._quote:
                self._num_in_row += 1
                if self._num_in_row == 3:
                    self._num_quotes, self._num_in_row, self._is_opening = 3, 0, False
                return False
            self._is_opening = False
            if self._num_in_row == 2:  # the empty string
                self._quote = ""
                return True
            self._num_in_row = 0
        if self._is_escaped:
            self._is_escaped = False
        elif char == "\\":
            self._is_escaped, self._num_in_row = True, 0
        else:
            self._num_in_row = self._num_in_row + 1 if char == self._quote else 0
            if self._num_in_row == self._num_quotes:
                self._quote = ""
        return False


def literal_json(text: str) -> str:
    """Return the JSON of a literal of Python or JSON; a string of the text where it is none."""
    text = text.strip()
    try:
        json.loads(text, parse_constant=_no_number)
    except (ValueError, RecursionError):
        pass
    else:
        return text
    try:
        with warnings.catch_warnings(action="ignore"):
            tree = ast.parse(text, mode="eval")
        return json.dumps(_value(tree.body), ensure_ascii=False, allow_nan=False)
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return json.dumps(text, ensure_ascii=False)


def _value(node: ast.expr) -> Any:
    """Return the value of a literal; `ValueError` where it has none in JSON."""
    match node:
        case ast.Constant(value=str() | int() | float() | bool() | None as value):
            return value
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float() as value)):
            return -value
        case ast.Name(id=name) if name in _NAMES:
            return _NAMES[name]
        case ast.List(elts=elements) | ast.Tuple(elts=elements) | ast.Set(elts=elements):
            return [_value(it) for it in elements]
        case ast.Dict(keys=keys, values=values):
            return {_key(key): _value(it) for key, it in zip(keys, values, strict=True)}
        case _:
            raise ValueError("no literal")


def _key(node: ast.expr | None) -> str:
    value = None if node is None else _value(node)
    if not isinstance(value, str):
        raise ValueError("the key of an object is a string")
    return value


def _no_number(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON")
