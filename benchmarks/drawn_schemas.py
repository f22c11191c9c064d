"""JSON schemas whose answers end: definitions of Kubernetes with bounds, and drawn ones of each keyword.

Bounds are what a cautious client would set: the length of strings, the number of items, and how deep
definitions refer to others. Numbers are left as they are.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from importlib import resources
from typing import Any

KUBERNETES = "v1.37.0-local-strict"
Schema = dict[str, Any]

MAX_STRING_CHARS = 12
MAX_ITEMS = 2
# Definitions of Kubernetes refer to others; below this depth an object holds what it requires.
MAX_DEPTH = 2
# Most optional properties that an object keeps, at each depth.
MAX_OPTIONAL = (8, 4, 2)


@dataclass(frozen=True)
class SchemaCase:
    """A schema, where it is from, and the keyword for which it must be refused ("": it is supported)."""

    name: str
    source: str
    schema: Schema
    unsupported: str = ""
    keywords: frozenset[str] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "keywords", frozenset(_keywords(self.schema)))

    @property
    def text(self) -> str:
        return json.dumps(self.schema)


# ------------------------------------------------------------------------------------------- Kubernetes


def kubernetes_cases(num_cases: int, seed: int = 17) -> list[SchemaCase]:
    """Draw definitions of Kubernetes that are objects, each made whole and bounded. All properties of the
    outermost object are required, so that no answer is empty; most may be null."""
    folder = resources.files("kubernetes_validate") / "kubernetes-json-schema" / KUBERNETES
    definitions = json.loads((folder / "_definitions.json").read_text())["$defs"]
    names = sorted(name for name, found in definitions.items() if found.get("properties"))
    random.Random(seed).shuffle(names)
    cases: dict[str, SchemaCase] = {}
    for name in names:
        if len(cases) < num_cases:
            schema = {**_bounded(definitions[name], definitions, 0), "type": "object"}
            schema["required"] = list(schema["properties"])
            case = SchemaCase(name, "kubernetes", schema, "format" if _has_unknown_format(schema) else "")
            cases.setdefault(case.text, case)
    return list(cases.values())


def _has_unknown_format(schema: Any) -> bool:
    """Whether a string has the format "byte", which is OpenAPI's and none of JSON schema."""
    if isinstance(schema, dict):
        return schema.get("format") == "byte" or any(map(_has_unknown_format, schema.values()))
    return isinstance(schema, list) and any(map(_has_unknown_format, schema))


_KEPT = ("type", "enum", "format", "description", "required")


def _bounded(schema: Schema, definitions: Mapping[str, Schema], depth: int) -> Schema:
    """Return a schema without references, of bounded depth, whose strings, arrays and maps are bounded."""
    if "$ref" in schema:
        return _bounded(definitions[schema["$ref"].rpartition("#/$defs/")[2]], definitions, depth)
    found = {key: schema[key] for key in _KEPT if key in schema}
    types = _types(schema)
    if "oneOf" in schema:
        found["oneOf"] = [_bounded(inner, definitions, depth) for inner in schema["oneOf"]]
    if "string" in types and "enum" not in schema:
        found["maxLength"] = MAX_STRING_CHARS
    if "array" in types:
        found["maxItems"] = MAX_ITEMS
        found["items"] = _bounded(schema["items"], definitions, depth + 1)
    if "object" in types:
        found |= _bounded_object(schema, definitions, depth)
    return found


def _bounded_object(schema: Schema, definitions: Mapping[str, Schema], depth: int) -> Schema:
    inner, required = schema.get("properties", {}), set(schema.get("required", ()))
    if not inner:
        others = schema.get("additionalProperties", False)
        if not isinstance(others, dict) or depth > MAX_DEPTH:
            return {"additionalProperties": False}
        bounded = _bounded(others, definitions, depth + 1)
        return {"additionalProperties": bounded, "maxProperties": MAX_ITEMS}
    num_optional = MAX_OPTIONAL[depth] if depth < len(MAX_OPTIONAL) else 0
    optional = [name for name in inner if name not in required][:num_optional]
    return {
        "properties": {
            name: _bounded(value, definitions, depth + 1)
            for name, value in inner.items()
            if name in required or name in optional
        },
        "additionalProperties": False,
    }


def _types(schema: Schema) -> tuple[str, ...]:
    types = schema.get("type", ())
    return (types,) if isinstance(types, str) else tuple(types)


# ------------------------------------------------------------------------------------------------ drawn


