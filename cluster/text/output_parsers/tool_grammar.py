"""Grammars of answers with tool calls, in the notations that the parsers read.

A grammar lets the model think first, where it does that, and then holds it to the names of the tools and to
the schemas of their arguments. It is written in llguidance's variant of Lark's syntax. There a special token
is named by its id and is no text, so each marker is written as the tokenizer has it.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal

from cluster.text.json_schemas import SchemaError, prepared
from cluster.text.output_parsers.parameters import STRING, kinds_of, resolved
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
]
# Returns the id of a marker that is one special token; None where it is text.
SpecialToken = Callable[[str], int | None]

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
}
# The marker behind each call, or behind the list of them.
_ENDS: dict[CallNotation, str] = {
    "hermes": "</tool_call>",
    "qwen3_coder": "</tool_call>",
    "seed_oss": "</seed:tool_call>",
    "phi4": "<|/tool_call|>",
    "apertus": "<|tools_suffix|>",
}
_IN_TAGS = "qwen3_coder", "seed_oss"
_LISTED = "mistral", "granite", "phi4", "apertus"
_ARGS, _CALL_ID = "[ARGS]", "[CALL_ID]"
_PARAMETER, _PARAMETER_END = "<parameter=", "</parameter>"
_VALUE_END = f"\n{_PARAMETER_END}\n"
# Demands on strings, which do not apply to a value that is plain text.
_OF_TEXT = frozenset(("minLength", "maxLength", "pattern", "format"))
_TERMINALS = (
    "TEXT: /(.|\\n)*/",
    "SPACE: / ?/",
    "BREAKS: /\\n{0,2}/",
    "WHITE: /[ \\n]{0,8}/",
    'NOTHING: ""',
    # As in the JSON of a constraint, which may be what begins with the same brace.
    "COLON: /: ?/",
    "COMMA: /, ?/",
)


class ToolSchemaError(ValueError):
    """The arguments of a tool cannot be what its schema demands; the text has the reason."""

    def __init__(self, tool: str, reason: str) -> None:
        super().__init__(reason)
        self.tool = tool


class CallableTool(Part, frozen=True):
    """A function, and the JSON schema of its arguments ("": any object). Where that `is_strict`, keywords
    that are not supported are refused, else ignored."""

    name: str
    schema_json: str = ""
    is_strict: bool = False


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
    rules = _Rules(special_token, json_style, is_bounded)
    begins_freely = content is None and (calls is None or not calls.is_required)
    if calls is None:
        answer = "TEXT" if content is None else "@content"
    elif calls.is_required:
        answer = rules.calls(calls)
    else:
        answer = rules.text_or_calls(calls) if content is None else f"{rules.calls(calls)} | @content"
    start = "answer"
    if reasoning is not None:
        marker = _STARTS[calls.notation] if calls is not None else ""
        start = f"{rules.thought(reasoning, marker, '' if begins_freely else 'BREAKS')} answer"
    lark = "\n".join(("%llguidance {}", f"start: {start}", f"answer: {answer}", *rules.lines, ""))
    if content is None or "@content" not in answer:
        return lark
    return json.dumps({"grammars": [{"name": "answer", "lark_grammar": lark}, *_content_parts(content)]})


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
    """Writes the rules of one grammar into `lines`. Methods that return something return an expression."""

    def __init__(self, special_token: SpecialToken, json_style: JsonCompileOptions, is_bounded: bool) -> None:
        self._special_token = special_token
        self._json_style = json_style
        self._is_bounded = is_bounded
        self.lines = list(_TERMINALS)

    def thought(self, reasoning: ReasoningRules, call_marker: str, breaks: str) -> str:
        """Return the rule of reasoning, and of `breaks` behind it. No call begins in it: a reader that does
        not separate reasoning would take that for a call."""
        self.lines.append(f"THOUGHT: {_without(call_marker) if call_marker else 'TEXT'}")
        end = self._up_to("thought_end", "THOUGHT", reasoning.end)
        if reasoning.is_open:
            return f"{end} {breaks}"
        # Where something is demanded, white space must not be the way into reasoning.
        before = "NOTHING" if breaks else "WHITE"
        return f"({self._up_to('thought_start', before, reasoning.start)} {end} {breaks})?"

    def calls(self, calls: CallRules) -> str:
        """Return the rule of calls alone."""
        if calls.notation == "json":
            return self._behind_start(calls)
        start = self._mark(_STARTS[calls.notation])
        if calls.notation == "llama3":
            start = f"({start})?"
        return f"{start} {self._behind_start(calls)}"

    def text_or_calls(self, calls: CallRules) -> str:
        """Return the rule of text, which calls may follow."""
        start = _STARTS[calls.notation]
        behind = self._behind_start(calls)
        if calls.notation != "llama3":
            return f"TEXT | {self._up_to('calls_start', 'TEXT', start)} {behind}"
        # There the answer is calls or text from its beginning.
        self.lines.append(f"NO_CALL: TEXT & ~/\\s*({_pattern(start)}|\\{{)(.|\\n)*/")
        mark = self._mark(start)
        if self._special_token(start) is not None:
            return f"NO_CALL | WHITE ({mark} WHITE)? {behind}"
        # One terminal, so that it and the text go on together until one of them cannot.
        self.lines.append(f"LEAD: WHITE ({mark} WHITE)?")
        return f"NO_CALL | LEAD {behind}"

    def _behind_start(self, calls: CallRules) -> str:
        """Return the rule of everything behind the first marker."""
        tools = [self._tool(index, tool, calls.notation) for index, tool in enumerate(calls.tools)]
        any_tool = " | ".join(tools)
        if calls.notation in ("mistral_args", *_IN_TAGS):
            self.lines.append(f"tool: {any_tool}")
        elif calls.notation == "apertus":
            self.lines.append(rf'tool: "{{" ({any_tool}) "}}"')
        else:
            self.lines.append(rf'tool: "{{" "\"name\"" COLON ({any_tool}) "}}"')
        start = self._mark(_STARTS[calls.notation])
        match calls.notation:
            case "hermes" | "qwen3_coder" | "seed_oss":
                end = self._mark(_ENDS[calls.notation])
                call, between = f"BREAK tool BREAK {end}", f"BREAKS {start}"
                self.lines.append("BREAK: /\\n?/")
            case "llama3":
                call, between = "tool", '";" SPACE'
            case "json":
                call, between = "tool", r'"\n"'
            case "mistral" | "granite" | "phi4" | "apertus":
                call, between = "tool", '"," SPACE'
            case "mistral_args":
                call, between = "tool", start
        self.lines.append(f"call: {call}")
        several = f"call ({between} call)*" if calls.allows_several else "call"
        if calls.notation not in _LISTED:
            return several
        end = self._mark(_ENDS[calls.notation]) if calls.notation in _ENDS else ""
        return f'SPACE "[" {several} "]" {end}'

    def _tool(self, index: int, tool: CallableTool, notation: CallNotation) -> str:
        """Return the rule of a call of one tool, without markers around it."""
        if notation in _IN_TAGS:
            self.lines.append(f"tool_{index}: {self._tagged(index, tool)}")
            return f"tool_{index}"
        name = json.dumps(tool.name if notation == "mistral_args" else json.dumps(tool.name))
        arguments = f"%json {json.dumps(self._schema(tool))}"
        if notation == "mistral_args":
            call_id = f"({self._mark(_CALL_ID)} /[a-zA-Z0-9]{{9}}/)?"
            self.lines.append(f"tool_{index}: {name} {call_id} {self._mark(_ARGS)} {arguments}")
        elif notation == "apertus":
            self.lines.append(f"tool_{index}: {name} COLON {arguments}")
        else:
            key = "parameters" if notation == "llama3" else "arguments"
            self.lines.append(rf'tool_{index}: {name} COMMA "\"{key}\"" COLON {arguments}')
        return f"tool_{index}"

    def _tagged(self, index: int, tool: CallableTool) -> str:
        """Return the rule of a call in tags, whose parameters come in the order of the schema."""
        schema = _arguments_schema(tool)
        arguments = resolved(schema, schema)
        properties = arguments.get("properties") if isinstance(arguments, dict) else None
        parts = [json.dumps(f"<function={tool.name}>\n")]
        if isinstance(properties, dict):
            required = arguments.get("required") or ()
            for number, (key, value) in enumerate(properties.items()):
                rule = f"tool_{index}_{number}"
                self.lines.append(f"{rule}: {self._parameter(tool, key, value, schema)}")
                parts.append(rule if key in required else f"{rule}?")
        elif isinstance(arguments, dict) and arguments.get("additionalProperties") is not False:
            self._add_once(
                f'any_parameter: "<parameter=" /[A-Za-z0-9_.-]{{1,64}}/ ">\\n" {self._free_text()}'
            )
            parts.append("any_parameter*")
        return f'{" ".join(parts)} "</function>"'

    def _parameter(self, tool: CallableTool, key: str, schema: Any, root: Any) -> str:
        """Return the rule of a parameter with its tags: text as it is, other values as JSON."""
        if any(char in key for char in "<>\n"):
            raise ToolSchemaError(tool.name, f"the name {key[:50]!r} cannot stand in a tag; change it")
        start = json.dumps(f"{_PARAMETER}{key}>\n")
        found, kinds = resolved(schema, root), kinds_of(schema, root)
        values = None
        if isinstance(found, dict):
            values = found.get("enum", [found["const"]] if "const" in found else None)
        if isinstance(values, list):
            texts = [value if isinstance(value, str) else json.dumps(value) for value in values]
            if any(_PARAMETER_END in text for text in texts):
                raise ToolSchemaError(tool.name, f"a value of {key[:50]!r} has the tag that ends it")
            return f"{start} ({' | '.join(map(json.dumps, texts))}) {json.dumps(_VALUE_END)}"
        if kinds is None or STRING in kinds:
            if tool.is_strict and isinstance(found, dict) and (unheld := sorted(_OF_TEXT & found.keys())):
                raise ToolSchemaError(tool.name, f"{', '.join(unheld)}: not supported in this model's calls")
            return f"{start} {self._free_text()}"
        definitions = {name: root[name] for name in ("$defs", "definitions") if name in root}
        inner = self._prepared(tool, {**definitions, **found})
        return f"{start} %json {json.dumps(inner)} {json.dumps(_VALUE_END)}"

    def _free_text(self) -> str:
        """Return the rule of any text, up to the first end of its tag, where readers see it."""
        self._add_once(f"value_text[lazy]: TEXT {json.dumps(_PARAMETER_END)}")
        return 'value_text "\\n"'

    def _add_once(self, line: str) -> None:
        if line not in self.lines:
            self.lines.append(line)

    def _schema(self, tool: CallableTool) -> dict[str, Any]:
        return {**self._prepared(tool, _arguments_schema(tool)), "type": "object"}

    def _prepared(self, tool: CallableTool, schema: dict[str, Any]) -> dict[str, Any]:
        try:
            found = prepared(schema, is_lenient=not tool.is_strict, is_bounded=self._is_bounded)
        except SchemaError as error:
            raise ToolSchemaError(tool.name, str(error)) from None
        return {**found, "x-guidance": {**self._json_style, "lenient": not tool.is_strict}}

    def _up_to(self, name: str, text: str, marker: str) -> str:
        """Return the rule of text by a terminal, and of the marker when it first comes, also where it is
        spelled in other tokens than its own: readers see no difference."""
        self.lines.append(f"{name}_text[lazy]: {text} {json.dumps(marker)}")
        token = self._special_token(marker)
        other = "" if token is None else f" | {text} <[{token}]>"
        self.lines.append(f"{name}: {name}_text{other}")
        return name

    def _mark(self, marker: str) -> str:
        token = self._special_token(marker)
        return json.dumps(marker) if token is None else f"<[{token}]>"


def _arguments_schema(tool: CallableTool) -> dict[str, Any]:
    """Return the schema of a tool's arguments, which is one of objects."""
    schema = json.loads(tool.schema_json or "{}")
    if schema is True:
        schema = {}
    kinds = schema.get("type", "object") if isinstance(schema, dict) else None
    if kinds != "object" and not (isinstance(kinds, list) and "object" in kinds):
        raise ToolSchemaError(tool.name, "arguments are an object; give the schema this type")
    assert isinstance(schema, dict)
    return schema


def _without(marker: str) -> str:
    """Return a terminal for texts in which the marker does not occur."""
    return f"TEXT & ~/(.|\\n)*{_pattern(marker)}(.|\\n)*/"


def _pattern(text: str) -> str:
    """Return a regular expression for this text alone."""
    return "".join(char if char.isalnum() else f"\\x{{{ord(char):x}}}" for char in text)
