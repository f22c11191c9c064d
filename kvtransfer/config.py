"""Settings that are composed into the cluster's file: of the transfer between pools under `transfer:`, of the
tiered store under `store:`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from kvtransfer.codec import Part
from kvtransfer.common.group_shares import GroupShares
from kvtransfer.common.patterns import Matches
from kvtransfer.transfer_orders import TransferSettings

TransportName = Literal["cuda_ipc", "shm", "nccl", "gloo", "rdma", "tcp"]
Admission = Literal["adaptive", "all", "seen_twice"]
# The dtype of keys and values; `auto`: that of activations on a device, and that of the device in the store.
KvDtype = Literal["auto", "int8", "fp8"]
GRANULE_BYTES = 64 << 10


class TransferConfig(BaseModel):
    """How KV moves. Times are seconds, rates are 1e9 bytes a second."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    # Those that are offered and used, in order of preference. Each pair of ranks takes the first that both
    # offer, that connects and that is fast enough, and reports why it rejected the others; `gloo` is the
    # code of `nccl` on a CPU.
    transports: tuple[TransportName, ...] = Field(
        default=("cuda_ipc", "shm", "nccl", "rdma", "tcp"), min_length=1
    )
    # The floor: a path measured below it is slow (0: no floor).
    min_gb_s: float = Field(default=0.0, ge=0)
    # What is done with a slow path: the next transport is tried, or it is used with a warning.
    below_floor: Literal["refuse", "warn"] = "refuse"
    # TCP connections of one pair of ranks; blocks are dealt out over them.
    tcp_streams: int = Field(default=2, ge=1, le=16)
    # Network devices for `rdma`, by UCX's names; empty: the host's InfiniBand devices, and where there are
    # none `rdma` is not offered.
    rdma_devices: tuple[str, ...] = ()
    # The most that one rank writes for hand-overs (0: no limit). A chunk of a prompt that needs longer than
    # `landing_stall_s` at this rate is taken for one that does not move.
    hand_over_gb_s: float = Field(default=0.0, ge=0)
    # The same for prefetches, which move only while no hand-over wants to.
    prefetch_gb_s: float = Field(default=0.0, ge=0)
    # The same for write-backs, which come last.
    write_back_gb_s: float = Field(default=0.0, ge=0)
    # Failures of a transport towards one peer rank, without a success between, after which it cools down and
    # the next one is used.
    error_budget: int = Field(default=3, ge=1)
    # How long the first time; it doubles with every further one, up to `max_cool_down_s`.
    cool_down_s: float = Field(default=1.0, gt=0)
    max_cool_down_s: float = Field(default=300.0, gt=0)
    # A landing whose writer is not heard of for this long is aborted.
    landing_lease_s: float = Field(default=10.0, gt=0)
    # A writer whose prompt has not moved on for this long stops renewing the lease. It is longer than any
    # step may take; two replicas that wait for each other's free blocks part by it.
    landing_stall_s: float = Field(default=30.0, gt=0)
    # Landings that wait for free blocks at a decode replica before it refuses.
    landing_queue: int = Field(default=256, ge=1)
    # Share of the decode replica's blocks kept for the growth of what it already runs.
    growth_reserve: float = Field(default=0.1, ge=0, lt=1)
    # Streams that one replica moves to others at a time when it leaves or changes its role.
    max_migrations: int = Field(default=8, ge=1)
    # A writer that has not acknowledged a stop after this is killed.
    writer_ack_s: float = Field(default=5.0, gt=0)
    # The address on which ranks listen for KV over TCP, and that they announce to their peers.
    data_host: str = "127.0.0.1"

    @field_validator("transports")
    @classmethod
    def _each_once(cls, value: tuple[TransportName, ...]) -> tuple[TransportName, ...]:
        if repeated := [name for name in value if value.count(name) > 1]:
            raise ValueError(f"{repeated[0]} is named more than once")
        return value

    def settings(self) -> TransferSettings:
        """Return the settings that a rank's transfer agent needs."""
        return TransferSettings(**{name: getattr(self, name) for name in TransferSettings.__struct_fields__})