def drawn_cases(num_cases: int, seed: int = 17) -> list[SchemaCase]:
    """Draw schemas of which each supported keyword has its share; every twelfth has a refused keyword."""
    draw = random.Random(seed)
    supported, refused = list(PARTS), list(UNSUPPORTED)
    cases: dict[str, SchemaCase] = {}
    while (number := len(cases)) < num_cases:
        if number % 12 == 11:
            unsupported = keyword = refused[number // 12 % len(refused)]
            part = UNSUPPORTED[keyword]
        else:
            unsupported, keyword = "", supported[number % len(supported)]
            part = PARTS[keyword](draw)
        whole = part if draw.random() < 0.3 else _object_around(draw, part)
        case = SchemaCase(f"{keyword}-{number}", "drawn", whole, unsupported)
        cases.setdefault(case.text, case)
    return list(cases.values())


# Keywords that the compiler of grammars refuses, in a schema that has them.
UNSUPPORTED: dict[str, Schema] = {
    "not": {"type": "integer", "not": {"const": 3}},
    "if": {"if": {"type": "integer"}, "then": {"minimum": 0}, "else": {"type": "null"}},
    "contains": {"type": "array", "contains": {"type": "null"}, "maxItems": 3},
    "uniqueItems": {"type": "array", "items": {"type": "boolean"}, "uniqueItems": True, "maxItems": 2},
    "propertyNames": {"type": "object", "propertyNames": {"pattern": "^[a-z]$"}, "maxProperties": 2},
    "dependentRequired": {"type": "object", "dependentRequired": {"a": ["b"]}},
    "dependentSchemas": {"type": "object", "dependentSchemas": {"a": {"required": ["b"]}}},
    "unevaluatedProperties": {"type": "object", "unevaluatedProperties": False},
    "unevaluatedItems": {"type": "array", "unevaluatedItems": False},
    "$dynamicRef": {"$dynamicRef": "#node"},
}

FORMATS = ("date", "time", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "uri", "uuid")
_BOUNDED_FORMATS = {"email": 24, "hostname": 24, "uri": 40, "duration": 12, "time": 16, "date-time": 32}
_PATTERNS = ("^[a-z]{2,5}$", "^\\d{3}-\\d{2}$", "^(ab|c){1,3}$", "^#[0-9A-F]{6}$", "^\\w+@x$", "^[^\\d\\s]+$")
_VALUES = ("red", "grün", 7, None, True, "a b", 'q"', -1.5, [1, "x"], {"k": None})
_NAMES = ("id", "name", "größe", "tags", "child", 'a "quoted" name', "$ref")


def _string(draw: random.Random) -> Schema:
    return {"type": "string", "maxLength": draw.randrange(3, 20)}


def _leaf(draw: random.Random) -> Schema:
    kinds: list[Schema] = [{"type": "boolean"}, {"type": "null"}, _string(draw), _range(draw)]
    kinds += [{"enum": draw.sample(_VALUES, 3)}, {"const": draw.choice(_VALUES)}]
    return draw.choice(kinds)


def _any_part(draw: random.Random) -> Schema:
    """Return a part of any kind, mostly small."""
    return PARTS[draw.choice(list(PARTS))](draw) if draw.random() < 0.3 else _leaf(draw)


def _range(draw: random.Random, *ends: str) -> Schema:
    """Return a number or integer with these ends, two by default."""
    low = draw.choice((0, 1, -7, 250, -100_000, draw.randrange(-1000, 1000)))
    high = low + draw.choice((2, 9, 500, 10**6))
    is_integer = draw.random() < 0.5
    found: Schema = {"type": "integer" if is_integer else "number"}
    for end in ends or ("minimum", "maximum"):
        found[end] = low if end in ("minimum", "exclusiveMinimum") else high
        if not is_integer and draw.random() < 0.5:
            found[end] += 0.25
    return found


def _array(draw: random.Random, **how: Any) -> Schema:
    return {"type": "array", "items": _leaf(draw), "maxItems": draw.randrange(1, 5), **how}


def _object(draw: random.Random, **how: Any) -> Schema:
    names = draw.sample(_NAMES, draw.randrange(1, 4))
    return {
        "type": "object",
        "properties": {name: _leaf(draw) for name in names},
        "required": [name for name in names if draw.random() < 0.6],
        "additionalProperties": False,
        **how,
    }


def _object_around(draw: random.Random, part: Schema) -> Schema:
    """Return an object that requires the part, with others next to it; definitions stay at the top."""
    inner = dict(part)
    shared: Schema = {key: inner.pop(key) for key in ("$defs", "definitions") if key in inner}
    names = ["part", *draw.sample(_NAMES, draw.randrange(3))]
    draw.shuffle(names)
    found = {name: inner if name == "part" else _any_part_without_definitions(draw) for name in names}
    return {
        **shared,
        "type": "object",
        "properties": found,
        "required": ["part", *(name for name in names if name != "part" and draw.random() < 0.5)],
        "additionalProperties": False,
    }


def _any_part_without_definitions(draw: random.Random) -> Schema:
    part = _any_part(draw)
    return part if "$ref" not in json.dumps(part) else _leaf(draw)


def _list_of_few(draw: random.Random) -> Schema:
    """Return a list whose type refers to another one for what follows; one in four to itself, so that it may
    never end."""
    num_types = draw.randrange(4)
    definitions: Schema = {}
    for number in range(num_types + 1):
        following = min(number + 1, num_types)
        more = [{"$ref": f"#/$defs/node{following}"}] if following > number or num_types == 0 else []
        definitions[f"node{number}"] = {
            "type": "object",
            "properties": {"value": _leaf(draw), "next": {"anyOf": [{"type": "null"}, *more]}},
            "required": ["value", "next"],
            "additionalProperties": False,
        }
    return {"$defs": definitions, "$ref": "#/$defs/node0"}


def _pattern_names(draw: random.Random) -> Schema:
    patterns = {"^x[a-z]{1,3}$": _leaf(draw), "^[0-9]{2}$": _leaf(draw)}
    return {
        "type": "object",
        "patternProperties": patterns,
        "additionalProperties": False,
        "maxProperties": 3,
    }


def _map(draw: random.Random, **how: Any) -> Schema:
    return {"type": "object", "additionalProperties": _leaf(draw), "maxProperties": 3, **how}


def _all_of(draw: random.Random) -> Schema:
    return {
        "allOf": [
            {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]},
            {"properties": {"a": {"minimum": draw.randrange(9), "maximum": 99}, "b": _leaf(draw)}},
            {"additionalProperties": False, "properties": {"a": {}, "b": {}}},
        ]
    }


