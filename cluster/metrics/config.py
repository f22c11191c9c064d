"""Settings under `logs:`, `tracing:` and `recording:` of the cluster's file."""

from __future__ import annotations

from typing import Literal

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
