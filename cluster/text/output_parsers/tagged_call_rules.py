"""Rules of a grammar for calls in tags, whose values are plain text where they are strings."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from typing import Any

from cluster.text.output_parsers.callable_tools import CallableTool, ToolSchemaError
from cluster.text.output_parsers.grammar_lines import GrammarLines
from cluster.text.output_parsers.parameters import (
    STRING,
    UNENFORCED_IN_TEXT,
    kinds_of,
    resolved,
    values_of,
    with_definitions,
)

# The longest name of a parameter that the parsers read.
_MAX_NAME_CHARS = 256
_ANY_NAME = "/[A-Za-z0-9_.-]{1,64}/"


class TaggedCallRules(ABC):
    """Writes the rules of calls whose parameters come in the order of the schema."""

    # The mark behind a value.
    _value_end = ""

    def __init__(self, lines: GrammarLines) -> None:
        self._lines = lines

    def call(self, tool: CallableTool) -> str:
        """Return the rule of a call of one tool, between the markers of a call."""
        root, members = self._lines.arguments_of(tool)
        parts = []
        for member in members.named:
            rule = self._lines.shared(self._parameter(tool, member.name, member.schema, root))
            parts.append(rule if member.is_required else f"{rule}?")
        if members.others is not None:
            parts.append(f"{self._lines.shared(f'{self._key(_ANY_NAME)} {self._free_text()}')}*")
        return self._function(tool.name, " ".join(parts))

    @abstractmethod
    def _function(self, name: str, parameters: str) -> str:
        """Return the expression of a call with these parameters."""

    @abstractmethod
    def _key(self, name: str) -> str:
        """Return the expression of a parameter before its value; `name` is an expression."""

    @abstractmethod
    def _end(self) -> str:
        """Return the expression of what follows a value."""

    @abstractmethod
    def _free_text(self) -> str:
        """Return the rule of any text, up to the first end of its tag, where readers see it."""

    def _parameter(self, tool: CallableTool, key: str, schema: Any, root: Any) -> str:
        """Return the rule of a parameter with its tags: text as it is, other values as JSON."""
        if not key.strip() == key != "" or len(key) > _MAX_NAME_CHARS or any(char in key for char in "<>\n"):
            raise ToolSchemaError(tool.name, f"the name {key[:50]!r} cannot stand in a tag; change it")
        start = self._key(json.dumps(key))
        found, kinds = resolved(schema, root), kinds_of(schema, root)
        if (values := values_of(found)) is not None:
            texts = [value if isinstance(value, str) else json.dumps(value) for value in values]
            if any(self._value_end in text for text in texts):
                raise ToolSchemaError(tool.name, f"a value of {key[:50]!r} has the tag that ends it")
            return f"{start} ({' | '.join(map(json.dumps, texts))}) {self._end()}"
        if kinds is None or STRING in kinds:
            unenforced = sorted(UNENFORCED_IN_TEXT & found.keys()) if isinstance(found, dict) else []
            if unenforced and tool.is_strict:
                problem = f"{', '.join(unenforced)}: not supported in this model's calls"
                raise ToolSchemaError(tool.name, problem)
            return f"{start} {self._free_text()}"
        return f"{start} {self._lines.json(tool, with_definitions(found, root))} {self._end()}"


class FunctionTagRules(TaggedCallRules):
    """Those of calls as Qwen3-Coder writes them, and Seed-OSS without line breaks around values."""

    _value_end = "</parameter>"

    def __init__(self, lines: GrammarLines, *, breaks_around_values: bool) -> None:
        super().__init__(lines)
        self._break = "\n" if breaks_around_values else ""

    def _function(self, name: str, parameters: str) -> str:
        return f'BREAK {json.dumps(f"<function={name}>")} "\\n" {parameters} "</function>" BREAK'

    def _key(self, name: str) -> str:
        return f'"<parameter=" {name} {json.dumps(f">{self._break}")}'

    def _end(self) -> str:
        return json.dumps(f"{self._break}{self._value_end}\n")

    def _free_text(self) -> str:
        return f'{self._lines.up_to("value", "TEXT", self._value_end)} "\\n"'


class KeyTagRules(TaggedCallRules):
    """Those of calls as GLM-4.5 writes them, with line breaks between the tags, and GLM-4.6 without."""

    _value_end = "</arg_value>"

    def _function(self, name: str, parameters: str) -> str:
        return f"{json.dumps(name)} BREAK {parameters}"

    def _key(self, name: str) -> str:
        key, key_end, value = map(self._lines.mark, ("<arg_key>", "</arg_key>", "<arg_value>"))
        return f"{key} {name} {key_end} BREAK {value}"

    def _end(self) -> str:
        return f"{self._lines.mark(self._value_end)} BREAK"

    def _free_text(self) -> str:
        return f"{self._lines.up_to('value', 'TEXT', self._value_end)} BREAK"
