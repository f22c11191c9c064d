"""States of sequences against what moves and keeps them: they are counted as they are stored, and remedies
name settings that make them fit."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from doctor_harness import FakeMachine, config_of, context_of, only, said
from state_families import write_state_checkpoint

from cluster.doctor import state_records
from cluster.doctor.check_context import CheckContext
from cluster.doctor.checks import Severity
from cluster.serve.resource_needs import ClusterNeed, needs_of
from workers.model.kv_groups import GroupBytes

OK, WARNING = Severity.OK, Severity.WARNING
# The states of Qwen3-Next 80B at one rank.
LARGE = 36 * (32 * 128 * 128 + 3 * (32 + 2 * 16) * 128) * 4


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    write_state_checkpoint(path, "qwen3_next")
    return path


def with_states(needs: ClusterNeed, state_bytes: int) -> ClusterNeed:
    """Return the needs of a model whose states are as large at each rank."""
    pools = []
    for pool in needs.pools:
        ranks = [
            rank._replace(
                block_bytes=GroupBytes(
                    [rank.block_bytes.block_bytes[0], state_bytes], rank.block_bytes.limits
                )
            )
            for rank in pool.ranks
        ]
        pools.append(pool._replace(ranks=tuple(ranks)))
    return needs._replace(pools=tuple(pools))


def context(folder: Path, tmp_path: Path, state_bytes: int = LARGE, **sections: Any) -> CheckContext:
    config = config_of(folder, **{"store": {"dram_gb": 4.0}, **sections})
    return context_of(FakeMachine(tmp_path).view(), config, needs=with_states(needs_of(config), state_bytes))


def test_states_are_counted_as_they_are_stored(folder: Path, tmp_path: Path) -> None:
    """Three layers, each with a matrix for each of 6 heads, and the last 3 inputs of its convolution."""
    config = config_of(folder)
    result = only(state_records.state_records, context_of(FakeMachine(tmp_path).view(), config))
    assert result.severity is OK
    assert result.figures["state_bytes"] == 3 * (6 * 12 * 32 + 3 * (2 * 3 * 12 + 6 * 32)) * 4


def test_other_models_have_none(tmp_path: Path) -> None:
    assert not said(state_records.state_records, context_of(FakeMachine(tmp_path).view()))


def test_a_segment_must_hold_one(folder: Path, tmp_path: Path) -> None:
    def store(segment_mb: int) -> dict[str, Any]:
        return {"dram_gb": 4.0, "nvme_path": "/fast", "nvme_gb": 100, "segment_mb": segment_mb}

    small = only(state_records.state_records, context(folder, tmp_path, store=store(64)))
    assert small.severity is WARNING
    least = re.search(r"store.segment_mb to (\d+)", small.remedy)
    assert least is not None
    enough = int(least[1])
    assert only(state_records.state_records, context(folder, tmp_path, store=store(enough))).severity is OK
    less = only(state_records.state_records, context(folder, tmp_path, store=store(enough - 1)))
    assert less.severity is WARNING


@pytest.mark.parametrize(("dram_gb", "num_states"), [(0.05, 0), (0.2, 2)])
def test_the_host_tier_must_hold_several(
    folder: Path, tmp_path: Path, dram_gb: float, num_states: int
) -> None:
    small = only(state_records.state_records, context(folder, tmp_path, store={"dram_gb": dram_gb}))
    assert (small.severity, small.figures["num_states"]) == (WARNING, num_states)
    least = re.search(r"store.dram_gb to ([\d.]+)", small.remedy)
    assert least is not None
    enough = context(folder, tmp_path, store={"dram_gb": float(least[1]) + 0.1})
    assert only(state_records.state_records, enough).severity is OK
    assert only(state_records.state_records, context(folder, tmp_path, store={"dram_gb": 0})).severity is OK


def test_a_hand_over_must_not_take_longer_than_a_stall(folder: Path, tmp_path: Path) -> None:
    slow = only(state_records.state_records, context(folder, tmp_path, transfer={"hand_over_gb_s": 0.001}))
    assert slow.severity is WARNING
    least = re.search(r"transfer.hand_over_gb_s to ([\d.e-]+)", slow.remedy)
    assert least is not None
    faster = context(folder, tmp_path, transfer={"hand_over_gb_s": float(least[1])})
    assert only(state_records.state_records, faster).severity is OK
    alone = [{"name": "all", "role": "both"}]
    whole = context(folder, tmp_path, transfer={"hand_over_gb_s": 0.001}, pools=alone)
    assert only(state_records.state_records, whole).severity is OK
