"""JSON schemas before grammars are made of them: notes for readers alone go, and parts that the library that
makes grammars reads otherwise than the standard does are written so that both agree, or refused."""

from __future__ import annotations

from collections.abc import Callable
from decimal import Decimal
from typing import Any

Schema = dict[str, Any]

# The places where other schemas stand in a schema: by name, in a list, or directly.
_NAMED_SCHEMAS = frozenset(("properties", "patternProperties", "$defs", "definitions", "dependentSchemas"))
_LISTED_SCHEMAS = frozenset(("anyOf", "allOf", "oneOf", "prefixItems", "items"))
_SCHEMAS = frozenset(("items", "additionalProperties", "additionalItems", "contains", "propertyNames", "not"))
_NOTES = frozenset(("title", "description", "examples", "default", "$comment"))
# Keywords that do not matter to null.
_NOT_OF_NULL = _NOTES | {
    *("type", "format", "minLength", "maxLength", "pattern", "items", "prefixItems", "additionalItems"),
    *("minItems", "maxItems", "properties", "patternProperties", "additionalProperties", "required"),
    *("minProperties", "maxProperties", "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"),
    *("multipleOf", "$defs", "definitions"),
}

# Names of maps have at most 64 characters where nothing else bounds them.
_BOUNDED_NAME = "^[\\s\\S]{0,64}$"
# The limit of RFC 8259: readers keep integers up to here.
_MAX_INTEGER = 2**53 - 1
_STEP, _COARSE_STEP = 1e-9, Decimal("1e-6")
_LOWER, _UPPER = ("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum")


# The parser keeps some 4 items for each property that may come next, of at most 2,000; it reads properties in
# their order, so that those that are required cost nothing.
MAX_OPTIONAL_PROPERTIES = 480
# Compiling takes longer than in proportion to properties: some 0.4 s for this number.
MAX_PROPERTIES = 4000


class SchemaError(ValueError):
    """No grammar can be made of the schema; the text gives the reason."""


def without_notes(schema: Any) -> Any:
    """Return a schema without parts that change no output, which may be the most of it."""
    return _mapped(schema, lambda found: {key: found[key] for key in found if key not in _NOTES})


def prepared(schema: Any, *, is_lenient: bool = False, is_bounded: bool = True) -> Any:
    """Return a schema of which the library makes a grammar whose texts all conform to this one. Raise
    `SchemaError` where none is known, unless it `is_lenient`.

    Where it `is_bounded`, names and numbers that may have any length get one, so that a model that repeats
    itself comes to an end. In rare combinations the library then finds nothing that conforms.
    """
    has_plain_numbers = is_bounded and _has_plain_numbers(schema)
    num_properties, counts = 0, _OptionalCounts(schema)

    def change(found: Schema) -> Schema:
        nonlocal num_properties
        num_properties += len(_properties(found))
        if num_properties > MAX_PROPERTIES:
            raise SchemaError(f"the schema has more than {MAX_PROPERTIES} properties; split it")
        counts.check(found)
        if not is_lenient:
            _check_num_properties(found)
        if "oneOf" in found:
            found = {**found, "oneOf": _without_null(found["oneOf"])}
        if is_bounded:
            found = _with_bounded_names(found)
        if has_plain_numbers:
            found = _with_bounded_numbers(found)
        return dict(found)

    return _mapped(schema, change)


def _mapped(schema: Any, change: Callable[[Schema], Schema]) -> Any:
    """Change a schema and all schemas in it, the outer ones first."""
    if not isinstance(schema, dict):
        return schema
    found = change(schema)
    for key, value in found.items():
        if key in _NAMED_SCHEMAS and isinstance(value, dict):
            found[key] = {name: _mapped(inner, change) for name, inner in value.items()}
        elif key in _LISTED_SCHEMAS and isinstance(value, list):
            found[key] = [_mapped(inner, change) for inner in value]
        elif key in _SCHEMAS:
            found[key] = _mapped(value, change)
    return found


def _without_null(alternatives: Any) -> Any:
    """Take null from alternatives of which several allow it, as where a nullable value is one of two nullable
    types: null conforms to more than one, so that it must not come. The library refuses alternatives that
    overlap."""
    if not isinstance(alternatives, list) or sum(map(_allows_null, alternatives)) < 2:
        return alternatives
    found = []
    for it in alternatives:
        if not _allows_null(it):
            found.append(it)
        elif types := [name for name in it["type"] if name != "null"]:
            found.append({**it, "type": types})
    return found


