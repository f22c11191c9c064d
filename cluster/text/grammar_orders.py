"""The messages between a `GrammarCompiler` and its child: the required form of an output, and its grammar."""

from __future__ import annotations

from typing import Literal

from cluster.text.output_parsers.tool_grammar import CallRules, ReasoningRules
from cluster.text.tag_grammar import Tag
from kvtransfer.codec import Codec, Message


class OutputConstraint(Message, frozen=True):
    """The required form of the output: `text` is a JSON schema, a regular expression, a grammar in GBNF or in
    Lark's syntax; `choices` and `tags` with `triggers` go with their kinds. The kind "anything" demands
    nothing of the content. `reasoning` may precede it, and `calls` are made instead of it or behind it."""

    kind: Literal["json_schema", "json_object", "regex", "choice", "grammar", "structural_tags", "anything"]
    text: str = ""
    choices: tuple[str, ...] = ()
    tags: tuple[Tag, ...] = ()
    triggers: tuple[str, ...] = ()
    calls: CallRules | None = None
    reasoning: ReasoningRules | None = None


class GrammarMade(Message, frozen=True):
    """The grammar in the library's own syntax."""

    text: str


class GrammarRefused(Message, frozen=True):
    """The reason why there is no grammar, and the tool whose schema is the reason ("": none)."""

    reason: str
    tool: str = ""


ORDER_CODEC: Codec[OutputConstraint] = Codec(OutputConstraint)
RESULT_CODEC: Codec[GrammarMade | GrammarRefused] = Codec(GrammarMade | GrammarRefused)
