"""How long a CUDA device did something while the host waited, launched or computed."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch


class DeviceTime:
    """Measures in its block how long the device did something, in any stream: `busy_s`, afterwards."""

    def __init__(self) -> None:
        self._profile = profile_of(torch.profiler.ProfilerActivity.CUDA)
        self.busy_s = 0.0

    def __enter__(self) -> DeviceTime:
        torch.cuda.synchronize()
        self._profile.__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        torch.cuda.synchronize()
        self._profile.__exit__(*error)  # type: ignore[no-untyped-call]
        events = self._profile.events()  # type: ignore[no-untyped-call]
        events = [each for each in events if each.device_type.name == "CUDA"]
        self.busy_s = union_us([(each.time_range.start, each.time_range.end) for each in events]) / 1e6


def profile_of(activity: torch.profiler.ProfilerActivity) -> torch.profiler.profile:
    """Return a profile of one run. Where events are not kept for later runs, torch 2.11 warns of that."""
    return torch.profiler.profile(activities=[activity], acc_events=True)


def union_us(spans: Iterable[tuple[float, float]]) -> float:
    """Return the length that the spans (start, end) cover together."""
    covered = 0.0
    last = float("-inf")
    for start, end in sorted(spans):
        covered += max(0.0, end - max(start, last))
        last = max(last, end)
    return covered
