"""From a checked request to what its output must look like: its constraint, and the tool calls it demands."""

from __future__ import annotations

import json

from msgspec import structs

from cluster.errors import FieldViolation, InvalidRequestError, InvalidToolsError
from cluster.proto.tandem.v1 import inference_pb2 as pb
from cluster.text.grammars import OutputConstraint
from cluster.text.json_schemas import without_notes
from cluster.text.output_parsers.choose import OutputParsers
from cluster.text.output_parsers.tool_grammar import CallableTool, CallRules, ReasoningRules
from cluster.text.tag_grammar import Tag


def output_constraint(
    request: pb.GenerateRequest, parsers: OutputParsers, reasoning: ReasoningRules | None
) -> OutputConstraint | None:
    """Return what the output must look like; None: it is free. The constraint is one of the content: the
    model may reason before it, as `reasoning` says, and call tools in a chat instead.

    Raise `InvalidToolsError` where the request demands calls of a model that has no notation for them.
    """
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
    chat, choice, notation = request.chat, request.chat.tool_choice, parsers.call_notation
    if not chat.tools or choice.mode == pb.ToolChoice.MODE_NONE:
        return None
    is_required = bool(choice.name) or choice.mode == pb.ToolChoice.MODE_REQUIRED
    wants_several = not choice.name and (chat.parallel_tool_calls or not chat.HasField("parallel_tool_calls"))
    is_free = wants_several and not any(tool.strict for tool in chat.tools)
    if is_free and not is_required and not request.HasField("constraint"):
        return None
    if notation is None:
        if is_required:
            problem = "no way is known in which this model calls tools, so that none can be required"
            raise InvalidToolsError(f"{problem}; let tool_choice be auto, or configure gateway.tool_parser")
        return None
    tools = tuple(
        CallableTool(
            tool.name, _without_notes(tool.parameters_json) if is_required or tool.strict else "", tool.strict
        )
        for tool in chat.tools
        if choice.name in ("", tool.name)
    )
    return CallRules(notation, tools, is_required, wants_several and parsers.allows_several)


def _without_notes(schema_json: str) -> str:
    """Return a schema without what changes no output, which may be the most of it."""
    try:
        return json.dumps(without_notes(json.loads(schema_json))) if schema_json else ""
    except RecursionError:  # whoever compiles it says so
        return schema_json


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
