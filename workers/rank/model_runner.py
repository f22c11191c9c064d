"""The model runner of a rank: executes its part of step plans on one device, and makes no decisions.

It owns the model shard, the KV pool and the sampler. Called by a rank process with the engine core's plans,
and directly by the engine benchmark."""

from __future__ import annotations

import contextlib
import functools
import logging
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvtransfer.blocks.device_pool import DevicePool, transfer_bytes
from kvtransfer.blocks.host_memory import KvMemory
from kvtransfer.blocks.layout import BlockLayout
from kvtransfer.blocks.pool import HostPool, KvPool, RecordPool
from kvtransfer.common.clock import Clock
from kvtransfer.common.faults import Faults
from kvtransfer.messages import PROTOCOL_VERSION, CompatibilityRecord, KvGroup
from workers.errors import CapacityError, WorkerError
from workers.model.attention.choice import choose_attention
from workers.model.attention.groups_backend import GroupsAttention
from workers.model.attention.interface import AttentionBackend, AttentionShape
from workers.model.attention.kinds_backend import backend_of_kinds
from workers.model.attention.quantized_kv import kv_dtype
from workers.model.attention.split_latents import SplitLatentAttention
from workers.model.decoder import Decoder, load_decoder
from workers.model.fingerprint import FingerprintTask
from workers.model.host_kv import HostKv, streaming_bytes
from workers.model.kv_form import KvForm
from workers.model.kv_groups import GroupBytes, StateCapacity, group_limits, kv_groups
from workers.model.kv_layout import kv_layout, token_parts
from workers.model.latent_split import LatentSplit
from workers.model.make_linear import refuse_nondeterministic
from workers.model.model_config import ModelConfig
from workers.model.rank_memory import least_kv_tokens
from workers.model.sizes import layer_heads
from workers.model.weights import ShardSpec
from workers.rank.collectives import RankGroups
from workers.rank.compiled_grammars import CompiledGrammars
from workers.rank.device_accounts import CudaAccounts
from workers.rank.device_queue import make_queue, take_device
from workers.rank.expert_reports import ExpertReports
from workers.rank.kernel_task import KernelTask
from workers.rank.memory_profile import MemoryMeter, MemoryProfile, largest_steps, trial_blocks
from workers.rank.quantized_records import QuantizedRecords, conversion_bytes
from workers.rank.rank_model import RankModel
from workers.rank.runner_settings import AutoKv, CheckpointFolder, ComputeSettings, RankCapacity, RankPlace
from workers.rank.step_runner import BatchLimits, StepRunner
from workers.rank.warm_up import NUM_WARM_UP_SLOTS, WARM_UP_TOKENS, WarmUp

_log = logging.getLogger("tandem.rank")

# The bytes of a KV pool in host memory that are taken from the start on. The rest, which a replica may never
# use, is taken when it is first written, which adds a few percent to those steps.
_POPULATED_BYTES = 1 << 30
# The number of graphs from which the memory of all graphs is computed.
_NUM_MEASURED_GRAPHS = 2
_ALONE = RankPlace()


@dataclass(frozen=True, slots=True)
class ReadyFields:
    """The facts that a rank reports of its model and KV pool when both are ready."""

    num_blocks: int
    num_window_blocks: tuple[int, ...]
    num_offload_blocks: int
    vocab_size: int
    max_context_tokens: int
    eos_token_ids: tuple[int, ...]
    backend: str
    compatibility: CompatibilityRecord


