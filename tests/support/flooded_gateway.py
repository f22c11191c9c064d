"""A gateway over scripted replicas in a process of its own, with two tenants, of which one floods it.

Prints its ports over HTTP and gRPC; ends when its input does.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Awaitable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp
import grpc
import grpc.aio
import psutil
from callers import key_of
from gateway_harness import GatewayHarness, ScriptedReplica, write_model
from http_harness import CHAT, raw_request
from http_process import started_process

from cluster.proto.tandem.v1 import inference_pb2 as pb
from cluster.proto.tandem.v1 import inference_pb2_grpc
from cluster.serve.allocator import return_large_blocks

NUM_BODY_BYTES = 15 << 20
_NUM_SAMPLES = 40


async def _serve(folder: Path, gateway: dict[str, Any]) -> None:
    keys_file = folder / "keys.yaml"
    keys = [key_of(keys_file, tenant) for tenant in ("flooding", "neighbor")]
    harness = GatewayHarness(write_model(folder))
    for replica_id, role in (("p0", "prefill"), ("d0", "decode")):
        replica = harness.replicas[replica_id] = ScriptedReplica(harness, replica_id, role)
        await replica.start()
    auth = {"mode": "required", "keys_file": str(keys_file)}
    running, address = await harness.add_gateway(harness.config(auth=auth, **gateway))
    print(json.dumps([running.http_port, address, *keys]), flush=True)
    await asyncio.to_thread(sys.stdin.read)
    await harness.close()


def main() -> None:
    """Run the process: its argument is the section `gateway` of the configuration, as JSON."""
    return_large_blocks()
    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(_serve(Path(folder), json.loads(sys.argv[1])))


class FloodedGateway(NamedTuple):
    """The gateway, and what a test does to it."""

    process: psutil.Process
    http_port: int
    address: str
    flooding_key: str
    neighbor_key: str

    def rss_mb(self) -> float:
        """Return the memory of the gateway now."""
        return float(self.process.memory_info().rss / 1e6)

    async def neighbor_ttft_ms(self, during: Awaitable[Any] | None = None) -> float:
        """Return the neighbor's median time to the first token over HTTP, while the flood runs."""
        flood = asyncio.ensure_future(during) if during is not None else None
        found: list[float] = []
        headers = {"x-api-key": self.neighbor_key}
        async with aiohttp.ClientSession(f"http://127.0.0.1:{self.http_port}") as session:
            while len(found) < _NUM_SAMPLES or (flood is not None and not flood.done()):
                before = time.perf_counter()
                body = {**CHAT, "stream": True}
                async with session.post("/v1/chat/completions", json=body, headers=headers) as reply:
                    assert reply.status == 200, await reply.text()
                    await reply.content.readline()
                    found.append(time.perf_counter() - before)
                    await reply.read()
        if flood is not None:
            await flood
        return 1e3 * statistics.median(found)

    async def unfinished_body(self, num_bytes: int = NUM_BODY_BYTES) -> tuple[int, Any]:
        """Send all of a long body but its end; return the status of the answer, 0: none came within 2 s,
        and the connection."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.http_port)
        key = f"x-api-key: {self.flooding_key}"
        writer.write(raw_request(b"", key, f"Content-Length: {num_bytes + 1}"))
        status = 0
        try:
            for _ in range(num_bytes >> 18):
                writer.write(b" " * (1 << 18))
                await asyncio.wait_for(writer.drain(), 2.0)
        except (TimeoutError, ConnectionError):
            pass
        try:
            line = await asyncio.wait_for(reader.readline(), 2.0)
            status = int(line.split()[1]) if line else -1
        except (TimeoutError, ConnectionError):
            pass
        return status, writer

    async def long_call(self, num_bytes: int = NUM_BODY_BYTES) -> grpc.StatusCode:
        """Call `Generate` with a prompt that no context has room for; return the status."""
        async with grpc.aio.insecure_channel(self.address) as channel:
            stub = inference_pb2_grpc.InferenceStub(channel)
            metadata = (("authorization", f"Bearer {self.flooding_key}"),)
            call = stub.Generate(pb.GenerateRequest(text="a" * num_bytes), metadata=metadata, timeout=60)
            try:
                async for _ in call:
                    pass
            except grpc.aio.AioRpcError as error:
                return error.code()
        return grpc.StatusCode.OK


@contextmanager
def flooded_gateway(**gateway: Any) -> Iterator[FloodedGateway]:
    """Start a gateway with this section of the configuration."""
    with started_process("flooded_gateway", [json.dumps(gateway)]) as (process, line):
        yield FloodedGateway(psutil.Process(process.pid), *json.loads(line))
