"""Settings under `scaling:` in the cluster file: limits of the pools, and when the autoscaler moves them."""

from __future__ import annotations

from typing import Self

from pydantic import BaseModel, ConfigDict, Field, model_validator


class PoolLimits(BaseModel):
    """The limits within which the autoscaler may move one pool. Operators may go beyond."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    # 0: none while nothing is asked for; the first request then starts one.
    min: int = Field(default=1, ge=0)
    max: int = Field(default=1, ge=1)

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if self.max < self.min:
            raise ValueError(f"max {self.max} is below min {self.min}")
        return self


class ScalingConfig(BaseModel):
    """Off by default: then only operators change counts, and the desired counts are kept all the same."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    # Whether to move the pools in `pools` between their limits.
    autoscale: bool = False
    # An idle prefill replica may decode, and an idle decode replica prefill, until it is needed at home.
    change_roles: bool = False
    # Limits by pool name; a pool that is not named keeps its count.
    pools: dict[str, PoolLimits] = {}
    # The time to first token that 90 % of requests should not exceed.
    ttft_slo_s: float = Field(default=1.0, gt=0)
    # The time between tokens that 90 % of gaps should not exceed.
    itl_slo_s: float = Field(default=0.1, gt=0)
    # The time between two looks of the fast loop.
    interval_s: float = Field(default=2.0, gt=0)
    # How much history the demand forecast uses.
    forecast_s: float = Field(default=300.0, gt=0)
    # Share of the measured capacity that the forecast plans with.
    target_load: float = Field(default=0.8, gt=0, le=1)
    # The time after a pool grew until it may grow again.
    up_cool_down_s: float = Field(default=15.0, ge=0)
    # The time after a pool changed in either direction until it may shrink: about that of a start, since a
    # replica that is kept too long costs as much as one that must be started again.
    down_cool_down_s: float = Field(default=60.0, ge=0)
    # How long a replica must have been idle, and the other role short, before its role changes.
    role_change_after_s: float = Field(default=20.0, ge=0)
    # How long nothing must have been asked for before pools whose `min` is 0 have no replica.
    zero_after_s: float = Field(default=600.0, gt=0)
    # How long a request waits for a replica where pools may have none.
    zero_patience_s: float = Field(default=300.0, gt=0)

    @property
    def start_patience_s(self) -> float:
        """How long a request waits for the first replica; 0 where pools always have one."""
        return self.zero_patience_s if self.scales_to_zero else 0.0

    @property
    def scales_to_zero(self) -> bool:
        """Whether any pool may have no replica."""
        return self.autoscale and any(limits.min == 0 for limits in self.pools.values())

    @property
    def autoscaled(self) -> frozenset[str]:
        """The pools that the autoscaler may move."""
        return frozenset(self.pools) if self.autoscale else frozenset()
