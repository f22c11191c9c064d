"""From a checked request to the required form of its output: its constraint, and the tool calls it
demands."""

from __future__ import annotations

import json

from msgspec import structs

from cluster.errors import FieldViolation, InvalidRequestError
from cluster.proto.tandem.v1 import inference_pb2 as pb
from cluster.text.grammar_orders import OutputConstraint
from cluster.text.json_schemas import without_notes
from cluster.text.output_parsers.callable_tools import CallableTool
from cluster.text.output_parsers.choose import OutputParsers
from cluster.text.output_parsers.tool_grammar import CallRules, ReasoningRules
from cluster.text.tag_grammar import Tag

_NO_ARGUMENTS = '{"type": "object", "properties": {}, "additionalProperties": false}'


def output_constraint(
    request: pb.GenerateRequest, parsers: OutputParsers, reasoning: ReasoningRules | None
) -> OutputConstraint | None:
    """Return the required form of the output; None: it is free. The constraint is one of the content: the
    model may reason before it, as `reasoning` defines, and call tools in a chat instead."""
    is_chat = request.WhichOneof("prompt") == "chat"
    calls = _call_rules(request, parsers) if is_chat else None
    if calls is None and not request.HasField("constraint"):
        return None
    if request.ignore_eos:
        problem = "and demands on tool calls or on the output exclude each other; remove one"
        raise InvalidRequestError(FieldViolation("ignore_eos", problem))
    return structs.replace(
        _constraint_of(request.constraint)
        if request.HasField("constraint")
        else OutputConstraint("anything"),
        calls=calls,
        reasoning=reasoning,
    )


def _call_rules(request: pb.GenerateRequest, parsers: OutputParsers) -> CallRules | None:
    """Return which calls a chat may have; None: any."""
    chat, choice = request.chat, request.chat.tool_choice
    if not chat.tools or choice.mode == pb.ToolChoice.MODE_NONE:
        return None
    is_required = demands_calls(chat)
    notation = parsers.demanded().call_notation if is_required else parsers.call_notation
    wants_several = not choice.name and (chat.parallel_tool_calls or not chat.HasField("parallel_tool_calls"))
    is_free = wants_several and not any(tool.strict for tool in chat.tools)
    if is_free and not is_required and not request.HasField("constraint"):
        return None
    if notation is None:
        return None
    tools = tuple(
        CallableTool(tool.name, _arguments_schema(tool, is_held=is_required or tool.strict), tool.strict)
        for tool in chat.tools
        if choice.name in ("", tool.name)
    )
    return CallRules(notation, tools, is_required, wants_several and parsers.allows_several)


def demands_calls(chat: pb.ChatPrompt) -> bool:
    """Return whether the answer must call tools."""
    choice = chat.tool_choice
    return bool(chat.tools) and (bool(choice.name) or choice.mode == pb.ToolChoice.MODE_REQUIRED)


def _arguments_schema(tool: pb.Tool, *, is_held: bool) -> str:
    """Return the schema of a tool's arguments, without parts that change no output, which may be the most of
    it; "": any object. A tool without parameters takes none."""
    if not tool.parameters_json:
        return _NO_ARGUMENTS
    if not is_held:
        return ""
    try:
        return json.dumps(without_notes(json.loads(tool.parameters_json)))
    except RecursionError:  # the compiler of the grammar reports it
        return tool.parameters_json


def tags_of(constraint: pb.Constraint) -> tuple[Tag, ...]:
    """Return the structural tags of a constraint."""
    return tuple(Tag(it.begin, it.json_schema, it.end) for it in constraint.structural_tags.tags)


def _constraint_of(constraint: pb.Constraint) -> OutputConstraint:
    """Return the constraint for the compiler of grammars."""
    match constraint.WhichOneof("kind"):
        case "json_schema":
            return OutputConstraint("json_schema", constraint.json_schema)
        case "regex":
            return OutputConstraint("regex", constraint.regex)
        case "grammar":
            return OutputConstraint("grammar", constraint.grammar)
        case "choice":
            return OutputConstraint("choice", choices=tuple(constraint.choice.choices))
        case "structural_tags":
            found = constraint.structural_tags
            return OutputConstraint(
                "structural_tags", tags=tags_of(constraint), triggers=tuple(found.triggers)
            )
        case _:
            return OutputConstraint("json_object")
