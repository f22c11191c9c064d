"""Settings of the transfer between pools; composed into the cluster's file under `transfer:`."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator

from kvtransfer.messages import TransferSettings

TransportName = Literal["cuda_ipc", "shm", "nccl", "gloo", "rdma", "tcp"]


class TransferConfig(BaseModel):
    """How KV moves. Times are seconds, rates are 1e9 bytes a second."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    transports: tuple[TransportName, ...] = Field(
        default=("cuda_ipc", "shm", "nccl", "rdma", "tcp"), min_length=1
    )
    """Those that are offered and used, in order of preference. Each pair of ranks takes the first that both
    offer, that connects and that is fast enough, and tells why it passed over the others; `gloo` is `nccl`'s
    code on a CPU."""
    min_gb_s: float = Field(default=0.0, ge=0)
    """The floor: a path measured below it is slow (0: no floor)."""
    below_floor: Literal["refuse", "warn"] = "refuse"
    """What is done with a slow path: the next transport is tried, or it is used with a warning."""
    tcp_streams: int = Field(default=2, ge=1, le=16)
    """TCP connections of one pair of ranks; blocks are dealt out over them."""
    rdma_devices: tuple[str, ...] = ()
    """Network devices for `rdma`, by UCX's names; empty: the host's InfiniBand devices, and where there are
    none `rdma` is not offered."""
    hand_over_gb_s: float = Field(default=0.0, ge=0)
    """The most that one rank writes for hand-overs (0: no limit). A chunk of a prompt that needs longer than
    `landing_stall_s` at this rate is taken for one that does not move."""
    prefetch_gb_s: float = Field(default=0.0, ge=0)
    """The same for prefetches, which move only while no hand-over wants to."""
    write_back_gb_s: float = Field(default=0.0, ge=0)
    """The same for write-backs, which come last."""
    error_budget: int = Field(default=3, ge=1)
    """Failures of a transport towards one peer rank, without a success between, after which it cools down and
    the next one is used."""
    cool_down_s: float = Field(default=1.0, gt=0)
    """How long the first time; it doubles with every further one, up to `max_cool_down_s`."""
    max_cool_down_s: float = Field(default=300.0, gt=0)
    landing_lease_s: float = Field(default=10.0, gt=0)
    """A landing whose writer is not heard of for this long is aborted."""
    landing_stall_s: float = Field(default=30.0, gt=0)
    """A writer whose prompt has not moved on for this long stops renewing the lease. It is longer than any
    step may take; two replicas that wait for each other's room part by it."""
    landing_queue: int = Field(default=256, ge=1)
    """Landings waiting for room at a decode replica before it refuses."""
    growth_reserve: float = Field(default=0.1, ge=0, lt=1)
    """Share of the decode replica's blocks kept for the growth of what it already runs."""
    max_moves: int = Field(default=8, ge=1)
    """Streams that one replica moves to others at a time when it leaves or changes its role."""
    writer_ack_s: float = Field(default=5.0, gt=0)
    """A writer that has not acknowledged a stop after this is killed."""
    data_host: str = "127.0.0.1"
    """The address on which ranks listen for KV over TCP, and that they announce to their peers."""

    @field_validator("transports")
    @classmethod
    def _each_once(cls, value: tuple[TransportName, ...]) -> tuple[TransportName, ...]:
        if repeated := [name for name in value if value.count(name) > 1]:
            raise ValueError(f"{repeated[0]} is named more than once")
        return value

    def settings(self) -> TransferSettings:
        """What a rank's transfer agent needs of it."""
        return TransferSettings(**{name: getattr(self, name) for name in TransferSettings.__struct_fields__})