class ModelRunner:
    """Loads a rank's part of the model and its KV pool. Its `steps` then turn each `StepPlan` into a
    `StepReport`.

    The ranks of a replica run the same plans in the same order and meet in the groups of their place: the
    first stage embeds, each stage passes its hidden states [num_tokens, hidden_size] to the next, and the
    first rank of the last stage samples. `kv` is `[num_blocks, num_layers, 2, num_cells, block_tokens,
    width]` of this rank's layers and cells, as activations or quantized, and `pool` the same memory for the
    transports. Where layers with a window have KV apart, these are of the others, `window_kvs` those of each
    group with a window, and `pools` the memory of each group. Raises `CheckpointError` for a folder that
    cannot be served and `CapacityError` for a pool of less than one block."""

    def __init__(
        self,
        checkpoint: CheckpointFolder,
        compute: ComputeSettings,
        capacity: RankCapacity,
        clock: Clock,
        *,
        place: RankPlace = _ALONE,
        faults: Faults | None = None,
        progress: Callable[[str], None] = lambda phase: None,
        grammars: CompiledGrammars | None = None,
        kernels: KernelTask | None = None,
    ) -> None:
        """`progress` is called with the name of each phase that begins. Slots may start with the `grammars`,
        at the rank that samples. Nothing computes before `kernels` are compiled.

        Raises `WorkerError` where the device cannot compute deterministically, if that is asked for."""
        torch.set_num_threads(compute.num_threads)
        device = take_device(compute.device)
        dtype = compute.dtype
        self._clock = clock
        self._faults = faults or Faults()
        self._is_deterministic = compute.is_deterministic
        self._weights = compute.weights
        self._max_sequences = capacity.max_sequences
        self._mixed_tokens = capacity.mixed_tokens
        self._device = device
        self._dtype = dtype
        self._block_tokens = block_tokens = capacity.block_tokens
        groups = place.groups or RankGroups(None, tp=1, pp=1, rank=0, device=device, host="")
        if compute.is_deterministic:
            _check_deterministic(device, dtype, groups)
        self._grammars = grammars
        self._queue = compute.queue
        if self._queue is None and device.type != "cpu" and groups.pp == 1:
            self._queue = make_queue(device)
        progress("loading weights")
        self._report_phase = progress
        decoder = self._load(checkpoint, compute, place.shard)
        if kernels is not None:
            progress("compiling kernels")
            kernels.wait()
        if decoder.split_experts and self._queue is not None:
            _log.info(
                "engine.expert_offload %d: decoding steps are not recorded as graphs, for the host has to see"
                " which experts they choose",
                compute.expert_offload,
            )
        self._model = RankModel.join(decoder, groups)
        self.config = config = decoder.config
        has_groups = capacity.windows is not None or config.state is not None
        self._kv_groups = kv_groups(config) if has_groups else ()
        self._form = KvForm.of(capacity.kv_dtype, dtype.itemsize, len(config.kv_cells.parts))
        self._records = capacity.records
        self._splits_latents = capacity.latent_kv == "split" and groups.tp > 1
        states = capacity.states or StateCapacity(capacity.max_sequences, groups.pp)
        self._limits = group_limits(
            config, self._kv_groups, self._form, capacity.windows, states, block_tokens
        )
        self._block_dtypes = _block_dtypes(kv_dtype(capacity.kv_dtype, dtype), self._kv_groups)
        self.layouts = self._layouts(decoder.shard)
        self._offload_mode = capacity.offload_mode
        self.host: HostKv | None = None
        self._num_scratch = 0 if self._queue is None else 1
        num_host_blocks = capacity.num_offload_tokens // block_tokens
        num_blocks = self._num_blocks(capacity.num_kv_tokens, num_host_blocks, capacity.auto_kv)
        progress("allocating KV memory")
        sizes = [num_blocks, *self._num_group_blocks(num_blocks)]
        made = [
            _allocate(layout, size, self._num_scratch, dtype, device)
            for layout, size, dtype in zip(self.layouts, sizes, self._block_dtypes, strict=True)
        ]
        memory, self.pools = [kv for kv, _ in made], [pool for _, pool in made]
        self.kv, *self.window_kvs = (kv[:size] for kv, size in zip(memory, sizes, strict=True))
        self.host = self._allocate_host(num_host_blocks)
        self.record_pools = self._make_record_pools()
        self.attention = self._choose_attention(memory, clock)
        self._num_offload_blocks = len(self.host.kv) if self.host is not None else 0
        num_kv_tokens = (num_blocks + self._num_offload_blocks) * block_tokens
        self._max_context_tokens = min(config.max_context_tokens, num_kv_tokens)
        self.steps = self._make_steps(self.attention, self._max_context_tokens)

    @functools.cached_property
    def ready_fields(self) -> ReadyFields:
        """The fields that the rank reports. Waits until its weights are hashed.

        Raises `CheckpointError` if the checkpoint changed since the start."""
        config = self.config
        with self._fingerprint:
            model_fingerprint = self._fingerprint.result(self._report_phase)
        return ReadyFields(
            num_blocks=len(self.kv),
            num_window_blocks=tuple(map(len, self.window_kvs)),
            num_offload_blocks=self._num_offload_blocks,
            vocab_size=config.vocab_size,
            max_context_tokens=self._max_context_tokens,
            eos_token_ids=config.eos_token_ids,
            backend=self.attention.name,
            compatibility=_compatibility(
                config,
                model_fingerprint,
                self._dtype,
                self._weights.identity(config.quantization, _name_of(self._dtype), self._device.type),
                self._block_tokens,
                self._form,
                self._kv_groups,
            ),
        )

    def _load(
        self, checkpoint: CheckpointFolder, compute: ComputeSettings, shard: ShardSpec | None
    ) -> Decoder:
        """Load this rank's part of the model, and begin to hash the checkpoint beside."""
        self._fingerprint = checkpoint.fingerprint or FingerprintTask(checkpoint.path, self._clock)
        with contextlib.ExitStack() as if_it_fails:
            if_it_fails.enter_context(self._fingerprint)
            decoder = load_decoder(
                checkpoint.path,
                compute.dtype,
                self._device,
                shard,
                self._report_phase,
                is_deterministic=compute.is_deterministic,
                expert_offload=compute.expert_offload,
                expert_copies=compute.expert_copies,
                form=compute.weights,
            )
            if_it_fails.pop_all()
        return decoder

    def warm_up(self, step_tokens: int = WARM_UP_TOKENS) -> None:
        """Run what steps consist of, as `WarmUp` describes; chunks have up to `step_tokens`."""
        WarmUp(
            self.steps,
            self.host,
            num_blocks=len(self.kv),
            max_sequences=self._max_sequences,
            max_context_tokens=self.config.max_context_tokens,
            vocab_size=self.config.vocab_size,
            clock=self._clock,
        ).run(
            step_tokens,
            chooses_offload=self._offload_mode == "auto" and self.attention.can_stage,
            split_tokens=self.attention.split_tokens,
        )

    def expert_reports(self) -> ExpertReports:
        """Return what reports the tokens of this rank's experts from now on."""
        return ExpertReports(self._model.decoder, self._device)

    def close(self) -> None:
        """Release the pool's memory and leave the groups. Nothing may run afterwards."""
        with self._fingerprint:  # ends, if nobody waited for it
            pass
        self._model.groups.close()
        if self.host is not None:
            self.host.close()
        del self.kv, self.window_kvs, self.attention, self.steps
        for pool in dict.fromkeys((*self.record_pools, *self.pools)):
            pool.close()

    def _choose_attention(self, memory: Sequence[Tensor], clock: Clock | None) -> AttentionBackend:
        """Choose what computes attention over the KV `memory` of each group of layers, with a clock by
        measurement."""
        shape = self._model.decoder.attention_shape
        if self._splits_latents:
            return self._split_attention(shape, memory[0], clock)
        if not self._kv_groups:
            return self._backend(shape, memory[0], clock)
        layers = [
            [layer - layout.shard.layer_start for layer in layout.layers_of(layout.shard)]
            for layout in self.layouts
        ]
        make = functools.partial(self._backend, clock=clock)
        has_states = self.config.state is not None
        return GroupsAttention(shape, layers, memory, make, has_states=has_states)

    def _split_attention(
        self, shape: AttentionShape, memory: Tensor, clock: Clock | None
    ) -> SplitLatentAttention:
        """Return what computes attention over this rank's part of the tokens of each block of latents."""
        groups = self._model.groups
        num_heads = [len(layer_heads(self.config, 0, rank, groups.tp).queries) for rank in range(groups.tp)]
        split = LatentSplit(self._block_tokens, groups.tp)
        make = functools.partial(self._backend, clock=clock)
        return SplitLatentAttention(shape, memory, make, split, num_heads, self._model.unfinished)

    def _layouts(self, shard: ShardSpec) -> list[BlockLayout]:
        """Return the layout of the blocks of each group of layers; of all layers, if there are no groups."""
        whole = kv_layout(
            self.config,
            range(shard.layer_start, shard.layer_end),
            shard.tp_rank,
            shard.tp_size,
            self._block_tokens,
            self._form,
            is_split=self._splits_latents,
        )
        return [whole.of_group(group) for group in self._kv_groups] or [whole]

    def _backend(self, shape: AttentionShape, memory: Tensor, clock: Clock | None) -> AttentionBackend:
        """Choose what computes attention over one KV."""
        if self._queue is not None and self._queue.has_triton and memory.device.type == "cpu":
            from workers.model.attention.triton_latents import make_triton  # in the interpreter, for tests

            make = functools.partial(make_triton, is_deterministic=self._is_deterministic)
            return backend_of_kinds(shape, memory, make)
        return choose_attention(
            shape,
            memory,
            clock,
            is_staged=self.host is not None and self._offload_mode == "stream",
            is_deterministic=self._is_deterministic,
        )

    def _make_steps(self, attention: AttentionBackend, max_context_tokens: int) -> StepRunner:
        return StepRunner(
            self._model,
            attention,
            self.host,
            self._clock,
            self._faults,
            limits=BatchLimits(
                self._max_sequences + NUM_WARM_UP_SLOTS,
                max_context_tokens,
                self._max_sequences,
                self._mixed_tokens,
            ),
            queue=self._queue,
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
        return self._model.groups.smallest(min(num_blocks, fitting))

    def _fitting_blocks(self, auto: AutoKv, num_host_blocks: int) -> int:
        """Return how many blocks the device has memory for."""
        buffer_bytes = sum(map(transfer_bytes, self.layouts))
        if (form := self._records) is not None:
            buffer_bytes += sum(
                conversion_bytes(layout, form) for layout in self.layouts if not layout.is_state
            )
        if self._offload_mode != "in_place":
            buffer_bytes += streaming_bytes(self.layouts[0], num_host_blocks)
        groups = self._model.groups
        meter = MemoryMeter(
            CudaAccounts(self._device),
            len(self._model.decoder.layers),
            is_in_group=groups.tp * groups.pp > 1,
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
        sizes = [layout.block_bytes for layout in self.layouts]
        group_bytes = GroupBytes(sizes, self._limits)
        num_blocks = group_bytes.fitting_blocks(max(left - self._num_scratch * sum(sizes), 0))
        least = least_kv_tokens(self.config, self._block_tokens) // self._block_tokens
        if num_blocks < least:
            raise CapacityError(
                f"kv_tokens: auto leaves space for {num_blocks} blocks of {self._block_tokens} tokens on "
                f"{self._device}, of whose {limits.total_bytes} bytes other processes leave "
                f"{limits.most_available_bytes} to this one, and the replica needs {least}: "
                "raise tp or pp, raise engine.memory_share, or lower max_batch_tokens or max_sequences"
            )
        return num_blocks

    def _profile(self, meter: MemoryMeter, num_rows: int, buffer_bytes: int) -> MemoryProfile:
        """Run the largest steps, and record graphs, over as little KV as they need."""
        num_blocks = trial_blocks(num_rows, self.config.max_context_tokens, self._block_tokens)
        # Plans of the trial name no blocks of groups behind the first, whose first block is then used. States
        # are large, and no part of how long a sequence is.
        sizes = [num_blocks, *(1 if limit.has_states else num_blocks for limit in self._limits)]
        memory = [
            _zeros(layout, size + self._num_scratch, dtype, self._device)
            for layout, size, dtype in zip(self.layouts, sizes, self._block_dtypes, strict=True)
        ]
        # Block tables are as long as those of the replica.
        steps = self._make_steps(self._choose_attention(memory, None), self.config.max_context_tokens)
        self._run_largest(steps, num_rows)
        meter.step_done(sum(kv.nbytes for kv in memory))
        for size in steps.graph_sizes[: -1 - _NUM_MEASURED_GRAPHS : -1]:
            steps.record_graphs((size,))
            meter.graph_done()
        # Those without a measurement of their own are counted as the last one, which takes more than others.
        for mixed in steps.mixed_sizes[: -1 - _NUM_MEASURED_GRAPHS : -1]:
            steps.record_mixed((mixed,))
            meter.graph_done()
        num_graphs = len(steps.graph_sizes) + len(steps.mixed_sizes)
        del steps, memory
        return meter.profile(num_graphs, buffer_bytes)

    def _run_largest(self, steps: StepRunner, num_rows: int) -> None:
        """Run the largest steps, of up to `num_rows` rows."""
        limits = num_rows, self._max_sequences, self.config.max_context_tokens, self._block_tokens
        started, *largest, freed = largest_steps(*limits)
        steps.run(started)
        for plan in largest:
            steps.rehearse(plan)
        steps.run(freed)

    def _num_group_blocks(self, num_blocks: int) -> list[int]:
        """Return the blocks of each group behind the first, which has `num_blocks`."""
        return [limit.most_blocks(num_blocks) for limit in self._limits]

    def _make_record_pools(self) -> list[RecordPool]:
        """Return the pools as the store has their blocks: states as they are, and KV in the records' form."""
        form, kvs = self._records, (self.kv, *self.window_kvs)
        return [
            pool if form is None or pool.layout.is_state else QuantizedRecords(pool.layout, kv, form)
            for pool, kv in zip(self.pools, kvs, strict=True)
        ]

    def _allocate_host(self, num_blocks: int) -> HostKv | None:
        if not num_blocks:
            return None
        host = HostKv(self.kv, num_blocks)
        if self._offload_mode != "auto":
            host.use(self._offload_mode)
        return host


def _check_deterministic(device: torch.device, dtype: torch.dtype, groups: RankGroups) -> None:
    """Raise `WorkerError` if the device cannot compute deterministically, or if sums of the stage's ranks are
    not added in one order."""
    refuse_nondeterministic(device, dtype)
    if not groups.adds_in_order:
        raise WorkerError(
            f"engine.deterministic with tp {groups.tp} needs the ranks of a stage on CPUs of one host, or on "
            "GPUs of one host that NVLink joins: set tp 1 or 2, or engine.deterministic: false"
        )


def _name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _compatibility(
    config: ModelConfig,
    fingerprint: bytes,
    dtype: torch.dtype,
    weight_dtype: str,
    block_tokens: int,
    form: KvForm,
    groups: tuple[KvGroup, ...],
) -> CompatibilityRecord:
    cells = config.kv_cells
    return CompatibilityRecord(
        protocol=PROTOCOL_VERSION,
        model_fingerprint=fingerprint,
        dtype=_name_of(dtype),
        weight_dtype=weight_dtype,
        block_tokens=block_tokens,
        num_layers=cells.num_layers,
        num_kv_heads=cells.num_cells,
        head_dim=cells.width,
        kv_dtype=form.name,
        scale_bytes=form.scale_bytes,
        num_kinds=cells.num_kinds,
        groups=groups,
        token_parts=token_parts(config, block_tokens, form),
    )


def _block_dtypes(dtype: torch.dtype, groups: Sequence[KvGroup]) -> list[torch.dtype]:
    """Return the dtype of the blocks of each group of layers; of all layers, if there are no groups."""
    return [torch.float32 if group.state_size else dtype for group in groups] or [dtype]


def _allocate(
    layout: BlockLayout, num_blocks: int, num_scratch: int, dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, KvPool]:
    """Allocate zeroed blocks, `num_scratch` more than `num_blocks`: as the model's tensor, and as the
    transports' pool over the same memory. Where this rank has no layer of the blocks, the pool has none."""
    num_all = num_blocks + num_scratch
    if not layout.block_bytes:
        return _zeros(layout, num_all, dtype, device), HostPool(layout, KvMemory.allocate(0))
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
    """Return the shape of blocks as a tensor, in which latents have one head of all tokens that are here."""
    shard = layout.shard
    width = layout.head_bytes // (layout.block_tokens * layout.item_bytes)
    heads = shard.num_heads, layout.block_tokens
    if layout.num_kinds == 1 and not layout.is_state:
        heads = 1, shard.num_heads * layout.block_tokens
    return num_blocks, layout.num_layers(shard), layout.num_kinds, *heads, width
