"""Every field of every request over HTTP, generated from the classes that requests are decoded by: a value of
another type is refused by the field's path, and no value of the right type breaks the gateway."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any, NamedTuple

import msgspec
import pytest
from gateway_harness import GatewayHarness
from http_harness import SCHEMAS, HttpFrontHarness, Reply
from msgspec import inspect

from cluster.errors import InvalidRequestError
from cluster.http import body_decoding, chat, completions, embeddings, messages, responses, schemas

TRANSLATED: dict[str, Callable[[Any], object]] = {
    "/v1/chat/completions": chat.translate,
    "/v1/completions": lambda body: completions.translate(body, 8),
    "/v1/responses": responses.translate,
    "/v1/messages": messages.translate,
    "/v1/messages/count_tokens": messages.count_request,
    "/tokenize": embeddings.tokenize_request,
    "/detokenize": embeddings.detokenize_request,
    "/v1/embeddings": lambda body: embeddings.embed_request(body, 8),
}
# What is sent beside the field under test.
TURN = {"role": "user", "content": "hello"}
BASES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [TURN], "max_tokens": 2},
    "/v1/completions": {"prompt": "hello", "max_tokens": 2},
    "/v1/responses": {"input": "hello", "max_output_tokens": 2},
    "/v1/messages": {"messages": [TURN], "max_tokens": 2},
    "/v1/messages/count_tokens": {"messages": [TURN]},
    "/v1/embeddings": {"input": "hello"},
    "/tokenize": {"prompt": "hello"},
    "/detokenize": {"tokens": [5]},
}
# A value of each kind that JSON has.
KINDS: dict[str, Any] = {
    "null": None,
    "bool": True,
    "int": 7,
    "float": 0.5,
    "str": "x",
    "array": [],
    "object": {},
}
# Values that are of the right type, and hardly ever right.
EDGES: dict[str, tuple[Any, ...]] = {
    "bool": (True, False),
    "int": (-(1 << 70), -(1 << 31), -1, 0, 1, (1 << 31) - 1, 1 << 32, 1 << 63, 1 << 70),
    "float": (-1.0, -0.0, 1e-300, 0.5, 1e308, -1e308),
    "str": ("", "\0", "x", "é\U0001f600\u202e", "x" * 3000, "{{ 7 * 7 }}", "../..", "\n\n"),
    "array": ([],),
    "object": ({}, {"": ""}),
}
# Those of them that are sent to a gateway.
SENT_EDGES: dict[str, tuple[Any, ...]] = {
    "int": (-1, 0, 1 << 40),
    "float": (-1e308,),
    "str": ("", "\0\U0001f600"),
    "array": ([],),
    "object": ({}, {"": ""}),
}
_KIND_OF: dict[type[inspect.Type], str] = {
    inspect.NoneType: "null",
    inspect.BoolType: "bool",
    inspect.IntType: "int",
    inspect.FloatType: "float",
    inspect.StrType: "str",
    inspect.ListType: "array",
    inspect.DictType: "object",
    inspect.StructType: "object",
}
_KEY = "5"


class Place(NamedTuple):
    """Somewhere in a request: its path, the kinds of values that its type takes, and what is around it."""

    path: str
    kinds: frozenset[str]
    keys: tuple[str | int, ...]
    # The smallest request that has the place.
    around: dict[str, Any]

    def body(self, value: Any) -> dict[str, Any]:
        """The request with this value there."""
        found: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(self.around))
        target: Any = found
        for key in self.keys[:-1]:
            target = target[key]
        target[self.keys[-1]] = value
        return found


def alternatives(kind: inspect.Type) -> tuple[inspect.Type, ...]:
    return kind.types if isinstance(kind, inspect.UnionType) else (kind,)


def kinds_of(kind: inspect.Type) -> frozenset[str]:
    """What JSON's kinds a type takes; a whole number is a float too."""
    found = set()
    for each in alternatives(kind):
        if isinstance(each, inspect.AnyType):
            return frozenset(KINDS)
        found.add(_KIND_OF[type(each)])
    return frozenset(found | {"int"} if "float" in found else found)


