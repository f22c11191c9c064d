"""Grammars of answers with tool calls, in the notations that the parsers read.

A grammar lets the model think first, where it does that, and then holds it to the names of the tools and to
the schemas of their arguments.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Literal

from cluster.text.output_parsers.brace_call_rules import BraceCallRules
from cluster.text.output_parsers.callable_tools import CallableTool
from cluster.text.output_parsers.grammar_lines import GrammarLines, SpecialToken, pattern_of
from cluster.text.output_parsers.harmony import CHANNEL, END, MESSAGE, HarmonyPlace
from cluster.text.output_parsers.harmony_rules import HarmonyRules
from cluster.text.output_parsers.named_calls import NEXT_TURN
from cluster.text.output_parsers.python_call_rules import PythonCallRules
from cluster.text.output_parsers.tagged_call_rules import FunctionTagRules, KeyTagRules
from kvtransfer.codec import Part

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions

CallNotation = Literal[
    "hermes",
    "llama3",
    "mistral",
    "mistral_args",
    "qwen3_coder",
    "json",
    "seed_oss",
    "granite",
    "phi4",
    "apertus",
    "glm4",
    "glm45",
    "olmo3",
    "gemma3",
    "gemma4",
    "cohere2",
    "harmony",
]

# The marker before calls; "": none.
_STARTS: dict[CallNotation, str] = {
    "hermes": "<tool_call>",
    "llama3": "<|python_tag|>",
    "mistral": "[TOOL_CALLS]",
    "mistral_args": "[TOOL_CALLS]",
    "qwen3_coder": "<tool_call>",
    "json": "",
    "seed_oss": "<seed:tool_call>",
    "granite": "<|tool_call|>",
    "phi4": "<|tool_call|>",
    "apertus": "<|tools_prefix|>",
    "glm4": "",
    "glm45": "<tool_call>",
    "olmo3": "<function_calls>",
    "gemma3": "```tool_code",
    "gemma4": "<|tool_call>",
    "cohere2": "<|START_ACTION|>",
}
# The marker behind each call, or behind the list of them.
_ENDS: dict[CallNotation, str] = {
    "hermes": "</tool_call>",
    "qwen3_coder": "</tool_call>",
    "seed_oss": "</seed:tool_call>",
    "phi4": "<|/tool_call|>",
    "apertus": "<|tools_suffix|>",
    "glm45": "</tool_call>",
    "olmo3": "</function_calls>",
    "gemma3": "```",
    "gemma4": "<tool_call|>",
    "cohere2": "<|END_ACTION|>",
}
# Calls that are no JSON, but for values in them.
_OWN_SYNTAX = "qwen3_coder", "seed_oss", "glm45", "olmo3", "gemma3", "gemma4"
_LISTED = "mistral", "granite", "phi4", "apertus", "cohere2"
_ARGS, _CALL_ID = "[ARGS]", "[CALL_ID]"


class CallRules(Part, frozen=True):
    """The calls that an answer may have. Where calls are not required, it may be text instead, or begin with
    text. Nothing follows calls."""

    notation: CallNotation
    tools: tuple[CallableTool, ...]
    is_required: bool
    allows_several: bool


class ReasoningRules(Part, frozen=True):
    """The markers of the reasoning that may precede an answer. Where it `is_open`, the prompt has the first
    marker, and the second one must come."""

    start: str
    end: str
    is_open: bool
    # Where the prompt leaves an answer of harmony; None: another notation.
    harmony: HarmonyPlace | None = None

    @classmethod
    def of_harmony(cls, place: HarmonyPlace) -> ReasoningRules:
        """Return the rules of harmony behind a prompt that ends there."""
        return cls(f"{CHANNEL}analysis{MESSAGE}", END, is_open=place == "analysis", harmony=place)


def answer_grammar(
    calls: CallRules | None,
    reasoning: ReasoningRules | None,
    content: str | None,
    special_token: SpecialToken,
    json_style: JsonCompileOptions,
    *,
    is_bounded: bool = True,
) -> str:
    """Return the grammar of an answer: reasoning, then calls or `content`, a grammar of llguidance (None: any
    text). `json_style` is how JSON is written. Raise `ToolSchemaError` for the schema of a tool."""
    lines = GrammarLines(special_token, json_style, is_bounded)
    if (reasoning is not None and reasoning.harmony) or (calls is not None and calls.notation == "harmony"):
        answer, start = _harmony_answer(lines, calls, reasoning, has_content=content is not None)
    else:
        answer, start = _answer(lines, calls, reasoning, has_content=content is not None)
    lark = "\n".join(("%llguidance {}", f"start: {start}", f"answer: {answer}", *lines.lines, ""))
    if content is None or "@content" not in f"{start} {answer}":
        return lark
    return json.dumps({"grammars": [{"name": "answer", "lark_grammar": lark}, *_content_parts(content)]})


def _answer(
    lines: GrammarLines, calls: CallRules | None, reasoning: ReasoningRules | None, *, has_content: bool
) -> tuple[str, str]:
    """Return the expression of an answer, and of all with the reasoning before it."""
    rules = _Rules(lines)
    begins_freely = not has_content and (calls is None or not calls.is_required)
    if calls is None:
        answer = "@content" if has_content else "TEXT"
    elif calls.is_required:
        answer = rules.calls(calls)
    else:
        answer = f"{rules.calls(calls)} | @content" if has_content else rules.text_or_calls(calls)
    start = "answer"
    if reasoning is not None:
        marker = _STARTS[calls.notation] if calls is not None else ""
        start = f"{rules.thought(reasoning, marker, '' if begins_freely else 'BREAKS')} answer"
    return answer, start


def _harmony_answer(
    lines: GrammarLines, calls: CallRules | None, reasoning: ReasoningRules | None, *, has_content: bool
) -> tuple[str, str]:
    """As `_answer`, of messages."""
    rules = HarmonyRules(lines)
    place = reasoning.harmony if reasoning is not None else None
    called = None if calls is None else rules.calls(calls.tools, allows_several=calls.allows_several)
    must_call = calls is not None and calls.is_required
    answer = rules.answer(called, must_call=must_call, has_content=has_content)
    return answer, rules.start(place or "header", must_call=must_call, has_content=has_content)


def _content_parts(grammar: str) -> list[dict[str, Any]]:
    """Return the parts of a grammar, the first of which is now called "content"."""
    if not grammar.lstrip().startswith("{"):
        return [{"name": "content", "lark_grammar": grammar}]
    match json.loads(grammar):
        case {"grammars": [dict(first), *others]}:
            return [{**first, "name": "content"}, *others]
        case _:
            raise ValueError("the grammar is neither in Lark's notation nor a list of grammars")


class _Rules:
    """Writes the rules of one grammar. Methods that return something return an expression."""

    def __init__(self, lines: GrammarLines) -> None:
        self._lines = lines

    def thought(self, reasoning: ReasoningRules, call_marker: str, breaks: str) -> str:
        """Return the rule of reasoning, and of `breaks` behind it. No call begins in it: a reader that does
        not separate reasoning would take that for a call."""
        self._lines.add(f"THOUGHT: {_without(call_marker) if call_marker else 'TEXT'}")
        end = self._lines.up_to("thought_end", "THOUGHT", reasoning.end)
        if reasoning.is_open:
            return f"{end} {breaks}"
        # Where something is demanded, white space must not be the way into reasoning.
        before = "NOTHING" if breaks else "WHITE"
        return f"({self._lines.up_to('thought_start', before, reasoning.start)} {end} {breaks})?"

    def calls(self, calls: CallRules) -> str:
        """Return the rule of calls alone."""
        marker = _STARTS[calls.notation]
        if not marker:
            return self._behind_start(calls)
        start = self._lines.mark(marker)
        if calls.notation == "llama3":
            start = f"({start})?"
        return f"{start} {self._behind_start(calls)}"

    def text_or_calls(self, calls: CallRules) -> str:
        """Return the rule of text, which calls may follow."""
        start = _STARTS[calls.notation]
        behind = self._behind_start(calls)
        if calls.notation == "glm4":
            return self._text_or_named(calls)
        if calls.notation != "llama3":
            return f"TEXT | {self._lines.up_to('calls_start', 'TEXT', start)} {behind}"
        # There the answer is calls or text from its beginning.
        self._lines.add(f"NO_CALL: TEXT & ~/\\s*({pattern_of(start)}|\\{{)(.|\\n)*/")
        mark = self._lines.mark(start)
        if self._lines.is_token(start):
            return f"NO_CALL | WHITE ({mark} WHITE)? {behind}"
        # One terminal, so that it and the text go on together until one of them cannot.
        self._lines.add(f"LEAD: WHITE ({mark} WHITE)?")
        return f"NO_CALL | LEAD {behind}"

    def _text_or_named(self, calls: CallRules) -> str:
        """Return the rule of text that is no call of a tool, or calls, of which no marker begins the first:
        a tool's name and the brace behind it do."""
        names = "|".join(pattern_of(tool.name) for tool in calls.tools)
        self._lines.add(f"NO_CALL: TEXT & ~/\\s*({names})\\s*\\n\\s*\\{{(.|\\n)*/")
        firsts = []
        for index, tool in enumerate(calls.tools):
            self._lines.add(f"LEAD_{index}: WHITE {json.dumps(tool.name)} / {{0,8}}\\n/ WHITE")
            firsts.append(f"LEAD_{index} {self._arguments(tool)}")
        further = f" ({self._between(calls.notation)} call)*" if calls.allows_several else ""
        return f"NO_CALL | ({' | '.join(firsts)}){further}"

    def _behind_start(self, calls: CallRules) -> str:
        """Return the rule of everything behind the first marker."""
        notation = calls.notation
        tools = [self._tool(index, tool, notation) for index, tool in enumerate(calls.tools)]
        any_tool = " | ".join(tools)
        if notation in ("mistral_args", "glm4", *_OWN_SYNTAX):
            self._lines.add(f"tool: {any_tool}")
        elif notation == "apertus":
            self._lines.add(rf'tool: "{{" ({any_tool}) "}}"')
        elif notation == "cohere2":
            call_id = r'"\"tool_call_id\"" COLON "\"" /[0-9]{1,3}/ "\"" COMMA'
            self._lines.add(rf'tool: "{{" {call_id} "\"tool_name\"" COLON ({any_tool}) "}}"')
        else:
            self._lines.add(rf'tool: "{{" "\"name\"" COLON ({any_tool}) "}}"')
        end = self._lines.mark(_ENDS[notation]) if notation in _ENDS else ""
        match notation:
            case "hermes":
                call = f"BREAK tool BREAK {end}"
            case "qwen3_coder" | "seed_oss" | "glm45" | "gemma4":
                call = f"tool {end}"
            case _:
                call = "tool"
        self._lines.add(f"call: {call}")
        several = f"call ({self._between(notation)} call)*" if calls.allows_several else "call"
        if notation == "cohere2":
            return f'"[" WHITE {several} WHITE "]" {end}'
        if notation in _LISTED:
            return f'SPACE "[" {several} "]" {end}'
        return f"BREAK {several} BREAK {end}" if notation in ("olmo3", "gemma3") else several

    def _between(self, notation: CallNotation) -> str:
        """Return the expression of what stands between two calls."""
        start = _STARTS[notation]
        match notation:
            case "hermes" | "qwen3_coder" | "seed_oss" | "glm45" | "gemma4":
                return f"BREAKS {self._lines.mark(start)}"
            case "mistral_args":
                return self._lines.mark(start)
            case "cohere2":
                return '"," WHITE'
            case "llama3":
                return '";" SPACE'
            case "json" | "olmo3" | "gemma3":
                return r'"\n"'
            case "glm4":  # each call is a turn of its own
                return self._lines.mark(NEXT_TURN) if self._lines.is_token(NEXT_TURN) else r'"\n"'
            case _:
                return '"," SPACE'

    def _tool(self, index: int, tool: CallableTool, notation: CallNotation) -> str:
        """Return the rule of a call of one tool, without markers around it."""
        rule = f"tool_{index}"
        self._lines.add(f"{rule}: {self._call(rule, tool, notation)}")
        return rule

    def _call(self, rule: str, tool: CallableTool, notation: CallNotation) -> str:
        name = json.dumps(json.dumps(tool.name))
        match notation:
            case "qwen3_coder" | "seed_oss":
                return FunctionTagRules(self._lines, breaks_around_values=notation == "qwen3_coder").call(
                    tool
                )
            case "glm45":
                return KeyTagRules(self._lines).call(tool)
            case "olmo3" | "gemma3":
                return PythonCallRules(self._lines, has_python_values=notation == "gemma3").call(tool)
            case "gemma4":
                return BraceCallRules(self._lines).call(rule, tool)
            case "glm4":
                return f"{json.dumps(tool.name)} / ?\\n/ {self._arguments(tool)}"
            case "mistral_args":
                call_id = f"({self._lines.mark(_CALL_ID)} /[a-zA-Z0-9]{{9}}/)?"
                args = self._lines.mark(_ARGS)
                return f"{json.dumps(tool.name)} {call_id} {args} {self._arguments(tool)}"
            case "apertus":
                return f"{name} COLON {self._arguments(tool)}"
            case _:
                key = "parameters" if notation in ("llama3", "cohere2") else "arguments"
                return rf'{name} COMMA "\"{key}\"" COLON {self._arguments(tool)}'

    def _arguments(self, tool: CallableTool) -> str:
        """Return the rule of all arguments as JSON."""
        return self._lines.json(tool, {**tool.arguments_schema(), "type": "object"})


def _without(marker: str) -> str:
    """Return a terminal for texts in which the marker does not occur."""
    return f"TEXT & ~/(.|\\n)*{pattern_of(marker)}(.|\\n)*/"
