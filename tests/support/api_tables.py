"""The tables of docs/api.md: every field of the messages that clients send and receive, with the comments of
the .proto file. Run this file to write them anew."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

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
            parts.append("| field | type | |\n|---|---|---|")
            parts += [f"| `{row.name}` | {row.kind} | {_cell(row.comment)} |" for row in block.rows]
        parts.append("")
    return "\n".join(parts)


def _cell(text: str) -> str:
    text = _escaped(text)
    return text[:1].upper() + text[1:]


def _escaped(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;")


def http_tables() -> str:
    """Return a table for each route, of all fields that it knows; vLLM's are marked."""
    parts = []
    for route, entries in FIELDS.items():
        parts.append(f"#### {route}\n\n| field | here | |\n|---|---|---|")
        for entry in entries:
            name = f"`{entry.name}`" + (" (vLLM)" if entry.is_vllm else "")
            parts.append(f"| {name} | {entry.effect} | {_escaped(entry.notes)} |")
        parts.append("")
    return "\n".join(parts)


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
