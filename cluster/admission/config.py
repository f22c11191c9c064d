"""Settings under `admission:` of the cluster's file: what each class of requests is promised, and how much
may wait. Times are in seconds."""

from __future__ import annotations

from typing import Any, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from kvtransfer.request_facts import SERVICE_CLASSES, ServiceClass


class ClassConfig(BaseModel):
    """The promises to requests of one class, and their limits."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    # The objective for the time to the first token: a request that is predicted to miss it is refused at
    # once. None: there is none.
    ttft_s: float | None = Field(default=None, gt=0)
    # Whether a request is refused whose prompt alone takes longer than `ttft_s` to compute, so that it would
    # miss it on an idle replica too. By default only where `ttft_s` is given: otherwise such a request is
    # judged by its wait alone.
    refuses_unattainable: bool = False
    # The class's part of the replicas' time, next to the weights of the other classes and of the tenants that
    # wait.
    weight: float = Field(default=1.0, gt=0)
    # A request that has waited for this time goes before all that have waited less, in a tenth of the
    # replicas' time besides the turns of its tenant.
    aging_s: float = Field(default=60.0, gt=0)
    # No request waits longer in a gateway: it is refused, at once where that can be predicted.
    max_wait_s: float = Field(default=3600.0, gt=0)
    # Under load `max_tokens` is cut to this, and the usage of the request says so; None: never.
    capped_tokens: int | None = Field(default=None, ge=1)

    @model_validator(mode="before")
    @classmethod
    def _given_objective(cls, fields: Any) -> Any:
        """Take an objective that is given as one that somebody wants kept."""
        if isinstance(fields, dict) and fields.get("ttft_s") is not None:
            return {"refuses_unattainable": True, **fields}
        return fields


class AdmissionConfig(BaseModel):
    """The rules of which requests are taken, and how many wait where."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    interactive: ClassConfig = ClassConfig(
        ttft_s=10.0, refuses_unattainable=False, weight=8.0, aging_s=5.0, max_wait_s=10.0
    )
    standard: ClassConfig = ClassConfig(
        ttft_s=30.0, refuses_unattainable=False, weight=4.0, aging_s=15.0, max_wait_s=30.0
    )
    batch: ClassConfig = ClassConfig(ttft_s=None, weight=1.0, aging_s=600.0, max_wait_s=3600.0)
    # The bytes of all requests of one gateway that are not submitted yet: as they arrived, their prompts and
    # grammars.
    max_queue_mb: float = Field(default=256.0, gt=0)
    # Output that waits in one gateway for clients to read it, in all. The slowest reader is cut off first.
    max_unread_mb: float = Field(default=256.0, gt=0)
    # Bodies and messages that one gateway reads at once, or has read and not yet judged: of all callers, and
    # of one, a tenant with all its keys. The bytes are taken before the first one is read: the length that a
    # body announces, or the largest allowed where the length is unknown.
    max_reading_mb: float = Field(default=256.0, gt=0)
    max_caller_reading_mb: float = Field(default=32.0, gt=0)
    # Calls of one caller at one gateway, over gRPC and HTTP, and its connections; None: twice
    # `gateway.max_requests`.
    max_caller_calls: int | None = Field(default=None, ge=1)
    max_caller_connections: int | None = Field(default=None, ge=1)

    def of(self, name: ServiceClass) -> ClassConfig:
        """Return the settings of a class."""
        settings: ClassConfig = getattr(self, name)
        return settings

    def share(self, name: ServiceClass, tenant_weight: float) -> float:
        """Return the weight of a tenant's requests of a class, next to those of all other flows."""
        return self.of(name).weight * tenant_weight

    @model_validator(mode="before")
    @classmethod
    def _over_defaults(cls, fields: Any) -> Any:
        """Merge the given settings of each class over its defaults."""
        if not isinstance(fields, dict):
            return fields
        given = {name: fields[name] for name in SERVICE_CLASSES if isinstance(fields.get(name), dict)}
        merged = {}
        for name, settings in given.items():
            default = cls.model_fields[name].default.model_dump()
            if "ttft_s" in settings:
                del default["refuses_unattainable"]
            merged[name] = {**default, **settings}
        return {**fields, **merged}

    @model_validator(mode="after")
    def _aging_before_refusal(self) -> Self:
        for name in SERVICE_CLASSES:
            settings = self.of(name)
            if settings.aging_s >= settings.max_wait_s:
                raise ValueError(
                    f"{name}.aging_s: after {settings.aging_s:g} s a request would go first that is refused "
                    f"after {settings.max_wait_s:g} s ({name}.max_wait_s); make it less"
                )
        return self
