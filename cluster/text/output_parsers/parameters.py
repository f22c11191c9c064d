"""Parameters of a function that the model writes as plain text, not as JSON: the kind of each value is in the
schema alone."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, NamedTuple, NoReturn

STRING = "string"
# Demands on strings, which do not apply to a value that is plain text.
UNENFORCED_IN_TEXT = frozenset(("minLength", "maxLength", "pattern", "format"))
# Keywords that demand nothing themselves.
NOTES = frozenset(
    {
        *("$defs", "definitions", "$schema", "$id", "title", "description", "examples", "default"),
        *("$comment", "deprecated", "readOnly", "writeOnly"),
    }
)
# The spelling of Python, and of many templates, for values that JSON writes otherwise.
_AS_JSON: Mapping[str, str] = {"True": "true", "False": "false", "None": "null"}
_MAX_DEPTH = 16

# The types that a value may have; None: any.
Kinds = frozenset[str] | None


def resolved(schema: Any, root: Any) -> Any:
    """Return the schema that a schema refers to within the root, or the schema itself."""
    for _ in range(_MAX_DEPTH):
        if not isinstance(schema, dict) or not isinstance(reference := schema.get("$ref"), str):
            return schema
        schema = root if reference.startswith("#") else None
        for part in reference.removeprefix("#").split("/")[1:]:
            name = part.replace("~1", "/").replace("~0", "~")
            schema = schema.get(name) if isinstance(schema, dict) else None
    return schema


def kinds_of(schema: Any, root: Any, depth: int = 0) -> Kinds:
    """Return the types of the values that a schema within the root allows."""
    schema = resolved(schema, root)
    if not isinstance(schema, dict) or depth > _MAX_DEPTH:
        return None
    named = schema.get("type")
    if isinstance(named, str):
        return frozenset((named,))
    if isinstance(named, list):
        return frozenset(name for name in named if isinstance(name, str))
    if isinstance(values := schema.get("enum"), list):
        return frozenset(map(kind_of, values))
    if "const" in schema:
        return frozenset((kind_of(schema["const"]),))
    for key in ("anyOf", "oneOf"):
        if isinstance(found := schema.get(key), list):
            return _union([kinds_of(it, root, depth + 1) for it in found])
    if isinstance(found := schema.get("allOf"), list):
        return next((kinds for it in found if (kinds := kinds_of(it, root, depth + 1)) is not None), None)
    return None


class ObjectProperty(NamedTuple):
    """A property of an object, and its schema."""

    name: str
    schema: Any
    is_required: bool


class ObjectProperties(NamedTuple):
    """The properties of an object: those that are named, or the schema of all (None: there are no others)."""

    named: tuple[ObjectProperty, ...]
    others: Any = None


def properties_of(schema: Any) -> ObjectProperties:
    """Return the properties that a schema of objects allows in calls: where it names some, those alone."""
    if not isinstance(schema, dict):
        return ObjectProperties((), True)
    properties, others = schema.get("properties"), schema.get("additionalProperties", True)
    names, required = properties if isinstance(properties, dict) else {}, schema.get("required")
    needed = [name for name in required if isinstance(name, str)] if isinstance(required, list) else []
    found = {**names, **{name: others for name in needed if name not in names}}
    allowed = [name for name, it in found.items() if it is not False or name in needed]
    named = tuple(ObjectProperty(name, found[name], name in needed) for name in allowed)
    is_open = not named and not isinstance(properties, dict) and others is not False
    return ObjectProperties(named, others if is_open else None)


def values_of(schema: Any) -> list[Any] | None:
    """Return the values that a schema lists; None where it lists none."""
    if not isinstance(schema, dict):
        return None
    found = schema.get("enum", [schema["const"]] if "const" in schema else None)
    return found if isinstance(found, list) else None


def with_definitions(schema: dict[str, Any], root: Any) -> dict[str, Any]:
    """Return a schema with the definitions of the root, to which it may refer."""
    return {**{name: root[name] for name in ("$defs", "definitions") if name in root}, **schema}


def kind_of(value: Any) -> str:
    """Return the type of a value as schemas name it."""
    if value is None:
        return "null"
    for kind, name in ((bool, "boolean"), (int, "integer"), (float, "number"), (str, STRING)):
        if isinstance(value, kind):
            return name
    return "array" if isinstance(value, list) else "object"


def as_json(text: str, kinds: Kinds) -> str:
    """Return the value of a text of these kinds as JSON: a string where it is nothing else."""
    plain = text.strip()
    plain = _AS_JSON.get(plain, plain)
    if kinds is None or kinds - {STRING}:
        try:
            kind = kind_of(json.loads(plain, parse_constant=_no_number))
        except (ValueError, RecursionError):
            return in_json(text)
        if kind != STRING and (kinds is None or kind in kinds or (kind == "integer" and "number" in kinds)):
            return plain
    return in_json(text)


def in_json(text: str) -> str:
    """Return a JSON string."""
    return json.dumps(text, ensure_ascii=False)


def _union(found: list[Kinds]) -> Kinds:
    known = [kinds for kinds in found if kinds is not None]
    return frozenset().union(*known) if len(known) == len(found) else None


def _no_number(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON")
