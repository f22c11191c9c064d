"""HostBlocks: references to the blocks of the offload pools."""

from __future__ import annotations

from collections import Counter

import pytest

from workers.scheduler.host_blocks import HostBlocks


def test_ids_follow_on_those_of_the_device_and_are_counted() -> None:
    host = HostBlocks(10, 3)
    first, second = host.allocate(), host.allocate()
    assert {first, second} < {10, 11, 12}
    assert host.split([4, first, 9, second]) == ([4, 9], [first, second])
    host.acquire([first])
    assert (host.is_shared(first), host.is_shared(second)) == (True, False)
    host.check(Counter({first: 2, second: 1}))
    host.release([first, second])
    assert (host.num_used, host.num_free) == (1, 2)
    host.release([first])
    assert host.num_used == 0
    host.check(Counter())


def test_without_blocks_every_table_is_on_the_device() -> None:
    host = HostBlocks(2, 0)
    assert host.split([0, 1]) == ([0, 1], [])
    assert host.num_free == host.num_used == 0


def test_misuse_is_an_assertion() -> None:
    host = HostBlocks(10, 2)
    block = host.allocate()
    with pytest.raises(AssertionError, match="counts other references"):
        host.check(Counter())
    with pytest.raises(AssertionError, match="it holds nothing"):
        host.acquire([10 if block == 11 else 11])
    host.release([block])
    with pytest.raises(AssertionError, match="has no reference to release"):
        host.release([block])
