"""Reasoning that stands between two markers at the beginning of an answer."""

from __future__ import annotations

from cluster.text.output_parsers.pieces import (
    MAX_WAITING_CHARS,
    Content,
    OutputParser,
    Piece,
    Reasoning,
    find_marker,
    joined,
    without_end,
)


class ReasoningParser:
    """Takes the reasoning from the beginning of an answer; `inner` gets the text behind it. Line breaks next
    to the markers belong to neither."""

    def __init__(self, start: str, end: str, inner: OutputParser, *, is_open: bool) -> None:
        """With `is_open` the prompt ends with the first marker, or within the reasoning."""
        self._start = start
        self._end = end
        self._inner = inner
        # "before" the first marker, "within" the reasoning, "behind" it.
        self._place = "within" if is_open else "before"
        self._held = ""
        self._has_begun = False

    @property
    def is_reasoning(self) -> bool:
        """Whether the text that comes next is reasoning."""
        return self._place == "within"

    def push(self, text: str) -> list[Piece]:
        """Return the pieces that are certain after this text."""
        return joined(self._push(text))

    def flush(self, *, is_cut: bool = False) -> list[Piece]:
        """Return the rest. Reasoning that never ended stays reasoning."""
        held, self._held = self._held, ""
        if self._place == "within":
            thought = find_marker(held, (self._end,)).before if is_cut else held
            return joined([Reasoning(without_end(thought, "\n"))])
        if is_cut and self._place == "before":
            held = ""
        return joined([*self._inner.push(held), *self._inner.flush(is_cut=is_cut)])

    def _push(self, text: str) -> list[Piece]:
        self._held += text
        if self._place == "before":
            found = self._held.lstrip()
            num_waiting = len(self._held) - len(found)
            if found.startswith(self._start) and num_waiting <= MAX_WAITING_CHARS:
                self._place, self._held = "within", found[len(self._start) :]
            elif self._start.startswith(found) and num_waiting <= MAX_WAITING_CHARS:
                return []  # it may still come
            else:
                self._place = "behind"
                self._has_begun = True
        pieces: list[Piece] = []
        if self._place == "within":
            pieces += self._reasoning()
        if self._place == "behind":
            rest, self._held = self._held, ""
            if not self._has_begun:
                rest = rest.lstrip("\n")
                self._has_begun = bool(rest)
            pieces += self._inner.push(rest)
        return pieces

    def _reasoning(self) -> list[Piece]:
        if not self._has_begun:
            self._held = self._held.lstrip("\n")
            self._has_begun = bool(self._held)
        before, marker, after = find_marker(self._held, (self._end,))
        if marker:
            self._place, self._held, self._has_begun = "behind", after, False
            return [Reasoning(without_end(before, "\n"))]
        certain = without_end(before, "\n")
        self._held = before[len(certain) :] + after
        return [Reasoning(certain)]


class ResponseParser:
    """Takes the markers from around an answer, as Granite writes them behind its reasoning; `inner` gets the
    text between them, and what follows. An answer that does not begin with the first marker is as it is."""

    def __init__(self, start: str, end: str, inner: OutputParser) -> None:
        self._start = start
        self._end = end
        self._inner = inner
        # "before" the first marker, "within" the answer, "behind" it, or where there are no markers.
        self._place = "before"
        self._held = ""

    @property
    def is_reasoning(self) -> bool:
        """Whether the text that comes next is reasoning."""
        return self._inner.is_reasoning

    def push(self, text: str) -> list[Piece]:
        """Return the pieces that are certain after this text."""
        self._held += text
        if self._place == "before":
            found = self._held.lstrip()
            num_waiting = len(self._held) - len(found)
            if num_waiting <= MAX_WAITING_CHARS and self._start.startswith(found) and found != self._start:
                return []
            is_begun = num_waiting <= MAX_WAITING_CHARS and found.startswith(self._start)
            self._place = "within" if is_begun else "behind"
            self._held = found[len(self._start) :] if is_begun else self._held
        certain, self._held = self._held, ""
        if self._place == "within":
            before, marker, after = find_marker(certain, (self._end,))
            self._place = "behind" if marker else "within"
            certain, self._held = (before + after, "") if marker else (before, after)
        return self._inner.push(certain) if certain else []

    def flush(self, *, is_cut: bool = False) -> list[Piece]:
        """Return the rest."""
        held, self._held = self._held, ""
        rest = [] if is_cut or not held else self._inner.push(held)
        return joined([*rest, *self._inner.flush(is_cut=is_cut)])


class PlainParser:
    """All is content."""

    @property
    def is_reasoning(self) -> bool:
        """No text is reasoning."""
        return False

    def push(self, text: str) -> list[Piece]:
        """Return the text."""
        return [Content(text)] if text else []

    def flush(self, *, is_cut: bool = False) -> list[Piece]:
        """Return nothing: no text was held."""
        return []
