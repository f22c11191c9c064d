"""Fault rules: when they fire, how often, and in which process."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvtransfer.common.faults import FaultRule, Faults


def test_a_rule_fires_so_many_times_in_the_process_that_came_first(tmp_path: Path) -> None:
    rule = FaultRule("point", "corrupt", str(tmp_path / "marker"), after=2, times=3)
    first, second = Faults([rule]), Faults([rule])
    assert [first.at("point") for _ in range(6)] == [False, True, True, True, False, False]
    assert not any(second.at("point") for _ in range(6))
    assert not first.at("another")


def test_a_rule_that_raises_lacks_memory(tmp_path: Path) -> None:
    faults = Faults([FaultRule("point", "raise", str(tmp_path / "marker"))])
    with pytest.raises(MemoryError, match="a fault was injected at point"):
        faults.at("point")
    assert not faults.at("point")
