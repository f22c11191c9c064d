"""The text of one sample as its tokens arrive: content, reasoning, tool calls, and where it stops.

What is emitted after k tokens depends on those k tokens alone, not on how they were grouped into deltas, so
a resumed stream continues exactly where it ended.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple

import numpy as np

from cluster.text.output_parsers.pieces import (
    Content,
    OutputParser,
    Piece,
    Reasoning,
    ToolCallDelta,
    joined_calls,
    num_possible,
)
from cluster.text.output_parsers.reasoning import PlainParser
from cluster.text.tokenizer import Detokenizer
from kvtransfer.blocks.keys import TOKEN_BYTES


class StopMatch(NamedTuple):
    """Text that may be emitted, and the stop string that ended it ("": none)."""

    text: str
    stop: str


class StopStrings:
    """Cuts a growing text at the stop string that completes first (of those, the one that began first).

    Holds back the longest end of the text with which a stop string could begin.
    """

    def __init__(self, stops: Sequence[str], *, includes_stop: bool = False) -> None:
        """The text ends before the stop string, or behind it where that `includes_stop`."""
        self._stops = tuple(stops)
        self._includes_stop = includes_stop
        self._held = ""

    def push(self, text: str) -> StopMatch:
        """Return the text that is certain after this text."""
        if not self._stops:
            return StopMatch(text, "")
        buffer = self._held + text
        starts = [
            (start + len(stop), start, stop) for stop in self._stops if (start := buffer.find(stop)) >= 0
        ]
        if starts:
            end, start, stop = min(starts)
            self._held = ""
            return StopMatch(buffer[: end if self._includes_stop else start], stop)
        num_held = max(num_possible(buffer, stop) for stop in self._stops)
        self._held = buffer[len(buffer) - num_held :]
        return StopMatch(buffer[: len(buffer) - num_held], "")

    def flush(self) -> str:
        """Return the held text."""
        held, self._held = self._held, ""
        return held


class TextStep(NamedTuple):
    """The result of `SampleText.push` for a delta: how many of its tokens count, their text, the finish, and
    parts that stand apart from the text. `matched_stop` is the stop string or stop token that ended the
    sample; None while it goes on, and at the model's own end."""

    num_tokens: int
    text: str
    finish: str
    reasoning: str = ""
    tool_calls: tuple[ToolCallDelta, ...] = ()
    matched_stop: str | int | None = None


class SampleText:
    """The text of one sample as its tokens arrive.

    The text ends at a stop string (`finish` becomes "stop", later tokens do not count) and does not contain
    the end token of a sample that finished with "stop". Stop strings are searched in the content, not in
    reasoning or tool calls. A sample with tool calls that would finish with "stop" finishes with
    "tool_calls".
    """

    def __init__(
        self,
        detokenizer: Detokenizer,
        stops: Sequence[str] = (),
        *,
        stop_token_ids: Collection[int] = (),
        includes_stop: bool = False,
        parser: OutputParser | None = None,
    ) -> None:
        self._detokenizer = detokenizer
        self._stops = StopStrings(stops, includes_stop=includes_stop)
        self._stop_token_ids = frozenset(stop_token_ids)
        self._includes_stop = includes_stop
        self._parser = parser or PlainParser()
        # All text is content, and certain at once.
        self._is_plain = isinstance(self._parser, PlainParser) and not stops
        self._has_calls = False
        # Tokens of the reasoning so far.
        self.num_reasoning_tokens = 0

    def push(self, tokens: bytes, finish: str) -> TextStep:
        """Add tokens, and return the step of the text; `finish` is that of the delta: "" while the sample
        goes on."""
        if self._is_plain and not finish and len(tokens) == TOKEN_BYTES:  # as of most tokens
            return TextStep(1, self._detokenizer.push(int.from_bytes(tokens, "little")), "")
        ids = np.frombuffer(tokens, dtype="<u4").tolist()
        matched = ids[-1] if finish == "stop" and ids and ids[-1] in self._stop_token_ids else None
        is_shown = finish != "stop" or (matched is not None and self._includes_stop)
        pieces: list[Piece] = []
        for count, token in enumerate(ids if is_shown else ids[:-1], start=1):
            self.num_reasoning_tokens += self._parser.is_reasoning
            if stop := self._take(self._parser.push(self._detokenizer.push(token)), pieces):
                return self._step(count, pieces, "stop", stop)
        if finish:
            rest = self._parser.push(self._detokenizer.flush())
            if stop := self._take([*rest, *self._parser.flush(is_cut=finish != "stop")], pieces):
                return self._step(len(ids), pieces, "stop", stop)
            pieces.append(Content(self._stops.flush()))
        return self._step(len(ids), pieces, finish, matched)

    def _take(self, found: list[Piece], pieces: list[Piece]) -> str:
        """Append the pieces up to a stop string, which is returned."""
        for piece in found:
            if isinstance(piece, Content):
                match = self._stops.push(piece.text)
                pieces.append(Content(match.text))
                if match.stop:
                    return match.stop
            else:
                self._has_calls = self._has_calls or isinstance(piece, ToolCallDelta)
                pieces.append(piece)
        return ""

    def _step(
        self, num_tokens: int, pieces: list[Piece], finish: str, matched_stop: str | int | None
    ) -> TextStep:
        if finish == "stop" and self._has_calls:
            finish = "tool_calls"
        return TextStep(
            num_tokens,
            "".join(piece.text for piece in pieces if isinstance(piece, Content)),
            finish,
            "".join(piece.text for piece in pieces if isinstance(piece, Reasoning)),
            joined_calls(piece for piece in pieces if isinstance(piece, ToolCallDelta)),
            matched_stop,
        )