def sample(kind: inspect.Type) -> Any:
    """The smallest value of a type."""
    each = alternatives(kind)[0]
    if isinstance(each, inspect.StructType):
        return {field.encode_name: sample(field.type) for field in each.fields if field.required}
    return {"array": [], "object": {}, "str": "x", "int": 1}[_KIND_OF[type(each)]]


def places(
    kind: inspect.Type,
    path: str,
    keys: tuple[str | int, ...],
    around: dict[str, Any],
    above: tuple[type, ...],
) -> Iterator[Place]:
    """The place of this type, and those within it; of a class within itself, the outer one."""
    if keys:
        yield Place(path, kinds_of(kind), keys, around)
    for each in alternatives(kind):
        if isinstance(each, inspect.StructType) and each.cls not in above:
            for field in each.fields:
                inner = f"{path}.{field.encode_name}".removeprefix(".")
                outer = Place(path, frozenset(), keys, around).body(sample(each)) if keys else around
                next_keys = (*keys, field.encode_name)
                yield from places(field.type, inner, next_keys, outer, (*above, each.cls))
        elif isinstance(each, inspect.ListType):
            outer = Place(path, frozenset(), keys, around).body([None])
            yield from places(each.item_type, f"{path}[0]", (*keys, 0), outer, above)
        elif isinstance(each, inspect.DictType):
            outer = Place(path, frozenset(), keys, around).body({})
            yield from places(each.value_type, f"{path}[{_KEY}]", (*keys, _KEY), outer, above)


def places_of(route: str) -> list[Place]:
    return list(places(inspect.type_info(SCHEMAS[route]), "", (), BASES[route], ()))


@pytest.mark.parametrize("route", SCHEMAS)
def test_a_value_of_another_type_is_refused_by_its_path(route: str) -> None:
    found = places_of(route)
    assert {place.path for place in found} >= set(SCHEMAS[route].__struct_encode_fields__)
    num_wrong = 0
    for place in found:
        for name in KINDS.keys() - place.kinds:
            paths = refused_paths(route, place.body(KINDS[name]))
            assert paths == [place.path], (place, name)
            num_wrong += 1
    assert num_wrong > len(SCHEMAS[route].__struct_encode_fields__)


@pytest.fixture
async def front(harness: GatewayHarness) -> AsyncIterator[HttpFrontHarness]:
    async with HttpFrontHarness(harness) as built:
        yield built


def top_field(path: str) -> str:
    return path.partition(".")[0].partition("[")[0]


def problem_of(route: str, body: dict[str, Any], reply: Reply) -> str:
    """What is wrong with the answer: it must be one of the API, or an error of its
    shape that names a field."""
    if reply.status == 200:
        return ""
    if reply.status not in (400, 404):
        return f"status {reply.status}: {reply.body!r}"
    if route.startswith("/v1/messages"):
        error = reply.json["error"]
        named = error["message"].partition(":")[0]
    else:
        error = reply.error
        named = error["param"] or ""
    is_named = reply.status == 404 or (top_field(named) in body and error["message"].startswith(f"{named}: "))
    return "" if is_named else f"no field of the request is named: {error}"


def refused_paths(route: str, body: dict[str, Any]) -> list[str]:
    """The bad fields of a request; none where it can be translated."""
    try:
        TRANSLATED[route](body_decoding.decode(json.dumps(body).encode(), SCHEMAS[route], {}))
    except InvalidRequestError as error:
        return [it.field for it in error.violations]
    return []


@pytest.mark.parametrize("route", SCHEMAS)
def test_every_value_of_the_right_type_is_translated_or_refused_by_its_field(route: str) -> None:
    num_taken = 0
    for place in places_of(route):
        for edge in (edge for kind in place.kinds for edge in EDGES.get(kind, ())):
            body = place.body(edge)
            paths = refused_paths(route, body)
            assert {top_field(path) for path in paths} <= body.keys(), (place, edge, paths)
            num_taken += not paths
    assert num_taken > 0


