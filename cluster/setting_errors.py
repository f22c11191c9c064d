"""The faults of a configuration, in words for its author: each line names the setting by its path.

pools[0].replica: unknown key; did you mean replicas?
pools[0].tp: must be at least 1, not 0
"""

from __future__ import annotations

import difflib
import types
import typing
from collections.abc import Iterator, Mapping
from typing import Any

from pydantic import BaseModel, ValidationError

Location = tuple[int | str, ...]
_MAX_SHOWN_CHARS = 60
# The project's wording for kinds of errors by pydantic's names; the names in braces are of its context.
_WORDS: Mapping[str, str] = {
    "missing": "is missing; it has no default",
    "greater_than": "must be more than {gt}",
    "greater_than_equal": "must be at least {ge}",
    "less_than": "must be less than {lt}",
    "less_than_equal": "must be at most {le}",
    "multiple_of": "must be a multiple of {multiple_of}",
    "literal_error": "must be {expected}",
    "enum": "must be {expected}",
    "finite_number": "must be a finite number",
    "too_short": "must have at least {min_length} entries",
    "too_long": "must have at most {max_length} entries",
    "string_too_short": "must have at least {min_length} characters",
    "string_too_long": "must have at most {max_length} characters",
    "bool_type": "must be true or false",
    "bool_parsing": "must be true or false",
    "int_type": "must be a whole number",
    "int_parsing": "must be a whole number",
    "int_parsing_size": "must be a whole number of less than 4300 digits",
    "int_from_float": "must be a whole number",
    "float_type": "must be a number",
    "float_parsing": "must be a number",
    "string_type": "must be text; quote it",
    "path_type": "must be a path",
    "dict_type": "must be a mapping of names to values",
    "model_type": "must be a mapping of names to values",
    "model_attributes_type": "must be a mapping of names to values",
    "list_type": "must be a list",
    "tuple_type": "must be a list",
    "set_type": "must be a list",
    "frozen_set_type": "must be a list",
    "none_required": "must be left out",
}
# Kinds whose value is not shown, because it is absent or because its type is what is wrong.
_NOT_SHOWN = ("missing", "extra_forbidden", "value_error")


def setting_lines(
    error: ValidationError, model: type[BaseModel], renamed: Mapping[Location, str] | None = None
) -> list[str]:
    """Return a line for each setting that is wrong; `renamed` has the texts about keys with another name."""
    # A default that follows from another setting is none where that one is wrong, which is reported.
    items = [it for it in error.errors(include_url=False) if it["type"] != "default_factory_not_called"]
    # A union reports each of its members, and what holds it.
    implied = {item["loc"][:length] for item in items for length in range(1, len(item["loc"]))}
    lines = []
    for item in items:
        location: Location = item["loc"]
        if location not in implied:
            said = (renamed or {}).get(location) or _said(item, location, model)
            lines.append(f"{_path(location)}{said}")
    return lines


def _said(item: Any, location: Location, model: type[BaseModel]) -> str:
    kind, value = item["type"], item.get("input")
    if kind == "extra_forbidden":
        return _unknown(str(location[-1]), known_keys(model, location[:-1]))
    words = _WORDS.get(kind)
    if words is None:
        return str(item["msg"]).removeprefix("Value error, ")
    said = words.format(**item.get("ctx", {}))
    shown = repr(value) if isinstance(value, str) else str(value)
    is_shown = kind not in _NOT_SHOWN and isinstance(value, str | int | float) and not _hides(location)
    return f"{said}, not {shown}" if is_shown and len(shown) <= _MAX_SHOWN_CHARS else said


def _hides(location: Location) -> bool:
    """Whether the value may be a secret, such as a password in a URL."""
    return any(
        isinstance(part, str) and part.endswith(("url", "secret", "key", "token", "password"))
        for part in location
    )


def _unknown(key: str, known: list[str]) -> str:
    close = difflib.get_close_matches(key, known, n=1, cutoff=0.6)
    return f"unknown key; did you mean {close[0]}?" if close else f"unknown key; there are {', '.join(known)}"


def known_keys(model: type[BaseModel], location: Location) -> list[str]:
    """Return the keys of the mapping at the location; none where it is no mapping of settings."""
    models = [model]
    for part in location:
        found: list[type[BaseModel]] = []
        for each in models:
            if isinstance(part, str) and part in each.model_fields:
                found += _models(each.model_fields[part].annotation)
        models = found or models  # an index, a name, or a member of a union: the same models
    return sorted({name for each in models for name in each.model_fields})


def _models(annotation: Any) -> Iterator[type[BaseModel]]:
    """Yield the models that an annotation speaks of, wherever they stand in it."""
    if isinstance(annotation, type) and not isinstance(annotation, types.GenericAlias):
        if issubclass(annotation, BaseModel):
            yield annotation
        return
    for argument in typing.get_args(annotation):
        yield from _models(argument)


def _path(location: Location) -> str:
    """Return `("pools", 0, "tp")` as `pools[0].tp: `; empty at the root, where the message has the name."""
    path = ""
    for part in location:
        path += f"[{part}]" if isinstance(part, int) else f".{part}" if path else part
    return f"{path}: " if path else ""
