"""A simulated request, as the figures of serving read it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from cluster.simulation.simulated_call import CallRecord


class ServedCall(NamedTuple):
    """A request as a `cluster.bench.serving_figures.ServedRequest`. Its tokens come at even distances."""

    record: CallRecord

    @property
    def sent_at(self) -> float:
        return self.record.arrived_at

    @property
    def finished_at(self) -> float:
        return self.record.arrived_at if self.record.ended_at is None else self.record.ended_at

    @property
    def outcome(self) -> str:
        return "ok" if self.record.is_good else self.record.refusal or "failed"

    @property
    def reason(self) -> str:
        return self.record.error

    @property
    def service_class(self) -> str:
        return self.record.service_class

    @property
    def num_input(self) -> int:
        return self.record.num_prompt

    @property
    def num_cached(self) -> int:
        return self.record.num_cached

    @property
    def num_output(self) -> int:
        return self.record.num_output if self.record.is_good else 0

    @property
    def ttft_s(self) -> float:
        return self.record.ttft_s

    @property
    def tpot_s(self) -> float | None:
        return self.record.tpot_s if self.record.num_output > 1 else None

    @property
    def gaps_s(self) -> Sequence[float]:
        return [self.record.tpot_s] * (self.record.num_output - 1)
