"""The model runner of a rank: executes its part of step plans on one device, and makes no decisions.

It owns the model shard, the KV pool and the sampler. Called by a rank process with the engine core's plans,
and directly by the engine benchmark."""

from __future__ import annotations

import contextlib
import functools
import logging
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvtransfer.blocks.device_pool import DevicePool, transfer_bytes
from kvtransfer.blocks.host_memory import KvMemory
from kvtransfer.blocks.layout import BlockLayout
from kvtransfer.blocks.pool import HostPool, KvPool
from kvtransfer.common.clock import Clock
from kvtransfer.common.faults import Faults
from kvtransfer.messages import PROTOCOL_VERSION, CompatibilityRecord, Shard
from workers.errors import CapacityError, WorkerError
from workers.messages.rank_channel import StepPlan, StepReport
from workers.model.attention.choice import choose_attention
from workers.model.attention.interface import AttentionBackend
from workers.model.decoder import load_decoder
from workers.model.fingerprint import FingerprintTask
from workers.model.host_kv import HostKv, OffloadMode, streaming_bytes
from workers.model.model_config import ModelConfig
from workers.model.parallel import Unfinished, parallelize
from workers.model.products import refuse_nondeterministic
from workers.model.rank_memory import least_kv_tokens
from workers.model.sizes import kv_heads
from workers.model.weights import ShardSpec
from workers.rank.collectives import RankGroups
from workers.rank.compiled_grammars import CompiledGrammars
from workers.rank.device_accounts import CudaAccounts
from workers.rank.device_queue import DeviceQueue, make_queue, take_device
from workers.rank.input_batch import InputBatch
from workers.rank.memory_profile import MemoryMeter, MemoryProfile, largest_steps, trial_blocks
from workers.rank.step_parts import Executed
from workers.rank.step_runner import StepRunner
from workers.rank.tickets import Ticket
from workers.rank.warm_up import NUM_WARM_UP_SLOTS, WARM_UP_TOKENS, WarmUp

_log = logging.getLogger("tandem.rank")

_DTYPES = {
    "float32": torch.float32,
    "fp32": torch.float32,
    "bfloat16": torch.bfloat16,
    "bf16": torch.bfloat16,
    "float16": torch.float16,
    "fp16": torch.float16,
}
# The bytes of a KV pool in host memory that are taken from the start on. The rest, which a replica may never
# use, is taken when it is first written, which adds a few percent to those steps.
_POPULATED_BYTES = 1 << 30
# The number of graphs from which the memory of all graphs is computed.
_NUM_MEASURED_GRAPHS = 2


@dataclass(frozen=True, slots=True)
class ReadyFields:
    """The facts that a rank reports of its model and KV pool when both are ready."""

    num_blocks: int
    num_offload_blocks: int
    vocab_size: int
    max_context_tokens: int
    eos_token_ids: tuple[int, ...]
    backend: str
    compatibility: CompatibilityRecord


class AutoKv(NamedTuple):
    """Configures how a rank on CUDA decides its KV capacity: what is left of `memory_share` of its device's
    memory after all else that it is measured to take, in steps of up to `max_batch_tokens` rows."""

    memory_share: float
    max_batch_tokens: int


def read_dtype(name: str) -> torch.dtype:
    """Return the dtype of that name. Raises `WorkerError`, naming the known ones."""
    dtype = _DTYPES.get(name)
    if dtype is None:
        raise WorkerError(f"dtype {name!r} is not one of {', '.join(_DTYPES)}")
    return dtype


