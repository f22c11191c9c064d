"""Settings of the transfer between pools; composed into the cluster's file under `transfer:`."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field


class TransferConfig(BaseModel):
    """How KV moves. Times are seconds, rates are 1e9 bytes a second."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    transports: tuple[str, ...] = ("shm", "tcp")
    """In order of preference; each pair takes the first that connects, and logs which."""
    min_gb_s: float = Field(default=0.0, ge=0)
    """A path measured below this is refused (0: no floor)."""
    landing_lease_s: float = Field(default=10.0, gt=0)
    """A landing whose writer is not heard of for this long is aborted."""
    landing_stall_s: float = Field(default=30.0, gt=0)
    """A writer whose prompt has not moved on for this long stops renewing the lease. It is longer than any
    step may take; two replicas that wait for each other's room part by it."""
    landing_queue: int = Field(default=256, ge=1)
    """Landings waiting for room at a decode replica before it refuses."""
    growth_reserve: float = Field(default=0.1, ge=0, lt=1)
    """Share of the decode replica's blocks kept for the growth of what it already runs."""
    writer_ack_s: float = Field(default=5.0, gt=0)
    """A writer that has not acknowledged a stop after this is killed."""
    data_host: str = "127.0.0.1"
    """The address on which ranks listen for KV over TCP, and that they announce to their peers."""
