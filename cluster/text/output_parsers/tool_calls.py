"""Tool calls in the notations of the model families."""

from __future__ import annotations

import re
from typing import NamedTuple, Protocol

from cluster.text.output_parsers.json_call import JsonCall, ValueEnd
from cluster.text.output_parsers.pieces import (
    MAX_WAITING_CHARS,
    CallIds,
    Content,
    Piece,
    ToolCallDelta,
    find_marker,
    joined,
    without_end,
)

# The length of a call before its arguments.
_MAX_HEADER_CHARS = 256
_NAME_PART = re.compile(r"[A-Za-z0-9_.-]*")
# Characters that stand between calls of Llama 3.
_SEPARATORS = " \t\r\n;"


class CallText(Protocol):
    """A call whose text is arriving."""

    @property
    def is_done(self) -> bool:
        """Whether it is complete."""

    @property
    def is_broken(self) -> bool:
        """Whether it is no call."""

    def push(self, text: str) -> tuple[list[Piece], str]:
        """Return the pieces of the call, and the text behind it. Where it breaks, its text so far is content,
        unless it was given as a call already."""

    def flush(self, *, is_cut: bool) -> list[Piece]:
        """Return the held text, at the end of an answer in the middle of the call; a limit may have cut it.
        Text that a marker began is never content."""


class _JsonCallText:
    """A call as a JSON object, behind `opening` (given back as content where there is no call). A call of
    another name than `names` is none (None: all names are fine, for a marker begins the call)."""

    def __init__(
        self,
        index: int,
        call_id: str,
        opening: str,
        names: frozenset[str] | None = None,
        *,
        is_keyed: bool = False,
    ) -> None:
        self._index = index
        self._call_id = call_id
        self._call = JsonCall(is_keyed=is_keyed)
        self._names = names
        self._raw = [opening]
        self._is_named = False

    @property
    def is_done(self) -> bool:
        return self._call.is_done

    @property
    def is_broken(self) -> bool:
        return self._call.is_broken or self._is_unknown

    @property
    def _is_unknown(self) -> bool:
        return bool(self._call.name) and self._names is not None and self._call.name not in self._names

    def push(self, text: str) -> tuple[list[Piece], str]:
        rest = self._call.push(text)
        read = text[: len(text) - len(rest)]
        if not self._is_named:
            self._raw.append(read)
        pieces: list[Piece] = []
        if self._is_unknown or (self._call.is_broken and not self._call.name):
            return self._given_back(), rest
        if self._call.name and not self._is_named:
            self._is_named = True
            pieces.append(ToolCallDelta(self._index, self._call_id, self._call.name))
        if self._is_named and (arguments := self._call.take_arguments()):
            pieces.append(ToolCallDelta(self._index, arguments=arguments))
        if self._call.is_broken:
            pieces.append(Content(read[-1:]))
        if self._call.is_done and not self._call.has_arguments:
            pieces.append(ToolCallDelta(self._index, arguments="{}"))
        return pieces, rest

    def flush(self, *, is_cut: bool) -> list[Piece]:
        return [] if is_cut or self._names is None else self._given_back()

    def _given_back(self) -> list[Piece]:
        return [] if self._is_named else [Content("".join(self._raw))]


