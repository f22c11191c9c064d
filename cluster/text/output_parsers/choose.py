"""Which parsers the answers of a model need, by the marks of its chat template."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Final, NamedTuple

from cluster.parser_names import ReasoningParserName, ToolParserName
from cluster.text.output_parsers.brace_calls import GEMMA4_MARKS, GEMMA4_QUOTE, BraceCalls
from cluster.text.output_parsers.harmony import ANSWER_ENDS, HARMONY_MARKS, HarmonyParser, harmony_place
from cluster.text.output_parsers.named_calls import NamedCalls
from cluster.text.output_parsers.pieces import CallIds, OutputParser
from cluster.text.output_parsers.python_calls import PythonCalls
from cluster.text.output_parsers.reasoning import PlainParser, ReasoningParser, ResponseParser
from cluster.text.output_parsers.tagged_calls import FunctionTags, KeyTags, TaggedCalls
from cluster.text.output_parsers.tool_calls import (
    HERMES_MARKS,
    BareCalls,
    CallMarks,
    ListedCalls,
    MarkedCalls,
    MistralCalls,
)
from cluster.text.output_parsers.tool_grammar import CallNotation, ReasoningRules


class ParserNeeds(NamedTuple):
    """The demands of one request on the parsers: `tools` are those that may be called, by their names the
    JSON schemas of their arguments ("": any). The answer `is_turn` of a chat, or goes on with a text."""

    tools: Mapping[str, str]
    separates_reasoning: bool
    is_turn: bool = True


# The notation of whole answers, which names both parsers.
_HARMONY: Final = "harmony"
# Makes the parser of one sample for the needs of its request, and whether an answer may have several calls.
_MakeParser = Callable[[CallIds, ParserNeeds, bool], OutputParser]
_GRANITE = ("<|tool_call|>", "<tool_call>"), ("</tool_call>",)
_PHI4 = ("<|tool_call|>",), ("<|/tool_call|>",)
_APERTUS = ("<|tools_prefix|>",), ("<|tools_suffix|>",)
_COHERE2 = ("<|START_ACTION|>",), ("<|END_ACTION|>",)
_SEED = CallMarks("<seed:tool_call>", "</seed:tool_call>")
_OLMO3 = CallMarks("<function_calls>", "</function_calls>")
_GEMMA3 = CallMarks("```tool_code", "```")


@dataclass(frozen=True, slots=True)
class _ToolParser:
    """How the calls of a family are read."""

    make: _MakeParser
    # The special tokens of the notation, which the text must keep.
    tokens: tuple[str, ...] = ()
    # The notation of its grammar; None: there is no grammar of such calls.
    grammar: CallNotation | None = None


_TOOL_PARSERS: dict[str, _ToolParser] = {
    "hermes": _ToolParser(
        lambda ids, _, several: MarkedCalls(ids, allows_several=several), HERMES_MARKS, "hermes"
    ),
    "llama3": _ToolParser(
        lambda ids, needs, several: BareCalls(ids, frozenset(needs.tools), allows_several=several),
        ("<|python_tag|>",),
        "llama3",
    ),
    # A family whose templates all know several.
    "mistral": _ToolParser(
        lambda ids, _, __: MistralCalls(ids), ("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"), "mistral"
    ),
    "qwen3_coder": _ToolParser(
        lambda ids, needs, several: TaggedCalls(ids, needs.tools, FunctionTags, allows_several=several),
        HERMES_MARKS,
        "qwen3_coder",
    ),
    "seed_oss": _ToolParser(
        lambda ids, needs, several: TaggedCalls(
            ids, needs.tools, FunctionTags, _SEED, allows_several=several
        ),
        _SEED,
        "seed_oss",
    ),
    "glm45": _ToolParser(
        lambda ids, needs, several: TaggedCalls(ids, needs.tools, KeyTags, allows_several=several),
        (*HERMES_MARKS, "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
        "glm45",
    ),
    "glm4": _ToolParser(
        lambda ids, needs, several: NamedCalls(ids, frozenset(needs.tools), allows_several=several),
        grammar="glm4",
    ),
    "granite": _ToolParser(
        lambda ids, _, several: ListedCalls(ids, *_GRANITE, allows_several=several),
        (*_GRANITE[0], *_GRANITE[1]),
        "granite",
    ),
    "phi4": _ToolParser(
        lambda ids, _, several: ListedCalls(ids, *_PHI4, allows_several=several),
        (*_PHI4[0], *_PHI4[1]),
        "phi4",
    ),
    "apertus": _ToolParser(
        lambda ids, _, several: ListedCalls(ids, *_APERTUS, is_keyed=True, allows_several=several),
        (*_APERTUS[0], *_APERTUS[1]),
        "apertus",
    ),
    "olmo3": _ToolParser(
        lambda ids, needs, several: PythonCalls(ids, needs.tools, _OLMO3, allows_several=several),
        _OLMO3,
        "olmo3",
    ),
    "gemma3": _ToolParser(
        lambda ids, needs, several: PythonCalls(ids, needs.tools, _GEMMA3, allows_several=several),
        grammar="gemma3",
    ),
    "gemma4": _ToolParser(
        lambda ids, _, several: BraceCalls(ids, allows_several=several),
        (*GEMMA4_MARKS, GEMMA4_QUOTE),
        "gemma4",
    ),
    "cohere2": _ToolParser(
        lambda ids, _, several: ListedCalls(ids, *_COHERE2, allows_several=several),
        (*_COHERE2[0], *_COHERE2[1]),
        "cohere2",
    ),
    # Calls that are demanded of a model without a notation of its own.
    "json": _ToolParser(
        lambda ids, needs, several: BareCalls(ids, frozenset(needs.tools), allows_several=several),
        grammar="json",
    ),
}


class _ReasoningMarks(NamedTuple):
    """The marks around reasoning, those around the answer behind it (None: there are none), and the special
    tokens in all of them."""

    start: str
    end: str
    tokens: tuple[str, ...]
    answer: tuple[str, str] | None = None


_REASONING_MARKS = {
    "think": _ReasoningMarks("<think>", "</think>", ("<think>", "</think>")),
    "mistral": _ReasoningMarks("[THINK]", "[/THINK]", ("[THINK]", "[/THINK]")),
    "seed_oss": _ReasoningMarks("<seed:think>", "</seed:think>", ("<seed:think>", "</seed:think>")),
    "granite": _ReasoningMarks(
        "<think>",
        "</think>",
        ("<think>", "</think>", "<response>", "</response>"),
        ("<response>", "</response>"),
    ),
    "granite32": _ReasoningMarks("Here is my thought process:", "Here is my response:", ()),
    "apertus": _ReasoningMarks(
        "<|inner_prefix|>", "<|inner_suffix|>", ("<|inner_prefix|>", "<|inner_suffix|>")
    ),
    "cohere2": _ReasoningMarks(
        "<|START_THINKING|>",
        "<|END_THINKING|>",
        ("<|START_THINKING|>", "<|END_THINKING|>", "<|START_RESPONSE|>", "<|END_RESPONSE|>"),
        ("<|START_RESPONSE|>", "<|END_RESPONSE|>"),
    ),
    "gemma4": _ReasoningMarks("<|channel>thought", "<channel|>", ("<|channel>", "<channel|>")),
}


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
            marked_tool_parser(source) if tools == "auto" else tools,
            _reasoning_of(source) if reasoning == "auto" else reasoning,
            marks_arguments="[ARGS]" in source,
        )

    def with_notation(self, notation: str | None) -> OutputParsers:
        """Return the same for calls as this parser reads them, or as `mistral_args`, Mistral's later form;
        None: the model has no notation that is known."""
        tools = "mistral" if notation == "mistral_args" else notation or "none"
        return replace(self, tools=tools, marks_arguments=notation == "mistral_args")

    @property
    def is_harmony(self) -> bool:
        """Whether answers are messages of harmony, which one parser reads whole."""
        return _HARMONY in (self.tools, self.reasoning)

    def demanded(self) -> OutputParsers:
        """Return those of an answer that must have calls: in plain JSON where the model has no notation."""
        return self if self.call_notation is not None else self.with_notation("json")

    @property
    def call_notation(self) -> CallNotation | None:
        """The notation of the model's calls in a grammar; None where there is none for them."""
        if self.is_harmony:
            return None if self.tools == "none" else _HARMONY
        notation = _TOOL_PARSERS[self.tools].grammar if self.tools in _TOOL_PARSERS else None
        return "mistral_args" if notation == "mistral" and self.marks_arguments else notation

    @property
    def markers(self) -> tuple[str, ...]:
        """The marks of the parts in the text of an answer."""
        return (*self._tool_tokens, *self._reasoning_tokens)

    @property
    def answer_ends(self) -> tuple[str, ...]:
        """The tokens that end an answer where its notation has some; the mark behind a turn in the template
        may be another then."""
        return ANSWER_ENDS if self.is_harmony else ()

    @property
    def _tool_tokens(self) -> tuple[str, ...]:
        return _TOOL_PARSERS[self.tools].tokens if self.tools in _TOOL_PARSERS else ()

    @property
    def _reasoning_tokens(self) -> tuple[str, ...]:
        return _REASONING_MARKS[self.reasoning].tokens if self.reasoning in _REASONING_MARKS else ()

    def reasoning_rules(self, prompt: str, continued: str = "") -> ReasoningRules | None:
        """Return between which markers the model may reason after a rendered prompt; None where it does not,
        or the prompt ends with the end of its reasoning. The answer goes on from the text that is
        `continued`, the last of the prompt."""
        if self.is_harmony:
            return ReasoningRules.of_harmony(harmony_place(prompt))
        marks = _REASONING_MARKS.get(self.reasoning)
        if marks is None or prompt.rstrip().endswith(marks.end):
            return None
        return ReasoningRules(marks.start, marks.end, is_open=self.opens_reasoning(prompt, continued))

    def kept_tokens(self, needs: ParserNeeds) -> frozenset[str]:
        """Return the special tokens that the text must keep for the parsers."""
        if self.is_harmony:
            return frozenset(HARMONY_MARKS if _reads_harmony(needs) else ())
        kept = self._tool_tokens if needs.tools else ()
        return frozenset((*kept, *self._reasoning_tokens) if needs.separates_reasoning else kept)

    def opens_reasoning(self, prompt: str, continued: str = "") -> bool:
        """Return whether a rendered prompt ends with the beginning of the reasoning, or in the middle of it,
        in the text that is `continued`."""
        if self.is_harmony:
            return harmony_place(prompt) == "analysis"
        marks = _REASONING_MARKS.get(self.reasoning)
        if marks is None:
            return False
        is_begun = continued.rfind(marks.start) > continued.rfind(marks.end)
        return prompt.rstrip().endswith(marks.start) or is_begun

    def make(
        self, needs: ParserNeeds, request_id: str, sample: int, *, opens_reasoning: bool
    ) -> OutputParser | None:
        """Return the parser of one sample; None where all of its text is content."""
        if self.is_harmony:
            if not _reads_harmony(needs):
                return None
            return HarmonyParser(
                CallIds(request_id, sample),
                needs.tools if self.tools != "none" else (),
                separates_reasoning=needs.separates_reasoning and self.reasoning != "none",
                opens_reasoning=opens_reasoning,
                allows_several=self.allows_several,
            )
        inner: OutputParser | None = None
        if needs.tools and self.tools in _TOOL_PARSERS:
            ids = CallIds(request_id, sample, is_short=self.tools == "mistral")
            inner = _TOOL_PARSERS[self.tools].make(ids, needs, self.allows_several)
        if needs.separates_reasoning and self.reasoning in _REASONING_MARKS:
            marks = _REASONING_MARKS[self.reasoning]
            inner = inner or PlainParser()
            if marks.answer is not None:
                inner = ResponseParser(*marks.answer, inner)
            return ReasoningParser(marks.start, marks.end, inner, is_open=opens_reasoning)
        return inner


