"""Answers in OpenAI's harmony format, as gpt-oss writes them: messages, each with a header that names its
channel and recipient."""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import Literal

from cluster.text.output_parsers.json_call import ValueEnd
from cluster.text.output_parsers.pieces import (
    CallIds,
    Content,
    Piece,
    Reasoning,
    ToolCallDelta,
    find_marker,
    joined,
)

START, CHANNEL, CONSTRAIN, MESSAGE = "<|start|>", "<|channel|>", "<|constrain|>", "<|message|>"
END, CALL, RETURN = "<|end|>", "<|call|>", "<|return|>"
HARMONY_MARKS = (START, CHANNEL, CONSTRAIN, MESSAGE, END, CALL, RETURN)
# The tokens that end an answer; `END` stands between its messages.
ANSWER_ENDS = (RETURN, CALL)
ROLE, FUNCTIONS = "assistant", "functions."
# Where a prompt leaves an answer: in the header of a message, or in the text of one on a channel.
HarmonyPlace = Literal["header", "analysis", "final"]

_TO = "to="
_RECIPIENT = re.compile(r"to=([^\s<]+)")
_ROLE = re.compile(r"\s*([^\s<]*)")
# Recipients of what the user may read.
_READERS = ("user", "all", ROLE)
# A longer header is cut off; what follows is the text of the message.
_MAX_HEADER_CHARS = 512


def harmony_place(prompt: str) -> HarmonyPlace:
    """Return where a rendered prompt ends."""
    header, marker, text = prompt.rpartition(START)[2].partition(MESSAGE)
    if not marker or any(end in text for end in (END, *ANSWER_ENDS)):
        return "header"
    return "analysis" if _is_analysis(header) else "final"


class HarmonyParser:
    """Takes an answer apart: messages to a function are calls, those on the channel `analysis` reasoning, as
    are those to a tool that is no function, and all others content.

    A line break separates several messages of a kind. Text without a header is content, and text that
    continues a message of the prompt is too. A message in another role is the model's idea of the next turn:
    it ends the answer.
    """

    def __init__(
        self,
        ids: CallIds,
        tools: Collection[str],
        *,
        separates_reasoning: bool,
        opens_reasoning: bool,
        allows_several: bool,
    ) -> None:
        """Without `tools`, calls are content, as is reasoning unless it is separated. With `opens_reasoning`,
        the prompt ends in a message on the channel `analysis`."""
        self._ids = ids
        self._tools = tools
        self._allows_several = allows_several
        self._reasoning = Reasoning if separates_reasoning else Content
        self._kinds_so_far: set[type[Content | Reasoning]] = set()
        self._num_calls = 0
        self._held = ""
        # The message whose text comes now; None: a header does.
        self._message: _Text | _Arguments | None = None
        self._header = ""
        # Whether a marker is in the header, or just before it: its text is never content then.
        self._is_marked = False
        self._is_over = False
        if opens_reasoning:
            self._message = self._text_of(self._reasoning)

    @property
    def is_reasoning(self) -> bool:
        """Whether the text that comes next is reasoning."""
        return isinstance(self._message, _Text) and self._message.kind is Reasoning

    def push(self, text: str) -> list[Piece]:
        """Return the pieces that are certain after this text."""
        self._held += text
        pieces: list[Piece] = []
        while not self._is_over:
            before, marker, self._held = find_marker(self._held, HARMONY_MARKS)
            pieces += self._read(before)
            if not marker:
                return joined(pieces)
            pieces += self._read_marker(marker)
        self._held = ""
        return joined(pieces)

    def flush(self, *, is_cut: bool = False) -> list[Piece]:
        """Return the rest."""
        held, self._held = self._held, ""
        if self._is_over or is_cut:
            return []
        return joined([*self._read(held), *self._ended()])

    def _read(self, text: str) -> list[Piece]:
        """Return the pieces of text without markers."""
        if self._is_over:
            return []
        if self._message is not None:
            return self._message.push(text)
        num_left = _MAX_HEADER_CHARS - len(self._header)
        self._header += text[:num_left]
        if not self._is_marked and not _may_be_header(self._header):
            self._message = self._text_of(Content)
            return self._message.push(self._header + text[num_left:])
        if len(text) <= num_left:
            return []
        pieces = self._begin()
        return [*pieces, *self._read(text[num_left:])]

    def _read_marker(self, marker: str) -> list[Piece]:
        if self._message is None and marker == MESSAGE:
            return self._begin()
        if self._message is None and marker in (CHANNEL, CONSTRAIN):
            self._header += marker
            self._is_marked = True
            return []
        if marker in (CONSTRAIN, MESSAGE):  # no part of a text
            return []
        pieces = self._ended()
        self._message = None
        self._header = marker if marker == CHANNEL else ""
        self._is_marked = marker in (START, CHANNEL)
        self._is_over = marker == RETURN
        return pieces

    def _ended(self) -> list[Piece]:
        """Return the rest of the message that ends."""
        if self._message is not None:
            return self._message.end()
        if self._is_marked or not self._header.strip():
            return []
        return self._text_of(Content).push(self._header)

    def _begin(self) -> list[Piece]:
        """Begin the message of the header."""
        role = _ROLE.match(self._header)
        if role is not None and role[1] and not role[1].startswith((ROLE, _TO)):
            self._is_over = True
            return []
        found = _RECIPIENT.search(self._header)
        recipient = found[1] if found is not None and found[1] not in _READERS else ""
        name = recipient.removeprefix(FUNCTIONS)
        is_function = recipient.startswith(FUNCTIONS) or recipient in self._tools
        if is_function and name and self._tools:
            return self._begin_call(name)
        is_content = is_function or not (recipient or _is_analysis(self._header))
        self._message = self._text_of(Content if is_content else self._reasoning)
        return []

    def _begin_call(self, name: str) -> list[Piece]:
        if self._num_calls and not self._allows_several:
            self._is_over = True
            return []
        index = self._num_calls
        self._num_calls += 1
        self._message = _Arguments(index)
        return [ToolCallDelta(index, self._ids.of(index), name)]

    def _text_of(self, kind: type[Content | Reasoning]) -> _Text:
        return _Text(kind, self._kinds_so_far)


