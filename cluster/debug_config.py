"""Settings under `debug:` of the cluster's file: aids for tests, which are off in production."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from kvtransfer.common.faults import FaultRule
from workers.config import PaceConfig


class FaultConfig(BaseModel):
    """Configures one fault to inject, for tests: see `kvtransfer.common.faults.FaultRule`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    point: str
    action: Literal["kill", "stop", "corrupt"]
    marker: str
    after: int = Field(default=1, ge=1)


class DebugConfig(BaseModel):
    """Configures debugging aids, which are off in production."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    # Requests may name the replicas that serve them.
    allow_pins: bool = False
    faults: tuple[FaultConfig, ...] = ()
    pace: PaceConfig | None = None

    @property
    def fault_rules(self) -> tuple[FaultRule, ...]:
        return tuple(FaultRule(**fault.model_dump()) for fault in self.faults)
