"""The lines of a grammar in llguidance's variant of Lark's syntax. There a special token is named by its id
and is no text, so each marker is written as the tokenizer has it."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from cluster.text.json_schemas import SchemaError, prepared
from cluster.text.output_parsers.callable_tools import CallableTool, ToolSchemaError
from cluster.text.output_parsers.parameters import NOTES, ObjectProperties, properties_of, resolved

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions

# Returns the id of a marker that is one special token; None where it is text.
SpecialToken = Callable[[str], int | None]
_TERMINALS = (
    "TEXT: /(.|\\n)*/",
    "SPACE: / ?/",
    "BREAK: /\\n?/",
    "BREAKS: /\\n{0,2}/",
    "WHITE: /[ \\n]{0,8}/",
    'NOTHING: ""',
    # As in the JSON of a constraint, which may be what begins with the same brace.
    "COLON: /: ?/",
    "COMMA: /, ?/",
)


# Keywords of all arguments together that rules hold to, or need not.
_ENFORCED_OF_ARGUMENTS = NOTES | {"type", "properties", "required", "additionalProperties", "$ref"}


class Arguments(NamedTuple):
    """The arguments of a tool, and the schema in which references of theirs are."""

    root: dict[str, Any]
    properties: ObjectProperties


class Element(NamedTuple):
    """An element of a list that has its own place there; one that is not required may be absent."""

    expression: str
    is_required: bool


class GrammarLines:
    """Collects the lines of one grammar. Methods that return something return an expression."""

    def __init__(self, special_token: SpecialToken, json_style: JsonCompileOptions, is_bounded: bool) -> None:
        self._special_token = special_token
        self._json_style = json_style
        self._is_bounded = is_bounded
        # Each line once; the values mean nothing.
        self._lines = dict.fromkeys(_TERMINALS)
        self._expression_to_rule: dict[str, str] = {}

    @property
    def lines(self) -> list[str]:
        """The lines so far."""
        return list(self._lines)

    def add(self, line: str) -> None:
        """Add a line, unless it is there."""
        self._lines[line] = None

    def is_token(self, marker: str) -> bool:
        """Whether a marker is one special token."""
        return self._special_token(marker) is not None

    def mark(self, marker: str) -> str:
        """Return the expression of a marker."""
        token = self._special_token(marker)
        return json.dumps(marker) if token is None else f"<[{token}]>"

    def up_to(self, name: str, text: str, marker: str) -> str:
        """Return the rule of text by a terminal, and of the marker when it first comes, also where it is
        spelled in other tokens than its own: readers see no difference."""
        self.add(f"{name}_text[lazy]: {text} {json.dumps(marker)}")
        token = self._special_token(marker)
        other = "" if token is None else f" | {text} <[{token}]>"
        self.add(f"{name}: {name}_text{other}")
        return name

    def shared(self, expression: str) -> str:
        """Return the rule of an expression, which is one however often it is asked for."""
        rule = self._expression_to_rule.setdefault(expression, f"part_{len(self._expression_to_rule)}")
        self.add(f"{rule}: {expression}")
        return rule

    def listed(self, elements: Sequence[Element], comma: str) -> str:
        """Return the rule of a list with these elements in their order, and a comma between any two; "" where
        there are none."""
        whole = behind = ""
        for expression, is_required in reversed(elements):
            first = f"{expression} {behind}"
            if not is_required:
                first = f"{first} | {whole}" if whole else f"({first})?"
            whole = self.shared(first)
            later = f"{comma} {expression}"
            behind = self.shared(f"{later if is_required else f'({later})?'} {behind}")
        return whole

    def json(self, tool: CallableTool, schema: dict[str, Any]) -> str:
        """Return the rule of JSON by a schema of a tool; raise `ToolSchemaError` where there is none."""
        options = {**self._json_style, "lenient": not tool.is_strict}
        return self.shared(f"%json {json.dumps({**self.checked(tool, schema), 'x-guidance': options})}")

    def arguments_of(self, tool: CallableTool) -> Arguments:
        """Return the arguments of a tool; raise `ToolSchemaError` where that is strict, and its schema
        demands something of all arguments together."""
        schema = tool.arguments_schema()
        self.checked(tool, schema)
        found = resolved(schema, schema)
        if (
            tool.is_strict
            and isinstance(found, dict)
            and (unenforced := sorted(found.keys() - _ENFORCED_OF_ARGUMENTS))
        ):
            problem = f"{', '.join(unenforced)} of all arguments: not supported in this model's calls"
            raise ToolSchemaError(tool.name, problem)
        return Arguments(schema, properties_of(found))

    def checked(self, tool: CallableTool, schema: dict[str, Any]) -> dict[str, Any]:
        """Return a schema of a tool as `prepared` does; raise `ToolSchemaError` where that refuses it."""
        try:
            found: dict[str, Any] = prepared(
                schema, is_lenient=not tool.is_strict, is_bounded=self._is_bounded
            )
        except SchemaError as error:
            raise ToolSchemaError(tool.name, str(error)) from None
        return found


def pattern_of(text: str) -> str:
    """Return a regular expression for this text alone."""
    return "".join(char if char.isalnum() else f"\\x{{{ord(char):x}}}" for char in text)
