"""What identifies a cluster and its callers is replaced while requests run, and none of them fails: an
issuer's keys, the gateway's certificate, the root of block keys. API keys: `test_authentication.py`; the
certificates inside: `tests/e2e/test_inner_tls.py`."""

from __future__ import annotations

import asyncio
import itertools
import ssl
from collections.abc import Awaitable, Callable
from pathlib import Path

import aiohttp
import pytest
from authority import Authority
from callers import Issuer, bearing, draw, jwt_config, write_jwks
from certificates import name_of
from gateway_harness import PROMPT, GatewayHarness, expected, until

from cluster.api.channel import ClientCredentials
from cluster.api.client import Client
from cluster.api.generate_options import GenerateOptions
from cluster.errors import CallError
from cluster.identity.key_roots import end_rotation, rotate_key_root
from kvtransfer.kv_events import BlocksStored, KvSnapshot

NUM_WORKERS = 4
TORN = "-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n"


class Load:
    """Workers that send requests one after the other. `passes` returns when each has sent some more."""

    def __init__(self, send: Callable[[int], Awaitable[None]]) -> None:
        self._send = send
        self._num_done = [0] * NUM_WORKERS
        self._is_over = False

    async def passes(self, what: str) -> None:
        before = list(self._num_done)
        await until(
            lambda: (
                all(now >= was + 2 for now, was in zip(self._num_done, before, strict=True))
                or any(task.done() for task in self._tasks)
            ),
            f"requests go on: {what}",
        )
        for task in self._tasks:
            if task.done():
                task.result()

    async def _work(self, index: int) -> None:
        while not self._is_over:
            await self._send(index)
            self._num_done[index] += 1

    async def __aenter__(self) -> Load:
        self._tasks = [asyncio.create_task(self._work(index)) for index in range(NUM_WORKERS)]
        await self.passes("the first ones")
        return self

    async def __aexit__(self, *_: object) -> None:
        self._is_over = True
        await asyncio.gather(*self._tasks)


async def complete(client: Client, seed: int) -> None:
    done = await client.complete(PROMPT, GenerateOptions(seed=seed, max_tokens=4))
    assert list(done.token_ids[0]) == expected(seed, 4)


@pytest.fixture
async def replicas(harness: GatewayHarness) -> GatewayHarness:
    await harness.add_replica("p0", "prefill")
    await harness.add_replica("d0", "decode")
    return harness


async def test_an_issuers_keys_rotate_under_load(replicas: GatewayHarness, tmp_path: Path) -> None:
    issuers = [Issuer(key_id=f"key-{number}") for number in range(4)]
    keys_file = write_jwks(tmp_path / "jwks.json", issuers[:1])
    auth = {"mode": "required", "jwt": jwt_config(keys_file)}
    gateway, address = await replicas.add_gateway(replicas.config(auth=auth))
    authenticator = gateway._access.authenticator
    current = issuers[0]
    client = replicas.client(address, credentials=ClientCredentials(bearer=lambda: current.token()))
    async with Load(lambda index: complete(client, index)) as load:
        for old, new in itertools.pairwise(issuers):
            write_jwks(keys_file, (old, new))
            authenticator.reload()
            await load.passes("both keys are known")
            current = new
            await load.passes("the new key signs")
            write_jwks(keys_file, (new,))
            authenticator.reload()
            await load.passes("the old key is gone")
            keys_file.write_text("{")  # as somebody may write it by hand
            authenticator.reload()
            await load.passes("the file is damaged")
    stale = replicas.client(address, credentials=bearing(issuers[0].token()))
    with pytest.raises(CallError, match="UNAUTHENTICATED"):
        await stale.models()


