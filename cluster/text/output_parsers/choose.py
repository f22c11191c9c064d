"""Which parsers the answers of a model need, by the marks of its chat template."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

from cluster.config import ReasoningParserName, ToolParserName
from cluster.text.output_parsers.pieces import CallIds, OutputParser
from cluster.text.output_parsers.reasoning import PlainParser, ReasoningParser
from cluster.text.output_parsers.tagged_calls import TaggedCalls
from cluster.text.output_parsers.tool_calls import BareCalls, ListedCalls, MarkedCalls
from cluster.text.output_parsers.tool_grammar import CallNotation, ReasoningRules


class ParserNeeds(NamedTuple):
    """The demands of one request on the parsers: `tools` are those that may be called, by their names the
    JSON schemas of their arguments ("": any)."""

    tools: Mapping[str, str]
    separates_reasoning: bool


# Makers of parsers by name, called with the ids of the calls, the needs, and whether an answer may have
# several calls.
_TOOL_PARSERS: dict[str, Callable[[CallIds, ParserNeeds, bool], OutputParser]] = {
    "hermes": lambda ids, _, several: MarkedCalls(ids, allows_several=several),
    "llama3": lambda ids, needs, several: BareCalls(ids, frozenset(needs.tools), allows_several=several),
    # Families whose templates all know several.
    "mistral": lambda ids, _, __: ListedCalls(ids),
    "qwen3_coder": lambda ids, needs, several: TaggedCalls(ids, needs.tools, allows_several=several),
    # Calls that are demanded of a model without a notation of its own.
    "json": lambda ids, needs, several: BareCalls(ids, frozenset(needs.tools), allows_several=several),
}
# The special tokens that each notation writes, which the text must keep.
_TOOL_TOKENS = {
    "hermes": ("<tool_call>", "</tool_call>"),
    "llama3": ("<|python_tag|>",),
    "mistral": ("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"),
    "qwen3_coder": ("<tool_call>", "</tool_call>"),
}
_CALL_NOTATIONS: dict[str, CallNotation] = {
    "hermes": "hermes",
    "llama3": "llama3",
    "mistral": "mistral",
    "qwen3_coder": "qwen3_coder",
    "json": "json",
}
_REASONING_MARKERS = {"think": ("<think>", "</think>"), "mistral": ("[THINK]", "[/THINK]")}


@dataclass(frozen=True, slots=True)
class OutputParsers:
    """The parsers of one model: names of `ToolParserName` and `ReasoningParserName`, "none" where the model
    has no such notation."""

    tools: str
    reasoning: str
    # Whether calls are name[ARGS]{...}, as Mistral's later models write them.
    marks_arguments: bool = False
    # Whether an answer may have several calls.
    allows_several: bool = True

    @staticmethod
    def choose(template: str | None, tools: ToolParserName, reasoning: ReasoningParserName) -> OutputParsers:
        """Return the parsers of the configuration; where that is "auto", those that marks in the source of
        the chat template name."""
        source = template or ""
        return OutputParsers(
            _tools_of(source) if tools == "auto" else tools,
            _reasoning_of(source) if reasoning == "auto" else reasoning,
            marks_arguments="[ARGS]" in source,
        )

    def with_notation(self, notation: CallNotation | None) -> OutputParsers:
        """Return the same for calls in this notation; None: the model has none that is known."""
        tools = next((name for name, found in _CALL_NOTATIONS.items() if found == notation), "none")
        if notation == "mistral_args":
            tools = "mistral"
        return replace(self, tools=tools, marks_arguments=notation == "mistral_args")

    def demanded(self) -> OutputParsers:
        """Return those of an answer that must have calls: in plain JSON where the model has no notation."""
        return self if self.call_notation is not None else self.with_notation("json")

    @property
    def call_notation(self) -> CallNotation | None:
        """The notation of the model's calls; None where it has none for them."""
        notation = _CALL_NOTATIONS.get(self.tools)
        return "mistral_args" if notation == "mistral" and self.marks_arguments else notation

    @property
    def markers(self) -> tuple[str, ...]:
        """The marks of the parts in the model's answers."""
        return (*_TOOL_TOKENS.get(self.tools, ()), *_REASONING_MARKERS.get(self.reasoning, ()))

    def reasoning_rules(self, prompt: str, continued: str = "") -> ReasoningRules | None:
        """Return between which markers the model may reason after a rendered prompt; None where it does not,
        or the prompt ends with the end of its reasoning. The answer goes on from the text that is
        `continued`, the last of the prompt."""
        markers = _REASONING_MARKERS.get(self.reasoning)
        if markers is None or prompt.rstrip().endswith(markers[1]):
            return None
        return ReasoningRules(*markers, is_open=self.opens_reasoning(prompt, continued))

    def kept_tokens(self, needs: ParserNeeds) -> frozenset[str]:
        """Return the special tokens that the text must keep for the parsers."""
        kept: tuple[str, ...] = _TOOL_TOKENS.get(self.tools, ()) if needs.tools else ()
        if needs.separates_reasoning:
            kept += _REASONING_MARKERS.get(self.reasoning, ())
        return frozenset(kept)

    def opens_reasoning(self, prompt: str, continued: str = "") -> bool:
        """Return whether a rendered prompt ends with the beginning of the reasoning, or in the middle of it,
        in the text that is `continued`."""
        markers = _REASONING_MARKERS.get(self.reasoning)
        if markers is None:
            return False
        start, end = markers
        return prompt.rstrip().endswith(start) or continued.rfind(start) > continued.rfind(end)

    def make(
        self, needs: ParserNeeds, request_id: str, sample: int, *, opens_reasoning: bool
    ) -> OutputParser | None:
        """Return the parser of one sample; None where all of its text is content."""
        inner: OutputParser | None = None
        if needs.tools and self.tools in _TOOL_PARSERS:
            ids = CallIds(request_id, sample, is_short=self.tools == "mistral")
            inner = _TOOL_PARSERS[self.tools](ids, needs, self.allows_several)
        if needs.separates_reasoning and self.reasoning in _REASONING_MARKERS:
            start, end = _REASONING_MARKERS[self.reasoning]
            return ReasoningParser(start, end, inner or PlainParser(), is_open=opens_reasoning)
        return inner


def _tools_of(template: str) -> str:
    if "<tool_call>" in template:
        return "qwen3_coder" if "<function=" in template else "hermes"
    if "[TOOL_CALLS]" in template:
        return "mistral"
    if "<|python_tag|>" in template or ("<|start_header_id|>" in template and "tool_calls" in template):
        return "llama3"
    return "none"


def _reasoning_of(template: str) -> str:
    if "<think>" in template or "</think>" in template:
        return "think"
    return "mistral" if "[THINK]" in template else "none"
