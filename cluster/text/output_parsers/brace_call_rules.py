"""Rules of a grammar for calls as Gemma 4 writes them, `call:name{key:value,...}`: the schema of each value
becomes rules, since only numbers, true and false are as in JSON."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from typing import Any

from cluster.text.output_parsers.brace_calls import GEMMA4_QUOTE
from cluster.text.output_parsers.callable_tools import CallableTool, ToolSchemaError
from cluster.text.output_parsers.grammar_lines import Element, GrammarLines
from cluster.text.output_parsers.parameters import (
    NOTES,
    STRING,
    ObjectProperties,
    ObjectProperty,
    kinds_of,
    properties_of,
    resolved,
    values_of,
)

# Keys that need no quotation marks: the parser ends others where the key goes on.
_PLAIN_KEY = re.compile(r"[^\s:,{}\[\]\"<]([^:,{}\[\]\"<]{0,254}[^\s:,{}\[\]\"<])?")
_NUMBER_KEYS = frozenset(("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"))
_COMMA = '","'
_ALTERNATIVES = "anyOf", "oneOf"
# Keywords that the rules enforce, or that demand nothing.
_ENFORCED = (
    NOTES
    | _NUMBER_KEYS
    | {"type", "enum", "const", "properties", "required", "additionalProperties", "items", "minItems"}
    | {"maxItems", "$ref"}
)
_IN_JSON = ("integer", "number", "boolean")
# As the template writes it.
_NULL = json.dumps("None")
# The schema of any value, as `true`.
_ANY: dict[str, Any] = {}
_KINDS = (STRING, *_IN_JSON, "null", "object", "array")


class BraceCallRules:
    """Writes the rules of calls whose keys are sorted, as the model's chat template sorts them."""

    def __init__(self, lines: GrammarLines) -> None:
        self._lines = lines

    def call(self, name: str, tool: CallableTool) -> str:
        """Return the rule of a call of one tool. Names of further rules begin with `name`."""
        root, properties = self._lines.arguments_of(tool)
        values = _ValueRules(self._lines, name, tool, root)
        return f"{json.dumps(f'call:{tool.name}')} {values.object(properties)}"


