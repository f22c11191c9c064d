"""How many requests each call takes from its tenant's bucket, over HTTP and gRPC: served, refused for what is
in it, and refused because of the load."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
import pytest_asyncio
from gateway_harness import PROMPT, GatewayHarness
from google.protobuf.message import Message
from http_harness import CHAT, HttpFrontHarness

from cluster.admission import read_budget
from cluster.api import servicer
from cluster.proto.tandem.v1 import inference_pb2 as pb
from cluster.proto.tandem.v1.inference_pb2_grpc import InferenceStub

# A hundred requests, and no more.
FULL = 100
LIMITS: dict[str, Any] = {"requests_per_s": 1e-6, "burst_s": FULL * 1e6}
MESSAGES = CHAT["messages"]
MOST_BYTES = 10_000
# Over HTTP: the body, and what it takes when it is served.
ROUTES: dict[str, tuple[str, dict[str, Any], int]] = {
    "chat": ("/v1/chat/completions", {"messages": MESSAGES, "max_tokens": 1}, 1),
    "chat of three samples": ("/v1/chat/completions", {"messages": MESSAGES, "max_tokens": 1, "n": 3}, 1),
    "stream": ("/v1/chat/completions", {"messages": MESSAGES, "max_tokens": 1, "stream": True}, 1),
    "completion": ("/v1/completions", {"prompt": "a", "max_tokens": 1}, 1),
    "list of one": ("/v1/completions", {"prompt": ["a"], "max_tokens": 1}, 1),
    "list of five": ("/v1/completions", {"prompt": ["a"] * 5, "max_tokens": 1}, 5),
    "response": ("/v1/responses", {"input": "a", "max_output_tokens": 1}, 1),
    "message": ("/v1/messages", {"messages": MESSAGES, "max_tokens": 1}, 1),
    "embedding": ("/v1/embeddings", {"input": "a"}, 1),
    "four embeddings": ("/v1/embeddings", {"input": ["a"] * 4}, 4),
    "tokenize": ("/tokenize", {"prompt": "a"}, 1),
    "detokenize": ("/detokenize", {"tokens": [5, 6]}, 1),
    "count": ("/v1/messages/count_tokens", {"messages": MESSAGES}, 1),
}
ROUTES = {name: (path, {"model": "m", **body}, count) for name, (path, body, count) in ROUTES.items()}
# One for each path.
PATHS = {path: body for path, body, _ in ROUTES.values()}
GENERATING = [name for name in ROUTES if name not in ("tokenize", "detokenize", "count")]
INPUTS = [pb.EmbedInput(text="a")] * 3
# Over gRPC.
METHODS: dict[str, tuple[Message, int]] = {
    "Generate": (pb.GenerateRequest(text=PROMPT, max_tokens=1), 1),
    "Embed": (pb.EmbedRequest(inputs=INPUTS), 3),
    "Score": (pb.ScoreRequest(text=PROMPT, continuations=INPUTS), 3),
    "Tokenize": (pb.TokenizeRequest(text=PROMPT), 1),
    "Detokenize": (pb.DetokenizeRequest(token_ids=[5, 6]), 1),
    "ListModels": (pb.ListModelsRequest(), 0),
    "ListRequests": (pb.ListRequestsRequest(), 0),
}
# Refused by the first checks.
BAD: dict[str, Message] = {
    "Generate": pb.GenerateRequest(text=PROMPT, max_tokens=1, temperature=-1.0),
    "Embed": pb.EmbedRequest(inputs=INPUTS, dimensions=4096),
    "Score": pb.ScoreRequest(text="", continuations=INPUTS),
}


class Front(HttpFrontHarness):
    """An HTTP and a gRPC port over replicas, whose callers have `FULL` requests."""

    def num_taken(self) -> int:
        """Return what was taken since it was last asked, and fill the bucket."""
        quotas, now = self.gateway.requests.charges.quotas, self.gateway.requests._clock.now()
        num_taken = FULL - round(quotas.rates("", now)["requests_per_s"].level)
        for _ in range(num_taken):
            quotas.withdraw("", 0, now)
        assert round(quotas.rates("", now)["requests_per_s"].level) == FULL
        return num_taken

    async def call(self, method: str, request: Message | bytes) -> grpc.StatusCode:
        """Make a gRPC call, and return its status."""
        async with grpc.aio.insecure_channel(self.grpc_address) as channel:
            if isinstance(request, bytes):
                call: Any = channel.unary_stream(f"/tandem.v1.Inference/{method}")(request)
            else:
                call = getattr(InferenceStub(channel), method)(request)
            try:
                if isinstance(call, grpc.aio.UnaryStreamCall):
                    async for _ in call:
                        pass
                else:
                    await call
            except grpc.aio.AioRpcError as error:
                return error.code()
            return grpc.StatusCode.OK


@pytest_asyncio.fixture
async def front(harness: GatewayHarness) -> AsyncIterator[Front]:
    async with Front(
        harness, harness.config(auth={"tenants": {"*": LIMITS}}, http={"max_body_bytes": MOST_BYTES})
    ) as front:
        yield front


async def test_calls_over_http_that_are_served(front: Front) -> None:
    for name, (path, body, count) in ROUTES.items():
        reply = await front.post(path, body)
        assert (name, reply.status, front.num_taken()) == (name, 200, count), reply.body
    for path in ("/v1/models", "/v1/models/m", "/health"):
        assert (path, (await front.get(path)).status, front.num_taken()) == (path, 200, 0)


async def test_a_body_that_is_refused_has_taken_one(front: Front) -> None:
    for path, body in PATHS.items():
        too_long = b" " * (MOST_BYTES + 1)
        for data, status in ((b"{", 400), (b"", 400), (too_long, 413), (b"[1]", 400)):
            reply = await front.send("POST", path, data=data, headers={"Content-Type": "application/json"})
            assert (path, reply.status, front.num_taken()) == (path, status, 1), (data[:9], reply.body)
        reply = await front.post(path, {**body, "no_such_field": 1})
        assert (path, reply.status, front.num_taken()) == (path, 400, 1), reply.body
    for path, field in (("/v1/completions", "prompt"), ("/v1/embeddings", "input")):
        for value in ([], ["a"] * 300):
            reply = await front.post(path, {"model": "m", field: value})
            assert (path, reply.status, front.num_taken()) == (path, 400, 1), reply.body


async def test_what_overload_refuses_takes_nothing(front: Front, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(front.gateway.requests.acceptance.running, "max_requests", 0)
    monkeypatch.setattr(servicer, "MAX_CALLS", 0)
    for name, (path, body, _) in ROUTES.items():
        reply = await front.post(path, body)
        assert (name, reply.status, front.num_taken()) == (name, 429, 0), reply.body
    for method, (request, count) in METHODS.items():
        status = await front.call(method, request)
        expected = grpc.StatusCode.RESOURCE_EXHAUSTED if count else grpc.StatusCode.OK
        assert (method, status, front.num_taken()) == (method, expected, 0)


async def test_what_exceeds_the_budget_for_reading_takes_nothing(
    front: Front, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(read_budget, "WAIT_S", 0.0)
    monkeypatch.setattr(front.gateway.reading.budget, "max_bytes", 0)
    for path, body in PATHS.items():
        reply = await front.post(path, body)
        assert (path, reply.status, front.num_taken()) == (path, 429, 0), reply.body
    for method, (request, _) in METHODS.items():
        status = await front.call(method, request)
        assert (method, status, front.num_taken()) == (method, grpc.StatusCode.RESOURCE_EXHAUSTED, 0)


async def test_what_finds_no_replica_or_a_gateway_that_stops_takes_nothing(front: Front) -> None:
    front.gateway.requests.acceptance._is_leaving = True
    for name in GENERATING:
        path, body, _ = ROUTES[name]
        reply = await front.post(path, body)
        assert (name, reply.status, front.num_taken()) == (name, 503, 0), reply.body
    for method in ("Generate", "Embed", "Score"):
        status = await front.call(method, METHODS[method][0])
        assert (method, status, front.num_taken()) == (method, grpc.StatusCode.UNAVAILABLE, 0)


async def test_of_a_list_whose_middle_is_refused_by_the_load_the_rest_is_given_back(front: Front) -> None:
    """Two are taken, and have cost something."""
    for replica in front.harness.replicas.values():
        replica.script.stop_after = 0
    front.gateway.requests.acceptance.running.max_requests = 2
    reply = await front.post("/v1/completions", {"model": "m", "prompt": ["a"] * 6, "max_tokens": 4})
    assert (reply.status, front.num_taken()) == (429, 2), reply.body
    assert await front.call("Embed", pb.EmbedRequest(inputs=[pb.EmbedInput(text="a")] * 40)) is (
        grpc.StatusCode.RESOURCE_EXHAUSTED
    )
    assert front.num_taken() == 2


async def test_calls_over_grpc(front: Front) -> None:
    for method, (request, count) in METHODS.items():
        status = await front.call(method, request)
        assert (method, status, front.num_taken()) == (method, grpc.StatusCode.OK, count)
    for method, request in BAD.items():
        status = await front.call(method, request)
        assert (method, status, front.num_taken()) == (method, grpc.StatusCode.INVALID_ARGUMENT, 0)
    for method in METHODS:
        status = await front.call(method, b"\xff\xff\xff")
        assert (method, status, front.num_taken()) == (method, grpc.StatusCode.INVALID_ARGUMENT, 0)
