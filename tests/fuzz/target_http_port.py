"""The HTTP port of a running gateway: any bytes on a connection, and bodies of each route by mutation."""

from __future__ import annotations

import asyncio
import copy
import json
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import aiohttp
from gateway_harness import GatewayHarness, write_model
from http_harness import SCHEMAS, EmbeddingReplica, parse_events, raw_request
from patience import WAIT_S

from tests.fuzz.mutation import any_text, any_tree, mutate_bytes, mutate_tree
from tests.fuzz.target import FindingError, Target

_LIMITS = {"max_body_bytes": 1 << 16, "max_header_bytes": 4096, "max_inputs": 8}
# How long a gateway waits for the rest of bytes. What does not end by itself ends then.
_HASTE_S = 0.02
# Requests whose connection has just ended may still run.
_MOST_RUNNING = 16
_TURN = {"role": "user", "content": "hello"}
_SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
_FUNCTION = {"name": "f", "description": "Add.", "parameters": _SCHEMA, "strict": True}
_SAMPLING: dict[str, Any] = {"max_tokens": 4, "temperature": 0.5, "top_p": 0.9, "seed": 1, "stream": False}
_CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
# Bodies that are served, of each route; those with the most fields that are checked.
_BODIES: dict[str, list[dict[str, Any]]] = {
    "/v1/chat/completions": [
        {"model": "m", "messages": [_TURN], **_SAMPLING, "n": 2, "logprobs": True, "top_logprobs": 2},
        {"messages": [_TURN], **_SAMPLING, "stream": True, "stream_options": {"include_usage": True}},
        {"messages": [_TURN], "tools": [{"type": "function", "function": _FUNCTION}], "max_tokens": 4},
        {
            "messages": [
                _TURN,
                {"role": "assistant", "content": None, "tool_calls": [_CALL]},
                {"role": "tool", "tool_call_id": "c", "content": [{"type": "text", "text": "2"}]},
            ],
            "max_tokens": 4,
        },
        {"messages": [_TURN], "stop": ["a", "b"], "logit_bias": {"5": 1.5}, "top_k": 3, "max_tokens": 4},
        {
            "messages": [_TURN],
            "response_format": {"type": "json_schema", "json_schema": {"name": "s", "schema": _SCHEMA}},
            "max_tokens": 4,
        },
    ],
    "/v1/completions": [
        {"prompt": ["a", "b"], **_SAMPLING, "echo": True, "logprobs": 2, "n": 2},
        {"prompt": [[1, 2], [3]], **_SAMPLING, "stream": True, "guided_regex": "[a-z]+"},
    ],
    "/v1/responses": [
        {"input": "hello", "instructions": "Be kind.", "max_output_tokens": 4, "stream": True},
        {
            "input": [{"role": "user", "content": [{"type": "input_text", "text": "hello"}]}],
            "tools": [{"type": "function", **_FUNCTION}],
            "tool_choice": "auto",
            "max_output_tokens": 4,
        },
    ],
    "/v1/messages": [
        {"messages": [_TURN], "max_tokens": 4, "system": [{"type": "text", "text": "s"}], "stream": True},
        {
            "messages": [{"role": "user", "content": [{"type": "text", "text": "hello"}]}],
            "tools": [{"name": "f", "description": "Add.", "input_schema": _SCHEMA}],
            "stop_sequences": ["a"],
            "max_tokens": 4,
        },
    ],
    "/v1/messages/count_tokens": [{"messages": [_TURN], "system": "s"}],
    "/v1/embeddings": [{"input": ["hello", "there"], "encoding_format": "base64"}, {"input": [1, 2, 3]}],
    "/tokenize": [{"prompt": "hello", "add_special_tokens": True}, {"messages": [_TURN]}],
    "/detokenize": [{"tokens": [5, 6]}],
}
# Nothing that a client sends is an error of the server. Not served: 501.
_STATUSES = {200, 400, 404, 408, 409, 413, 415, 421, 422, 429, 501}
_HEADERS = (
    *("Transfer-Encoding: chunked", "Content-Length: 0", "Content-Length: -1", "Content-Length: 9" * 3),
    *("Expect: 100-continue", "Connection: close", "Connection: Upgrade\r\nUpgrade: h2c", "Host: a.example"),
    *("Authorization: Bearer x", "Authorization: Bearer x\r\nAuthorization: y", "x-api-key: \xff"),
    *("X-Request-Id: a b", "traceparent: 00-", "Content-Encoding: gzip", "Content-Type: a/b; c"),
)
_REQUESTS = (
    b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n",
    b"GET /v1/models HTTP/1.1\r\nHost: 127.0.0.1\r\nAuthorization: Bearer x\r\n\r\n",
    b"GET /v1/models/m HTTP/1.0\r\n\r\n",
    b"OPTIONS * HTTP/1.1\r\nHost: 127.0.0.1\r\nOrigin: https://a.example\r\n\r\n",
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    raw_request(b'5\r\n{"a":\r\n2\r\n1}\r\n0\r\n\r\n', "Transfer-Encoding: chunked"),
)


