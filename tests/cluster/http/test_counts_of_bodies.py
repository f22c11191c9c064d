"""What has too many entries is refused before one of them is made."""

from __future__ import annotations

import json
import tracemalloc
from typing import Any

import pytest

from cluster.errors import InvalidRequestError
from cluster.http.body_decoding import Body, decode
from cluster.http.schemas import ChatRequest, CompletionRequest
from cluster.text.json_schemas import MAX_OPTIONAL_PROPERTIES, MAX_PROPERTIES, SchemaError, prepared
from cluster.text.validation import MAX_LOGIT_BIASES, MAX_STOP_CHARS, MAX_STOPS

MESSAGES = [{"role": "user", "content": "hi"}]


def body_of(**fields: Any) -> bytes:
    return json.dumps({"messages": MESSAGES, **fields}).encode()


def refusal(body: bytes, kind: type[Body] = ChatRequest) -> tuple[str, int]:
    """Return what is wrong with a body, and how much memory it took to find out beside the body itself."""
    tracemalloc.start()
    try:
        with pytest.raises(InvalidRequestError) as caught:
            decode(body, kind, {})
        return str(caught.value), tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        (
            {"logit_bias": {str(number): 1 for number in range(300_000)}},
            "logit_bias: has more than 1024 entries",
        ),
        ({"stop_token_ids": [5] * 300_000}, "stop_token_ids: has more than 64 tokens"),
        ({"stop": ["x"] * 300_000}, "stop: has more than 49344 bytes"),
        ({"guided_choice": ["x"] * 300_000}, "guided_choice: has more than 524288 bytes"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}] * 15_000}, "tools: has more than"),
    ],
)
def test_counts_are_refused_before_there_are_objects(fields: dict[str, Any], problem: str) -> None:
    body = body_of(**fields)
    said, num_bytes = refusal(body)
    assert problem in said
    assert num_bytes < 6 * len(body)


def test_what_may_be_there_is_read() -> None:
    bias = {str(number): 1.5 for number in range(MAX_LOGIT_BIASES)}
    stop = ["\U0001f98a" * MAX_STOP_CHARS] * MAX_STOPS
    read = decode(
        body_of(logit_bias=bias, stop=stop, stop_token_ids=[5] * 64, user="x" * 20_000), ChatRequest, {}
    )
    assert (read.logit_bias, read.stop) == (bias, stop)
    ids = list(range(100_000))
    prompt = json.dumps({"prompt": ids}).encode()
    assert decode(prompt, CompletionRequest, {}).prompt == ids


@pytest.mark.parametrize(
    ("body", "problem"),
    [
        (b'{"a": ' + b"1" * 20_000, "body: is not JSON"),
        (b'["' + b"x" * 20_000 + b'"]', "body: must be a JSON object"),
        (b'{"user": "' + b"x" * 20_000 + rb'\ud800"}', "body: is not JSON: it has half of a surrogate pair"),
        (b'{"' + b"x" * 20_000 + b'": 1}', "is not known here"),
    ],
)
def test_long_bodies_that_are_wrong_are_refused_as_short_ones_are(body: bytes, problem: str) -> None:
    assert problem in refusal(body)[0]


def properties(count: int, start: int = 0) -> dict[str, Any]:
    return {f"p{number}": {"type": "string"} for number in range(start, start + count)}


def test_a_schema_with_more_properties_than_a_rank_can_follow_is_refused_by_name() -> None:
    """Of an object, and of its alternatives together; those that are required have their order."""
    most = MAX_OPTIONAL_PROPERTIES
    prepared({"type": "object", "properties": properties(most)})
    many = properties(MAX_PROPERTIES)
    prepared({"type": "object", "properties": many, "required": list(many)})
    half = {"type": "object", "properties": properties(most // 2 + 1)}
    for schema in (
        {"type": "object", "properties": properties(5_000)},
        {"type": "object", "properties": properties(most + 1)},
        {"type": "array", "items": {"type": "object", "properties": properties(most + 1)}},
        {"anyOf": [half, half | {"properties": properties(most // 2 + 1, 1000)}]},
        {"$defs": {"half": half}, "oneOf": [{"$ref": "#/$defs/half"}, half | {"title": "other"}]},
    ):
        for is_lenient in (True, False):
            with pytest.raises(SchemaError, match=r"optional properties; at most|more than 4000"):
                prepared(schema, is_lenient=is_lenient)
    with pytest.raises(SchemaError, match="more than 4000 properties"):
        prepared({"type": "object", "properties": many | properties(1, 5000), "required": list(many)})


def test_schemas_that_refer_to_themselves_are_counted_once() -> None:
    alternatives = [{"$ref": "#/$defs/x"}] * 300
    prepared({"$defs": {"x": {"anyOf": [*alternatives, {"type": "null"}]}}, "$ref": "#/$defs/x"})
