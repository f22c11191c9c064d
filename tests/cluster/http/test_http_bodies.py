"""Bodies over HTTP that would take long to decode, or nest too deeply: they hold up nobody else, and what
goes wrong with them is an error of the API."""

from __future__ import annotations

import json
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from callers import key_of
from gateway_harness import GatewayHarness
from http_harness import CHAT, HttpFrontHarness, Reply, raw_request
from hypothesis import given
from hypothesis import strategies as st

from cluster.errors import InvalidRequestError
from cluster.http import endpoints
from cluster.http.body_decoding import decode
from cluster.http.body_shape import MAX_CONTAINERS, MAX_DEPTH, MAX_VALUES, check_shape

JSON = {"Content-Type": "application/json"}
BODIES: dict[str, tuple[str, str]] = {
    "guided_json": ("/v1/chat/completions", '{"messages":[{"role":"user","content":"x"}],"guided_json":@}'),
    "tools": (
        "/v1/chat/completions",
        '{"messages":[{"role":"user","content":"x"}],"tool_choice":"required",'
        '"tools":[{"type":"function","function":{"name":"f","parameters":@}}]}',
    ),
    "chat_template_kwargs": (
        "/v1/chat/completions",
        '{"messages":[{"role":"user","content":"x"}],"chat_template_kwargs":@}',
    ),
    "input_schema": (
        "/v1/messages",
        '{"max_tokens":2,"messages":[{"role":"user","content":"x"}],"tool_choice":{"type":"any"},'
        '"tools":[{"name":"f","input_schema":@}]}',
    ),
    "input": (
        "/v1/messages",
        '{"max_tokens":2,"messages":[{"role":"assistant","content":[{"type":"tool_use","id":"1","name":"f",'
        '"input":@}]},{"role":"user","content":"x"}]}',
    ),
    "prompt": ("/v1/completions", '{"prompt":[@]}'),
    "text.format": (
        "/v1/responses",
        '{"input":"x","text":{"format":{"type":"json_schema","name":"n","schema":@}}}',
    ),
}


@pytest.fixture
async def front(harness: GatewayHarness) -> AsyncIterator[HttpFrontHarness]:
    async with HttpFrontHarness(harness) as built:
        yield built


async def send(front: HttpFrontHarness, path: str, body: str) -> Reply:
    return await front.send("POST", path, data=body.encode(), headers=JSON)


def problem(reply: Reply) -> str:
    """The message of an error in the shape of its API."""
    fields = reply.json
    assert fields["error"]["type"] == "invalid_request_error"
    return str(fields["error"]["message"])


@pytest.mark.parametrize("field", BODIES)
async def test_a_body_may_nest_so_deeply_and_no_deeper(front: HttpFrontHarness, field: str) -> None:
    path, body = BODIES[field]
    before = body.partition("@")[0]
    num_around = sum(before.count(char) for char in "[{") - sum(before.count(char) for char in "]}")
    most = MAX_DEPTH - num_around - 1
    for depth in (most - 60, most, most + 1, *range(900, 1001, 20), 100_000):
        nested = '{"a":' * depth + "{}" + "}" * depth
        reply = await send(front, path, body.replace("@", nested))
        if depth > most:
            assert reply.status == 400
            assert problem(reply) == f"body: is nested more than {MAX_DEPTH} levels deep; flatten it"
        else:
            assert reply.status == 200 or "nested more" not in problem(reply)


async def test_an_error_that_nobody_expects_is_one_of_the_api(
    front: HttpFrontHarness, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*_: object) -> None:
        raise ZeroDivisionError("a secret")

    monkeypatch.setattr("cluster.http.chat.translate", broken)
    for path, body in (("/v1/chat/completions", CHAT), ("/v1/messages", {**CHAT, "seed": None})):
        monkeypatch.setattr("cluster.http.messages.translate", broken)
        reply = await front.post(path, body)
        assert (reply.status, reply.headers["Content-Type"]) == (500, "application/json")
        assert b"secret" not in reply.body
        assert reply.json["error"]["type"] == ("server_error" if "chat" in path else "api_error")
    assert "ZeroDivisionError" in caplog.text
    monkeypatch.undo()
    assert (await front.chat()).status == 200


def shape_problem(body: bytes) -> str:
    with pytest.raises(InvalidRequestError) as caught:
        check_shape(body)
    return str(caught.value)


