"""Settings of the router, composed into the cluster's file under `router:`."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field


class RouterConfig(BaseModel):
    """Settings of how replicas are chosen. Times are in seconds."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    policy: Literal["cost", "round_robin", "random", "least_loaded", "longest_prefix"] = "cost"
    # How long a routed prompt counts as cached before the replica's events confirm it.
    prediction_ttl_s: float = Field(default=5.0, gt=0)
    # A load report older than this makes its replica the last choice.
    stale_load_s: float = Field(default=5.0, gt=0)
    # With at most this many uncached tokens at the decode side, the prefill pool is always skipped.
    skip_prefill_tokens: int = Field(default=64, ge=0)
    # Cost in tokens of one sequence already running on a decode replica.
    decode_pressure: float = Field(default=64.0, ge=0)