def open_targets(stack: ExitStack, folder: Path) -> list[Target]:
    """Return a target for the bytes of a connection, and one for the bodies of each route."""
    assert _BODIES.keys() == SCHEMAS.keys(), "a route without bodies"
    server = _Server(stack, folder)
    bodies = [Target(f"HTTP port {path}", partial(server.run, path), 40) for path in _BODIES]
    return [Target("HTTP port bytes", partial(server.run, ""), 60), *bodies]


class _Server:
    """Two honest replicas, a gateway for bodies, and one that waits for nobody, for bytes."""

    def __init__(self, stack: ExitStack, folder: Path) -> None:
        self._runner = stack.enter_context(asyncio.Runner())
        self._harness = GatewayHarness(write_model(folder / "model"))
        stack.callback(lambda: self._runner.run(self._close()))
        self._runner.run(self._start())

    async def _start(self) -> None:
        for replica_id, role in (("p0", "prefill"), ("d0", "decode")):
            replica = self._harness.replicas[replica_id] = EmbeddingReplica(self._harness, replica_id, role)
            await replica.start()
        self._patient, _ = await self._harness.add_gateway(self._harness.config(http=_LIMITS))
        hasty = {**_LIMITS, "body_timeout_s": _HASTE_S, "idle_timeout_s": _HASTE_S}
        self._hasty, _ = await self._harness.add_gateway(self._harness.config(http=hasty))
        timeout = aiohttp.ClientTimeout(total=WAIT_S)
        url = f"http://127.0.0.1:{self._patient.http_port}"
        self._session = aiohttp.ClientSession(url, timeout=timeout)

    async def _close(self) -> None:
        await self._session.close()
        await self._harness.close()

    def run(self, path: str, rng: Random) -> str:
        """Send a body to a route, or bytes to the port."""
        found = self._runner.run(self._body(path, rng) if path else self._bytes(rng))
        for replica in self._harness.replicas.values():
            replica.submissions.clear()
            replica.cancels.clear()
        return found

    async def _body(self, path: str, rng: Random) -> str:
        body: Any = copy.deepcopy(rng.choice(_BODIES[path]))
        if rng.random() < 0.2:  # a field that another route or nobody knows
            body[rng.choice([*SCHEMAS[path].__struct_fields__, any_text(rng)])] = any_tree(rng)
        data = json.dumps(mutate_tree(rng, body)).encode()
        if rng.random() < 0.1:
            data = mutate_bytes(rng, data)
        headers = {"Content-Type": "application/json"}
        async with self._session.post(path, data=data, headers=headers) as reply:
            answer = await reply.read()
            kind = reply.content_type
        if reply.status not in _STATUSES:
            raise FindingError(f"{reply.status} {answer[:300]!r} for {data[:2000]!r}")
        if kind == "text/event-stream":
            _check_events(path, parse_events(answer))
            return "events"
        fields = json.loads(answer)
        if (reply.status == 200) == ("error" in fields and fields["error"] is not None):
            raise FindingError(f"{reply.status} with {answer[:300]!r}")
        return str(reply.status)

    async def _bytes(self, rng: Random) -> str:
        body = json.dumps(rng.choice(_BODIES["/v1/chat/completions"])).encode()
        headers = rng.sample(_HEADERS, rng.randrange(3))
        whole = raw_request(body, f"Content-Length: {len(body)}", *headers)
        data = b"".join(rng.choices((whole, *_REQUESTS), k=rng.randint(1, 3)))
        if rng.random() < 0.9:
            data = mutate_bytes(rng, data, _REQUESTS)
        reader, writer = await asyncio.open_connection("127.0.0.1", self._hasty.http_port)
        answer = b""
        try:
            with suppress(ConnectionError):
                for start in range(0, len(data), step := rng.choice((1 << 20, 1 << 20, 64, 7))):
                    writer.write(data[start : start + step])
                    await writer.drain()
                # The gateway ends the connection: nothing more comes.
                answer = await reader.read()
        finally:
            writer.transport.abort()
        status = answer[9:12].decode("ascii", "replace") if answer.startswith(b"HTTP/1.") else "closed"
        if status.isdigit() and int(status) not in _STATUSES | {100, 405, 417}:
            raise FindingError(f"{answer[:300]!r} for {data[:2000]!r}")
        if not self._hasty.connections.has_route() or self._hasty.requests.num_running > _MOST_RUNNING:
            raise FindingError(f"the gateway is stuck after {data[:2000]!r}")
        return status


def _check_events(path: str, events: list[tuple[str, Any]]) -> None:
    """A stream ends as its API has it: with its last event or an error."""
    name, last = events[-1]
    if path == "/v1/messages":
        ends_well = name in ("message_stop", "error")
    elif path == "/v1/responses":
        ends_well = name in ("response.completed", "response.incomplete", "response.failed", "error")
    else:
        ends_well = last == "[DONE]" or "error" in last
    if not ends_well:
        raise FindingError(f"a stream ends with {name!r} {last!r}")