class _NamedCallText:
    """A call as Mistral's later models write it: name[ARGS]{...}, or name[CALL_ID]id[ARGS]{...}."""

    _ARGS, _CALL_ID = "[ARGS]", "[CALL_ID]"

    def __init__(self, index: int, call_id: str, opening: str) -> None:
        self._index = index
        self._call_id = call_id
        self._opening = opening
        self._header = ""
        self._end: ValueEnd | None = None
        self._has_arguments = False
        self.is_done = False
        self.is_broken = False

    def push(self, text: str) -> tuple[list[Piece], str]:
        pieces: list[Piece] = []
        if self._end is None:
            self._header += text
            before, marker, text = find_marker(self._header, (self._ARGS, "{"))
            is_long = len(before) > _MAX_HEADER_CHARS
            if not marker:
                if is_long or not self._may_be_header(before):
                    self.is_broken = True
                    return [Content(self._opening)], self._header
                return [], ""
            name = before.partition(self._CALL_ID)[0].strip()
            if is_long or not name or not self._may_be_header(before):
                self.is_broken = True
                return [Content(self._opening)], self._header
            text = marker + text if marker == "{" else text
            self._end = ValueEnd()
            pieces.append(ToolCallDelta(self._index, self._call_id, name))
        if not self._has_arguments:
            text = text.lstrip()
            if text and text[0] != "{":
                self.is_done = True
                return [*pieces, ToolCallDelta(self._index, arguments="{}")], text
            self._has_arguments = bool(text)
        for position, char in enumerate(text):
            if self._end.is_reached(char):
                self.is_done = True
                return [*pieces, ToolCallDelta(self._index, arguments=text[: position + 1])], text[
                    position + 1 :
                ]
        return [*pieces, ToolCallDelta(self._index, arguments=text)] if text else pieces, ""

    def flush(self, *, is_cut: bool) -> list[Piece]:
        return []

    def _may_be_header(self, text: str) -> bool:
        rest = text.lstrip()
        found = _NAME_PART.match(rest)
        rest = rest[found.end() if found else 0 :].lstrip()
        if self._CALL_ID.startswith(rest):
            return True
        is_id = _NAME_PART.fullmatch(rest.removeprefix(self._CALL_ID).strip())
        return rest.startswith(self._CALL_ID) and is_id is not None


class Calls:
    """The common part of the notations: content, then calls, one after another."""

    def __init__(self, ids: CallIds, *, allows_several: bool = True) -> None:
        """A further call is dropped, with all behind it, where the model can make one alone, because its
        template refuses an answer with several."""
        self._ids = ids
        self._allows_several = allows_several
        self._num_calls = 0
        self._call: CallText | None = None
        self._held = ""
        # Whether the answer is over: later text does not belong to it.
        self._is_over = False

    @property
    def is_reasoning(self) -> bool:
        """Nothing is."""
        return False

    @property
    def _may_call(self) -> bool:
        """Whether a call may begin now."""
        return self._allows_several or not self._num_calls

    def push(self, text: str) -> list[Piece]:
        """Return the pieces that are certain after this text."""
        self._held += text
        pieces: list[Piece] = []
        while (found := self._next()) is not None:
            pieces += found
        return joined(pieces)

    def flush(self, *, is_cut: bool = False) -> list[Piece]:
        """Return the rest."""
        held, self._held = self._held, ""
        if self._call is not None:
            return joined([*self._call.flush(is_cut=is_cut), Content(held)])
        # Held text may be the beginning of a marker, or white space before one.
        return [] if is_cut else joined(self._last(held))

    def _next(self) -> list[Piece] | None:
        """Return the pieces that are certain from the held text, and drop that; None where more is needed."""
        if self._is_over:
            self._held = ""
            return None
        if self._call is None:
            return self._between()
        if not self._held:
            return None
        text, self._held = self._held, ""
        pieces, self._held = self._call.push(text)
        if self._call.is_broken:
            self._call = None
            self._broke()
        elif self._call.is_done:
            self._num_calls += 1
            self._call = None
            self._ended()
        return pieces

    def _between(self) -> list[Piece] | None:
        """As `_next`, outside of calls."""
        raise NotImplementedError

    def _ended(self) -> None:
        """Handle a complete call."""

    def _broke(self) -> None:
        """Handle text that began as a call and was none."""

    def _last(self, held: str) -> list[Piece]:
        """Return the pieces of the held text, at the end of the answer outside of calls."""
        return [Content(held)]

    def _open(self, opening: str, names: frozenset[str] | None = None) -> None:
        self._call = _JsonCallText(self._num_calls, self._ids.of(self._num_calls), opening, names)


