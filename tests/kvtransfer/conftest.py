"""Fixtures of the transfer's tests: two agents in processes of their own, and two ranks in this one."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from service_harness import TARGET, WRITER, Rank
from transfer_harness import TRANSPORTS, TransferHarness


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what is not for the fast suite: transports whose library takes seconds to start and to give a dead
    peer up, and shapes of replicas over any other transport than TCP but for one of each transport."""
    for item in items:
        callspec = getattr(item, "callspec", None)
        if callspec is None:
            continue
        transport, source = callspec.params.get("processes"), callspec.params.get("source")
        is_failure = item.path.name == "test_peer_failure.py" and transport in ("rdma", "gloo")
        is_shape = item.path.name == "test_transports.py" and source not in (None, (2, 2))
        if is_failure or (is_shape and transport != "tcp"):
            item.add_marker(pytest.mark.slow)


@pytest.fixture(scope="module", params=(*TRANSPORTS, "tcp with TLS"))
def processes(request: pytest.FixtureRequest) -> Iterator[TransferHarness]:
    harness = TransferHarness(request.param)
    yield harness
    harness.close()


@pytest.fixture
def harness(processes: TransferHarness) -> Iterator[TransferHarness]:
    with processes.one_test():
        yield processes


@pytest.fixture
def target() -> Iterator[Rank]:
    with Rank(TARGET) as rank:
        yield rank


@pytest.fixture
def writer(target: Rank) -> Iterator[Rank]:
    """Made after the target and closed before it."""
    with Rank(WRITER, seed=1) as rank:
        yield rank
