"""Rounds of measurements: in each, every engine takes one turn at every measure, so that ratios compare
moments that lie close together.

A round of a measure in which other processes used more than a few percent of the CPU is void and repeated.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, Protocol

import psutil

from kvtransfer.common.clock import Clock

# The share of the CPU that others may use in a round that counts.
QUIET_SHARE = 0.04
# After this many void rounds of a measure, all its rounds are reported with their share.
MOST_VOID_ROUNDS = 12
# The most by which the kernel's count of busy time, by ticks, may differ from that of the processes, per CPU.
_TICK_S = 0.02


class Measure(NamedTuple):
    """The subject of a measurement: the prefill of one prompt, or decode steps of a batch."""

    what: str
    num_tokens: int
    batch: int = 1
    context: int = 0
    num_steps: int = 0

    @property
    def label(self) -> str:
        if self.what == "prefill":
            return f"prefill {self.num_tokens}"
        return f"decode {self.batch} at {self.context}"


class Engine(Protocol):
    """An engine that is measured: ours or a peer."""

    def prefill_s(self, num_tokens: int) -> float:
        """Return the seconds that a random prompt takes up to its first token."""

    def decode_s(self, batch: int, context_tokens: int, num_steps: int) -> float:
        """Return the seconds of `num_steps` steps of `batch` sequences of `context_tokens` tokens."""


def measure_s(engine: Engine, measure: Measure) -> float:
    """Return the seconds of one turn."""
    if measure.what == "prefill":
        return engine.prefill_s(measure.num_tokens)
    return engine.decode_s(measure.batch, measure.context, measure.num_steps)


class Round(NamedTuple):
    """One round of one measure: tokens a second by engine and by limit, and the share of the CPU that others
    used."""

    name_to_tok_s: Mapping[str, float]
    others: float

    @property
    def is_void(self) -> bool:
        return self.others > QUIET_SHARE


class OthersMeter:
    """Measures the share of the machine's CPU time that processes other than ours used. Time that the host
    took from a virtual machine counts as theirs."""

    def __init__(self, own_cpu_s: Callable[[], float], clock: Clock) -> None:
        self._own_cpu_s = own_cpu_s
        self._clock = clock
        self._begin = (0.0, 0.0, 0.0)

    def start(self) -> None:
        self._begin = self._read()

    def share(self) -> float:
        """Return the share since `start`."""
        wall_s, busy_s, own_s = (now - then for now, then in zip(self._read(), self._begin, strict=True))
        num_cpus = psutil.cpu_count() or 1
        return max(0.0, busy_s - own_s - _TICK_S * num_cpus) / max(wall_s * num_cpus, 1e-9)

    def _read(self) -> tuple[float, float, float]:
        times = psutil.cpu_times()._asdict()
        idle = ("idle", "iowait", "guest", "guest_nice")  # guests are part of user and nice
        busy_s = sum(value for name, value in times.items() if name not in idle)
        return self._clock.now(), busy_s, self._own_cpu_s()


class Meter(Protocol):
    """Measures others, as `OthersMeter` does."""

    def start(self) -> None:
        """Begin a round."""

    def share(self) -> float:
        """Return the share of the CPU that others used since `start`."""


# Takes a measure and the number of its round; returns tokens a second by name.
Turns = Callable[[Measure, int], Mapping[str, float]]


def run_rounds(
    measures: Sequence[Measure],
    num_rounds: int,
    turns: Turns,
    meter: Meter,
    on_round: Callable[[Measure, Round], None],
) -> dict[Measure, list[Round]]:
    """Run rounds until every measure has `num_rounds` that count, or `MOST_VOID_ROUNDS` that do not.

    Returns the rounds of each measure to report: those that count, or all if they are too few.
    """
    measure_to_rounds: dict[Measure, list[Round]] = {measure: [] for measure in measures}
    number = 0
    while pending := [each for each in measures if not _is_complete(measure_to_rounds[each], num_rounds)]:
        for measure in pending:
            meter.start()
            rates = turns(measure, number)
            done = Round(rates, meter.share())
            measure_to_rounds[measure].append(done)
            on_round(measure, done)
        number += 1
    return {measure: _reported(rounds, num_rounds) for measure, rounds in measure_to_rounds.items()}


def _is_complete(rounds: Sequence[Round], num_rounds: int) -> bool:
    num_void = sum(each.is_void for each in rounds)
    return len(rounds) - num_void >= num_rounds or num_void >= MOST_VOID_ROUNDS


def _reported(rounds: list[Round], num_rounds: int) -> list[Round]:
    quiet = [each for each in rounds if not each.is_void]
    return quiet if len(quiet) >= num_rounds else rounds


def median_tok_s(rounds: Sequence[Round], name: str) -> float | None:
    """Return the median of a rate; None if no round has it."""
    rates = [each.name_to_tok_s[name] for each in rounds if name in each.name_to_tok_s]
    return statistics.median(rates) if rates else None


def median_ratio(rounds: Sequence[Round], name: str, to: str) -> float | None:
    """Return the median of the rounds' ratios of two rates; None if no round has both."""
    both = [each.name_to_tok_s for each in rounds if {name, to} <= each.name_to_tok_s.keys()]
    return statistics.median(rates[name] / rates[to] for rates in both) if both else None
