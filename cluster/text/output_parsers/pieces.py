"""The pieces of an answer, and the search for the markers between its parts."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol


@dataclass(frozen=True, slots=True)
class ToolCallDelta:
    """A part of the tool call with this index. The first part has its id and name, each a part of its
    `arguments`, which are JSON text together."""

    index: int
    id: str = ""
    name: str = ""
    arguments: str = ""


class Content(NamedTuple):
    """Text for the user."""

    text: str


class Reasoning(NamedTuple):
    """The model's reasoning before it answered."""

    text: str


Piece = Content | Reasoning | ToolCallDelta


class OutputParser(Protocol):
    """Text in, pieces out, one sample. The pieces do not depend on how the text before them was cut."""

    def push(self, text: str) -> list[Piece]:
        """Return the pieces that are certain after this text."""

    def flush(self, *, is_cut: bool = False) -> list[Piece]:
        """Return the rest, at the end. A call that has no name yet is dropped with its marker. Where a limit
        `is_cut` the answer, so is the possible beginning of a marker; else nothing else is lost."""

    @property
    def is_reasoning(self) -> bool:
        """Whether the text that comes next is reasoning."""


class CallIds:
    """The ids of the tool calls of one sample, which are the same when the request is resumed."""

    def __init__(self, request_id: str, sample: int, *, is_short: bool = False) -> None:
        """Mistral's templates accept ids of nine characters alone, which are the short ones."""
        self._prefix = f"{request_id}\0{sample}\0"
        self._is_short = is_short

    def of(self, index: int) -> str:
        """Return the id of the call with this index."""
        digest = hashlib.sha256(f"{self._prefix}{index}".encode()).hexdigest()
        return digest[:9] if self._is_short else f"call_{digest[:24]}"


class Found(NamedTuple):
    """The result of a search for markers: text before the first one, the marker, and the text behind it.
    Without a marker (""), `before` is text that can be none, and `after` text that may become one."""

    before: str
    marker: str
    after: str


def find_marker(text: str, markers: Sequence[str]) -> Found:
    """Search for the marker that begins first."""
    starts = [(start, marker) for marker in markers if (start := text.find(marker)) >= 0]
    if starts:
        start, marker = min(starts)
        return Found(text[:start], marker, text[start + len(marker) :])
    held = max((num_possible(text, marker) for marker in markers), default=0)
    return Found(text[: len(text) - held], "", text[len(text) - held :])


# White space that waits for what follows it; more than this is text in any case.
MAX_WAITING_CHARS = 64


def without_end(text: str, chars: str | None = None) -> str:
    """Return the text without the white space (or `chars`) at its end, of which at most
    `MAX_WAITING_CHARS` are left out."""
    return text[: max(len(text.rstrip(chars)), len(text) - MAX_WAITING_CHARS)]


def num_possible(text: str, marker: str) -> int:
    """Return the length of the longest end of the text that is a proper beginning of the marker."""
    for length in range(min(len(marker) - 1, len(text)), 0, -1):
        if text.endswith(marker[:length]):
            return length
    return 0


def joined_calls(calls: Iterable[ToolCallDelta]) -> tuple[ToolCallDelta, ...]:
    """Join parts of the same call that follow each other."""
    return tuple(piece for piece in joined(calls) if isinstance(piece, ToolCallDelta))


def joined(pieces: Iterable[Piece]) -> list[Piece]:
    """Join neighbours of the same kind, and drop empty ones."""
    result: list[Piece] = []
    for piece in pieces:
        last = result[-1] if result else None
        if isinstance(piece, Content | Reasoning):
            if not piece.text:
                continue
            if type(last) is type(piece):
                assert isinstance(last, Content | Reasoning)
                result[-1] = type(piece)(last.text + piece.text)
                continue
        elif isinstance(last, ToolCallDelta) and last.index == piece.index and not piece.name:
            result[-1] = replace(last, arguments=last.arguments + piece.arguments)
            continue
        result.append(piece)
    return result
