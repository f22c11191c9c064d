"""Settings of a replica's engine; composed into the cluster's file under `engine:` of a pool."""

from __future__ import annotations

from typing import NamedTuple

from pydantic import BaseModel, ConfigDict, Field, field_validator


class Parallel(NamedTuple):
    """How a replica is split over ranks: `tp` ranks share every layer of each of `pp` stages. `devices` is
    one torch device a stage; `layers` how many each stage has (empty: by measured cost)."""

    tp: int = 1
    pp: int = 1
    devices: tuple[str, ...] = ("cpu",)
    layers: tuple[int, ...] = ()

    @property
    def num_ranks(self) -> int:
        return self.tp * self.pp


class EngineConfig(BaseModel):
    """One replica's engine: batching, KV blocks, numerics. Sizes are tokens unless named otherwise."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    block_tokens: int = Field(default=64, ge=16, le=256)
    # KV capacity of the replica, in tokens; rounded down to whole blocks.
    kv_tokens: int = Field(default=16384, ge=256)
    # Token budget of one step: decoding sequences first, the rest for prefill chunks.
    max_batch_tokens: int = Field(default=512, ge=1)
    # Longest prefill chunk of one sequence in one step.
    chunk_tokens: int = Field(default=256, ge=1)
    # Sequences computed in one step.
    max_sequences: int = Field(default=64, ge=1)
    # Requests waiting in this replica before it refuses.
    max_waiting: int = Field(default=512, ge=1)
    # CPU threads of each rank.
    num_threads: int = Field(default=1, ge=1)
    # An idle engine runs an empty step this often, so that its health is known.
    canary_idle_s: float = Field(default=2.0, gt=0)
    # Ranks that make no progress with a step for so long, however long the step takes, hang: the replica
    # reports itself unhealthy. A rank reports progress up to four times a second.
    stall_s: float = Field(default=5.0, ge=1)

    # The start of a replica fails when none of its ranks comes further for this long. Progress is a new
    # phase, or another layer loaded.
    start_stall_s: float = Field(default=600.0, gt=0)

    # KV capacity in host memory beyond `kv_tokens`, where running sequences keep older blocks (0: none, a
    # sequence that finds no free block is preempted).
    offload_tokens: int = Field(default=0, ge=0)
    # Blocks move there when more than this share of `kv_tokens` is in use.
    offload_at: float = Field(default=0.95, gt=0, le=1)
    # The most of one sequence's blocks that may lie there: every step brings all of them to the device.
    offload_share: float = Field(default=0.9, ge=0, le=1)
    # Finished blocks that may wait to be copied into the node's host tier; more are not stored.
    write_queue: int = Field(default=1024, ge=1)
    # Requests whose KV is being loaded from the store at a time; more wait their turn.
    max_loading: int = Field(default=4, ge=1)

    @property
    def longest_chunk_tokens(self) -> int:
        """What a step can hold of one prompt, however long chunks may be."""
        return min(self.chunk_tokens, self.max_batch_tokens)

    @field_validator("block_tokens")
    @classmethod
    def _power_of_two(cls, value: int) -> int:
        if value & (value - 1):
            raise ValueError(f"block_tokens must be a power of two from 16 to 256, not {value}")
        return value
