"""Bodies of requests over HTTP: any JSON for the fields of every route, up to the checks of `Generate`."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import msgspec

from cluster.errors import InvalidRequestError, RequestError
from cluster.http import chat, completions, embeddings, messages, messages_schemas, responses
from cluster.http.body_decoding import Body, decode
from cluster.http.call import AbortedCall
from cluster.http.errors import HttpProblem, anthropic_error, openai_error
from cluster.http.fields import refused
from cluster.http.schemas import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    EmbeddingRequest,
    TokenizeRequest,
)
from cluster.proto.tandem.v1 import inference_pb2 as pb
from cluster.text.validation import check_request
from tests.fuzz.mutation import EDGE_FLOATS, EDGE_INTS, any_text, mutate_bytes
from tests.fuzz.target import FindingError, Target, outcome
from tests.fuzz.target_requests import LIMITS

_MAX_INPUTS = 256
_MAX_DEPTH = 4
# By route: what its body is, and the requests that are made of it.
ROUTES: dict[str, tuple[type[Body], Callable[[Any], Sequence[Any]]]] = {
    "/v1/chat/completions": (ChatRequest, lambda body: chat.translate(body).calls),
    "/v1/completions": (CompletionRequest, lambda body: completions.translate(body, _MAX_INPUTS).calls),
    "/v1/responses": (responses.ResponsesRequest, lambda body: responses.translate(body).calls),
    "/v1/messages": (messages_schemas.MessagesRequest, lambda body: messages.translate(body).calls),
    "/v1/messages/count_tokens": (
        messages_schemas.CountTokensRequest,
        lambda body: [messages.count_request(body)],
    ),
    "/v1/embeddings": (EmbeddingRequest, lambda body: [embeddings.embed_request(body, _MAX_INPUTS)]),
    "/tokenize": (TokenizeRequest, lambda body: [embeddings.tokenize_request(body)]),
    "/detokenize": (DetokenizeRequest, lambda body: [embeddings.detokenize_request(body)]),
}
_GOOD: dict[str, Any] = {
    "messages": [{"role": "user", "content": "the fox"}],
    "prompt": "the fox",
    "input": "the fox",
    "tokens": [1, 2],
    "max_tokens": 3,
}
# Names and values of the parts that bodies consist of.
_WORDS = (
    *("type", "text", "content", "role", "name", "id", "function", "arguments", "parameters", "input"),
    *("json_schema", "schema", "format", "input_schema", "tool_use_id", "call_id", "output", "structures"),
    *("triggers", "begin", "end", "strict", "effort", "image_url", "user", "system", "assistant", "tool"),
    *("tool_result", "tool_use", "thinking", "message", "function_call", "function_call_output"),
    *("reasoning", "summary", "json_object", "regex", "choice", "structural_tag", "auto", "required"),
)


def open_targets(stack: ExitStack, folder: Path) -> list[Target]:
    """Return a target for each route with a body."""
    return [Target(f"HTTP {route}", partial(_body, route), 60) for route in ROUTES]


def _body(route: str, rng: Random) -> str:
    kind, requests_of = ROUTES[route]
    fields = kind.__struct_encode_fields__
    drawn = {name: value for name, value in _GOOD.items() if name in fields and rng.random() < 0.9}
    for _ in range(rng.randrange(4)):
        drawn[rng.choice(fields)] = _value(rng, 0)
    for name in ("messages", "input", "tools"):
        if name in fields and rng.random() < 0.2:
            drawn[name] = [_object(rng, 1) for _ in range(rng.randrange(4))]
    data = json.dumps(drawn).encode()
    if rng.random() < 0.2:
        data = mutate_bytes(rng, data)
    return outcome(lambda: _take(route, kind, requests_of, data), RequestError)


def _take(route: str, kind: type[Body], requests_of: Callable[[Any], Sequence[Any]], data: bytes) -> None:
    """Do with a body what the port does; every refusal names a field, and can be shown."""
    try:
        for request in requests_of(decode(data, kind, refused(route))):
            if isinstance(request, pb.GenerateRequest):
                check_request(request, LIMITS)
    except RequestError as error:
        if isinstance(error, InvalidRequestError) and not all(path for path, _ in error.violations):
            raise FindingError(f"no field is named: {error}") from error
        problem = HttpProblem.of_call(AbortedCall.of(error))
        for encode in (openai_error, anthropic_error):
            msgspec.json.decode(encode(problem))
        raise


def _object(rng: Random, depth: int) -> dict[str, Any]:
    drawn = {rng.choice(_WORDS): _value(rng, depth + 1) for _ in range(rng.randrange(5))}
    return {"type": rng.choice(_WORDS), "role": rng.choice(("user", "assistant", "tool")), **drawn}


def _value(rng: Random, depth: int) -> Any:
    match rng.randrange(9):
        case 0:
            return None
        case 1:
            return rng.random() < 0.5
        case 2:
            return rng.choice((*EDGE_INTS, 1, 1 << 70))
        case 3:
            return rng.choice((*EDGE_FLOATS, 0.5))
        case 4:
            return any_text(rng)
        case 5:
            return rng.choice(_WORDS)
        case 6 if depth < _MAX_DEPTH:
            return [_value(rng, depth + 1) for _ in range(rng.randrange(4))]
        case 7 if depth < _MAX_DEPTH:
            return _object(rng, depth)
        case _:
            return {rng.choice(_WORDS): "x"}
