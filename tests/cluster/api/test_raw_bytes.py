"""Bytes that are no gRPC and no HTTP, at the ports of a running gateway: it serves afterwards, and keeps
neither descriptors nor tasks of those who sent them."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from random import Random

import psutil
import pytest
from gateway_harness import PROMPT, GatewayHarness, until
from patience import WAIT_S

from cluster.api.generate_options import GenerateOptions

SEED = 23
_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_SETTINGS = bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])
NUM_CONNECTIONS = 40


def http2_frame(rng: Random) -> bytes:
    """Return a frame of any type, flags and stream, whose length may be a lie."""
    body = rng.randbytes(rng.choice([0, 1, 8, 100]))
    length = len(body) if rng.random() < 0.6 else rng.choice([0, 1, 16_384, (1 << 24) - 1])
    head = length.to_bytes(3, "big") + bytes([rng.choice([*range(10), 255]), rng.randrange(256)])
    return head + rng.choice([0, 1, 3, 2, (1 << 31) - 1]).to_bytes(4, "big") + body


def grpc_bytes(rng: Random) -> bytes:
    if rng.random() < 0.3:
        return rng.randbytes(rng.randint(1, 2000))
    data = _PREFACE + _SETTINGS + b"".join(http2_frame(rng) for _ in range(rng.randint(0, 6)))
    return data[: rng.randint(1, len(data))] if rng.random() < 0.5 else data


def http_bytes(rng: Random) -> bytes:
    """Return a request for the console: garbage, headers or bodies that are too large, or cut ones."""
    kind = rng.randrange(5)
    if kind == 0:
        return rng.randbytes(rng.randint(1, 2000))
    if kind == 1:
        return b"GET / HTTP/1.1\r\nhost: x\r\nx-long: " + b"a" * 200_000 + b"\r\n\r\n"
    if kind == 2:
        return b"POST /api/login HTTP/1.1\r\nhost: x\r\ncontent-length: 99999999999\r\n\r\n" + bytes(1000)
    if kind == 3:
        return b"GET / HTTP/1.1\r\n" + b"x-many: 1\r\n" * 20_000 + b"\r\n"
    return b"POST /api/login HTTP/1.1\r\nhost: x\r\ncontent-length: 100\r\n\r\n{"


async def send_raw(port: int, data: bytes) -> socket.socket:
    """Connect and send as much as is read; the connection is half open: nobody reads from it."""
    sock = await asyncio.to_thread(socket.create_connection, ("127.0.0.1", port))
    sock.setblocking(False)
    with contextlib.suppress(ConnectionError, TimeoutError):
        async with asyncio.timeout(2.0):
            await asyncio.get_running_loop().sock_sendall(sock, data)
    return sock


@pytest.mark.parametrize("port_name", ["public", "admin", "console"])
async def test_a_gateway_serves_after_bytes_of_any_kind(harness: GatewayHarness, port_name: str) -> None:
    await harness.add_replica("p0", "prefill")
    await harness.add_replica("d0", "decode")
    gateway, address = await harness.add_gateway(harness.config(console_port=0))
    client = harness.client(address)
    admin = harness.admin(gateway)
    port = {
        "public": int(address.rpartition(":")[2]),
        "admin": gateway.admin_port,
        "console": gateway.console_port,
    }[port_name]
    make = http_bytes if port_name == "console" else grpc_bytes
    process = psutil.Process()

    async def serves() -> None:
        async with asyncio.timeout(WAIT_S):
            await client.complete(PROMPT, GenerateOptions(max_tokens=3))
            await admin.status()

    async def console_serves() -> bool:
        reader, writer = await asyncio.open_connection("127.0.0.1", gateway.console_port)
        writer.write(b"GET / HTTP/1.1\r\nhost: 127.0.0.1\r\nconnection: close\r\n\r\n")
        async with asyncio.timeout(WAIT_S):
            answer = await reader.read(1 << 20)
        writer.close()
        await writer.wait_closed()
        return answer.startswith(b"HTTP/1.1 ")

    assert port is not None
    await serves()
    assert await console_serves()
    rng = Random(f"{SEED} {port_name}")
    (await send_raw(port, make(rng))).close()  # what the first one takes once
    num_tasks, num_descriptors = len(asyncio.all_tasks()), process.num_fds()
    open_ones = [await send_raw(port, make(rng)) for _ in range(NUM_CONNECTIONS)]
    await serves()
    assert await console_serves()
    for sock in open_ones:
        sock.close()
    await until(lambda: process.num_fds() <= num_descriptors + 4, "their descriptors are closed")
    await until(lambda: len(asyncio.all_tasks()) <= num_tasks + 2, "their tasks have ended")
    await serves()