def _allows_null(alternative: Any) -> bool:
    """Whether null is one of several types of an alternative, whatever else it demands."""
    return (
        isinstance(alternative, dict)
        and isinstance(types := alternative.get("type"), list)
        and "null" in types
        and alternative.keys() <= _NOT_OF_NULL
    )


def _properties(schema: Schema) -> Schema:
    found = schema.get("properties")
    return found if isinstance(found, dict) else {}


class _OptionalCounts:
    """Counts of how many properties any may come next in an object, or in one of its alternatives."""

    def __init__(self, root: Any) -> None:
        self._root = root
        # By the identity of the schema, which is kept so that no other one gets the same.
        self._known: dict[int, tuple[Schema, int]] = {}

    def check(self, schema: Schema) -> None:
        """Refuse parts that a rank could not follow."""
        num_optional = self._count(schema)
        if num_optional > MAX_OPTIONAL_PROPERTIES:
            problem = f"an object, with its alternatives, has {num_optional} optional properties"
            raise SchemaError(
                f"{problem}; at most {MAX_OPTIONAL_PROPERTIES} are supported: name more of them in required"
            )

    def _count(self, schema: Any) -> int:
        if not isinstance(schema, dict):
            return 0
        if (known := self._known.get(id(schema))) is not None:
            return known[1]
        self._known[id(schema)] = schema, 0  # also where it leads back to itself
        required = schema.get("required")
        names = {it for it in required if isinstance(it, str)} if isinstance(required, list) else set()
        count = sum(name not in names for name in _properties(schema))
        if isinstance(reference := schema.get("$ref"), str):
            count += self._count(_referred(reference, self._root))
        for key in ("anyOf", "oneOf", "allOf"):
            if isinstance(alternatives := schema.get(key), list):
                count += sum(map(self._count, alternatives))
        self._known[id(schema)] = schema, count
        return count


def _referred(reference: str, root: Any) -> Any:
    """Return the schema that a reference within this one names; None where there is none."""
    found = root
    for name in reference.removeprefix("#").strip("/").split("/"):
        found = found.get(name) if isinstance(found, dict) else None
    return found


def _check_num_properties(schema: Schema) -> None:
    """Refuse to count names that the schema leaves open: a grammar cannot keep them apart, and a name that is
    written twice is one property."""
    least = schema.get("minProperties", 0)
    is_open = schema.get("additionalProperties") is not False or "patternProperties" in schema
    required = schema.get("required", ())
    if not isinstance(least, int) or not isinstance(required, list | tuple) or not is_open:
        return
    if least > len(required) + 1:
        problem = f"minProperties {least} counts names that the schema leaves open, which may repeat"
        raise SchemaError(f"{problem}; list them under properties and required, or lower it")


def _with_bounded_names(schema: Schema) -> Schema:
    """Bound the names of a map; those of an object that also names some stay as they are."""
    others = schema.get("additionalProperties")
    if not isinstance(others, dict) or not schema.keys().isdisjoint(("properties", "patternProperties")):
        return schema
    return {**schema, "patternProperties": {_BOUNDED_NAME: others}, "additionalProperties": False}


def _with_bounded_numbers(schema: Schema) -> Schema:
    """Bound integers, and numbers of which an end is given: those have no exponents, but any digits."""
    types = schema.get("type", ())
    types = (types,) if isinstance(types, str) else types
    has_ends = not schema.keys().isdisjoint(_LOWER + _UPPER + ("multipleOf",))
    if not ("number" in types and has_ends) and not ("integer" in types and "number" not in types):
        return schema
    found = dict(schema)
    if schema.keys().isdisjoint(_LOWER):
        found["minimum"] = -_MAX_INTEGER
    if schema.keys().isdisjoint(_UPPER):
        found["maximum"] = _MAX_INTEGER
    ends = [schema[key] for key in _LOWER + _UPPER if key in schema]
    if "number" in types and "multipleOf" not in schema and all(map(_is_coarse, ends)):
        found["multipleOf"] = _STEP
    return found


def _is_coarse(end: Any) -> bool:
    """Whether multiples of `_STEP` lie close to it in every range that it may begin or end."""
    return isinstance(end, int | float) and Decimal(repr(float(end))) % _COARSE_STEP == 0


def _has_plain_numbers(value: Any) -> bool:
    """Whether no number in a schema is beyond the integers that every reader of JSON keeps."""
    if isinstance(value, int | float):
        return abs(value) <= _MAX_INTEGER
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return all(map(_has_plain_numbers, inner))
