"""From the fields of a body that demand a form of the output, of which it may have one, to a `Constraint`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from cluster.http.errors import bad_field
from cluster.http.request_parts import ResponseFormat, StructuredOutputs, TagStructure
from cluster.http.schemas import SampledRequest
from cluster.proto.tandem.v1 import inference_pb2 as pb


def set_constraint(request: pb.GenerateRequest, body: SampledRequest, names: dict[str, str]) -> None:
    """Set the required form of the output, from the one field that names it."""
    given = {
        "response_format": body.response_format,
        "structured_outputs": body.structured_outputs,
        "guided_json": body.guided_json,
        "guided_regex": body.guided_regex,
        "guided_choice": body.guided_choice,
        "guided_grammar": body.guided_grammar,
    }
    if body.response_format is not None and body.response_format.type == "text":
        del given["response_format"]
    said = [name for name, value in given.items() if value is not None]
    if not said:
        return
    if len(said) > 1:
        raise bad_field(said[1], f"cannot be combined with {said[0]}; keep one of them")
    constraint, path = request.constraint, said[0]
    if body.response_format is not None:
        path = _set_format(constraint, body.response_format)
    elif body.structured_outputs is not None:
        path = _set_structured(constraint, body.structured_outputs)
    elif body.guided_json is not None:
        constraint.json_schema = schema_text(body.guided_json)
    elif body.guided_regex is not None:
        constraint.regex = body.guided_regex
    elif body.guided_choice is not None:
        constraint.choice.choices.extend(body.guided_choice)
    else:
        constraint.grammar = body.guided_grammar or ""
    names["constraint"] = names[f"constraint.{constraint.WhichOneof('kind')}"] = path


def schema_text(schema: Mapping[str, Any] | str | bool) -> str:
    """Return a JSON schema as text."""
    return schema if isinstance(schema, str) else msgspec.json.encode(schema).decode()


def _set_format(constraint: pb.Constraint, wanted: ResponseFormat) -> str:
    """Set the format, and return the path of the field that demands it."""
    if wanted.type == "json_object":
        constraint.json_object = True
    elif wanted.type == "json_schema":
        if wanted.json_schema is None or wanted.json_schema.schema is None:
            raise bad_field("response_format.json_schema.schema", "is missing; send a JSON schema")
        constraint.json_schema = schema_text(wanted.json_schema.schema)
        return "response_format.json_schema.schema"
    elif wanted.type == "structural_tag":
        if not wanted.structures or not wanted.triggers:
            raise bad_field("response_format", "of the type structural_tag needs structures and triggers")
        _set_tags(constraint, wanted.structures, wanted.triggers)
    else:
        raise bad_field("response_format.type", "must be text, json_object, json_schema or structural_tag")
    return "response_format"


def _set_tags(constraint: pb.Constraint, tags: Sequence[TagStructure], triggers: Sequence[str]) -> None:
    for tag in tags:
        schema = "" if tag.schema is None else schema_text(tag.schema)
        constraint.structural_tags.tags.add(begin=tag.begin, json_schema=schema, end=tag.end)
    constraint.structural_tags.triggers.extend(triggers)


def _set_structured(constraint: pb.Constraint, wanted: StructuredOutputs) -> str:
    """Set the requested structure, and return its path."""
    kinds = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")
    given = [kind for kind in kinds if getattr(wanted, kind) not in (None, False)]
    if len(given) != 1:
        raise bad_field("structured_outputs", f"needs exactly one of {', '.join(kinds)}")
    if wanted.whitespace_pattern is not None:
        raise bad_field("structured_outputs.whitespace_pattern", "is not supported; remove it")
    if wanted.json is not None:
        constraint.json_schema = schema_text(wanted.json)
    elif wanted.regex is not None:
        constraint.regex = wanted.regex
    elif wanted.choice is not None:
        constraint.choice.choices.extend(wanted.choice)
    elif wanted.grammar is not None:
        constraint.grammar = wanted.grammar
    elif wanted.json_object:
        constraint.json_object = True
    else:
        _set_structural_text(constraint, wanted.structural_tag or "")
    return f"structured_outputs.{given[0]}"


def _set_structural_text(constraint: pb.Constraint, text: str) -> None:
    field = "structured_outputs.structural_tag"
    try:
        wanted = msgspec.json.decode(text, type=ResponseFormat)
    except (msgspec.DecodeError, RecursionError) as error:
        raise bad_field(field, f"cannot be read: {str(error)[:200]}") from error
    if not wanted.structures or not wanted.triggers:
        raise bad_field(field, "needs structures and triggers")
    _set_tags(constraint, wanted.structures, wanted.triggers)
