"""The decode steps that the policy plans with, where replicas report what they have measured."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from scaling_harness import NOTHING, NOW, config, decoding, history_of

from cluster.metrics.demand import Demand
from cluster.metrics.replica_stats import load_of, stats_of
from cluster.scaling.measured_rates import MeasuredRates, measured_rates
from cluster.scaling.samples import ReplicaSample
from workers.stats_record import ReplicaStats

MEASURED = {"decode_base_s": 0.01, "decode_sequence_s": 1e-3, "decode_context_s": 1e-6}


def rates_of(**measured: Any) -> MeasuredRates:
    """Return the rates of a replica whose batches vary, and whose mean step time does not follow."""

    def sample_of(at: float) -> tuple[Sequence[ReplicaSample], Demand]:
        batch = 4 + int(at) % 8
        return [decoding(num_running=batch, num_context_tokens=1000 * batch, **measured)], NOTHING

    return measured_rates(history_of(config(), sample_of), config(), 64, NOW, has_prefill=True)


def test_steps_that_replicas_have_measured_themselves_come_before_a_line_through_samples() -> None:
    """10 ms, and for each sequence 1 ms and 1 ms for its 1,000 tokens of context: 20 of them in 50 ms."""
    rates = rates_of(**MEASURED)
    assert rates.step is not None
    assert rates.step.step_s(0) == pytest.approx(0.01)
    assert rates.step.step_s(1) == pytest.approx(0.012)
    assert rates.batch == 20


def test_the_line_serves_while_nothing_is_reported() -> None:
    assert rates_of().batch == 64
    assert rates_of(decode_base_s=0.01).step == rates_of().step


def test_the_status_has_what_the_policy_reads() -> None:
    stats = ReplicaStats(num_running=2, num_context_tokens=2000, **MEASURED)  # type: ignore[arg-type]
    read = stats_of(load_of(stats))
    assert {name: read[name] for name in MEASURED} == MEASURED
    assert read["num_context_tokens"] == 2000