class ModelRunner:
    """Loads a rank's part of the model and its KV pool, then turns each `StepPlan` into a `StepReport`.

    The ranks of a replica run the same plans in the same order and meet in `groups`: the first stage embeds,
    each stage passes its hidden states [num_tokens, hidden_size] to the next, and the first rank of the last
    stage samples. `kv` is `[num_blocks, num_layers, 2, num_cells, block_tokens, width]` of this rank's layers
    and cells, and `pool` the same memory for the transports. Raises `CheckpointError` for a folder
    that cannot be served and `CapacityError` for a pool of less than one block."""

    def __init__(
        self,
        *,
        model_dir: Path,
        dtype: torch.dtype,
        device: torch.device,
        block_tokens: int,
        num_kv_tokens: int,
        num_threads: int,
        clock: Clock,
        max_sequences: int = 64,
        shard: ShardSpec | None = None,
        groups: RankGroups | None = None,
        fingerprint: FingerprintTask | None = None,
        num_offload_tokens: int = 0,
        auto_kv: AutoKv | None = None,
        offload_mode: OffloadMode | Literal["auto"] = "auto",
        is_deterministic: bool = False,
        faults: Faults | None = None,
        queue: DeviceQueue | None = None,
        progress: Callable[[str], None] = lambda phase: None,
        grammars: CompiledGrammars | None = None,
    ) -> None:
        """`shard` (default: the whole model) is the part of this rank in `groups` (default: the only rank);
        `fingerprint` computes that of the checkpoint (default: begun here). Plans use the slots below
        `max_sequences`.

        Block ids after those of the device's `num_kv_tokens` denote `num_offload_tokens` in host memory; with
        the mode "auto" the warm-up measures which way to read them is faster, if attention has both. With
        `auto_kv` the device's are at most `num_kv_tokens`, and as many as all ranks have memory for.
        `is_deterministic`: raise WorkerError unless products and attention of a sequence depend on nothing
        else. With a `queue` (default: on CUDA, unless stages are on several ranks) tokens stay on the device
        and steps that decode are graphs, also on a CPU, where Triton then runs in its interpreter. `progress`
        is called with the name of each phase that begins. Slots may start with the `grammars`, at the rank
        that samples.
        """
        torch.set_num_threads(num_threads)
        device = take_device(device)
        if is_deterministic:
            refuse_nondeterministic(device, dtype)
        self._clock = clock
        self._faults = faults or Faults()
        self._is_deterministic = is_deterministic
        self._max_sequences = max_sequences
        self._device = device
        self._dtype = dtype
        self._block_tokens = block_tokens
        self._groups = groups or RankGroups(None, tp=1, pp=1, rank=0, device=device, host="")
        self._grammars = grammars
        self._queue = queue
        if queue is None and device.type == "cuda" and self._groups.pp == 1:
            self._queue = make_queue(device)
        progress("loading weights")
        self._report_phase = progress
        self._fingerprint = fingerprint or FingerprintTask(model_dir, clock)
        with contextlib.ExitStack() as if_it_fails:
            if_it_fails.enter_context(self._fingerprint)
            self._decoder = load_decoder(
                model_dir, dtype, device, shard, progress, is_deterministic=is_deterministic
            )
            if_it_fails.pop_all()
        self._unfinished = Unfinished(self._groups, self._decoder)
        parallelize(self._decoder, self._unfinished)
        self.config = config = self._decoder.config
        self.layout = _layout(config, self._decoder.shard, block_tokens, dtype)
        self._offload_mode = offload_mode
        self.host: HostKv | None = None
        self._num_scratch = 0 if self._queue is None else 1
        num_host_blocks = num_offload_tokens // block_tokens
        num_blocks = self._num_blocks(num_kv_tokens, num_host_blocks, auto_kv)
        progress("allocating KV memory")
        memory, self.pool = _allocate(self.layout, num_blocks, self._num_scratch, dtype, device)
        self.kv = memory[:num_blocks]
        self.host = self._allocate_host(num_host_blocks)
        self.attention = self._choose_attention(memory, clock)
        self._num_offload_blocks = len(self.host.kv) if self.host is not None else 0
        num_kv_tokens = (num_blocks + self._num_offload_blocks) * block_tokens
        self._max_context_tokens = min(config.max_context_tokens, num_kv_tokens)
        self._runner = self._make_steps(self.attention, self._max_context_tokens)
        self.progress = self._runner.progress

    @functools.cached_property
    def ready_fields(self) -> ReadyFields:
        """The fields that the rank reports. Waits until its weights are hashed.

        Raises `CheckpointError` if the checkpoint changed since the start."""
        config = self.config
        with self._fingerprint:
            model_fingerprint = self._fingerprint.result(self._report_phase)
        return ReadyFields(
            num_blocks=len(self.kv),
            num_offload_blocks=self._num_offload_blocks,
            vocab_size=config.vocab_size,
            max_context_tokens=self._max_context_tokens,
            eos_token_ids=config.eos_token_ids,
            backend=self.attention.name,
            compatibility=_compatibility(config, model_fingerprint, self._dtype, self._block_tokens),
        )

    @property
    def batch(self) -> InputBatch:
        """The rank's state of every slot."""
        return self._runner.batch

    @property
    def runs_ahead(self) -> bool:
        """Whether a step is still under way when `launch` returns."""
        return self._runner.runs_ahead

    def launch(self, plan: StepPlan) -> Ticket:
        """Execute this rank's part of one step, as `StepRunner.launch` describes."""
        return self._runner.launch(plan)

    def execute(self, plan: StepPlan) -> Executed:
        """Do the first half of `launch`, up to the logits."""
        return self._runner.execute(plan)

    def sample(self, executed: Executed, masks: NDArray[np.uint32] | None = None) -> Ticket:
        """Do the second half of `launch`, as `StepRunner.sample` describes."""
        return self._runner.sample(executed, masks)

    def collect(self, ticket: Ticket) -> StepReport:
        """Wait until a launched step is done. Returns its report."""
        return self._runner.collect(ticket)

    def run(self, plan: StepPlan) -> StepReport:
        """Launch a step and collect it."""
        return self.collect(self.launch(plan))

    def logits(self, plan: StepPlan) -> Tensor:
        """Compute all of a plan in one call, as `StepRunner.logits` describes."""
        return self._runner.logits(plan)

    def warm_up(self, step_tokens: int = WARM_UP_TOKENS) -> None:
        """Run what steps consist of, as `WarmUp` describes; chunks have up to `step_tokens`."""
        WarmUp(
            self._runner,
            self.host,
            num_blocks=len(self.kv),
            max_sequences=self._max_sequences,
            max_context_tokens=self.config.max_context_tokens,
            vocab_size=self.config.vocab_size,
            clock=self._clock,
        ).run(step_tokens, chooses_offload=self._offload_mode == "auto" and self.attention.can_stage)

    def close(self) -> None:
        """Release the pool's memory and leave the groups. Nothing may run afterwards."""
        with self._fingerprint:  # ends, if nobody waited for it
            pass
        self._groups.close()
        if self.host is not None:
            self.host.close()
        del self.kv, self.attention, self._runner
        self.pool.close()

    def _choose_attention(self, memory: Tensor, clock: Clock | None) -> AttentionBackend:
        """Choose what computes attention over the KV `memory`, with a clock by measurement."""
        if self._queue is not None and self._queue.has_triton and memory.device.type == "cpu":
            from workers.model.attention.triton_backend import (
                TritonAttention,  # in the interpreter, for tests
            )

            shape = self._decoder.attention_shape
            return TritonAttention(shape, memory, is_deterministic=self._is_deterministic)
        return choose_attention(
            self._decoder.attention_shape,
            memory,
            clock,
            is_staged=self.host is not None and self._offload_mode == "stream",
            is_deterministic=self._is_deterministic,
        )

    def _make_steps(self, attention: AttentionBackend, max_context_tokens: int) -> StepRunner:
        return StepRunner(
            self._decoder,
            attention,
            self.host,
            self._groups,
            self._unfinished,
            self._block_tokens,
            self._clock,
            self._faults,
            max_slots=self._max_sequences + NUM_WARM_UP_SLOTS,
            max_context_tokens=max_context_tokens,
            queue=self._queue,
            num_graph_rows=self._max_sequences,
            grammars=self._grammars,
        )

    def _num_blocks(self, num_kv_tokens: int, num_host_blocks: int, auto: AutoKv | None) -> int:
        num_blocks = num_kv_tokens // self._block_tokens
        if num_blocks < 1:
            raise CapacityError(
                f"kv_tokens {num_kv_tokens} is less than one block of {self._block_tokens} tokens"
            )
        if auto is None:
            return num_blocks
        fitting = sys.maxsize  # host memory was divided before the ranks started
        if self._device.type == "cuda":
            self._report_phase("measuring memory")
            fitting = self._fitting_blocks(auto, num_host_blocks)
        return self._groups.smallest(min(num_blocks, fitting))

    def _fitting_blocks(self, auto: AutoKv, num_host_blocks: int) -> int:
        """Return how many blocks the device has memory for."""
        buffer_bytes = transfer_bytes(self.layout)
        if self._offload_mode != "in_place":
            buffer_bytes += streaming_bytes(self.layout, num_host_blocks)
        meter = MemoryMeter(
            CudaAccounts(self._device),
            len(self._decoder.layers),
            is_in_group=self._groups.tp * self._groups.pp > 1,
        )
        try:
            profile = self._profile(meter, auto.max_batch_tokens, buffer_bytes)
        except torch.OutOfMemoryError as error:
            raise CapacityError(
                f"{self._device} has no memory for the largest step beside the weights: raise tp or pp, or "
                f"lower max_batch_tokens or max_sequences ({error})"
            ) from error
        limits = meter.limits(profile)
        left = profile.kv_bytes(auto.memory_share, limits)
        _log.info("memory of %s: %s, %s, left for KV: %d bytes", self._device, limits, profile, left)
        num_blocks = max(left // self.layout.block_bytes - self._num_scratch, 0)
        least = least_kv_tokens(self.config, self._block_tokens) // self._block_tokens
        if num_blocks < least:
            raise CapacityError(
                f"kv_tokens: auto leaves space for {num_blocks} blocks of {self._block_tokens} tokens on "
                f"{self._device}, of whose {limits.total_bytes} bytes other processes leave "
                f"{limits.most_available_bytes} to this one, and the replica needs {least}: "
                "raise tp or pp, raise engine.memory_share, or lower max_batch_tokens"
            )
        return num_blocks

    def _profile(self, meter: MemoryMeter, num_rows: int, buffer_bytes: int) -> MemoryProfile:
        """Run the largest steps, and record graphs, over as little KV as they need."""
        limits = num_rows, self._max_sequences, self.config.max_context_tokens, self._block_tokens
        num_blocks = trial_blocks(num_rows, self.config.max_context_tokens, self._block_tokens)
        memory = _zeros(self.layout, num_blocks + self._num_scratch, self._dtype, self._device)
        # Block tables are as long as those of the replica.
        steps = self._make_steps(self._choose_attention(memory, None), self.config.max_context_tokens)
        started, *largest, freed = largest_steps(*limits)
        steps.collect(steps.launch(started))
        for plan in largest:
            steps.rehearse(plan)
        steps.collect(steps.launch(freed))
        meter.step_done(memory.nbytes)
        for size in steps.graph_sizes[: -1 - _NUM_MEASURED_GRAPHS : -1]:
            steps.record_graphs((size,))
            meter.graph_done()
        num_graphs = len(steps.graph_sizes)
        del steps, memory
        return meter.profile(num_graphs, buffer_bytes)

    def _allocate_host(self, num_blocks: int) -> HostKv | None:
        if not num_blocks:
            return None
        host = HostKv(self.kv, num_blocks)
        if self._offload_mode != "auto":
            host.use(self._offload_mode)
        return host


def _compatibility(
    config: ModelConfig, fingerprint: bytes, dtype: torch.dtype, block_tokens: int
) -> CompatibilityRecord:
    name, cells = str(dtype).removeprefix("torch."), config.kv_cells
    return CompatibilityRecord(
        protocol=PROTOCOL_VERSION,
        model_fingerprint=fingerprint,
        dtype=name,
        weight_dtype=name,
        block_tokens=block_tokens,
        num_layers=cells.num_layers,
        num_kv_heads=cells.num_cells,
        head_dim=cells.width,
    )


def _layout(config: ModelConfig, shard: ShardSpec, block_tokens: int, dtype: torch.dtype) -> BlockLayout:
    cells = config.kv_cells
    part = kv_heads(cells.num_cells, shard.tp_rank, shard.tp_size)
    held = Shard(shard.layer_start, min(shard.layer_end, cells.num_layers), part.start, part.stop)
    return BlockLayout(held, cells.width, block_tokens, dtype.itemsize)


def _allocate(
    layout: BlockLayout, num_blocks: int, num_scratch: int, dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, KvPool]:
    """Allocate zeroed blocks, `num_scratch` more than `num_blocks`: as the model's tensor, and as the
    transports' pool over the same memory."""
    num_all = num_blocks + num_scratch
    if device.type == "cpu":
        memory = KvMemory.allocate(num_all * layout.block_bytes)
        memory.populate(_POPULATED_BYTES)
        kv = torch.frombuffer(memory.buffer, dtype=dtype).view(_shape(layout, num_all))
        return kv, HostPool(layout, memory)
    try:
        kv = _zeros(layout, num_all, dtype, device)
    except torch.OutOfMemoryError as error:
        raise CapacityError(
            f"kv_tokens: {device} has no memory for {num_all} blocks of {layout.block_bytes} bytes: lower "
            f"kv_tokens or engine.memory_share, or end what else uses the device ({error})"
        ) from error
    return kv, DevicePool(layout, kv[:num_blocks].view(num_blocks, -1).view(torch.uint8))


def _zeros(layout: BlockLayout, num_blocks: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.zeros(_shape(layout, num_blocks), dtype=dtype, device=device)


def _shape(layout: BlockLayout, num_blocks: int) -> tuple[int, ...]:
    shard = layout.shard
    return (num_blocks, shard.num_layers, 2, shard.num_heads, layout.block_tokens, layout.head_dim)
