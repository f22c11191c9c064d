"""The check of the index server, against real ones: slow, old, full, and with another password."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from doctor_harness import config_of, context_of, only, said
from index_harness import RawRedis
from optional_programs import uses_redis_or_valkey

from cluster.doctor import redis
from cluster.doctor.check_context import CheckContext
from cluster.doctor.checks import CheckResult, Severity
from cluster.serve.machine import Machine
from cluster.stores import smallest_record_bytes
from kvtransfer.errors import StoreError

pytestmark = uses_redis_or_valkey
OK, NOTE, WARNING, ERROR = Severity


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RawRedis]:
    with closing(RawRedis(tmp_path, maxmemory="64mb", maxmemory_policy="allkeys-lru")) as running:
        running.client().ping()
        yield running


def given(url: str, **store: object) -> CheckContext:
    return context_of(Machine(), config_of(store={"redis_url": url, **store}))


def look(context: CheckContext) -> list[CheckResult]:
    return list(redis.server(context))


def test_a_good_server_is_well(server: RawRedis) -> None:
    results = look(given(server.url, lookup_budget_ms=100))
    assert [result.severity for result in results] == [OK, OK, OK]
    version, lookups, memory = results
    known = server.client().info("server")
    assert str(known.get("valkey_version") or known["redis_version"]) in version.seen
    assert 0 < float(lookups.figures["median_ms"]) <= float(lookups.figures["p90_ms"]) < 100
    assert "allkeys-lru" in memory.seen
    assert server.client().dbsize() == 0


def test_look_ups_beyond_the_budget_are_reported(server: RawRedis) -> None:
    slow = next(
        result for result in look(given(server.url, lookup_budget_ms=0.001)) if "look-up" in result.seen
    )
    assert slow.severity is WARNING
    assert "lookup_budget_ms" in slow.remedy


def test_an_index_that_grows_is_given_memory_and_never_an_eviction_policy(server: RawRedis) -> None:
    """Ray's control state may be on the same server, and an eviction would drop it."""
    client = server.client()

    def result() -> CheckResult:
        return look(given(server.url, lookup_budget_ms=100, dram_gb=10, nvme_gb=0))[-1]

    assert result().severity is OK
    assert "not Ray's control state" in result().seen
    client.config_set("maxmemory-policy", "noeviction")
    assert result().severity is NOTE
    record_bytes = smallest_record_bytes(config_of().pools, config_of().model_path)
    assert result().figures["index_bytes_a_node"] == pytest.approx(10e9 / record_bytes * 200, rel=1e-3)
    client.config_set("maxmemory", int(client.info("memory")["used_memory"] * 1.1))
    assert result().severity is WARNING
    assert "raise its maxmemory" in result().remedy
    client.config_set("maxmemory", 0)
    assert result().severity is WARNING
    for policy, limit in (("noeviction", 0), ("noeviction", 64 << 20), ("allkeys-random", 64 << 20)):
        client.config_set("maxmemory-policy", policy)
        client.config_set("maxmemory", limit)
        assert "must stay at noeviction" in result().remedy
        assert "CONFIG SET" not in result().remedy


def test_a_wrong_password_is_named_and_not_shown(tmp_path: Path) -> None:
    with closing(RawRedis(tmp_path, requirepass="right-password")) as server:
        server.client(password="right-password").ping()
        for url in (server.url, server.url.replace("//", "//:wrong-password@")):
            result = only(redis.server, given(url))
            assert result.severity is ERROR
            assert "give the right user and password in store.redis_url" in result.seen
            assert "wrong-password" not in result.seen + result.why + result.remedy
        right = server.url.replace("//", "//:right-password@")
        assert Severity.ERROR not in [result.severity for result in look(given(right))]


def test_a_server_that_is_away_or_speaks_no_tls_is_an_error(server: RawRedis) -> None:
    with_tls = only(redis.server, given(server.url.replace("redis://", "rediss://")))
    assert with_tls.severity is ERROR
    assert "TLS" in with_tls.seen
    server.kill()
    away = only(redis.server, given(server.url))
    assert away.severity is ERROR
    assert "start it, or correct store.redis_url" in away.seen
    assert only(redis.server, given("http://127.0.0.1:1/")).severity is ERROR


def test_versions_before_6_2_are_refused() -> None:
    def severities(**info: str) -> list[Severity]:
        return [result.severity for result in redis.version("redis://h", info)]

    assert severities(redis_version="6.0.16") == [ERROR]
    assert severities(redis_version="6.2.0") == [OK]
    assert severities(redis_version="10.1") == [OK]
    assert severities(server_name="valkey", valkey_version="9.0.0", redis_version="7.2.4") == [OK]
    assert severities() == [NOTE]


def test_the_servers_clock_is_compared() -> None:
    assert not list(redis.lead("redis://h", 0.4))
    (ahead,) = redis.lead("redis://h", 90.0)
    (behind,) = redis.lead("redis://h", -90.0)
    assert "90.0 s ahead of" in ahead.seen
    assert "90.0 s behind" in behind.seen


def test_without_a_url_a_server_of_ours_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    assert only(redis.server, context_of(Machine())).severity is OK

    def none() -> str:
        raise StoreError("no redis-server was found")

    monkeypatch.setattr(redis, "find_binary", none)
    assert only(redis.server, context_of(Machine())).severity is WARNING
    assert not said(redis.server, context_of(Machine(), config_of(store={"index": False})))
    assert not said(redis.server, context_of(Machine(), config_of(store={"dram_gb": 0})))
