"""Reads the pools that `--autoscale` of `tandem simulate` describes."""

from __future__ import annotations

import re

from cluster.errors import ConfigError
from cluster.scaling.config import PoolLimits, ScalingConfig
from cluster.simulation.simulated_scaling import PlannedScaling
from cluster.simulation.simulated_serve import ReplicaTimes

_FORM = re.compile(r"(?P<pool>prefill|decode|both)=(?P<min>[0-9]+):(?P<max>[0-9]+)")


def planned_scaling(
    text: str, start_s: float | None, ttft_slo_s: float, itl_slo_s: float, *, may_change_roles: bool
) -> PlannedScaling | None:
    """Return the scaling of the pools in `prefill=1:8,decode=1:8`, for these objectives, with replicas that
    take `start_s` (None: a minute) to start; None without any pool. Raises `ConfigError`."""
    if not text:
        return None
    entries = [_limits(entry) for entry in text.split(",")]
    pools = dict(entries)
    if len(pools) < len(entries):
        raise ConfigError(f"--autoscale {text}: names a pool more than once; give each one MIN:MAX")
    config = ScalingConfig(
        autoscale=True,
        change_roles=may_change_roles,
        pools=pools,
        ttft_slo_s=ttft_slo_s,
        itl_slo_s=itl_slo_s,
    )
    return PlannedScaling(config, ReplicaTimes() if start_s is None else ReplicaTimes(start_s))


def _limits(entry: str) -> tuple[str, PoolLimits]:
    found = _FORM.fullmatch(entry.strip())
    if found is None or int(found["max"]) < max(1, int(found["min"])):
        raise ConfigError(
            f"--autoscale {entry}: expected ROLE=MIN:MAX with MAX at least 1 and MIN, as prefill=1:8"
        )
    return found["pool"], PoolLimits(min=int(found["min"]), max=int(found["max"]))
