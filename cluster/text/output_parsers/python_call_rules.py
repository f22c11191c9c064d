"""Rules of a grammar for calls in the syntax of Python, `name(key=value, ...)`."""

from __future__ import annotations

import json
import re
from typing import Any

from cluster.text.output_parsers.callable_tools import CallableTool, ToolSchemaError
from cluster.text.output_parsers.grammar_lines import Element, GrammarLines
from cluster.text.output_parsers.parameters import (
    STRING,
    UNENFORCED_IN_TEXT,
    kinds_of,
    resolved,
    values_of,
    with_definitions,
)

_KEYWORD = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,255}")
_WORD_KINDS = ((True, "boolean"), (False, "boolean"), (None, "null"))


class PythonCallRules:
    """Writes the rules of calls whose arguments come by their names, in the order of the schema."""

    def __init__(self, lines: GrammarLines, *, has_python_values: bool) -> None:
        """Values are JSON. With `has_python_values`, those that are true, false or null themselves are
        Python's words, and a string may stand between single quotation marks."""
        self._lines = lines
        self._has_python_values = has_python_values

    def call(self, tool: CallableTool) -> str:
        """Return the rule of a call of one tool."""
        root, members = self._lines.arguments_of(tool)
        if members.others is not None:
            value = self._lines.json(tool, {})
            argument = self._lines.shared(f'/[A-Za-z_][A-Za-z0-9_]{{0,63}}/ "=" {value}')
            arguments = f"({argument} (COMMA {argument})*)?"
        else:
            elements = []
            for member in members.named:
                if not _KEYWORD.fullmatch(member.name):
                    problem = f"the name {member.name[:50]!r} is none of an argument in this model's calls"
                    raise ToolSchemaError(tool.name, f"{problem}; use letters, digits and _")
                value = self._value(tool, member.schema, root)
                rule = self._lines.shared(f"{json.dumps(f'{member.name}=')} ({value})")
                elements.append(Element(rule, member.is_required))
            arguments = self._lines.listed(elements, "COMMA")
        return f'{json.dumps(f"{tool.name}(")} {arguments} ")"'

    def _value(self, tool: CallableTool, schema: Any, root: Any) -> str:
        """Return the rule of the value of an argument."""
        found, kinds = resolved(schema, root), kinds_of(schema, root)
        inner = found if isinstance(found, dict) else schema if isinstance(schema, dict) else {}
        whole = self._lines.json(tool, with_definitions(inner, root))
        if not self._has_python_values or not isinstance(found, dict):
            return whole
        values, is_string = values_of(found), kinds == frozenset((STRING,))
        if values is not None:
            words = [value for value in values if value is None or isinstance(value, bool)]
            has_others = len(words) < len(values)
        else:
            words = [value for value, kind in _WORD_KINDS if kinds is None or kind in kinds]
            has_others = kinds is None or not kinds <= {kind for _, kind in _WORD_KINDS}
        spelled = [whole] if has_others else []
        spelled += [json.dumps(repr(value)) for value in words]
        if is_string and values is None and not UNENFORCED_IN_TEXT & found.keys():
            self._lines.add(r"QUOTED: /'([^'\\\x00-\x1f]|\\['\"\\nrt])*'/")
            spelled.append("QUOTED")
        return " | ".join(spelled)