def _reads_harmony(needs: ParserNeeds) -> bool:
    return needs.is_turn or needs.separates_reasoning or bool(needs.tools)


def marked_tool_parser(template: str) -> str:
    """Return the parser that the marks in the source of a template name, "none" where there are none."""
    for mark, name in (
        ("<|channel|>", _HARMONY),
        ("<seed:tool_call>", "seed_oss"),
        ("<|START_ACTION|>", "cohere2"),
        ("<|tool_call>call:", "gemma4"),
        ("<|tools_prefix|>", "apertus"),
        ("<function_calls>", "olmo3"),
        ("<arg_key>", "glm45"),
        ("<|/tool|>", "phi4"),
        ("<|tool_call|>", "granite"),
        ("[TOOL_CALLS]", "mistral"),
    ):
        if mark in template and not (name == "mistral" and "<tool_call>" in template):
            return name
    if "<tool_call>" in template:
        return "qwen3_coder" if "<function=" in template else "hermes"
    if "<|python_tag|>" in template or ("<|start_header_id|>" in template and "tool_calls" in template):
        return "llama3"
    if "'observation'" in template and "metadata" in template:
        return "glm4"
    # Gemma 3 is prompted to call in blocks of code; its template knows no tools.
    return "gemma3" if "<start_of_turn>" in template and "tools" not in template else "none"


def _reasoning_of(template: str) -> str:
    if "<|channel|>" in template:
        return _HARMONY
    if "<think>" in template or "</think>" in template:
        return "granite" if "<response>" in template else "think"
    for mark, name in (
        ("[THINK]", "mistral"),
        ("<|START_THINKING|>", "cohere2"),
        ("<seed:think>", "seed_oss"),
        ("<|inner_prefix|>", "apertus"),
        ("<|channel>thought", "gemma4"),
        ("Here is my thought process:", "granite32"),
    ):
        if mark in template:
            return name
    return "none"
