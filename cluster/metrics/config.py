"""Settings under `logs:` and `tracing:` of the cluster's file."""

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