class CallMarks(NamedTuple):
    """The markers before and behind calls."""

    start: str
    end: str


HERMES_MARKS = CallMarks("<tool_call>", "</tool_call>")


class MarkedCalls(Calls):
    """Reads calls in JSON between two markers each, as Hermes and Qwen write them. White space before a call
    and next to the markers belongs to nothing."""

    def __init__(self, ids: CallIds, marks: CallMarks = HERMES_MARKS, *, allows_several: bool = True) -> None:
        super().__init__(ids, allows_several=allows_several)
        self._start, self._end = marks
        self._is_closing = False
        # The white space that comes now follows a call.
        self._follows = False

    def _ended(self) -> None:
        self._is_closing = self._follows = True

    def _between(self) -> list[Piece] | None:
        if self._is_closing:
            text = self._held.lstrip()
            if text.startswith(self._end):
                self._is_closing, self._held = False, text[len(self._end) :]
                return []
            if self._end.startswith(text):
                self._held = text
                return None
            self._is_closing, self._held = False, text
        if self._follows:
            self._held = self._held.lstrip()
            if not self._held:
                return None
        before, marker, after = find_marker(self._held, (self._start,))
        certain = without_end(before)
        if marker:
            self._held, self._follows = after, False
            if not self._may_call:
                self._is_over = True
                return [Content(certain)]
            self._open(before[len(certain) :] + marker)
            return [Content(certain)]
        self._held = before[len(certain) :] + after
        if not certain:
            return None
        self._follows = False
        return [Content(certain)]

    def _last(self, held: str) -> list[Piece]:
        is_part_of_end = self._is_closing and self._end.startswith(held.lstrip())
        return [] if is_part_of_end or (self._follows and not held.strip()) else [Content(held)]


class BareCalls(Calls):
    """The whole answer is calls in JSON, separated by semicolons, as Llama 3 writes it, with or without the
    token <|python_tag|> before. Other answers are content, also JSON that looks like a call: without the
    token, it is one only where a tool has its name."""

    _TAG = "<|python_tag|>"

    def __init__(self, ids: CallIds, tool_names: frozenset[str], *, allows_several: bool = True) -> None:
        super().__init__(ids, allows_several=allows_several)
        self._tool_names = tool_names
        self._has_tag = False
        self._is_content = False

    def _between(self) -> list[Piece] | None:
        if self._is_content:
            text, self._held = self._held, ""
            return [Content(text)] if text else None
        if not self._may_call:
            text = self._held.lstrip(_SEPARATORS)
            if text.startswith(("{", self._TAG)):
                self._is_over = True
                return []
            if len(self._held) <= MAX_WAITING_CHARS and self._TAG.startswith(text):
                return None
            self._is_content = True
            return []
        text = self._held.lstrip()
        if self._num_calls:
            text = text.removeprefix(";").lstrip()
        num_before = 0
        is_tagged = text.startswith(self._TAG)
        if is_tagged:
            num_before, text = len(self._TAG), text[len(self._TAG) :].lstrip()
        opening = self._held[: len(self._held) - len(text)]
        if len(opening) - num_before > MAX_WAITING_CHARS:
            self._is_content = True
            return []
        if not text or (not num_before and self._TAG.startswith(text)):
            return None
        if text[0] != "{":
            self._is_content = True
            return []
        self._held = text
        self._has_tag = self._has_tag or is_tagged
        self._open(opening, None if self._has_tag else self._tool_names)
        return []

    def _broke(self) -> None:
        self._is_content = True

    def _last(self, held: str) -> list[Piece]:
        is_separator = self._num_calls > 0 and not held.strip(_SEPARATORS)
        is_marker = held.lstrip(_SEPARATORS).startswith(self._TAG)
        return [] if is_separator or is_marker else [Content(held)]


