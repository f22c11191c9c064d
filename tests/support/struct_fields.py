"""The fields of msgspec's structs, with those of the structs within them, and the comments that stand above
them in the source."""

from __future__ import annotations

import ast
import functools
import inspect
import re
import types
import typing
from collections.abc import Iterator
from typing import Annotated, Any, NamedTuple

import msgspec

_KINDS: dict[Any, str] = {
    str: "text",
    int: "integer",
    float: "number",
    bool: "boolean",
    type(None): "null",
    Any: "any",
    msgspec.Raw: "object",
}


# The effects by annotation.
_EFFECTS = {"Ignored": "ignored", "Refused": "refused with its type"}
_NO_EFFECT = "Without effect"
# A comment that stands for all fields up to the next one.
_OF_GROUP = re.compile(r"Of [\w ]+")


class StructField(NamedTuple):
    """A field by its path: `[]` stands for an entry of a list, `*` for a value of an object with any names.
    `of` are the kinds of objects that have it, where there may be one of several."""

    path: str
    kind: str
    note: str
    of: tuple[str, ...] = ()
    is_required: bool = False


# Where the fields of a type's structs are.
Places = dict[tuple[type[msgspec.Struct], ...], str]


def struct_fields(kind: type[msgspec.Struct], places: Places | None = None) -> list[StructField]:
    """Return all fields, each path once. Fields of structs in `places` are not repeated: a note says where
    they are. Those that are found are added."""
    found: dict[str, StructField] = {}
    for it in _fields(kind, "", (), {} if places is None else places):
        if (before := found.get(it.path)) is None:
            found[it.path] = it
            continue
        notes = [before.note, *(note for note in [it.note] if note not in before.note.split(", "))]
        note = ", ".join(note for note in notes if note)
        found[it.path] = before._replace(note=note, of=tuple(dict.fromkeys((*before.of, *it.of))))
    return list(found.values())


def all_structs(kind: type[msgspec.Struct]) -> set[type[msgspec.Struct]]:
    """Return a struct and all within it."""
    found: set[type[msgspec.Struct]] = set()
    due = [kind]
    while due:
        it = due.pop()
        if it not in found:
            found.add(it)
            hints = typing.get_type_hints(it, include_extras=True)
            due += [inner for field in it.__struct_fields__ for _, inner in _structs(hints[field], "")]
    return found


def _fields(
    kind: type[msgspec.Struct], above: str, of: tuple[str, ...], places: Places
) -> Iterator[StructField]:
    hints = typing.get_type_hints(kind, include_extras=True)
    for field in msgspec.structs.fields(kind):
        hint = hints[field.name]
        path = f"{above}.{field.encode_name}".removeprefix(".")
        structs = list(_structs(hint, path))
        within = tuple(inner for _, inner in structs)
        note = _note(kind, field, hint)
        if within in places:
            note = f"{note}; {places[within]}".removeprefix("; ")
        yield StructField(path, _kind(hint), note, of, field.required)
        if within and within not in places:
            places[within] = f"as `{structs[0][0]}`"
            for place, inner in structs:
                places.setdefault((inner,), f"as `{place}`")
                yield from _fields(inner, place, (_tag(inner),) if len(structs) > 1 else of, places)


def _note(kind: type[msgspec.Struct], field: Any, hint: Any) -> str:
    parts = [_comments(_owner(kind, field.name)).get(field.name, "")]
    parts.append(_EFFECTS.get(_annotation(kind, field.name), ""))
    if isinstance(field.default, str) and field.default and field.name in ("type", "object", "role"):
        return f"`{field.default}`"
    if msgspec.UnsetType in _members(hint):
        parts.append("absent if there is none")
    return "; ".join(part for part in parts if part)


def _members(hint: Any) -> tuple[Any, ...]:
    """Return the alternatives of a type."""
    if typing.get_origin(hint) is Annotated:
        return _members(typing.get_args(hint)[0])
    if typing.get_origin(hint) in (types.UnionType, typing.Union):
        return tuple(found for it in typing.get_args(hint) for found in _members(it))
    return (hint,)


def _kind(hint: Any) -> str:
    names = []
    for it in _members(hint):
        if typing.get_origin(it) is list:
            names.append(f"list of {_kind(typing.get_args(it)[0]).replace(' or ', ' / ')}")
        elif typing.get_origin(it) is dict or (isinstance(it, type) and issubclass(it, msgspec.Struct)):
            names.append("object")
        elif it is not msgspec.UnsetType:
            names.append(_KINDS[it])
    return " or ".join(dict.fromkeys(names))


def _structs(hint: Any, path: str) -> Iterator[tuple[str, type[msgspec.Struct]]]:
    """Yield the structs that a type has, with their paths."""
    for it in _members(hint):
        if typing.get_origin(it) is list:
            yield from _structs(typing.get_args(it)[0], f"{path}[]")
        elif typing.get_origin(it) is dict:
            yield from _structs(typing.get_args(it)[1], f"{path}.*")
        elif isinstance(it, type) and issubclass(it, msgspec.Struct):
            yield path, it


def _tag(kind: type[msgspec.Struct]) -> str:
    (found,) = (str(it.default) for it in msgspec.structs.fields(kind) if it.name == "type")
    return found


def _owner(kind: type, name: str) -> type:
    """Return the class that declares a field."""
    return next(it for it in kind.__mro__ if name in inspect.get_annotations(it))


def _annotation(kind: type, name: str) -> str:
    return str(_owner(kind, name).__annotations__[name])


@functools.cache
def _comments(kind: type) -> dict[str, str]:
    """Return, by field, the comment above it. A comment that tells what fields are of stands above all up to
    the next."""
    lines, _ = inspect.getsourcelines(kind)
    (tree,) = ast.parse("".join(lines)).body
    assert isinstance(tree, ast.ClassDef)
    found, of_group = {}, ""
    for node in tree.body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            above: list[str] = []
            for line in reversed(lines[: node.lineno - 1]):
                if not line.strip().startswith("#"):
                    break
                above.insert(0, line.strip().removeprefix("#").strip())
            comment = " ".join(above).removesuffix(".")
            if comment:
                of_group = comment if _OF_GROUP.fullmatch(comment) else ""
            found[node.target.id] = "" if comment == _NO_EFFECT else comment or of_group
    return found
