"""A replica of a model with experts, of two stages: its load reports say how evenly these are loaded."""

from __future__ import annotations

from pathlib import Path

import pytest
from e2e_harness import E2eHarness, until
from family_checkpoints import CASES, write_family_checkpoint
from paged_model import tokens_of

from workers.config import Parallel

pytestmark = pytest.mark.slow


async def test_a_replica_reports_the_load_of_its_experts(tmp_path: Path) -> None:
    """The last counts come with the report of a canary."""
    write_family_checkpoint(tmp_path, **CASES["qwen3_moe-2"])
    async with E2eHarness(tmp_path, Parallel(pp=2, devices=("cpu", "cpu"), layers=(1, 3))) as harness:
        replica = await harness.add("b0")
        assert replica.core.reports.load().expert_imbalance == 0.0
        await harness.run(replica, harness.submission("first", tokens_of(3, 150)))
        experts = replica.core.steps.stats.experts
        await until(lambda: len(experts.hottest(15)) == 15, "counts of three layers with five experts each")
        load = replica.core.reports.load()
        assert 1.0 < load.expert_imbalance <= 5.0
        assert load.expert_rank_imbalance == 1.0
        assert load.hottest_expert_layer in (0, 2, 3), "layer 1 has no experts"
        assert 1 / 5 < load.hottest_expert_share <= 1.0
        assert sum(hot.share for hot in experts.hottest(15)) == pytest.approx(3.0)