class ListedCalls(Calls):
    """Calls in a JSON list behind a marker, as Granite, Phi-4 and Apertus write them, or one call there
    without a list. A marker may stand behind the list."""

    def __init__(
        self,
        ids: CallIds,
        starts: tuple[str, ...],
        ends: tuple[str, ...] = (),
        *,
        is_keyed: bool = False,
        allows_several: bool = True,
    ) -> None:
        """With `is_keyed`, the objects of the list are {name: {...}}."""
        super().__init__(ids, allows_several=allows_several)
        self._starts = starts
        self._ends = ends
        self._is_keyed = is_keyed
        # "content", "start" (behind the marker), "list" (within one).
        self._place = "content"
        # The marker that was read, and the beginning of a list without a call so far.
        self._start = self._opening = ""
        # What comes now follows calls: white space, or the marker behind them.
        self._follows = False

    def _between(self) -> list[Piece] | None:
        if self._place == "content":
            return self._content()
        text = self._held.lstrip()
        if self._place == "start" and len(self._held) - len(text) > MAX_WAITING_CHARS:
            self._place = "content"
            return [Content(self._start)]
        if not text:
            self._held = text if self._place == "list" else self._held
            return None
        if self._place == "start":
            if text[0] == "[":
                self._place, self._held, self._opening = "list", text[1:], f"{self._start}["
                return []
            self._place, self._held = "content", text
            return self._without_list()
        if text[0] == "]":
            self._place, self._held, self._follows = "content", text[1:], not self._opening
            return [Content(f"{self._opening}]")] if self._opening else []
        if text[0] == "," and not self._opening:
            text = text[1:].lstrip()
            if not text:
                self._held = ","
                return None
        if text[0] != "{":
            self._place, self._held = "content", text
            return [Content(self._opening)]
        if not self._may_call:
            self._is_over = True
            return []
        self._held = text
        self._open(self._opening)
        self._opening = ""
        return []

    def _without_list(self) -> list[Piece]:
        """Handle text behind the marker that begins no list."""
        if self._held[0] != "{" or not self._may_call:
            return [Content(self._start)]
        self._open(self._start)
        return []

    def _content(self) -> list[Piece] | None:
        if self._follows:
            self._held = self._held.lstrip()
            if not self._held or any(end.startswith(self._held) and end != self._held for end in self._ends):
                return None
            end = next((end for end in self._ends if self._held.startswith(end)), "")
            if end:
                self._held = self._held[len(end) :]
                return []
        before, marker, after = find_marker(self._held, self._starts)
        certain = without_end(before)
        if marker:
            self._place, self._held, self._start, self._follows = "start", after, marker, False
            return [Content(certain)]
        self._held = before[len(certain) :] + after
        if not certain:
            return None
        self._follows = False
        return [Content(certain)]

    def _open(self, opening: str, names: frozenset[str] | None = None) -> None:
        self._call = _JsonCallText(
            self._num_calls, self._ids.of(self._num_calls), opening, names, is_keyed=self._is_keyed
        )

    def _ended(self) -> None:
        self._follows = self._place == "content"

    def _broke(self) -> None:
        self._place = "content"

    def _last(self, held: str) -> list[Piece]:
        if self._place == "start" or (self._place == "list" and self._opening):
            return []
        is_between = self._follows or self._place == "list"
        rest = held.strip(" \t\r\n,")
        if is_between and (not rest or any(end.startswith(rest) for end in self._ends)):
            return []
        return [Content(held)]


class MistralCalls(ListedCalls):
    """Calls behind the token [TOOL_CALLS], as Mistral writes them: a JSON list of objects, or a name with its
    arguments, and the token again before each further one."""

    def __init__(self, ids: CallIds) -> None:
        super().__init__(ids, ("[TOOL_CALLS]",))

    def _without_list(self) -> list[Piece]:
        self._call = _NamedCallText(self._num_calls, self._ids.of(self._num_calls), self._start)
        return []