class _Text:
    """The text of a message for a reader. `so_far` has the kinds of all messages that had text."""

    def __init__(self, kind: type[Content | Reasoning], so_far: set[type[Content | Reasoning]]) -> None:
        self.kind = kind
        self._so_far = so_far
        self._has_begun = False

    def push(self, text: str) -> list[Piece]:
        """Return the text, behind a line break where another message of this kind came before."""
        if not text:
            return []
        separator = "\n" if not self._has_begun and self.kind in self._so_far else ""
        self._has_begun = True
        self._so_far.add(self.kind)
        return [self.kind(separator + text)]

    def end(self) -> list[Piece]:
        """Return nothing: no text is held."""
        return []


class _Arguments:
    """The arguments of a call: an object in JSON, or where the model writes none, text as it is."""

    def __init__(self, index: int) -> None:
        self._index = index
        self._has_begun = False
        self._end: ValueEnd | None = None
        self._is_done = False

    def push(self, text: str) -> list[Piece]:
        """Return the part of the arguments; text behind the object is left out."""
        if not self._has_begun:
            text = text.lstrip()
            self._has_begun = bool(text)
            self._end = ValueEnd() if text.startswith("{") else None
        if self._is_done or not text:
            return []
        if self._end is not None:
            for place, char in enumerate(text, start=1):
                if self._end.is_reached(char):
                    self._is_done, text = True, text[:place]
                    break
        return [ToolCallDelta(self._index, arguments=text)]

    def end(self) -> list[Piece]:
        """Return the arguments of a call that had none."""
        return [] if self._has_begun else [ToolCallDelta(self._index, arguments="{}")]


def _is_analysis(header: str) -> bool:
    return header.rpartition(CHANNEL)[2].lstrip().startswith("analysis")


def _may_be_header(text: str) -> bool:
    """Return whether this is the beginning of a header up to its channel, with or without the role."""
    text = text.lstrip()
    if ROLE.startswith(text):
        return True
    text = text.removeprefix(ROLE).lstrip()
    return _TO.startswith(text[: len(_TO)]) and len(text.split()) <= 1
