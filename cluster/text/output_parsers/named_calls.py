"""Tool calls as GLM-4 writes them: the name of a tool on a line of its own, and its arguments in JSON."""

from __future__ import annotations

from cluster.text.output_parsers.json_call import ValueEnd
from cluster.text.output_parsers.pieces import MAX_WAITING_CHARS, CallIds, Content, Piece, ToolCallDelta
from cluster.text.output_parsers.tool_calls import Calls

# The mark of the model's turns, each of which has one call. Behind a call it is not text.
NEXT_TURN = "<|assistant|>"


class NamedCalls(Calls):
    """The whole answer is calls, one after another. No marker begins them, so a line is the beginning of one
    only where a tool has its name and a brace follows. Other answers are content."""

    def __init__(self, ids: CallIds, tool_names: frozenset[str], *, allows_several: bool = True) -> None:
        super().__init__(ids, allows_several=allows_several)
        self._tool_names = tool_names
        self._is_content = False

    def _between(self) -> list[Piece] | None:
        if self._is_content:
            text, self._held = self._held, ""
            return [Content(text)] if text else None
        text = self._held.lstrip()
        num_marked = 0
        if self._num_calls and text:
            if NEXT_TURN.startswith(text):
                return None
            num_marked = len(NEXT_TURN) if text.startswith(NEXT_TURN) else 0
            text = text[num_marked:].lstrip()
        line, end, rest = text.partition("\n")
        name, arguments = line.rstrip(), rest.lstrip()
        num_spaces = len(self._held) - num_marked - len(name) - len(arguments)
        if num_spaces > MAX_WAITING_CHARS or not self._may_be(name, is_whole=bool(end) or line != name):
            self._is_content = True
            return []
        if not arguments:
            return None
        if arguments[0] != "{":
            self._is_content = True
            return []
        if not self._may_call:
            self._is_over = True
            return []
        self._held = arguments
        self._call = _ArgumentsText(self._num_calls)
        return [ToolCallDelta(self._num_calls, self._ids.of(self._num_calls), name)]

    def _may_be(self, name: str, *, is_whole: bool) -> bool:
        """Return whether this is the name of a tool, or the beginning of one."""
        if is_whole:
            return name in self._tool_names
        return any(it.startswith(name) for it in self._tool_names)

    def _last(self, held: str) -> list[Piece]:
        return [] if self._num_calls and held.strip() in ("", NEXT_TURN) else [Content(held)]


class _ArgumentsText:
    """The arguments of a call, an object in JSON."""

    is_broken = False

    def __init__(self, index: int) -> None:
        self._index = index
        self._end = ValueEnd()
        self.is_done = False

    def push(self, text: str) -> tuple[list[Piece], str]:
        """Return the part of the arguments, and the text behind them."""
        for place, char in enumerate(text, start=1):
            if self._end.is_reached(char):
                self.is_done = True
                return [ToolCallDelta(self._index, arguments=text[:place])], text[place:]
        return [ToolCallDelta(self._index, arguments=text)], ""

    def flush(self, *, is_cut: bool) -> list[Piece]:
        """Return nothing: all of it was given."""
        return []