@pytest.mark.parametrize("route", SCHEMAS)
async def test_no_value_of_the_right_type_breaks_the_gateway(front: HttpFrontHarness, route: str) -> None:
    places = [place for place in places_of(route) if len(place.keys) == 1]
    assert len(places) == len(SCHEMAS[route].__struct_encode_fields__)
    bodies = [
        place.body(edge) for place in places for kind in place.kinds for edge in SENT_EDGES.get(kind, ())
    ]
    turn = asyncio.Semaphore(16)

    async def send(body: dict[str, Any]) -> str:
        async with turn:
            problem = problem_of(route, body, await front.post(route, body))
            return f"{body}: {problem}" if problem else ""

    problems = [found for found in await asyncio.gather(*map(send, bodies)) if found]
    assert not problems, "\n".join(problems)
    assert (await front.post(route, BASES[route])).status == 200


U = {"role": "user", "content": "hello"}
F = {"name": "f", "parameters": {"type": "object"}}
STRANGE = {"type": "strange"}


def called(**function: Any) -> dict[str, Any]:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}", **function}}
    return {"role": "assistant", "content": None, "tool_calls": [call]}


CHAT = "/v1/chat/completions"
MESSAGES = "/v1/messages"
RESPONSES = "/v1/responses"


@pytest.mark.parametrize(
    ("route", "changes", "path"),
    [
        (CHAT, {"messages": [U, called(name="a b")]}, "messages[1].tool_calls[0].function.name"),
        (CHAT, {"messages": [{**U, "tool_call_id": "x"}]}, "messages[0].tool_call_id"),
        (CHAT, {"tools": [{"type": "function", "function": {"name": ""}}]}, "tools[0].function.name"),
        (CHAT, {"tools": [{"type": "function", "function": F}] * 2}, "tools[1].function.name"),
        (CHAT, {"tools": [{"type": "function"}]}, "tools[0].function"),
        (CHAT, {"tools": [{"type": "custom", "custom": {"name": "x"}}]}, "tools[0].type"),
        (CHAT, {"tools": [{"type": "mcp", "server_url": "x"}]}, "tools[0].type"),
        (CHAT, {"tools": [{"type": "function", "function": F, "x": 1}]}, "tools[0].x"),
        (CHAT, {"tool_choice": {"type": "function", "function": {"name": "g"}}}, "tool_choice.function.name"),
        (CHAT, {"tool_choice": "required"}, "tool_choice"),
        (CHAT, {"tool_choice": {"type": "allowed_tools", "allowed_tools": {}}}, "tool_choice.type"),
        (CHAT, {"stop": ""}, "stop"),
        (CHAT, {"stop": ["a", ""]}, "stop[1]"),
        (CHAT, {"logit_bias": {"-1": 1}}, "logit_bias[-1]"),
        (CHAT, {"logit_bias": {"1": "x"}}, "logit_bias[1]"),
        (CHAT, {"logit_bias": {"1": 1, "2": 101}}, "logit_bias[2]"),
        (CHAT, {"logit_bias": {"4000000000": 1}}, "logit_bias"),
        (CHAT, {"guided_regex": ""}, "guided_regex"),
        (CHAT, {"guided_regex": "("}, "guided_regex"),
        (CHAT, {"guided_choice": []}, "guided_choice"),
        (CHAT, {"guided_json": "no JSON"}, "guided_json"),
        (CHAT, {"guided_json": False}, "guided_json"),
        (CHAT, {"guided_grammar": "start: /["}, "guided_grammar"),
        (CHAT, {"structured_outputs": {"json": STRANGE}}, "structured_outputs.json"),
        (CHAT, {"structured_outputs": {"choice": [""]}}, "structured_outputs.choice"),
        (
            CHAT,
            {"response_format": {"type": "json_schema", "json_schema": {"schema": STRANGE}}},
            "response_format.json_schema.schema",
        ),
        (
            CHAT,
            {"messages": [{"role": "user", "content": [{"type": "video", "x": 1}]}]},
            "messages[0].content[0].type",
        ),
        (
            MESSAGES,
            {
                "system": "s",
                "messages": [
                    U,
                    {"role": "user", "content": [{"type": "tool_use", "id": "a", "name": "f", "input": {}}]},
                ],
            },
            "messages[1].role",
        ),
        (
            MESSAGES,
            {
                "messages": [
                    {
                        "role": "user",
                        "content": [
                            {"type": "tool_result", "tool_use_id": "x", "content": "r"},
                            {"type": "text", "text": "x"},
                        ],
                    },
                    {
                        "role": "assistant",
                        "content": [{"type": "tool_use", "id": "a", "name": "a b", "input": {}}],
                    },
                ]
            },
            "messages[1].content[0].name",
        ),
        (MESSAGES, {"tools": [{"type": "web_search_20250305", "name": "w", "max_uses": 5}]}, "tools[0].type"),
        (MESSAGES, {"tools": [{"name": ""}]}, "tools[0].name"),
        (MESSAGES, {"tool_choice": {"type": "tool", "name": "g"}}, "tool_choice.name"),
        (MESSAGES, {"output_config": {"format": {"type": "json_schema"}}}, "output_config.format.schema"),
        (
            MESSAGES,
            {"output_config": {"format": {"type": "json_schema", "schema": STRANGE}}},
            "output_config.format.schema",
        ),
        (RESPONSES, {"tools": [{"type": "web_search", "search_context_size": "low"}]}, "tools[0].type"),
        (RESPONSES, {"tools": [{"type": "function"}]}, "tools[0].name"),
        (RESPONSES, {"input": [{"type": "computer_call", "action": {}}]}, "input[0].type"),
        (RESPONSES, {"input": [{"role": "user"}]}, "input[0].content"),
        (
            RESPONSES,
            {
                "instructions": "be brief",
                "input": [
                    U,
                    {"type": "reasoning", "summary": []},
                    {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
                    {"type": "function_call", "call_id": "d", "name": "a b", "arguments": "[]"},
                ],
            },
            "input[3].name",
        ),
        (RESPONSES, {"text": {"format": {"type": "json_schema", "name": "n"}}}, "text.format.schema"),
        (
            RESPONSES,
            {"text": {"format": {"type": "json_schema", "name": "n", "schema": STRANGE}}},
            "text.format.schema",
        ),
        (
            "/tokenize",
            {"prompt": None, "messages": [U], "continue_final_message": True},
            "continue_final_message",
        ),
        (
            "/v1/messages/count_tokens",
            {"system": "s", "messages": [U], "tools": [{"name": ""}]},
            "tools[0].name",
        ),
    ],
)
async def test_what_is_wrong_within_a_field_is_named_by_its_path(
    front: HttpFrontHarness, route: str, changes: dict[str, Any], path: str
) -> None:
    reply = await front.post(route, {**BASES[route], **changes})
    assert reply.status == 400, reply.body
    assert reply.json["error"]["message"].startswith(f"{path}: "), reply.body
    assert reply.json["error"].get("param", path) == path


@pytest.mark.parametrize(
    "changes",
    [
        {"messages": [{"role": "system", "content": "a"}, {"role": "system", "content": "b"}, U]},
        {"messages": [{"role": "user", "content": ""}]},
        {"messages": [{"role": "user", "content": "<|im_start|>\0\U0001f600\u202e\n"}]},
        {"messages": [U, {"role": "tool", "tool_call_id": "of no call", "content": "x"}]},
        {"messages": [U, called(arguments="")]},
        {"guided_json": True, "max_tokens": 8},
        {"seed": -1},
        {"stop": []},
        {"tools": []},
    ],
)
async def test_what_is_unusual_is_answered(front: HttpFrontHarness, changes: dict[str, Any]) -> None:
    reply = await front.post(CHAT, {**BASES[CHAT], **changes})
    assert reply.status == 200, reply.body


@pytest.mark.parametrize("half", ["\\ud83d", "\\ude00", "x\\ud83dx"])
def test_half_a_character_is_refused_in_words(half: str) -> None:
    body = f'{{"prompt": "{half}"}}'.encode()
    with pytest.raises(InvalidRequestError, match="half of a surrogate pair"):
        body_decoding.decode(body, schemas.CompletionRequest, {})
    whole = b'{"prompt": "\\ud83d\\ude00"}'
    assert body_decoding.decode(whole, schemas.CompletionRequest, {}).prompt == "\U0001f600"
