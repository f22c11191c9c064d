"""How a gateway listens: TLS with certificates that change, a port for probes, and connections that age."""

from __future__ import annotations

import asyncio
import ssl
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from certificates import name_of, write_certificate
from gateway_harness import PROMPT, GatewayHarness, expected
from grpc_health.v1 import health_pb2, health_pb2_grpc
from patience import WAIT_S
from serving import free_port

from cluster.api.channel import ClientCredentials
from cluster.api.client import Client
from cluster.api.generate_options import GenerateOptions
from cluster.api.public_ports import SERVICE_NAME
from cluster.config import parse_config
from cluster.errors import CallError, ConfigError, StartError

SERVING = health_pb2.HealthCheckResponse.SERVING


async def start(harness: GatewayHarness, **gateway: Any) -> str:
    """A gateway with two replicas behind it; its address."""
    await harness.add_replica("p0", "prefill")
    await harness.add_replica("d0", "decode")
    _, address = await harness.add_gateway(harness.config(**gateway))
    return address


async def shown_name(address: str) -> str:
    """Of the certificate that the server shows to a new connection."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.set_alpn_protocols(["h2"])
    host, _, port = address.rpartition(":")
    _, writer = await asyncio.open_connection(host, int(port), ssl=context)
    certificate = writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
    writer.close()
    return name_of(certificate)


def trusting(cert_file: Path) -> ClientCredentials:
    return ClientCredentials(root_certificate=cert_file.read_bytes())


async def test_with_a_certificate_only_tls_is_spoken(harness: GatewayHarness, tmp_path: Path) -> None:
    cert_file, key_file = write_certificate(tmp_path, "one")
    address = await start(harness, tls_cert_file=str(cert_file), tls_key_file=str(key_file))
    async with Client(f"tls://{address}", credentials=trusting(cert_file)) as client:
        done = await client.complete(PROMPT, GenerateOptions(seed=7, max_tokens=12))
        assert list(done.token_ids[0]) == expected(7, 12)
    (tmp_path / "elsewhere").mkdir()
    other, _ = write_certificate(tmp_path / "elsewhere", "somebody else")
    async with Client(f"tls://{address}", credentials=trusting(other)) as stranger:
        with pytest.raises(CallError) as caught:
            await stranger.models()
        assert caught.value.code is grpc.StatusCode.UNAVAILABLE
    async with Client(address) as plain:
        with pytest.raises(CallError):
            await plain.models()


async def test_a_renewed_certificate_is_shown_without_a_restart(
    harness: GatewayHarness, tmp_path: Path
) -> None:
    cert_file, key_file = write_certificate(tmp_path, "one")
    address = await start(harness, tls_cert_file=str(cert_file), tls_key_file=str(key_file))
    assert await shown_name(address) == "one"
    key_file.unlink()  # in the middle of being replaced
    assert await shown_name(address) == "one"
    write_certificate(tmp_path, "two")
    assert await shown_name(address) == "two"
    cert_file.write_text("torn")
    assert await shown_name(address) == "two"


async def test_a_certificate_that_cannot_be_used_is_named(harness: GatewayHarness, tmp_path: Path) -> None:
    cert_file, key_file = write_certificate(tmp_path, "one")
    missing, torn = tmp_path / "missing.key", tmp_path / "torn.crt"
    torn.write_text("torn")
    with pytest.raises(StartError, match=r"gateway\.tls_key_file.*missing\.key"):
        await harness.add_gateway(harness.config(tls_cert_file=str(cert_file), tls_key_file=str(missing)))
    with pytest.raises(StartError, match=r"gateway\.tls_cert_file: .*torn\.crt holds no PEM"):
        await harness.add_gateway(harness.config(tls_cert_file=str(torn), tls_key_file=str(key_file)))
    with pytest.raises(ConfigError, match="tls_cert_file and tls_key_file are given together"):
        harness.config(tls_key_file=str(key_file))


async def test_probes_that_speak_no_tls_have_a_port_with_health_alone(
    harness: GatewayHarness, tmp_path: Path
) -> None:
    cert_file, key_file = write_certificate(tmp_path, "one")
    health_port = free_port()
    address = await start(
        harness, tls_cert_file=str(cert_file), tls_key_file=str(key_file), health_port=health_port
    )
    async with Client(f"tls://{address}", credentials=trusting(cert_file)) as client:
        await client.complete(PROMPT, GenerateOptions(max_tokens=1))
    probe = f"127.0.0.1:{health_port}"
    async with grpc.aio.insecure_channel(probe) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        answer = await stub.Check(health_pb2.HealthCheckRequest(service=SERVICE_NAME), timeout=WAIT_S)
        assert answer.status == SERVING
    async with Client(probe) as client:
        with pytest.raises(CallError) as caught:
            await client.models()
        assert caught.value.code is grpc.StatusCode.UNIMPLEMENTED


async def test_a_health_port_that_is_taken_is_named(harness: GatewayHarness) -> None:
    taken = free_port()
    await harness.add_gateway(harness.config(health_port=taken))
    with pytest.raises(StartError, match=f"serve its health on 127.0.0.1:{taken}: the port is taken"):
        await harness.add_gateway(harness.config(health_port=taken))


async def test_an_old_connection_is_left_but_not_by_its_streams(harness: GatewayHarness) -> None:
    address = await start(harness, max_connection_age_s=0.3)
    script = harness.replicas["d0"].script
    script.stop_after = 4
    async with grpc.aio.insecure_channel(address) as channel, Client(address) as client:
        stub = health_pb2_grpc.HealthStub(channel)
        await stub.Check(health_pb2.HealthCheckRequest(), timeout=WAIT_S)
        stream = client.generate(PROMPT, GenerateOptions(seed=7, max_tokens=12))
        waiting = asyncio.create_task(collect(stream))
        async with asyncio.timeout(WAIT_S):
            while channel.get_state() is grpc.ChannelConnectivity.READY:
                await channel.wait_for_state_change(grpc.ChannelConnectivity.READY)
        script.resume.set()
        assert await waiting == expected(7, 12)
        assert stream.num_resumes == 0


async def collect(stream: Any) -> list[int]:
    ids: list[int] = []
    async for event in stream:
        ids += getattr(event, "token_ids", ())
    return ids


def test_custom_resources_are_custom() -> None:
    pool = {"name": "all", "role": "both"}
    with pytest.raises(ConfigError, match=r"pools\[0\].resources: GPU is Ray's own"):
        parse_config({"model": "m", "pools": [{**pool, "resources": {"GPU": 1}}]}, "file")
    with pytest.raises(ConfigError, match=r"gateway\.resources\.g: .*must be at least 0.0001"):
        parse_config({"model": "m", "pools": [pool], "gateway": {"resources": {"g": 0}}}, "file")
