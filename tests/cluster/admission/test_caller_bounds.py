"""What one caller may send, have running and keep open at a real gateway, over HTTP and gRPC, and that its
neighbor does not notice."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import grpc
import grpc.aio
import pytest
from callers import key_of
from gateway_harness import PROMPT, GatewayHarness, until
from http_harness import CHAT, HttpFrontHarness, raw_request

from cluster.admission import read_budget
from cluster.admission.config import AdmissionConfig
from cluster.api import authentication
from cluster.config import ClusterConfig
from cluster.errors import retry_after_s
from cluster.proto.tandem.v1 import inference_pb2 as pb
from cluster.proto.tandem.v1 import inference_pb2_grpc

GENERATE = "/tandem.v1.Inference/Generate"
MAX_MESSAGE_BYTES = 1 << 16
MAX_BODY_BYTES = 1 << 20


class Scene:
    """A gateway with two tenants, `flooding` with two keys."""

    def __init__(self, front: HttpFrontHarness, keys: list[str]) -> None:
        self.front = front
        self.harness = front.harness
        self.reading = front.gateway.reading
        self.key, self.other_key, self.neighbor_key = keys
        self.address = ""

    async def chat(self, key: str, **options: Any) -> Any:
        return await self.front.post("/v1/chat/completions", CHAT, headers={"x-api-key": key}, **options)

    async def generate(self, key: str, text: str = PROMPT) -> None:
        """Call `Generate` once, whatever comes; raise `AioRpcError` where it is refused."""
        async with grpc.aio.insecure_channel(self.address) as channel:
            request = pb.GenerateRequest(text=text, max_tokens=1)
            stub = inference_pb2_grpc.InferenceStub(channel)
            async for _ in stub.Generate(request, metadata=(("authorization", f"Bearer {key}"),)):
                pass

    @contextlib.asynccontextmanager
    async def unfinished_body(self, num_bytes: int) -> AsyncIterator[asyncio.StreamReader]:
        """Announce a body of this length and send little of it; return when the gateway reads it."""
        before = self.reading.budget.num_bytes
        async with self.front.connection() as (reader, writer):
            writer.write(raw_request(b"{", f"x-api-key: {self.key}", f"Content-Length: {num_bytes}"))
            await until(lambda: self.reading.budget.num_bytes >= before + num_bytes, "it is read")
            yield reader

    @contextlib.asynccontextmanager
    async def silent_call(self, key: str) -> AsyncIterator[Any]:
        """Begin a call of `Generate` without its message."""
        silence = asyncio.Event()

        async def requests() -> AsyncIterator[pb.GenerateRequest]:
            await silence.wait()
            yield pb.GenerateRequest()

        async with grpc.aio.insecure_channel(self.address) as channel:
            method = channel.stream_stream(
                GENERATE,
                request_serializer=pb.GenerateRequest.SerializeToString,
                response_deserializer=pb.GenerateResponse.FromString,
            )
            call = method(requests(), metadata=(("authorization", f"Bearer {key}"),))
            yield call
            call.cancel()


@contextlib.asynccontextmanager
async def opened(
    harness: GatewayHarness, folder: Path, limits: dict[str, Any], **gateway: Any
) -> AsyncIterator[Scene]:
    path = folder / "keys.yaml"
    keys = [key_of(path, tenant) for tenant in ("flooding", "flooding", "neighbor")]
    tenants = {"flooding": {"requests_per_s": 0.001, "burst_s": 5000}}
    auth = {"mode": "required", "keys_file": str(path), "tenants": tenants}
    sizes = {"max_message_bytes": MAX_MESSAGE_BYTES, "http": {"max_body_bytes": MAX_BODY_BYTES}}
    config: ClusterConfig = harness.config(auth=auth, **{**sizes, **gateway})
    config = config.model_copy(update={"admission": AdmissionConfig.model_validate(limits)})
    async with HttpFrontHarness(harness, config) as front:
        scene = Scene(front, keys)
        ports = front.gateway._ports.clients
        assert ports is not None
        scene.address = f"127.0.0.1:{ports.number}"
        yield scene


@pytest.fixture(autouse=True)
def short_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(read_budget, "WAIT_S", 0.02)


# ----------------------------------------------------------------------------------------- bytes over HTTP


async def test_bodies_under_way_are_bounded_for_a_tenant_whatever_its_keys(
    harness: GatewayHarness, tmp_path: Path
) -> None:
    async with opened(harness, tmp_path, {"max_caller_reading_mb": 2.0}) as scene:
        async with scene.unfinished_body(MAX_BODY_BYTES), scene.unfinished_body(951_400):
            for key in (scene.key, scene.other_key):
                refused = await scene.chat(key)
                assert (refused.status, refused.error["code"]) == (429, "overloaded")
                assert "admission.max_caller_reading_mb" in refused.error["message"]
                assert int(refused.headers["Retry-After"]) >= 1
            with pytest.raises(grpc.aio.AioRpcError, match="max_caller_reading_mb") as over_grpc:
                await scene.generate(scene.key)
            assert over_grpc.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
            assert retry_after_s(tuple(over_grpc.value.trailing_metadata()))
            assert (await scene.chat(scene.neighbor_key)).status == 200
        await until(lambda: scene.reading.budget.num_bytes == 0, "what was cut off is given back")
        assert (await scene.chat(scene.key)).status == 200


async def test_a_body_without_a_length_grows_within_the_bound(
    harness: GatewayHarness, tmp_path: Path
) -> None:
    async with opened(harness, tmp_path, {"max_caller_reading_mb": 1.2}) as scene:
        key = f"x-api-key: {scene.key}"
        chunk = b"4000\r\n" + b" " * 0x4000 + b"\r\n"
        async with (
            scene.unfinished_body(700_000),
            scene.front.connection() as (reader, writer),
        ):
            writer.write(raw_request(b"", key, "Transfer-Encoding: chunked"))
            for _ in range(60):
                writer.write(chunk)
            line = await reader.readline()
            assert b" 429 " in line
        whole = json.dumps(CHAT).encode()
        async with scene.front.connection() as (reader, writer):
            writer.write(raw_request(b"", key, "Transfer-Encoding: chunked"))
            for _ in range(40):
                writer.write(chunk)
            writer.write(b"%x\r\n%s\r\n0\r\n\r\n" % (len(whole), whole))
            assert b" 200 " in await reader.readline()


async def test_a_request_is_taken_from_the_bucket_when_its_body_begins(
    harness: GatewayHarness, tmp_path: Path
) -> None:
    async with opened(harness, tmp_path, {}) as scene:
        quotas = scene.front.gateway.requests.charges.quotas

        def level() -> int:
            return int(quotas.rates("flooding", harness.clock.now())["requests_per_s"].level)

        before = level()
        async with scene.unfinished_body(1000):
            assert level() == before - 1
        assert (await scene.chat(scene.key)).status == 200
        assert level() == before - 2, "what was taken then is not taken again"
        bad = await scene.front.post("/v1/chat/completions", {}, headers={"x-api-key": scene.key})
        assert (bad.status, level()) == (400, before - 3)


async def test_what_a_body_holds_is_passed_on_while_its_answer_is_written(
    harness: GatewayHarness, tmp_path: Path
) -> None:
    async with opened(harness, tmp_path, {}) as scene:
        harness.replicas["d0"].script.stop_after = 2
        headers = {"x-api-key": scene.key}
        body = {"prompt": ["hello"] * 3, "max_tokens": 8, "stream": True}
        async with scene.front.session.post("/v1/completions", json=body, headers=headers) as reply:
            assert reply.status == 200
            await until(lambda: scene.front.gateway.requests.num_running == 3, "all run")
            assert scene.reading.budget.num_bytes == 0
            harness.replicas["d0"].script.resume.set()
            await reply.read()


# ----------------------------------------------------------------------------------------- bytes over gRPC


async def test_messages_that_do_not_come_are_bounded_and_given_up(
    harness: GatewayHarness, tmp_path: Path
) -> None:
    """There is room for the largest message of one call at a time."""
    limits = {"max_caller_reading_mb": 0.1}
    http = {"max_body_bytes": 1 << 15}
    async with opened(harness, tmp_path, limits, message_timeout_s=0.5, http=http) as scene:
        async with scene.silent_call(scene.key) as silent:
            await until(lambda: scene.reading.budget.num_bytes == MAX_MESSAGE_BYTES, "it is waited for")
            with pytest.raises(grpc.aio.AioRpcError, match="max_caller_reading_mb"):
                await scene.generate(scene.other_key)
            await scene.generate(scene.neighbor_key)
            assert await silent.code() is grpc.StatusCode.DEADLINE_EXCEEDED
            assert "gateway.message_timeout_s" in await silent.details()
        await scene.generate(scene.key)
        assert scene.reading.budget.num_bytes == 0


async def test_a_message_that_is_none_is_refused_by_name(harness: GatewayHarness, tmp_path: Path) -> None:
    async with opened(harness, tmp_path, {}) as scene, grpc.aio.insecure_channel(scene.address) as channel:
        metadata = (("authorization", f"Bearer {scene.key}"),)
        raw = channel.unary_stream(GENERATE)
        with pytest.raises(grpc.aio.AioRpcError, match="request: cannot be decoded") as refused:
            await raw(b"\xff\xff", metadata=metadata).read()
        assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        streaming = channel.stream_stream(GENERATE)
        with pytest.raises(grpc.aio.AioRpcError, match="request: is missing"):
            await streaming(iter(()), metadata=metadata).read()
        assert scene.reading.budget.num_bytes == 0


async def test_a_message_beyond_the_bound_is_not_received(harness: GatewayHarness, tmp_path: Path) -> None:
    async with opened(harness, tmp_path, {}) as scene:
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await scene.generate(scene.key, "a" * (MAX_MESSAGE_BYTES + 1))
        assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        await until(lambda: scene.reading.budget.num_bytes == 0, "it is given back")


@pytest.fixture
def no_collector() -> Iterator[None]:
    gc.disable()
    yield
    gc.enable()


async def test_a_refused_request_is_forgotten_at_once(
    harness: GatewayHarness, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, no_collector: None
) -> None:
    """gRPC's own frames keep the error of an aborted call in a cycle, which a collection of garbage alone
    would find."""
    seen: list[Any] = []
    parsed = authentication._parsed

    def noting(handler: Any, message: bytes) -> Any:
        request = parsed(handler, message)
        seen.append(request)
        return request

    monkeypatch.setattr(authentication, "_parsed", noting)
    async with opened(harness, tmp_path, {}) as scene:
        with pytest.raises(grpc.aio.AioRpcError, match="INVALID_ARGUMENT"):
            await scene.generate(scene.key, "a" * 60_000)
        await until(lambda: sys.getrefcount(seen[0]) == 2, "the list alone has the request")


# ------------------------------------------------------------------------------------ calls and connections


async def test_calls_of_a_caller_are_bounded_over_both(harness: GatewayHarness, tmp_path: Path) -> None:
    async with opened(harness, tmp_path, {"max_caller_calls": 2}) as scene:
        async with scene.unfinished_body(100), scene.silent_call(scene.other_key):
            await until(lambda: scene.reading.limits.num_calls("tenant:flooding") == 2, "both run")
            refused = await scene.chat(scene.key)
            assert refused.status == 429
            assert "admission.max_caller_calls" in refused.error["message"]
            with pytest.raises(grpc.aio.AioRpcError, match="max_caller_calls"):
                await scene.generate(scene.key)
            assert (await scene.chat(scene.neighbor_key)).status == 200
        await until(lambda: scene.reading.limits.num_calls("tenant:flooding") == 0, "both ended")


async def test_connections_of_a_caller_are_bounded(harness: GatewayHarness, tmp_path: Path) -> None:
    async with opened(harness, tmp_path, {"max_caller_connections": 2}) as scene:
        url = f"http://127.0.0.1:{scene.front.gateway.http_port}"
        headers = {"x-api-key": scene.key}
        async with contextlib.AsyncExitStack() as clients:
            sessions = [await clients.enter_async_context(aiohttp.ClientSession(url)) for _ in range(3)]
            statuses = []
            for session in sessions:
                async with session.get("/v1/models", headers=headers) as reply:
                    statuses.append(reply.status)
                    text = await reply.text()
            assert statuses == [200, 200, 429]
            assert "admission.max_caller_connections" in text
            assert reply.headers["Connection"] == "close"
            async with sessions[0].get("/v1/models", headers=headers) as again:
                assert again.status == 200, "an open one serves on"
            neighbor = await scene.front.get("/v1/models", headers={"x-api-key": scene.neighbor_key})
            assert neighbor.status == 200
        await until(lambda: scene.reading.limits.num_connections("tenant:flooding") == 0, "all are closed")
