"""Fixtures of the transfer's tests: two agents in processes of their own, and two ranks in this one."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from service_harness import TARGET, WRITER, Rank
from transfer_harness import TRANSPORTS, TransferHarness


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Transports whose library takes seconds to start and to give a dead peer up: not in the fast suite."""
    for item in items:
        callspec = getattr(item, "callspec", None)
        is_failure = item.path.name == "test_peer_failure.py"
        if is_failure and callspec is not None and callspec.params.get("processes") in ("rdma", "gloo"):
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
