"""Parsers of answers by chat templates, and what they find."""

from __future__ import annotations

import json
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from cluster.text.output_parsers.choose import OutputParsers, ParserNeeds
from cluster.text.output_parsers.parameters import kind_of
from cluster.text.output_parsers.pieces import Content, OutputParser, Piece, Reasoning, ToolCallDelta, joined

NEEDS = ParserNeeds(tools={"f": "", "find": ""}, separates_reasoning=True)


def parser_of(
    template: str, *, opens_reasoning: bool = False, tools: Mapping[str, str] = MappingProxyType({})
) -> OutputParser:
    needs = NEEDS._replace(tools={**NEEDS.tools, **tools})
    found = OutputParsers.choose(template, "auto", "auto").make(
        needs, "r", 0, opens_reasoning=opens_reasoning
    )
    assert found is not None
    return found


def read(parser: OutputParser, pieces: list[str]) -> list[Piece]:
    return joined([*(piece for text in pieces for piece in parser.push(text)), *parser.flush()])


def parts(pieces: list[Piece]) -> tuple[str, str, list[tuple[str, Any]]]:
    """Content, reasoning, and calls as (name, arguments)."""
    found: dict[int, tuple[str, str]] = {}
    for piece in pieces:
        if isinstance(piece, ToolCallDelta):
            name, arguments = found.get(piece.index, ("", ""))
            assert bool(piece.id) == bool(piece.name) == (not name)
            found[piece.index] = name + piece.name, arguments + piece.arguments
    return (
        "".join(it.text for it in pieces if isinstance(it, Content)),
        "".join(it.text for it in pieces if isinstance(it, Reasoning)),
        [(name, json.loads(arguments)) for _, (name, arguments) in sorted(found.items())],
    )


def schema_of(arguments: Mapping[str, Any]) -> str:
    """A schema of these arguments."""
    return json.dumps({"properties": {name: {"type": kind_of(value)} for name, value in arguments.items()}})


def raw_parts(pieces: list[Piece]) -> tuple[str, str, list[tuple[str, str]]]:
    """Content, reasoning, and calls with the text of their arguments."""
    found: dict[int, tuple[str, str]] = {}
    for piece in pieces:
        if isinstance(piece, ToolCallDelta):
            name, arguments = found.get(piece.index, ("", ""))
            found[piece.index] = name + piece.name, arguments + piece.arguments
    return (
        "".join(it.text for it in pieces if isinstance(it, Content)),
        "".join(it.text for it in pieces if isinstance(it, Reasoning)),
        [call for _, call in sorted(found.items())],
    )