def test_a_body_has_so_many_values_and_no_more() -> None:
    lists = b"[" + b"[]," * (MAX_CONTAINERS - 2) + b"[]]"
    check_shape(lists)
    assert "lists and objects" in shape_problem(lists.replace(b"[],", b"[],[],", 1))
    numbers = b"[" + b"1," * (MAX_VALUES - 1) + b"1]"
    check_shape(numbers)
    assert "values" in shape_problem(numbers.replace(b"1,", b"1,1,", 1))
    assert "nested" in shape_problem(b"[" * (MAX_DEPTH + 1) + b"]" * (MAX_DEPTH + 1))
    check_shape(b"[" * MAX_DEPTH + b"]" * MAX_DEPTH)


@given(st.text('[]{},:\\"a', max_size=40), st.integers(0, 3))
def test_what_stands_in_strings_is_not_counted(text: str, depth: int) -> None:
    """Also with quotes and backslashes, on both sides of the limit."""
    for levels, is_fine in ((MAX_DEPTH, True), (MAX_DEPTH + 1, False)):
        half = levels - depth - 1
        body = (
            b"[" * half
            + msgspec.json.encode({text: "[" * MAX_DEPTH})[:-1]
            + b',"b":'
            + b"[" * depth
            + b"]" * depth
            + b"}"
            + b"]" * half
        )
        if is_fine:
            check_shape(body)
        else:
            assert "nested" in shape_problem(body)


async def test_a_text_may_have_any_brackets(front: HttpFrontHarness) -> None:
    reply = await front.chat(messages=[{"role": "user", "content": "[" * 400}], max_tokens=2)
    assert reply.status == 200, reply.body


async def test_a_long_body_is_read_beside_the_event_loop(
    front: HttpFrontHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: list[int] = []

    def noted(*args: Any) -> Any:
        threads.append(threading.get_ident())
        return decode(*args)

    monkeypatch.setattr(endpoints, "decode", noted)
    for length in (10, endpoints.SHORT_BODY_BYTES):
        reply = await front.chat(metadata={"a": "x" * length}, max_tokens=2)
        assert reply.status == 200
        assert (threads.pop() == threading.get_ident()) == (length == 10)


async def test_a_body_that_cannot_be_read_counts_as_a_request_and_none_is_read_beyond_the_quota(
    harness: GatewayHarness, tmp_path: Path
) -> None:
    key = key_of(tmp_path / "keys.yaml", "acme")
    tenants = {"acme": {"requests_per_s": 0.1, "burst_s": 20}}
    auth = {"mode": "required", "keys_file": str(tmp_path / "keys.yaml"), "tenants": tenants}
    async with HttpFrontHarness(harness, harness.config(auth=auth)) as front:
        headers = {**JSON, "x-api-key": key}
        for remaining in ("1", "0"):
            reply = await front.send("POST", "/v1/completions", data=b'{"prompt": 7}', headers=headers)
            assert (reply.status, reply.error["param"]) == (400, "prompt")
            assert reply.headers["x-ratelimit-remaining-requests"] == remaining
        async with front.connection() as (reader, writer):
            writer.write(raw_request(b"", f"x-api-key: {key}", "Content-Length: 1000000"))
            head = await reader.readuntil(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 429 ")
            assert b"Retry-After:" in head
            length = int(head.lower().partition(b"content-length:")[2].partition(b"\r\n")[0])
            assert "requests_per_s" in json.loads(await reader.readexactly(length))["error"]["message"]


async def test_a_byte_order_mark_is_no_part_of_the_body(front: HttpFrontHarness) -> None:
    body = b"\xef\xbb\xbf" + json.dumps(CHAT).encode()
    assert (await front.send("POST", "/v1/chat/completions", data=body, headers=JSON)).status == 200


async def test_what_is_no_utf8_is_named_by_its_place(front: HttpFrontHarness) -> None:
    body = b'{"messages": "' + b"\xff" + b'"}'
    reply = await front.send("POST", "/v1/chat/completions", data=body, headers=JSON)
    assert (reply.status, reply.error["param"]) == (400, "body")
    assert "not UTF-8 at byte 14" in reply.error["message"]


@pytest.mark.parametrize("field", ["temperature", "repetition_penalty"])
async def test_a_number_beyond_single_precision_is_named(front: HttpFrontHarness, field: str) -> None:
    reply = await front.chat(**{field: 1e308})
    assert (reply.status, reply.error["param"]) == (400, field)