class _ValueRules:
    """Writes the rules of the values of one tool."""

    def __init__(self, lines: GrammarLines, name: str, tool: CallableTool, root: dict[str, Any]) -> None:
        self._lines = lines
        self._name = name
        self._tool = tool
        self._root = root
        # Rules by the identities of schemas, which are parts of `root`.
        self._id_to_rule: dict[int, str] = {}

    def object(self, members: ObjectProperties) -> str:
        """Return the rule of an object."""
        if members.others is not None:
            member = f'/[A-Za-z0-9_.-]{{1,64}}/ ":" {self._value(members.others)}'
            return f'"{{" ({member} ({_COMMA} {member})*)? "}}"'
        elements = [
            Element(self._member(member), member.is_required)
            for member in sorted(members.named, key=lambda it: it.name.lower())
        ]
        return f'"{{" {self._lines.listed(elements, _COMMA)} "}}"'

    def _resolved(self, schema: Any) -> dict[str, Any]:
        found = resolved(schema, self._root)
        if found is True or found == {}:
            return _ANY
        if not isinstance(found, dict) or "$ref" in found:
            reference = schema.get("$ref") if isinstance(schema, dict) else schema
            raise self._refusal(f"{str(reference)[:50]} stands for no schema within this one")
        if isinstance(schema, dict) and schema is not found:
            self._check({**schema, "$ref": ""})
        return found

    def _refusal(self, reason: str) -> ToolSchemaError:
        return ToolSchemaError(self._tool.name, reason)

    def _check(self, schema: dict[str, Any], *also: str) -> None:
        """Refuse keywords of a strict tool that no rule enforces; those of `also` are enforced too."""
        if self._tool.is_strict and (unenforced := sorted(schema.keys() - _ENFORCED - set(also))):
            raise self._refusal(f"{', '.join(unenforced)}: not supported in this model's calls")

    def _value(self, schema: Any) -> str:
        """Return the rule of a value by its schema. One that has a name may be within itself."""
        found = self._resolved(schema)
        if found is schema:
            return self._lines.shared(" | ".join(self._alternatives(found)))
        if (known := self._id_to_rule.get(id(found))) is not None:
            return known
        any_value = f"any_{'strict' if self._tool.is_strict else 'lenient'}"
        rule = f"{self._name}_named_{len(self._id_to_rule)}" if found else any_value
        self._id_to_rule[id(found)] = rule
        self._lines.add(f"{rule}: {' | '.join(self._alternatives(found))}")
        return rule

    def _alternatives(self, schema: dict[str, Any]) -> list[str]:
        if (values := values_of(schema)) is not None:
            self._check(schema)
            return list(map(self._literal, values))
        for key in _ALTERNATIVES:
            if isinstance(found := schema.get(key), list) and found and not self._is_narrowed(schema, key):
                self._check_disjoint(key, found)
                return list(map(self._value, found))
        if isinstance(found := schema.get("allOf"), list) and len(found) == 1:
            rest = {key: it for key, it in schema.items() if key != "allOf"}
            return self._alternatives({**self._resolved(found[0]), **rest})
        self._check(schema)
        return self._by_kinds(schema)

    def _is_narrowed(self, schema: dict[str, Any], key: str) -> bool:
        """Whether a schema demands more than one of its alternatives; refuse that for a strict tool."""
        self._check(schema, key)
        others = {"type", "properties", "items"} & schema.keys()
        if others and self._tool.is_strict:
            raise self._refusal(
                f"{key} beside {', '.join(sorted(others))}: not supported in this model's calls"
            )
        return bool(others)

    def _check_disjoint(self, key: str, alternatives: list[Any]) -> None:
        """Refuse `oneOf` of a strict tool where a value may be one of two alternatives."""
        if key != "oneOf" or not self._tool.is_strict:
            return
        kinds = [kinds_of(it, self._root) for it in alternatives]
        known = [it for it in kinds if it is not None]
        if len(known) < len(kinds) or sum(map(len, known)) > len(frozenset().union(*known)):
            raise self._refusal("oneOf of overlapping types: not supported in this model's calls")

    def _by_kinds(self, schema: dict[str, Any]) -> list[str]:
        """Return the rules of the types that a value may have."""
        kinds = kinds_of(schema, self._root)
        if kinds is None:
            kinds = frozenset(
                kind for key, kind in (("properties", "object"), ("items", "array")) if key in schema
            ) or frozenset(_KINDS)
        found = []
        if in_json := [kind for kind in _IN_JSON if kind in kinds]:
            limits = {key: schema[key] for key in _NUMBER_KEYS if key in schema}
            found.append(self._lines.json(self._tool, {"type": in_json, **limits}))
        if "null" in kinds:
            found.append(_NULL)
        if STRING in kinds:
            found.append(self._text())
        if "object" in kinds:
            found.append(self.object(properties_of(schema)))
        if "array" in kinds:
            found.append(self._array(schema))
        if not found:
            raise self._refusal(f"the type {schema.get('type')!r} is unknown")
        return found

    def _text(self) -> str:
        end = self._lines.up_to("string", "TEXT", GEMMA4_QUOTE)
        return self._lines.shared(f"{self._lines.mark(GEMMA4_QUOTE)} {end}")

    def _member(self, member: ObjectProperty) -> str:
        return self._lines.shared(f"{self._key(member.name)} {self._value(member.schema)}")

    def _array(self, schema: dict[str, Any]) -> str:
        least, most = schema.get("minItems", 0), schema.get("maxItems")
        if not isinstance(least, int) or not isinstance(most, int | None):
            raise self._refusal("minItems and maxItems are integers")
        if most == 0:
            return '"[" "]"'
        item = self._value(schema.get("items", True))
        further = f"({_COMMA} {item}){{{max(least - 1, 0)},{'' if most is None else most - 1}}}"
        return f'"[" {item} {further} "]"' if least else f'"[" ({item} {further})? "]"'

    def _key(self, key: str) -> str:
        return json.dumps(f"{key}:") if _PLAIN_KEY.fullmatch(key) else f'{self._quoted(key)} ":"'

    def _quoted(self, text: str) -> str:
        if GEMMA4_QUOTE in text:
            raise self._refusal(f"{GEMMA4_QUOTE} ends a text in this model's calls; change {text[:50]!r}")
        quote = self._lines.mark(GEMMA4_QUOTE)
        return f"{quote} {json.dumps(text)} {quote}" if text else f"{quote} {quote}"

    def _literal(self, value: Any) -> str:
        """Return the expression of a value."""
        match value:
            case str():
                return self._quoted(value)
            case list():
                return f'"[" {_joined(map(self._literal, value))} "]"'
            case dict():
                members = sorted(value.items(), key=lambda it: it[0].lower())
                return f'"{{" {_joined(f"{self._key(key)} {self._literal(it)}" for key, it in members)} "}}"'
            case None:
                return _NULL
            case _:
                return json.dumps(json.dumps(value))


def _joined(expressions: Iterable[str]) -> str:
    return f" {_COMMA} ".join(expressions)
