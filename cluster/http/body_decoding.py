"""Decode the JSON body of a request, and name the field that is wrong."""

from __future__ import annotations

import codecs
import re
from collections.abc import Mapping
from typing import Any, TypeVar

import msgspec

from cluster.errors import InvalidRequestError
from cluster.http.body_shape import check_counts, check_shape
from cluster.http.errors import bad_field

_PLACE = re.compile(r"^(.*) - at `\$(.*)`$", re.DOTALL)
_FIELD = re.compile(
    r"^Object (missing required|contains unknown) field `([^`]*)`(?: - at `\$([^`]*)`)?$", re.DOTALL
)
_KEY = re.compile(r"[^.\[\]]+")
# The parts served of the objects that name their types; others have fields of their own.
_KINDS_WITH_FIELDS = frozenset(
    (
        *("function", "custom", "message", "function_call", "function_call_output", "reasoning"),
        *("text", "input_text", "output_text", "reasoning_text", "summary_text", "refusal"),
        *("tool_use", "tool_result", "thinking", "redacted_thinking"),
        *("json_object", "json_schema", "structural_tag"),
        *("auto", "any", "none", "tool", "enabled", "disabled", "adaptive"),
    )
)
# The notation in paths for a value of an object with any keys.
_SOME_VALUE = "[...]"
# Half of a character beyond 16 bits, without the other half.
_SURROGATE = re.compile(
    rb"\\u[dD][89abAB]..(?!\\u[dD][c-fC-F])|(?<!\\u[dD][89abAB]..)\\u[dD][c-fC-F]", re.DOTALL
)
_HALF_CHARACTER = "it has half of a surrogate pair, which is no character; cut text between characters"
_MAX_PROBLEM_CHARS = 500
# In a shorter body there is too little to matter.
_SHORT_BODY_BYTES = 16 << 10
# Finds the fields without their values.
_FIELDS_DECODER = msgspec.json.Decoder(dict[str, msgspec.Raw])


class Body(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Base of JSON objects with these fields and no other."""


B = TypeVar("B", bound=Body)


def decode(body: bytes, kind: type[B], refused: Mapping[str, str]) -> B:
    """Return the request; `InvalidRequestError` names the bad field by its path. `refused` gives the
    alternatives to fields that exist elsewhere."""
    body = body.removeprefix(codecs.BOM_UTF8)
    check_shape(body)
    if len(body) > _SHORT_BODY_BYTES:
        _check_long(body)
    try:
        fields = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise bad_field("body", f"is not JSON: {_json_problem(body, error)}") from error
    if not isinstance(fields, dict):
        raise bad_field("body", "must be a JSON object")
    known = kind.__struct_encode_fields__
    for name in [name for name in fields if name not in known]:
        if fields.pop(name) is not None:
            raise unknown_field(name, refused)
    try:
        return msgspec.convert(fields, kind)
    except (msgspec.ValidationError, RecursionError) as error:
        raise _invalid(error, kind, fields) from error


def _check_long(body: bytes) -> None:
    """Refuse a long body for excess of values, before a value of it is made."""
    try:
        check_counts(_FIELDS_DECODER.decode(body))
    except msgspec.ValidationError:
        raise bad_field("body", "must be a JSON object") from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        problem = _HALF_CHARACTER if _SURROGATE.search(body) else _shortened(error)
        raise bad_field("body", f"is not JSON: {problem}") from error


def unknown_field(name: str, refused: Mapping[str, str]) -> InvalidRequestError:
    """Return the error of a field that is not served."""
    remedy = refused.get(name)
    if not name:
        return bad_field("body", "has a field without a name; remove it")
    if remedy is None:
        return bad_field(name[:100], "is not known here; remove it (docs/api.md lists the fields)")
    return bad_field(name, f"is not supported; {remedy}")


def _invalid(error: Exception, kind: type[Body], fields: Mapping[str, Any]) -> InvalidRequestError:
    if named := _field_problem(error, fields):
        return bad_field(*named)
    found = _PLACE.match(str(error))
    if found is None:
        return bad_field("body", _shortened(error))
    problem, path = found[1], found[2].removeprefix(".")
    name, is_value, _ = path.partition(_SOME_VALUE)
    if is_value:
        path = f"{name}[{_bad_key(kind, name, fields[name])}]"
    return bad_field(path[:200] or "body", f"{problem[:1].lower()}{problem[1:_MAX_PROBLEM_CHARS]}")


def _bad_key(kind: type[Body], name: str, values: Mapping[str, Any]) -> str:
    """Return the first key of a field whose value is not of its type."""
    (field,) = (it for it in msgspec.structs.fields(kind) if it.encode_name == name)
    for key, value in values.items():
        try:
            msgspec.convert({key: value}, field.type)
        except msgspec.ValidationError:
            return key
    return ""


def _field_problem(error: Exception, fields: Any) -> tuple[str, str] | None:
    """Return path and problem where a field is missing, or not known."""
    found = _FIELD.match(str(error))
    if found is None:
        return None
    above = (found[3] or "").removeprefix(".")
    path = f"{above}.{found[2]}".removeprefix(".")
    if found[1] == "missing required":
        return path[:200], "is missing"
    for key in _KEY.findall(above):
        fields = fields[int(key) if key.isdecimal() else key]
    kind = fields.get("type", "function")
    if isinstance(kind, str) and kind not in _KINDS_WITH_FIELDS:
        return f"{above}.type"[:200], f"{kind[:50]!r} is not supported; remove it"
    return path[:200], "is not known here; remove it"


def _json_problem(body: bytes, error: Exception) -> str:
    """Return the fault of a body that is not JSON."""
    if _SURROGATE.search(body):
        return _HALF_CHARACTER
    try:
        body.decode()
    except UnicodeDecodeError as wrong:
        return f"it is not UTF-8 at byte {wrong.start}"
    return _shortened(error)


def _shortened(error: Exception) -> str:
    return str(error)[:_MAX_PROBLEM_CHARS]
