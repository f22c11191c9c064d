"""The tables of docs/api.md: every field of the messages that clients send and receive, with the comments of
the .proto file. Run this file to write them anew."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import msgspec
from http_harness import SCHEMAS
from struct_fields import Places, StructField, struct_fields

from cluster.http import (
    chat_answer,
    completions,
    embeddings,
    errors,
    messages_answer,
    model_list,
    response_events,
)
from cluster.http.fields import FIELDS

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs/api.md"
PROTO = ROOT / "cluster/proto/tandem/v1/inference.proto"
BEGIN, END = "<!-- fields: begin -->", "<!-- fields: end -->"
HTTP_BEGIN, HTTP_END = "<!-- http: begin -->", "<!-- http: end -->"
_BLOCK = re.compile(r"^(message|enum) (\w+) \{")
_FIELD = re.compile(r"^\s*(optional |repeated )?(\w[\w.<>, ]*?) (\w+) = \d+;\s*(?://\s*(.*))?$")
_VALUE = re.compile(r"^\s*(\w+) = \d+;\s*(?://\s*(.*))?$")
_INNER = re.compile(r"^\s*(oneof|enum) (\w+) \{")


_ANTHROPIC_EVENTS: tuple[type[msgspec.Struct], ...] = (
    messages_answer._MessageStart,
    messages_answer._BlockStart,
    messages_answer._BlockDelta,
    messages_answer._BlockStop,
    messages_answer._MessageDelta,
    messages_answer._MessageStop,
    errors._AnthropicError,
)
# The answers of each route: as a whole, and as the events of a stream.
ANSWERS: dict[str, dict[str, tuple[type[msgspec.Struct], ...]]] = {
    "/v1/chat/completions": {
        "Answer": (chat_answer._Completion,),
        "Chunks of a stream": (chat_answer._Chunk,),
    },
    "/v1/completions": {"Answer, and chunks of a stream": (completions._Completion,)},
    "/v1/responses": {
        "Answer": (response_events._Response,),
        "Events of a stream, each with some of these": (response_events._Event,),
    },
    "/v1/messages": {"Answer": (messages_answer._Answer,), "Events of a stream": _ANTHROPIC_EVENTS},
    "/v1/messages/count_tokens": {"Answer": (messages_answer.TokenCount,)},
    "/v1/embeddings": {"Answer": (embeddings._Embeddings,)},
    "/tokenize": {"Answer": (embeddings._Tokens,)},
    "/detokenize": {"Answer": (embeddings._Text,)},
    "/v1/models": {"Answer": (model_list.ModelList,)},
    "/v1/models/{model}": {"Answer": (model_list.ModelEntry,)},
    "Errors": {
        "Of all routes": (errors._OpenAIError,),
        "Of those under /v1/messages": (errors._AnthropicError,),
    },
}


class Row(NamedTuple):
    """A field, or the value of an enum."""

    name: str
    kind: str
    comment: str


class Block(NamedTuple):
    """A message or an enum."""

    kind: str
    name: str
    comment: str
    rows: tuple[Row, ...]


def blocks(source: str) -> Iterator[Block]:
    """Yield the messages and enums of a .proto file; those within a message belong to it."""
    lines = iter(source.splitlines())
    comment: list[str] = []
    for line in lines:
        if line.startswith("//"):
            comment.append(line[2:].strip())
        elif found := _BLOCK.match(line):
            rows = () if line.rstrip().endswith("}") else tuple(_rows(lines))
            yield Block(found[1], found[2], " ".join(comment), rows)
            comment = []
        elif not line.strip() or "---" in line:
            comment = []


def _rows(lines: Iterator[str]) -> Iterator[Row]:
    """Yield the rows of a block whose first line was read."""
    comment: list[str] = []
    inner: list[str] = []
    for line in lines:
        text = line.strip()
        if text == "}":
            if not inner:
                return
            inner.pop()
            comment = []
        elif text.startswith("//"):
            comment.append(text[2:].strip())
        elif found := _INNER.match(line):
            inner.append(found[2])
            comment = []
        elif found := _FIELD.match(line):
            kind = f"{(found[1] or '').strip()} {found[2]}".strip()
            if inner:
                kind += f", one of `{inner[-1]}`"
            yield Row(found[3], kind, " ".join([*comment, found[4] or ""]).strip())
            comment = []
        elif found := _VALUE.match(line):
            yield Row(
                found[1],
                f"value of `{inner[-1]}`" if inner else "",
                " ".join([*comment, found[2] or ""]).strip(),
            )
            comment = []


def tables() -> str:
    """Return the tables of all messages and enums in which there is something."""
    parts = []
    for block in blocks(PROTO.read_text()):
        if not block.rows:
            continue
        parts.append(f"#### {block.name}\n")
        if block.comment:
            parts.append(textwrap.fill(_cell(block.comment), 100) + "\n")
        if block.kind == "enum":
            parts.append("| value | |\n|---|---|")
            parts += [f"| `{row.name}` | {_cell(row.comment)} |" for row in block.rows]
        else:
            parts.append("| field | type | notes |\n|---|---|---|")
            parts += [f"| `{row.name}` | {row.kind} | {_cell(row.comment)} |" for row in block.rows]
        parts.append("")
    return "\n".join(parts)


def _cell(text: str) -> str:
    text = _escaped(text)
    return text[:1].upper() + text[1:]


def _escaped(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;")


def http_tables() -> str:
    """Return tables for each route: of all fields that it knows, vLLM's marked, of those within them, and of
    its answers."""
    parts = []
    for route in ANSWERS:
        parts.append(f"#### {route}\n")
        if route in FIELDS:
            parts.append("| field | here | |\n|---|---|---|")
            for entry in FIELDS[route]:
                name = f"`{entry.name}`" + (" (vLLM)" if entry.is_vllm else "")
                parts.append(f"| {name} | {entry.effect} | {_escaped(entry.notes)} |")
            parts.append("")
            inner = [it for it in struct_fields(SCHEMAS[route]) if "." in it.path or "[" in it.path]
            if inner:
                parts += _struct_table("Nested fields", [_with_need(it) for it in inner])
        places: Places = {}
        for title, kinds in ANSWERS[route].items():
            parts += _struct_table(title, _merged(kinds, places))
            places = {structs: f"{where} of the answer" for structs, where in places.items()}
            places |= dict.fromkeys([kinds], "the answer")
    return "\n".join(parts)


def _lowered(note: str) -> str:
    return note[:1].lower() + note[1:]


def _with_need(field: StructField) -> StructField:
    return (
        field._replace(note=f"required; {_lowered(field.note)}".removesuffix("; "))
        if field.is_required
        else field
    )


def _named_fields(
    kind: type[msgspec.Struct], places: Places, *, is_one_of_several: bool
) -> Iterator[StructField]:
    fields = struct_fields(kind, places)
    name = next((it.note.strip("`") for it in fields if it.path == "type"), "")
    for it in fields:
        is_own = is_one_of_several and not any(char in it.path for char in ".[")
        yield it._replace(of=(name,)) if is_own else it


def _struct_table(title: str, fields: list[StructField]) -> list[str]:
    rows = [f"{title}:\n", "| field | type | notes |\n|---|---|---|"]
    for it in fields:
        note = it.note
        if it.of and not it.path.endswith("type"):
            note = f"of {', '.join(it.of)}" + (f"; {_lowered(note)}" if note else "")
        shown = _escaped(note)
        rows.append(f"| `{it.path}` | {it.kind} | {shown[:1].upper()}{shown[1:]} |")
    return [*rows, ""]


def _merged(kinds: tuple[type[msgspec.Struct], ...], places: Places) -> list[StructField]:
    """Return each path once, with all notes on it, and which of several kinds have it."""
    found: dict[str, StructField] = {}
    for kind in kinds:
        for it in _named_fields(kind, places, is_one_of_several=len(kinds) > 1):
            before = found.setdefault(it.path, it)
            notes = dict.fromkeys([*before.note.split(", "), *it.note.split(", ")])
            of = tuple(dict.fromkeys((*before.of, *it.of)))
            found[it.path] = before._replace(note=", ".join(note for note in notes if note), of=of)
    return list(found.values())


def written(page: str) -> str:
    """Return the page with the tables as they should be."""
    page = _filled(page, BEGIN, tables(), END)
    return _filled(page, HTTP_BEGIN, http_tables(), HTTP_END)


def _filled(page: str, begin: str, text: str, end: str) -> str:
    before, _, rest = page.partition(begin)
    _, _, after = rest.partition(end)
    return f"{before}{begin}\n\n{text}\n{end}{after}"


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text()))
