"""A gateway's HTTP port over scripted replicas, and a client that sees bytes and events as they come."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any, Self

import aiohttp
import numpy as np
from gateway_harness import GatewayHarness, ScriptedReplica
from multidict import CIMultiDict
from numpy.typing import NDArray
from patience import WAIT_S

from cluster.config import ClusterConfig
from cluster.http import body_decoding, messages_schemas, responses, schemas
from cluster.serve.gateway_server import Gateway
from workers.messages.link import (
    PrefillReport,
    PromptEmbedding,
    PromptLogprobs,
    StageTimes,
    StepFrame,
    Submission,
)
from workers.messages.sampling import PackedLogprobs

# The type that each route decodes.
SCHEMAS: dict[str, type[body_decoding.Body]] = {
    "/v1/chat/completions": schemas.ChatRequest,
    "/v1/completions": schemas.CompletionRequest,
    "/v1/responses": responses.ResponsesRequest,
    "/v1/messages": messages_schemas.MessagesRequest,
    "/v1/messages/count_tokens": messages_schemas.CountTokensRequest,
    "/v1/embeddings": schemas.EmbeddingRequest,
    "/tokenize": schemas.TokenizeRequest,
    "/detokenize": schemas.DetokenizeRequest,
}
CHAT = {"model": "m", "messages": [{"role": "user", "content": "hello"}], "seed": 1, "max_tokens": 8}


def embedding_of(prompt: bytes) -> NDArray[np.float32]:
    """Return the embedding that every replica gives for this prompt [8]."""
    return np.frombuffer(hashlib.sha256(prompt).digest()[:8], "u1").astype("<f4")


def prompt_logprobs(submission: Submission) -> PromptLogprobs:
    """Return log-probabilities of all tokens but the first: -0.25 each, and of the likeliest -1, -2 and so
    on."""
    num_tokens, num_top = len(submission.prompt) // 4 - 1, submission.sampling.num_prompt_logprobs or 0
    logprobs = PackedLogprobs(
        num_top,
        np.full(num_tokens, -0.25, "<f4").tobytes(),
        np.tile(np.arange(num_top, dtype="<u4"), num_tokens).tobytes(),
        np.tile(-1 - np.arange(num_top, dtype="<f4"), num_tokens).tobytes(),
    )
    return PromptLogprobs(submission.request_id, submission.attempt, 1, logprobs)


class EmbeddingReplica(ScriptedReplica):
    """Answers requests for embeddings too, and those for log-probabilities of prompts."""

    async def _prefill(self, submission: Submission, gateway_id: str) -> None:
        if submission.pooling is None:
            if submission.sampling.num_prompt_logprobs is not None:
                self._send(gateway_id, StepFrame(prompt_logprobs=(prompt_logprobs(submission),)))
            await super()._prefill(submission, gateway_id)
            return
        key = submission.request_id, submission.attempt
        report = PrefillReport(*key, len(submission.prompt) // 4, 0, StageTimes())
        embedding = PromptEmbedding(*key, embedding_of(submission.prompt).tobytes())
        self._send(gateway_id, StepFrame(prefills=(report,), embeddings=(embedding,)))


@dataclass
class Reply:
    """An answer as a whole; of a stream, the events as (name, JSON or text)."""

    status: int
    headers: CIMultiDict[str]
    body: bytes
    events: list[tuple[str, Any]] = field(default_factory=list)

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def error(self) -> dict[str, Any]:
        """The error, in OpenAI's shape."""
        found: dict[str, Any] = self.json["error"]
        assert found.keys() == {"message", "type", "param", "code"}
        return found


class HttpFrontHarness:
    """p0 (prefill), d0 (decode), a gateway, and a session of a client. Use as an async context manager."""

    def __init__(self, harness: GatewayHarness, config: ClusterConfig | None = None) -> None:
        self.harness = harness
        self.gateway: Gateway
        self.grpc_address = ""
        self.session: aiohttp.ClientSession
        self._config = config

    async def __aenter__(self) -> Self:
        for replica_id, role in (("p0", "prefill"), ("d0", "decode")):
            if replica_id not in self.harness.replicas:
                replica = EmbeddingReplica(self.harness, replica_id, role)
                self.harness.replicas[replica_id] = replica
                await replica.start()
        self.gateway, self.grpc_address = await self.harness.add_gateway(self._config)
        timeout = aiohttp.ClientTimeout(total=WAIT_S)
        self.session = aiohttp.ClientSession(f"http://127.0.0.1:{self.gateway.http_port}", timeout=timeout)
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.session.close()

    async def get(self, path: str, **options: Any) -> Reply:
        return await self.send("GET", path, **options)

    async def post(self, path: str, body: Any, **options: Any) -> Reply:
        """Send a POST with a JSON body."""
        return await self.send("POST", path, json=body, **options)

    async def chat(self, **fields: Any) -> Reply:
        """Post one of the chats, with these fields; None leaves a field out."""
        body = {name: value for name, value in {**CHAT, **fields}.items() if value is not None}
        return await self.post("/v1/chat/completions", body)

    async def send(self, method: str, path: str, **options: Any) -> Reply:
        async with self.session.request(method, path, **options) as reply:
            body = await reply.read()
            events = parse_events(body) if reply.content_type == "text/event-stream" else []
            return Reply(reply.status, CIMultiDict(reply.headers), body, events)

    @contextlib.asynccontextmanager
    async def connection(self) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
        """Open a connection without a client behind it."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.gateway.http_port)
        try:
            yield reader, writer
        finally:
            writer.transport.abort()
            with contextlib.suppress(ConnectionError):
                await writer.wait_closed()


def parse_events(body: bytes) -> list[tuple[str, Any]]:
    """Return the events of a stream."""
    found: list[tuple[str, Any]] = []
    for block in body.decode().split("\n\n"):
        if not block:
            continue
        fields = dict(line.split(": ", 1) for line in block.split("\n"))
        data = fields["data"]
        found.append((fields.get("event", ""), data if data == "[DONE]" else json.loads(data)))
    return found


async def events_of(response: aiohttp.ClientResponse) -> AsyncIterator[Any]:
    """Yield the events of a stream that goes on."""
    async for line in response.content:
        if line.startswith(b"data: "):
            data = line[6:].decode().strip()
            yield data if data == "[DONE]" else json.loads(data)


def raw_request(body: bytes, *headers: str, path: str = "/v1/chat/completions") -> bytes:
    """Return a POST with these headers in addition to the usual ones."""
    lines = [f"POST {path} HTTP/1.1", "Host: 127.0.0.1", "Content-Type: application/json", *headers, "", ""]
    return "\r\n".join(lines).encode() + body