async def test_the_certificate_of_a_gateway_rotates_under_load(
    replicas: GatewayHarness, tmp_path: Path
) -> None:
    """Each request and each look at the console makes a new connection, also while the certificate is
    replaced already and its key is not."""
    authority = Authority("authority")
    ca_file = authority.write(tmp_path)
    cert_file, key_file = authority.issue(tmp_path, "one")
    config = replicas.config(tls_cert_file=str(cert_file), tls_key_file=str(key_file), console_port=0)
    gateway, address = await replicas.add_gateway(config)
    credentials = ClientCredentials(root_certificate=ca_file.read_bytes())
    trusting = ssl.create_default_context(cafile=str(ca_file))
    url = f"https://127.0.0.1:{gateway.console_port}/console/api/session"

    async def send(index: int) -> None:
        async with Client(f"tls://{address}", credentials=credentials) as client:
            await complete(client, index)
        async with aiohttp.ClientSession() as session, session.get(url, ssl=trusting) as reply:
            assert reply.status == 200

    async with Load(send) as load:
        for name in ("two", "three"):
            before = key_file.read_bytes()
            authority.issue(tmp_path, name)
            after = key_file.read_bytes()
            key_file.write_bytes(before)
            await load.passes("the certificate is of another key")
            key_file.write_bytes(after)
            await load.passes("both are there")
            assert await shown_name(address) == await shown_name(url) == name
            whole = cert_file.read_text()
            cert_file.write_text(TORN)
            await load.passes("the certificate is damaged")
            cert_file.write_text(whole)
            await load.passes("it is whole again")


async def shown_name(place: str) -> str:
    """The common name in the certificate that a server shows to a new connection."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    if not place.startswith("https://"):
        context.set_alpn_protocols(["h2"])
    port = place.removeprefix("https://").partition("/")[0].rpartition(":")[2]
    _, writer = await asyncio.open_connection("127.0.0.1", int(port), ssl=context)
    certificate = writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
    writer.close()
    return name_of(certificate)


async def test_the_root_of_block_keys_rotates_under_load(replicas: GatewayHarness, tmp_path: Path) -> None:
    """What is cached under the old root is found until the overlap ends, and then under the new one only."""
    roots_file = tmp_path / "roots"
    rotate_key_root(roots_file, draw)
    gateway, address = await replicas.add_gateway(replicas.config(auth={"key_root_file": str(roots_file)}))
    client = replicas.client(address)
    decode = replicas.replicas["d0"]
    prompt = PROMPT * 4
    sent = replicas.replicas["p0"].submissions
    sequence = 0

    async def send(index: int) -> None:
        done = await client.complete(prompt, GenerateOptions(seed=index, max_tokens=2))
        assert list(done.token_ids[0]) == expected(index, 2, prompt)

    async def cached_tokens() -> int:
        done = await client.complete(prompt, GenerateOptions(max_tokens=1))
        return (await client.explain(done.request_id)).decisions[0].decode_cached_tokens

    async def hold(keys: tuple[bytes, ...]) -> None:
        """The decode replica says that it has these blocks."""
        nonlocal sequence
        sequence += 1
        decode.broadcast(KvSnapshot(decode.identity, sequence, (BlocksStored(b"", keys),)))
        await until(lambda: gateway._key_roots._num_cached_blocks(keys) == len(keys), "the gateway knows it")

    async with Load(send) as load:
        first = sent[-1]
        await hold(first.block_keys)
        rotate_key_root(roots_file, draw)
        await until(lambda: len(gateway._key_roots.current) == 2, "both roots are in use")
        await load.passes("two roots")
        assert sent[-1].root_key == first.root_key
        assert await cached_tokens() > 0
        end_rotation(roots_file)
        await until(lambda: len(gateway._key_roots.current) == 1, "the new root alone is in use")
        await load.passes("the new root")
        second = sent[-1]
        assert second.root_key != first.root_key
        assert not set(second.block_keys) & set(first.block_keys)
        await hold(second.block_keys)
        assert await cached_tokens() > 0
    assert {it.root_key for it in sent} == {first.root_key, second.root_key}
