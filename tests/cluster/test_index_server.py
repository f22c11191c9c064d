"""The index server that `tandem serve` starts where none is configured: one that dies comes back."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
import redis
from optional_programs import uses_redis_or_valkey
from patience import WAIT_S
from trust_files import TRUST

from cluster.index_server import IndexServer
from kvtransfer.common.clock import SystemClock
from kvtransfer.store.index.redis_server import with_password

pytestmark = uses_redis_or_valkey


@pytest.fixture
def server() -> Iterator[IndexServer]:
    started = IndexServer("127.0.0.1", TRUST, SystemClock())
    yield started
    started.close()


def client(url: str) -> redis.Redis:
    return redis.Redis.from_url(with_password(url, TRUST), socket_timeout=1.0, retry=None)


def test_one_that_dies_comes_back_at_the_same_address(server: IndexServer) -> None:
    url, clock, pause = server.url, SystemClock(), threading.Event()
    with client(url) as connected:
        first = connected.info("server")["run_id"]
        connected.shutdown(nosave=True)
    end = clock.now() + WAIT_S
    second = first
    while second == first:
        assert clock.now() < end, "no other server came"
        try:
            with client(url) as connected:
                second = connected.info("server")["run_id"]
        except redis.ConnectionError:
            pause.wait(0.05)
    assert server.url == url


def test_strangers_are_refused_and_nothing_answers_after_the_end(server: IndexServer) -> None:
    with client(f"redis://127.0.0.1:{server.port}") as stranger, pytest.raises(redis.AuthenticationError):
        stranger.get("key")
    server.close()
    with client(server.url) as late, pytest.raises(redis.ConnectionError):
        late.ping()
