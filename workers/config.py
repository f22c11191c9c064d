"""Settings of a replica's engine; composed into the cluster's file under `engine:` of a pool."""

from __future__ import annotations

from collections.abc import Collection
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    ValidatorFunctionWrapHandler,
    WrapValidator,
    field_validator,
)

from kvtransfer.config import KvDtype


class Parallel(NamedTuple):
    """Configures how a replica is split over ranks: `tp` ranks share every layer of each of `pp` stages.
    `devices` is one torch device a stage; `layers` how many each stage has (empty: by measured cost). The
    experts of a layer are divided into `ep` parts, each of them shared by `tp / ep` ranks."""

    tp: int = 1
    pp: int = 1
    devices: tuple[str, ...] = ("cpu",)
    layers: tuple[int, ...] = ()
    ep: int = 1

    @property
    def num_ranks(self) -> int:
        return self.tp * self.pp


class PaceConfig(BaseModel):
    """Configures how long the steps of every rank take at least, in seconds, for benchmarks of the parts
    above the ranks: then their results depend neither on the machine nor on its other load."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    base_s: float = Field(default=0.0, ge=0, le=10)
    # The time for each sequence that decodes.
    sequence_s: float = Field(default=0.0, ge=0, le=1)
    # The time for each token of a prompt.
    token_s: float = Field(default=0.0, ge=0, le=1)


# Where the ranks that share layers keep latents: each all of them, or a part of the tokens of each block.
LatentKv = Literal["replicated", "split"]


class StepSizes(NamedTuple):
    """The values of `max_batch_tokens`, `chunk_tokens` and `max_sequences` where they are `auto`."""

    max_batch_tokens: int
    chunk_tokens: int
    max_sequences: int


# A step should be long enough that its products take longer than reading the weights does, and short enough
# that the sequences which decode in it do not wait. On a CPU 512 rows are many times what the first takes,
# and last a second with a model of a billion parameters. A GPU computes hundreds of times as fast for ten
# times the bandwidth: more sequences decode before a step takes much longer than reading the weights does.
DEVICE_TO_STEP_SIZES = {"cpu": StepSizes(512, 512, 64), "cuda": StepSizes(4096, 2048, 256)}
MIN_KV_TOKENS = 256


def _number_or_auto(value: Any, handler: ValidatorFunctionWrapHandler) -> int | Literal["auto"]:
    try:
        number: int | Literal["auto"] = handler(value)
    except ValidationError as error:
        limits = [item["ctx"]["ge"] for item in error.errors() if "ge" in item.get("ctx", {})]
        least = f" of at least {limits[0]}" if limits else ""
        raise ValueError(f"{value!r} is neither a whole number{least} nor auto") from error
    return number


Tokens = Annotated[Annotated[int, Field(ge=1)] | Literal["auto"], WrapValidator(_number_or_auto)]
NumberOrAuto = Annotated[Annotated[int, Field(ge=0)] | Literal["auto"], WrapValidator(_number_or_auto)]
KvTokens = Annotated[
    Annotated[int, Field(ge=MIN_KV_TOKENS)] | Literal["auto"], WrapValidator(_number_or_auto)
]


class EngineSettings(BaseModel):
    """One replica's engine, as the cluster's file has it: batching, KV blocks, numerics. Sizes are tokens
    unless named otherwise; those that are `auto` are decided at the replica's start."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    block_tokens: int = Field(default=64, ge=16, le=256)
    # KV capacity of the replica, in tokens; rounded down to whole blocks. `auto`: what the node's memory, or
    # the GPU's, has left after everything else (docs/operating.md).
    kv_tokens: KvTokens = "auto"
    # Share of that memory which may be used in all where `kv_tokens` is `auto`.
    memory_share: float = Field(default=0.9, gt=0, le=1)
    # Token budget of one step: decoding sequences first, the rest for prefill chunks. `auto`: 512 on CPUs,
    # 4096 on GPUs.
    max_batch_tokens: Tokens = "auto"
    # Longest prefill chunk of one sequence in one step. `auto`: 512 on CPUs, 2048 on GPUs.
    chunk_tokens: Tokens = "auto"
    # The time per output token (TPOT), in seconds, that running sequences should keep while prompts are
    # computed beside them: chunks become as short as that takes, by the measured costs of steps. None: chunks
    # have up to `chunk_tokens`.
    tpot_objective_s: float | None = Field(default=None, gt=0)
    # Whether a rank on CUDA with the whole model records graphs of steps with a chunk beside sequences that
    # decode, and of short chunks alone: worth their memory where `benchmarks.gpu mixed` finds the device idle
    # for more than 5 % of the former, or where the first token of a short prompt on an idle replica matters.
    mixed_graphs: bool = False
    # Sequences computed in one step. `auto`: 64 on CPUs, and 256 on GPUs; but 64 on GPUs, too, where some of
    # the model's layers keep a recurrent state, or the KV of their window alone. Those have memory for all
    # `max_sequences` sequences (`workers.model.kv_groups`), which 256 would take from the KV of the others.
    max_sequences: Tokens = "auto"
    # Requests waiting in this replica before it refuses.
    max_waiting: int = Field(default=512, ge=1)
    # CPU threads of each rank.
    num_threads: int = Field(default=1, ge=1)
    # The dtype of keys and values. `auto`: as activations; `int8` and `fp8` (e4m3): 8 bits, with a scale for
    # each token and head.
    kv_dtype: KvDtype = "auto"
    # The KV of models with latent attention, where several ranks share layers. `replicated`: each rank keeps
    # all latents; `split`: its part of the tokens of each block.
    latent_kv: LatentKv = "replicated"
    # A sequence's tokens depend neither on the other sequences of a step, nor on how it was cut into chunks,
    # nor on the number of threads: ranks start only with products and attention that promise it.
    deterministic: bool = False
    # An idle engine runs an empty step this often, so that its health is known.
    canary_idle_s: float = Field(default=2.0, gt=0)
    # Ranks that make no progress with a step for so long, however long the step takes, hang: the replica
    # reports itself unhealthy. A rank reports progress up to four times a second.
    stall_s: float = Field(default=5.0, ge=1)

    # Snapshots of the recurrent states of models that have some, behind which prompts with a known prefix
    # start: how many fit the replica beside what running sequences need. `auto`: as many as a quarter of the
    # memory for keys and values has space for.
    state_snapshots: NumberOrAuto = "auto"
    # A prompt leaves a snapshot after every so many tokens, in addition to its end, to ends of its messages,
    # and to where it leaves the way of earlier ones (0: nowhere else).
    snapshot_every_tokens: int = Field(default=0, ge=0)

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
    # Experts of each layer that stay in host memory, where the CPU computes them: for models whose experts do
    # not fit on the device, which has those that tokens choose most.
    expert_offload: int = Field(default=0, ge=0)
    # Slots for copies of experts in each layer of each rank, for pools with `ep`: experts that many tokens
    # choose are then computed by several ranks.
    expert_copies: int = Field(default=0, ge=0)
    # Finished blocks that may wait to be copied into the node's host tier; more are not stored.
    write_queue: int = Field(default=1024, ge=1)
    # Requests whose KV is being loaded from the store at a time; more wait their turn.
    max_loading: int = Field(default=4, ge=1)

    @property
    def num_state_snapshots(self) -> int | None:
        """The snapshots of states; None where their number follows from the memory for KV."""
        return None if self.state_snapshots == "auto" else self.state_snapshots

    def step_sizes(self, devices: Collection[str], *, has_groups: bool) -> StepSizes:
        """Return the sizes of steps on these devices, the smallest where they differ. `has_groups`: some of
        the model's layers have blocks apart (`workers.model.kv_groups`), whose number follows
        `max_sequences`."""
        autos = [DEVICE_TO_STEP_SIZES[device.partition(":")[0]] for device in devices]
        sizes = min(autos, default=DEVICE_TO_STEP_SIZES["cpu"])
        if has_groups:
            sizes = sizes._replace(max_sequences=DEVICE_TO_STEP_SIZES["cpu"].max_sequences)
        given = {name: getattr(self, name) for name in StepSizes._fields}
        return sizes._replace(**{name: value for name, value in given.items() if value != "auto"})

    def decided(self, kv_tokens: int, sizes: StepSizes) -> EngineConfig:
        """Return the same settings with this capacity, and with these sizes of steps."""
        return EngineConfig(**{**self.model_dump(), "kv_tokens": kv_tokens, **sizes._asdict()})

    @field_validator("block_tokens")
    @classmethod
    def _power_of_two(cls, value: int) -> int:
        if value & (value - 1):
            raise ValueError(f"block_tokens must be a power of two from 16 to 256, not {value}")
        return value


class EngineConfig(EngineSettings):
    """Settings of an engine whose sizes are all decided."""

    kv_tokens: int = Field(default=16384, ge=1)
    max_batch_tokens: int = Field(default=512, ge=1)
    chunk_tokens: int = Field(default=512, ge=1)
    max_sequences: int = Field(default=64, ge=1)

    @property
    def longest_chunk_tokens(self) -> int:
        """The most tokens that a step can hold of one prompt, however long chunks may be."""
        return min(self.chunk_tokens, self.max_batch_tokens)