def _one_of(draw: random.Random) -> Schema:
    return {"oneOf": [{"type": "null"}, {"type": "boolean"}, _range(draw), _string(draw)]}


def _prefixed(draw: random.Random, **how: Any) -> Schema:
    return {"type": "array", "prefixItems": [_leaf(draw), _leaf(draw)], **how}


def _format(draw: random.Random) -> Schema:
    name = draw.choice(FORMATS)
    found: Schema = {"type": "string", "format": name}
    if name in _BOUNDED_FORMATS:
        found["maxLength"] = _BOUNDED_FORMATS[name]
    return found


# A part for each supported keyword, and for numbers without bounds.
PARTS: dict[str, Callable[[random.Random], Schema]] = {
    "type": lambda draw: {"type": draw.sample(["null", "boolean", "integer"], 2)},
    "integer": lambda draw: {"type": "integer"},
    "number": lambda draw: {"type": "number"},
    "minimum": lambda draw: _range(draw, "minimum"),
    "maximum": lambda draw: _range(draw, "maximum"),
    "exclusiveMinimum": lambda draw: _range(draw, "exclusiveMinimum", "maximum"),
    "exclusiveMaximum": lambda draw: _range(draw, "minimum", "exclusiveMaximum"),
    "multipleOf": lambda draw: {"type": "number", "multipleOf": draw.choice((1, 5, 0.5, 0.01, 12))},
    "maxLength": _string,
    "minLength": lambda draw: {"type": "string", "minLength": draw.randrange(1, 9), "maxLength": 12},
    "pattern": lambda draw: {"type": "string", "pattern": draw.choice(_PATTERNS), "maxLength": 16},
    "format": _format,
    "enum": lambda draw: {"enum": draw.sample(_VALUES, 4)},
    "const": lambda draw: {"const": draw.choice(_VALUES)},
    "items": _array,
    "minItems": lambda draw: _array(draw, minItems=2, maxItems=4),
    "maxItems": lambda draw: _array(draw, maxItems=draw.randrange(4)),
    "prefixItems": lambda draw: _prefixed(draw, items=False),
    "prefixItems and items": lambda draw: _prefixed(draw, items=_leaf(draw), maxItems=4, minItems=1),
    "properties": _object,
    "required": lambda draw: _object(draw, required=[]),
    "additionalProperties": _map,
    "patternProperties": _pattern_names,
    "minProperties": lambda draw: _map(draw, minProperties=1),
    "maxProperties": lambda draw: _map(draw, maxProperties=draw.randrange(3)),
    "anyOf": lambda draw: {"anyOf": [_range(draw), _string(draw), _array(draw)]},
    "oneOf": _one_of,
    "allOf": _all_of,
    "$ref": _list_of_few,
    "definitions": lambda draw: {"definitions": {"d": _leaf(draw)}, "$ref": "#/definitions/d"},
}

_NAMED = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_VALUE_KEYWORDS = ("enum", "const", "required", "type", "dependentRequired", "description")


def _keywords(schema: Any) -> Iterator[str]:
    if isinstance(schema, list):
        for inner in schema:
            yield from _keywords(inner)
    elif isinstance(schema, dict):
        for key, value in schema.items():
            yield key
            if key in _NAMED:
                for inner in value.values():
                    yield from _keywords(inner)
            elif key not in _VALUE_KEYWORDS:
                yield from _keywords(value)
