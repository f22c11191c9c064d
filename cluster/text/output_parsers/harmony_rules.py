"""The rules of answers in harmony: reasoning, then calls or the message with the content."""

from __future__ import annotations

import json
from collections.abc import Sequence

from cluster.text.output_parsers.callable_tools import CallableTool
from cluster.text.output_parsers.grammar_lines import GrammarLines, pattern_of
from cluster.text.output_parsers.harmony import (
    CHANNEL,
    CONSTRAIN,
    END,
    FUNCTIONS,
    HARMONY_MARKS,
    MESSAGE,
    ROLE,
    START,
    HarmonyPlace,
)


class HarmonyRules:
    """Writes the rules of one answer. Methods return an expression."""

    def __init__(self, lines: GrammarLines) -> None:
        self._lines = lines
        # Text in which a reader finds no message.
        marks = "|".join(map(pattern_of, HARMONY_MARKS))
        lines.add(f"SAID: TEXT & ~/(.|\\n)*({marks})(.|\\n)*/")
        # The end of a message, and the beginning of the next one's header.
        lines.add(f"next: {lines.mark(END)} {self._next_role}")
        lines.add(f"rest: {lines.up_to('said', 'SAID', END)} {self._next_role}")
        lines.add(f"thought: {self._header('analysis')} rest")

    def calls(self, tools: Sequence[CallableTool], *, allows_several: bool) -> str:
        """Return the rule of calls, between which the model may think."""
        self._lines.add(f"tool: {' | '.join(self._call(tool) for tool in tools)}")
        return "tool (next thought* tool)*" if allows_several else "tool"

    def answer(self, calls: str | None, *, must_call: bool, has_content: bool) -> str:
        """Return the rule of messages that are no reasoning. Content that is free may follow others for the
        user, on the channel `commentary`, as may calls."""
        if must_call:
            assert calls is not None
            return calls
        content = f"{self._header('final')} {'@content' if has_content else 'SAID'}"
        either = content if calls is None else f"({content} | {calls})"
        if has_content:
            return either
        self._lines.add(f"preamble: {self._header('commentary')} rest")
        return f"(preamble thought*)* {either}"

    def start(self, place: HarmonyPlace, *, must_call: bool, has_content: bool) -> str:
        """Return the rule of all from where the prompt ends, with the `answer` in it."""
        if place == "header":
            return "thought* answer"
        if place == "analysis":
            return "rest thought* answer"
        if must_call:
            return "next thought* answer"
        return "@content" if has_content else "SAID"

    @property
    def _next_role(self) -> str:
        return f"{self._lines.mark(START)} {json.dumps(ROLE)}"

    def _header(self, channel: str) -> str:
        """Return the header of a message to the user, behind the role."""
        mark = self._lines.mark
        kind = f" ({self._kind})?" if channel == "final" else ""
        return f"{mark(CHANNEL)} {json.dumps(channel)}{kind} {mark(MESSAGE)}"

    @property
    def _kind(self) -> str:
        """The kind of a text, if it is JSON."""
        return f'SPACE {self._lines.mark(CONSTRAIN)} "json"'

    def _call(self, tool: CallableTool) -> str:
        """Return the rule of a call of one tool: its name stands before the channel or behind it."""
        mark = self._lines.mark
        name = f"{FUNCTIONS}{tool.name}"
        before = f'{json.dumps(f" to={name}")} {mark(CHANNEL)} "commentary"'
        behind = f"{mark(CHANNEL)} {json.dumps(f'commentary to={name}')}"
        header = f'({before} | {behind}) ({self._kind} | " json")? {mark(MESSAGE)}'
        arguments = self._lines.json(tool, {**tool.arguments_schema(), "type": "object"})
        return self._lines.shared(f"{header} {arguments}")
