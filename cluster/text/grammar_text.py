"""The grammar of an `OutputConstraint` in the syntax of llguidance."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from llguidance import LLMatcher
from llguidance.gbnf_to_lark import gbnf_to_lark

from cluster.text.grammar_orders import OutputConstraint
from cluster.text.json_schemas import prepared
from cluster.text.output_parsers.grammar_lines import SpecialToken
from cluster.text.output_parsers.tool_grammar import answer_grammar
from cluster.text.tag_grammar import tags_grammar

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions

# Between the parts of an object or a list there may be one space: free whitespace has no end.
_JSON_STYLE: JsonCompileOptions = {
    "item_separator": ", ?",
    "key_separator": ": ?",
    "whitespace_flexible": False,
    "lenient": False,
}


def grammar_text(order: OutputConstraint, special_token: SpecialToken, *, is_bounded: bool = True) -> str:
    """Return an order in the library's syntax; raise `ValueError` where there is no such. `is_bounded` is
    that of `cluster.text.json_schemas.prepared`."""
    content = _of_content(order, special_token, is_bounded)
    if content is not None and order.calls is None and order.reasoning is None:
        return content
    return answer_grammar(
        order.calls, order.reasoning, content, special_token, _JSON_STYLE, is_bounded=is_bounded
    )


def _of_content(order: OutputConstraint, special_token: SpecialToken, is_bounded: bool) -> str | None:
    """Return the grammar of the content alone; None where that is free."""
    match order.kind:
        case "anything":
            return None
        case "json_schema":
            return _of_schema(order.text, is_bounded)
        case "json_object":
            return _of_schema('{"type": "object"}', is_bounded)
        case "regex":
            return str(LLMatcher.grammar_from_regex(order.text))
        case "choice":
            return f"start: {' | '.join(json.dumps(choice) for choice in order.choices)}\n"
        case "grammar":
            return gbnf_to_lark(order.text) if "::=" in order.text else order.text
        case "structural_tags":
            return tags_grammar(order.tags, order.triggers, special_token, _JSON_STYLE, is_bounded=is_bounded)


def _of_schema(text: str, is_bounded: bool) -> str:
    """Return the grammar of a JSON schema."""
    try:
        schema = json.loads(text)
    except ValueError as error:
        raise ValueError(f"the schema is not JSON: {error}") from error
    if schema is True:
        schema = {}  # the same, as the library takes it
    if not isinstance(schema, dict):
        raise ValueError("a JSON schema is an object, or true")
    schema.pop("x-guidance", None)  # the library's own options
    text = json.dumps(prepared(schema, is_bounded=is_bounded))
    return str(LLMatcher.grammar_from_json_schema(text, overrides=_JSON_STYLE))