class StoreSettings(Part, frozen=True):
    """What a node's store process is started with; `StoreConfig` says what each means. Sizes are bytes.

    `name` is the abstract unix socket on which engine cores and ranks of the node find the owner; `host` the
    address on which other owners do."""

    node_id: str
    epoch: int
    name: str
    host: str
    dram_bytes: int
    granule_bytes: int = GRANULE_BYTES
    huge_pages: bool = True
    nvme_path: str = ""
    nvme_bytes: int = 0
    segment_bytes: int = 256 << 20
    io_threads: int = 8
    admission: Admission = "adaptive"
    write_queue: int = 1024
    flush_s: float = 5.0
    dram_shares: GroupShares = GroupShares()
    nvme_shares: GroupShares = GroupShares()
    prefetch_pin_s: float = 10.0
    redis_url: str = ""
    redis_ca_file: str = ""
    redis_namespace: str = "tandem"
    lookup_budget_s: float = 0.003
    node_lease_s: float = 10.0
    transports: tuple[str, ...] = ("shm", "tcp")
    prefetch_gb_s: float = 0.0
    remote_min_gb_s: float = 0.0


class StoreConfig(BaseModel):
    """Where finished KV is kept, beside the replicas' own blocks. Sizes are for each node."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    # Host memory for KV, in 1e9 bytes, taken as it is used and a little ahead; 0: no store.
    dram_gb: float = Field(default=1.0, ge=0)
    # The dtype of keys and values in the store. `auto`: that of the device; `int8` and `fp8` (e4m3): 8 bits,
    # with a scale for each token and head, of what devices keep as activations.
    kv_dtype: KvDtype = "auto"
    # Use huge pages for it where the host has any reserved.
    huge_pages: bool = True
    # A folder on a local disk; None: no such tier. Each node uses a subfolder of its own.
    nvme_path: Path | None = None
    # How much of that disk may be used, in 1e9 bytes.
    nvme_gb: float = Field(default=0.0, ge=0)
    # Size of one file there, in 2^20 bytes.
    segment_mb: int = Field(default=256, ge=1, le=4096)
    # Reads and writes of that disk under way at once.
    io_threads: int = Field(default=8, ge=1, le=64)
    # Which records are written to it: by what their like was worth, all, or those asked for again.
    admission: Admission = "adaptive"
    # Records that may wait to be written to NVMe; more are not: the store never holds up serving.
    write_queue: int = Field(default=1024, ge=1)
    # How long a store that is ordered to end may write admitted records to NVMe.
    flush_s: float = Field(default=5.0, ge=0)
    # How long a prefetched block is kept in host memory for the request that will want it.
    prefetch_pin_s: float = Field(default=10.0, gt=0)
    # The index of all nodes: redis://, rediss:// (TLS) or unix://. "": REDIS_URL of the environment, else a
    # server of our own. A URL with a password serves one host only: others read it from `redis_url_file`.
    redis_url: str = ""
    # Holds the URL with user and password, at the same path on every node, in place of `redis_url`. Relative
    # to the file that names it, as the next one.
    redis_url_file: Path | None = None
    # PEM file of the authority that signed the certificate of a rediss:// server; None: one that the system
    # knows.
    redis_ca_file: Path | None = None
    # Begins every key, so that clusters can share a server.
    redis_namespace: Annotated[
        str,
        Matches(
            r"^[A-Za-z0-9_.-]{1,64}$", "1 to 64 letters, digits, dots, dashes or underscores, such as team-a"
        ),
    ] = "tandem"
    # False: each node knows its own tiers only.
    index: bool = True
    # A look-up in the index that takes longer is not waited for. A store that has not answered after 200 ms
    # is considered hung by its engine cores.
    lookup_budget_ms: float = Field(default=3.0, gt=0, le=100)
    # A node that is not heard of for this long holds nothing, as far as the index knows.
    node_lease_s: float = Field(default=10.0, gt=0)
    # Blocks of other nodes are not fetched over a path slower than this.
    remote_min_gb_s: float = Field(default=0.0, ge=0)

    @property
    def has_redis(self) -> bool:
        """Whether a server for the index is configured."""
        return bool(self.redis_url or self.redis_url_file)

    @model_validator(mode="after")
    def _one_redis(self) -> StoreConfig:
        if self.redis_url and self.redis_url_file:
            raise ValueError("redis_url and redis_url_file are two places for one URL; name one of them")
        return self

    @model_validator(mode="after")
    def _nvme_needs_both(self) -> StoreConfig:
        if (self.nvme_path is None) != (self.nvme_gb == 0):
            raise ValueError("nvme_path and nvme_gb are given together, or neither")
        if self.nvme_gb and not self.dram_gb:
            raise ValueError("nvme_gb needs dram_gb above 0: NVMe is read and written through host memory")
        if self.nvme_gb and self.nvme_gb * 1e9 < 2 * self.segment_mb * 2**20:
            raise ValueError("nvme_gb must hold at least two segments of segment_mb")
        return self
