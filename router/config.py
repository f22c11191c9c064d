"""Settings of the router, composed into the cluster's file under `router:`."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator


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
    # Output tokens whose time counts as much as the time to the first one, where a decode replica is chosen.
    decode_steps: float = Field(default=10.0, ge=0)
    # Steps of work that a replica is sent at a time; what exceeds them is held in the gateway.
    steps_ahead: float = Field(default=2.5, gt=0)

    @model_validator(mode="before")
    @classmethod
    def _times_not_tokens(cls, fields: Any) -> Any:
        if isinstance(fields, dict) and "decode_pressure" in fields:
            raise ValueError(
                "decode_pressure: costs are seconds now, by each replica's measured steps; leave it out, or "
                "set decode_steps, the number of output tokens whose time counts"
            )
        return fields
