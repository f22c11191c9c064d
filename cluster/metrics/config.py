"""Settings under `logs:`, `tracing:`, `recording:` and `costs:` of the cluster's file."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field


class LogConfig(BaseModel):
    """The lines that the processes of the service write to standard error, which Ray keeps in files."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    format: Literal["text", "json"] = "text"
    level: Literal["debug", "info", "warning", "error"] = "info"
    # One line for every request that ends.
    access: bool = True


class TracingConfig(BaseModel):
    """OpenTelemetry; needs `pip install '.[tracing]'`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    # OTLP over gRPC, such as `http://collector:4317`; "": no traces.
    endpoint: str = ""
    # The share of the requests whose caller does not say whether they are traced.
    sample_ratio: float = Field(default=1.0, ge=0, le=1)


class RecordingConfig(BaseModel):
    """Each gateway's recording of its latest requests, as lengths and times without text, for what-if
    simulations."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    # The memory of a gateway for it; 0: nothing is recorded.
    max_mb: float = Field(default=16.0, ge=0)
    # The age at which a request is forgotten.
    max_age_s: float = Field(default=1800.0, gt=0)


class CostConfig(BaseModel):
    """Prices, from which the metric `tenant_cost_total` is made; in any currency."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    # The price of an hour of the device of one rank; None: no cost is shown.
    device_hour: float | None = Field(default=None, gt=0)
    # The same by pool, for pools with other devices.
    pools: dict[str, Annotated[float, Field(gt=0)]] = {}

    def price(self, pool_to_device_s: Mapping[str, float]) -> float | None:
        """Return the price of device time by pool; None: there is no price of any of it."""
        prices = [
            device_s / 3600 * price
            for pool, device_s in pool_to_device_s.items()
            if (price := self.pools.get(pool, self.device_hour)) is not None
        ]
        return sum(prices) if prices else None
