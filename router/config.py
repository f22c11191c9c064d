"""Settings of the router, composed into the cluster's file under `router:`."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

# `tandem` prices choices by all that is known, and the others are there to compare it with.
PolicyName = Literal[
    "tandem",
    "round_robin",
    "random",
    "least_loaded",
    "power_of_two",
    "longest_prefix",
    "consistent_hash",
    "predicted_only",
    "reported_only",
    "sglang",
    "ray",
    "aibrix",
]


class RouterConfig(BaseModel):
    """Settings of how replicas are chosen. Times are in seconds."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    # How replicas are chosen. `cost` is the former name of `tandem`.
    policy: PolicyName = "tandem"
    # How long a routed prompt counts as cached before the replica's events confirm it.
    prediction_ttl_s: float = Field(default=5.0, gt=0)
    # A load report older than this makes its replica the last choice.
    stale_load_s: float = Field(default=5.0, gt=0)
    # With at most this many uncached tokens at the decode side, the prefill pool is always skipped.
    skip_prefill_tokens: int = Field(default=64, ge=0)
    # Output tokens whose time counts as much as the time to the first one, where a decode replica is chosen.
    decode_steps: float = Field(default=10.0, ge=0)
    # Steps of work that a replica has at a time, those under way included; what exceeds them is held in the
    # gateway.
    steps_ahead: float = Field(default=2.5, gt=0)

    @field_validator("policy", mode="before")
    @classmethod
    def _present_name(cls, policy: Any) -> Any:
        return "tandem" if policy == "cost" else policy

    @model_validator(mode="before")
    @classmethod
    def _times_not_tokens(cls, fields: Any) -> Any:
        if isinstance(fields, dict) and "decode_pressure" in fields:
            raise ValueError(
                "decode_pressure: costs are seconds now, by each replica's measured steps; leave it out, or "
                "set decode_steps, the number of output tokens whose time counts"
            )
        return fields
