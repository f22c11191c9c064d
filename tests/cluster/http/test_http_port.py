"""The HTTP port: who is let in, what is refused before it is read, and clients that go, stall or stay too
long."""

from __future__ import annotations

import asyncio
import json
import ssl
from collections.abc import AsyncIterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from callers import Issuer, jwt_config, key_of
from certificates import write_certificate
from gateway_harness import GatewayHarness, until
from http_harness import CHAT, HttpFrontHarness, events_of, raw_request
from http_process import http_process

from cluster.admission.config import AdmissionConfig
from cluster.config import GatewayConfig
from cluster.http.guards import refused_host
from cluster.http.server import ROUTE_ACCESS
from cluster.metrics.ended_request import EndedRequest

LIMITS = {"max_body_bytes": 4096, "max_header_bytes": 4096, "body_timeout_s": 0.3, "idle_timeout_s": 0.5}


@pytest.fixture
async def front(harness: GatewayHarness) -> AsyncIterator[HttpFrontHarness]:
    async with HttpFrontHarness(harness, harness.config(http=LIMITS)) as built:
        yield built


def config_of(harness: GatewayHarness, folder: Path, **limits: Any) -> Any:
    keys_file = folder / "keys.yaml"
    issuer = folder / "issuer.pem"
    issuer.write_bytes(Issuer().pem())
    tenants = {"acme": limits} if limits else {}
    auth = {"mode": "required", "keys_file": str(keys_file), "jwt": jwt_config(issuer), "tenants": tenants}
    return harness.config(auth=auth)


# ------------------------------------------------------------------------------------------ credentials


async def test_a_key_is_shown_in_either_header(harness: GatewayHarness, tmp_path: Path) -> None:
    key = key_of(tmp_path / "keys.yaml", "acme")
    async with HttpFrontHarness(harness, config_of(harness, tmp_path)) as front:
        for headers in ({"Authorization": f"Bearer {key}"}, {"x-api-key": key}):
            reply = await front.post("/v1/chat/completions", CHAT, headers=headers)
            assert reply.status == 200
        assert harness.replicas["p0"].submissions[-1].tenant == "acme"
        for headers in ({}, {"Authorization": "Bearer nonsense"}, {"x-api-key": key[:-1]}):
            reply = await front.post("/v1/chat/completions", CHAT, headers=headers)
            assert (reply.status, reply.error["code"]) == (401, "invalid_api_key")
        assert (await front.get("/health")).status == 200


async def test_a_role_and_a_model_are_needed(harness: GatewayHarness, tmp_path: Path) -> None:
    viewer = key_of(tmp_path / "keys.yaml", "ops", "viewer")
    other = key_of(tmp_path / "keys.yaml", "acme", models=("elsewhere",))
    async with HttpFrontHarness(harness, config_of(harness, tmp_path)) as front:
        refused = await front.post("/v1/chat/completions", CHAT, headers={"x-api-key": viewer})
        assert (refused.status, refused.error["type"]) == (403, "permission_error")
        hidden = await front.post("/v1/chat/completions", CHAT, headers={"x-api-key": other})
        assert (hidden.status, hidden.error["code"]) == (404, "model_not_found")
        assert (await front.get("/v1/models", headers={"x-api-key": other})).json["data"] == []


