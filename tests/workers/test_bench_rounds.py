"""Rounds of the engine benchmark: what is repeated, what is reported, and the medians."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from workers.engine_bench.rounds import (
    MOST_VOID_ROUNDS,
    Measure,
    Round,
    median_ratio,
    median_tok_s,
    run_rounds,
)

A, B = Measure("prefill", 512), Measure("decode", 32, 2, 128, 16)


class ScriptedMeter:
    """Says the shares of a script, one a round."""

    def __init__(self, *shares: float) -> None:
        self._shares = list(shares)
        self._is_started = False

    def start(self) -> None:
        self._is_started = True

    def share(self) -> float:
        assert self._is_started
        self._is_started = False
        return self._shares.pop(0)


def run(num_rounds: int, *shares: float) -> tuple[list[tuple[str, int]], dict[Measure, list[Round]]]:
    """Return the turns that were taken, and the reported rounds."""
    taken: list[tuple[str, int]] = []

    def turns(measure: Measure, number: int) -> Mapping[str, float]:
        taken.append((measure.label, number))
        return {"tandem": float(len(taken))}

    rounds = run_rounds([A, B], num_rounds, turns, ScriptedMeter(*shares), lambda measure, done: None)
    return taken, rounds


def test_measures_take_turns() -> None:
    taken, rounds = run(2, 0, 0, 0.04, 0)
    assert taken == [("prefill 512", 0), ("decode 2 at 128", 0), ("prefill 512", 1), ("decode 2 at 128", 1)]
    assert [[each.name_to_tok_s["tandem"] for each in done] for done in rounds.values()] == [[1, 3], [2, 4]]


def test_only_the_disturbed_measure_is_repeated_and_its_void_rounds_are_dropped() -> None:
    taken, rounds = run(2, 0, 0.041, 0, 0, 0)
    assert taken[-1] == ("decode 2 at 128", 2)
    assert len(taken) == 5
    assert [each.name_to_tok_s["tandem"] for each in rounds[B]] == [4, 5]
    assert not any(each.is_void for done in rounds.values() for each in done)


def test_after_twelve_void_rounds_all_are_reported_with_their_share() -> None:
    _, rounds = run(1, 0.0, *([0.5] * MOST_VOID_ROUNDS))
    assert len(rounds[A]) == 1
    assert [each.others for each in rounds[B]] == [0.5] * MOST_VOID_ROUNDS


def test_quiet_rounds_that_are_too_few_are_reported_with_the_void_ones() -> None:
    shares = [0.0, 0.0, 0.0, 0.3] + [0.3] * (MOST_VOID_ROUNDS - 1)
    _, rounds = run(2, *shares)
    assert [each.others for each in rounds[B]] == [0.0] + [0.3] * MOST_VOID_ROUNDS


def test_medians_are_of_the_rounds_ratios_not_of_the_rates() -> None:
    rounds = [
        Round({"tandem": 10.0, "vllm": 5.0}, 0.0),
        Round({"tandem": 2.0, "vllm": 4.0}, 0.0),
        Round({"tandem": 9.0, "vllm": 3.0}, 0.0),
        Round({"tandem": 8.0}, 0.0),
    ]
    assert median_tok_s(rounds, "tandem") == 8.5
    assert median_tok_s(rounds, "vllm") == 4.0
    assert median_ratio(rounds, "tandem", "vllm") == pytest.approx(2.0)
    assert median_ratio(rounds, "tandem", "llama.cpp") is None
    assert median_tok_s([], "tandem") is None