async def test_an_expired_key_is_refused_and_recorded(
    harness: GatewayHarness, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    past = datetime(2026, 1, 2, tzinfo=UTC)
    key = key_of(tmp_path / "keys.yaml", "acme", expires=past)
    async with HttpFrontHarness(harness, config_of(harness, tmp_path)) as front:
        with caplog.at_level("INFO", "tandem.audit"):
            reply = await front.post("/v1/chat/completions", CHAT, headers={"x-api-key": key})
        assert reply.status == 401
        entry = json.loads(caplog.records[-1].getMessage())
        assert (entry["method"], entry["result"]) == ("/v1/chat/completions", "UNAUTHENTICATED")
        assert entry["peer"].startswith("ipv4:127.0.0.1:")
        assert key not in caplog.text


async def test_a_quota_is_429_with_what_is_left(harness: GatewayHarness, tmp_path: Path) -> None:
    key = key_of(tmp_path / "keys.yaml", "acme", max_priority=2)
    config = config_of(harness, tmp_path, requests_per_s=0.1, burst_s=20)
    async with HttpFrontHarness(harness, config) as front:
        headers = {"x-api-key": key}
        body = {**CHAT, "priority": 50}
        replies = [await front.post("/v1/chat/completions", body, headers=headers) for _ in range(3)]
        assert [reply.status for reply in replies] == [200, 200, 429]
        assert replies[0].headers["x-ratelimit-limit-requests"] == "2"
        assert [reply.headers["x-ratelimit-remaining-requests"] for reply in replies] == ["1", "0", "0"]
        assert replies[0].headers["x-ratelimit-reset-requests"].endswith("ms")
        assert 0 < int(replies[2].headers["Retry-After"]) <= 13  # a quarter later, at most
        assert replies[2].error["code"] == "rate_limit_exceeded"
        assert harness.replicas["p0"].submissions[-1].priority == 2, "within the caller's limit"


async def test_a_request_arrives_with_its_headers(harness: GatewayHarness, tmp_path: Path) -> None:
    """What is refused counts from there, as over gRPC."""
    async with HttpFrontHarness(harness) as front:
        ended: list[EndedRequest] = []
        requests = front.gateway.requests
        requests._observers = (*requests._observers, ended.append)
        body = json.dumps({**CHAT, "temperature": -1}).encode()
        async with front.connection() as (reader, writer):
            before = front.harness.clock.now()
            writer.write(raw_request(b"", f"Content-Length: {len(body)}", "Expect: 100-continue"))
            await reader.readuntil(b"100 Continue\r\n\r\n")
            after = front.harness.clock.now()
            writer.write(body)
            await reader.readuntil(b"HTTP/1.1 400 ")
        assert before <= ended[-1].started_at <= after


async def test_tls_is_spoken_as_over_grpc(harness: GatewayHarness, tmp_path: Path) -> None:
    cert_file, key_file = write_certificate(tmp_path, "first")
    config = harness.config(tls_cert_file=str(cert_file), tls_key_file=str(key_file))
    async with HttpFrontHarness(harness, config) as front:
        trusted = ssl.create_default_context(cafile=str(cert_file))
        url = f"https://127.0.0.1:{front.gateway.http_port}"
        async with aiohttp.ClientSession(url) as session:
            async with session.post("/v1/chat/completions", json=CHAT, ssl=trusted) as reply:
                assert reply.status == 200
            with pytest.raises(aiohttp.ClientError):
                await session.get("/health", ssl=ssl.create_default_context())


async def test_a_client_certificate_is_who_calls(harness: GatewayHarness, tmp_path: Path) -> None:
    cert_file, key_file = write_certificate(tmp_path, "first")
    identities = [{"name": "localhost", "tenant": "acme"}]
    auth = {"mode": "required", "certificates": {"ca_file": str(cert_file), "identities": identities}}
    config = harness.config(auth=auth, tls_cert_file=str(cert_file), tls_key_file=str(key_file))
    async with HttpFrontHarness(harness, config) as front:
        shown = ssl.create_default_context(cafile=str(cert_file))
        async with aiohttp.ClientSession(f"https://127.0.0.1:{front.gateway.http_port}") as session:
            with pytest.raises((aiohttp.ClientError, ConnectionError)):
                await session.get("/v1/models", ssl=shown)
            shown = ssl.create_default_context(cafile=str(cert_file))
            shown.load_cert_chain(cert_file, key_file)
            async with session.post("/v1/chat/completions", json=CHAT, ssl=shown) as reply:
                assert reply.status == 200, await reply.text()
        assert harness.replicas["p0"].submissions[-1].tenant == "acme"


async def test_pages_of_other_sites_reach_nothing(front: HttpFrontHarness) -> None:
    """Where nobody is asked for a credential, names of others for this host and forms are refused."""
    reply = await front.get("/v1/models", headers={"Host": "rebound.example"})
    assert reply.status == 421
    text = {"Content-Type": "text/plain"}
    reply = await front.send("POST", "/v1/chat/completions", data=json.dumps(CHAT), headers=text)
    assert reply.status == 415
    reply = await front.send("OPTIONS", "/v1/chat/completions", headers={"Origin": "https://a.example"})
    assert reply.status == 405
    assert not [name for name in reply.headers if name.lower().startswith("access-control")]
    assert refused_host("rebound.example", ()) != ""


# --------------------------------------------------------------------------------------------- bounds


async def test_an_oversized_body_is_refused_before_it_is_read(front: HttpFrontHarness) -> None:
    async with front.connection() as (reader, writer):
        writer.write(raw_request(b"{", "Content-Length: 1000000000"))
        head = await reader.readuntil(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 413 ")
        assert b"Connection: close" in head


async def test_a_body_without_a_length_ends_at_the_limit(front: HttpFrontHarness) -> None:
    async with front.connection() as (reader, writer):
        writer.write(raw_request(b"", "Transfer-Encoding: chunked"))
        for _ in range(20):
            writer.write(b"400\r\n" + b" " * 1024 + b"\r\n")
        assert (await reader.readuntil(b"\r\n")).startswith(b"HTTP/1.1 413 ")


async def test_whoever_expects_leave_to_send_gets_it_when_the_headers_are_good(
    front: HttpFrontHarness,
) -> None:
    async with front.connection() as (reader, writer):
        writer.write(raw_request(b"", "Expect: 100-continue", "Content-Length: 100000"))
        assert (await reader.readuntil(b"\r\n")).startswith(b"HTTP/1.1 413 ")
    body = json.dumps(CHAT).encode()
    async with front.connection() as (reader, writer):
        writer.write(raw_request(b"", "Expect: 100-continue", f"Content-Length: {len(body)}"))
        assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 100 ")
        writer.write(body)
        assert (await reader.readuntil(b"\r\n")).startswith(b"HTTP/1.1 200 ")


async def test_a_slow_body_is_not_waited_for(front: HttpFrontHarness) -> None:
    async with front.connection() as (reader, writer):
        writer.write(raw_request(b'{"model"', "Content-Length: 100"))
        assert (await reader.readuntil(b"\r\n")).startswith(b"HTTP/1.1 408 ")


@pytest.mark.parametrize("sent", [b"", b"POST /v1/chat", b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\nA: b"])
async def test_a_connection_without_a_request_is_closed(front: HttpFrontHarness, sent: bytes) -> None:
    async with front.connection() as (reader, writer):
        writer.write(sent)
        assert await reader.read() == b""


UNREAD = {
    "a long header": (raw_request(b"", "A: " + "b" * 10_000, "Content-Length: 2"), 431),
    "a long name": (raw_request(b"", "b" * 10_000 + ": A", "Content-Length: 2"), 431),
    "many headers": (raw_request(b"", *(f"X-{number}: y" for number in range(500))), 431),
    "a long path": (raw_request(b"", path="/" + "b" * 10_000), 431),
    "a wrong length": (raw_request(b"", "Content-Length: b"), 400),
    "another protocol": (b"\x16\x03\x01\x00\x00", 400),
    "bbb": (b"bbb\r\n\r\n", 400),
}


@pytest.mark.parametrize("what", UNREAD)
async def test_what_is_no_request_is_refused_as_the_api_does_and_ends_its_connection(
    front: HttpFrontHarness, what: str
) -> None:
    sent, status = UNREAD[what]
    async with front.connection() as (reader, writer):
        writer.write(sent)
        head, _, body = (await reader.read()).partition(b"\r\n\r\n")
    assert f" {status} ".encode() in head.partition(b"\r\n")[0]
    assert b"Content-Type: application/json" in head
    assert b"Server: tandem" in head
    error = json.loads(body)["error"]
    assert (error["type"], error["param"], error["code"]) == ("invalid_request_error", None, None)
    assert "bbb" not in error["message"], "no secret that was cut is shown"
    assert (await front.get("/health")).status == 200


async def test_compressed_bodies_are_refused(front: HttpFrontHarness) -> None:
    headers = {"Content-Type": "application/json", "Content-Encoding": "gzip"}
    reply = await front.send("POST", "/v1/chat/completions", data=b"\x1f\x8b", headers=headers)
    assert reply.status == 415


# ----------------------------------------------------------------------------------- clients that go


@pytest.mark.parametrize("streams", [True, False])
async def test_a_client_that_goes_ends_its_request(front: HttpFrontHarness, streams: bool) -> None:
    decode = front.harness.replicas["d0"]
    decode.script.stop_after = 3
    async with front.connection() as (reader, writer):
        body = json.dumps({**CHAT, "stream": streams}).encode()
        writer.write(raw_request(body, f"Content-Length: {len(body)}"))
        if streams:
            await reader.readuntil(b"data: ")
        else:
            await until(lambda: bool(decode.decoding), "it decodes")
        writer.transport.abort()
        await until(lambda: bool(decode.cancels), "the replica is told to stop")
        await until(lambda: front.gateway.requests.num_running == 0, "nothing runs")


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/responses"])
async def test_an_answer_that_is_kept_to_its_end_is_bounded(
    front: HttpFrontHarness, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    monkeypatch.setattr("cluster.http.kept_output.MAX_KEPT_BYTES", 40_000)
    chat = {**CHAT, "max_tokens": 60, "logprobs": True, "top_logprobs": 20}
    response = {"input": "hello", "max_output_tokens": 60, "top_logprobs": 20}
    body = chat if path.startswith("/v1/chat") else response
    whole = await front.post(path, body)
    assert (whole.status, whole.error["param"], whole.error["code"]) == (400, "stream", "answer_too_large")
    streamed = await front.post(path, {**body, "stream": True})
    assert streamed.status == 200
    name, last = streamed.events[-1]
    if body is chat:
        assert last == "[DONE]"
    else:
        assert (name, last["response"]["error"]["code"]) == ("response.failed", "invalid_prompt")
        assert 0 < last["response"]["usage"]["output_tokens"] < 60, "what it took until then"
    await until(lambda: front.gateway.requests.num_running == 0, "nothing runs")
    assert front.gateway.requests.unread.num_bytes == 0
    assert (await front.post(path, {**body, "top_logprobs": 0, **_short(path)})).status == 200


KEPT = {**CHAT, "max_tokens": 120, "logprobs": True, "top_logprobs": 20}


def small(harness: GatewayHarness, max_unread_mb: float, **gateway: Any) -> Any:
    """A configuration in which so little may wait for clients."""
    return harness.config(**gateway).model_copy(
        update={"admission": AdmissionConfig(max_unread_mb=max_unread_mb)}
    )


async def test_answers_that_are_kept_to_their_ends_are_bounded_together(harness: GatewayHarness) -> None:
    """The largest ends, in whatever it is; another one goes on with its place."""
    async with HttpFrontHarness(harness, small(harness, 0.15)) as front:
        unread, decode = front.gateway.requests.unread, harness.replicas["d0"]
        # What waits in between is little then.
        decode.script.token_s = 0.002
        decode.script.stop_after = 60
        first = asyncio.create_task(front.post("/v1/chat/completions", KEPT))
        await until(lambda: unread.num_bytes > 60_000, "half of it is kept")
        held = unread.num_bytes
        second = asyncio.create_task(front.post("/v1/chat/completions", KEPT))
        await until(lambda: unread.num_bytes >= 2 * held, "both have a half")
        decode.script.stop_after = None
        decode.script.resume.set()
        replies = sorted([await first, await second], key=lambda it: it.status)
        assert [reply.status for reply in replies] == [200, 429]
        assert "more than 0.15 MB of output wait in this gateway, most of it in this answer" in str(
            replies[1].error["message"]
        )
        assert len(replies[0].json["choices"][0]["logprobs"]["content"]) == 120
        assert unread.num_bytes == 0
        await until(lambda: front.gateway.requests.num_running == 0, "nothing runs")


async def test_an_answer_counts_until_its_client_has_taken_it(harness: GatewayHarness) -> None:
    async with (
        HttpFrontHarness(harness, small(harness, 9.0)) as front,
        front.connection() as (reader, writer),
    ):
        unread = front.gateway.requests.unread
        many = {**KEPT, "max_tokens": 400, "n": 16}
        body = json.dumps(many).encode()
        writer.write(raw_request(body, f"Content-Length: {len(body)}"))
        await reader.readuntil(b"HTTP/1.1 200 OK")
        writer.transport.pause_reading()  # type: ignore[attr-defined]
        await until(lambda: front.gateway.requests.num_running == 0, "the request has ended")
        assert unread.num_bytes > 6_000_000
        reply = await front.post("/v1/chat/completions", {**many, "n": 8})
        assert reply.status == 200, "the slower client has lost its connection"
        assert unread.num_bytes == 0
        writer.transport.abort()


def _short(path: str) -> dict[str, int]:
    return {"max_tokens" if path.startswith("/v1/chat") else "max_output_tokens": 3}


@pytest.mark.parametrize("streams", [False, True])
async def test_a_client_that_takes_nothing_is_cut_off(harness: GatewayHarness, streams: bool) -> None:
    config = harness.config(http={"write_timeout_s": 0.3})
    async with HttpFrontHarness(harness, config) as front, front.connection() as (reader, writer):
        many = {"stream": streams, "max_tokens": 400, "n": 16, "logprobs": True, "top_logprobs": 20}
        body = json.dumps({**CHAT, **many}).encode()
        writer.write(raw_request(body, f"Content-Length: {len(body)}"))
        await reader.readuntil(b"data: " if streams else b"HTTP/1.1 200 OK")
        writer.transport.pause_reading()  # type: ignore[attr-defined]
        front_port = front.gateway._http
        assert front_port is not None
        await until(lambda: front_port.num_connections() == 0, "its connection is ended")
        await until(lambda: front.gateway.requests.num_running == 0, "and its request")
        assert front.gateway.requests.unread.num_bytes == 0
        writer.transport.abort()


async def test_a_stream_that_is_cut_off_frees_what_its_client_does_not_take(harness: GatewayHarness) -> None:
    """At once, not when the write has lasted too long."""
    config = small(harness, 0.15, http={"write_timeout_s": 120.0})
    async with HttpFrontHarness(harness, config) as front, front.connection() as (reader, writer):
        many = {"stream": True, "max_tokens": 400, "n": 16, "logprobs": True, "top_logprobs": 20}
        body = json.dumps({**CHAT, **many}).encode()
        writer.write(raw_request(body, f"Content-Length: {len(body)}"))
        await reader.readuntil(b"data: ")
        writer.transport.pause_reading()  # type: ignore[attr-defined]
        await until(lambda: front.gateway.requests.num_running == 0, "it is cut off")
        await until(lambda: front.gateway.requests.unread.num_bytes == 0, "nothing of it is held", 10.0)
        reply = await front.post("/v1/chat/completions", {**CHAT, "max_tokens": 3})
        assert reply.status == 200
        writer.transport.resume_reading()  # type: ignore[attr-defined]
        events = b""
        while not events.endswith(b"\r\n0\r\n\r\n") and (read := await reader.read(1 << 16)):
            events = events[-1000:] + read
        assert b'"code":"slow_client"' in events, "a client that reads again learns why"
        assert read, "and its answer is whole"


# ----------------------------------------------------------------------------------------- gateways that go


async def test_a_stream_finishes_while_its_gateway_leaves(harness: GatewayHarness) -> None:
    async with HttpFrontHarness(harness, harness.config(drain_s=60.0)) as front:
        harness.gateways.remove(front.gateway)
        decode = harness.replicas["d0"]
        decode.script.stop_after = 3
        async with front.session.post("/v1/chat/completions", json={**CHAT, "stream": True}) as reply:
            events = events_of(reply)
            await anext(events)
            stopping = asyncio.create_task(front.gateway.stop())
            await until(lambda: bool(front.gateway.requests.acceptance._is_leaving), "it leaves")
            refused = await front.chat()
            assert (refused.status, refused.error["code"]) == (503, "unavailable")
            assert refused.headers["Connection"] == "close"
            assert (await front.get("/health")).status == 503
            decode.script.resume.set()
            rest = [event async for event in events]
            assert rest[-1] == "[DONE]"
            assert rest[-2]["choices"][0]["finish_reason"] == "length"
        await stopping


async def test_what_does_not_finish_in_time_ends_with_an_error_and_without_done(
    harness: GatewayHarness,
) -> None:
    async with HttpFrontHarness(harness, harness.config(drain_s=0.1)) as front:
        harness.gateways.remove(front.gateway)
        harness.replicas["d0"].script.stop_after = 3
        async with front.session.post("/v1/chat/completions", json={**CHAT, "stream": True}) as reply:
            events = events_of(reply)
            await anext(events)
            stopping = asyncio.create_task(front.gateway.stop())
            rest = [event async for event in events]
            assert rest[-1]["error"]["code"] == "unavailable"
            assert "[DONE]" not in rest
        await stopping


async def test_a_killed_gateway_cuts_its_streams_and_never_says_done() -> None:
    with http_process(token_s=0.01) as (process, port):
        async with aiohttp.ClientSession(f"http://127.0.0.1:{port}") as session:
            body = {**CHAT, "stream": True, "max_tokens": 400}
            async with session.post("/v1/chat/completions", json=body) as reply:
                events = events_of(reply)
                seen = [await anext(events) for _ in range(5)]
                process.kill()
                with pytest.raises(aiohttp.ClientPayloadError):
                    seen.extend([event async for event in events])
    assert "[DONE]" not in seen
    assert all(event["choices"][0]["finish_reason"] is None for event in seen)


def test_another_port_than_the_default_comes_with_a_free_one_for_http() -> None:
    def http_port(**fields: Any) -> int | None:
        return GatewayConfig.model_validate(fields).http.port

    assert http_port() == 8784
    assert http_port(port=9000) == http_port(port=0) == 0
    assert http_port(port=9000, http={"port": 9001}) == 9001
    assert http_port(port=9000, http={"body_timeout_s": 1}) == 0
    assert http_port(http={"port": None}) is None
    assert GatewayConfig().at(None, 9000).http.port == 0


async def test_without_a_port_nothing_listens(harness: GatewayHarness) -> None:
    gateway, _ = await harness.add_gateway(harness.config(http={"port": None}))
    assert gateway.http_port == 0


def test_every_route_has_an_entry() -> None:
    assert all(access in ("open", "user") for access in ROUTE_ACCESS.values())


# ------------------------------------------------------------------------------------- what anybody may ask


async def test_head_is_answered_wherever_get_is(front: HttpFrontHarness) -> None:
    """Also of the console, whose routes `test_red_team` lists."""
    for path in ("/health", "/ping", "/version", "/v1/models", "/v1/models/m"):
        got, head = await front.get(path), await front.send("HEAD", path)
        assert (head.status, got.status, head.body) == (200, 200, b"")
        assert int(head.headers.get("Content-Length", "0")) == len(got.body)


async def test_version_and_ping_are_open(harness: GatewayHarness, tmp_path: Path) -> None:
    key_of(tmp_path / "keys.yaml", "acme")
    async with HttpFrontHarness(harness, config_of(harness, tmp_path)) as front:
        assert (await front.get("/ping")).status == 200
        assert (await front.get("/version")).json.keys() == {"version"}
        unknown = await front.get("/v1/models")
        assert unknown.status == 401
        assert "send the header `Authorization: Bearer KEY`" in unknown.error["message"]


async def test_a_request_without_a_version_is_answered_with_a_status(front: HttpFrontHarness) -> None:
    async with front.connection() as (reader, writer):
        writer.write(b"GET /health\r\n\r\n")
        assert (await reader.readline()).startswith(b"HTTP/1.0 400 ")
