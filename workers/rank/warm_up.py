"""Run what steps consist of before a rank serves, so that no request pays for lazy set-up."""

from __future__ import annotations

import logging
from queue import SimpleQueue

import numpy as np

from kvtransfer.common.clock import Clock
from workers.messages.rank_channel import (
    BatchEntry,
    PromptTargets,
    SlotSample,
    SlotStart,
    StepPlan,
    TableChange,
)
from workers.messages.sampling import SamplingParams
from workers.model.host_kv import MODES, HostKv, OffloadMode
from workers.rank.step_runner import StepRunner
from workers.rank.tickets import MOST_LAUNCHED, launched

_log = logging.getLogger("tandem.rank")

WARM_UP_TOKENS = 48
# The number of steps that continue the prompt of the warm-up.
_NUM_CONTINUED = 2
# The ways to sample, each computed by other code.
_WAYS_TO_SAMPLE = (
    SamplingParams(temperature=1.0),
    SamplingParams(),
    SamplingParams(temperature=0.7, top_k=20, top_p=0.9, min_p=0.01),
    SamplingParams(repetition_penalty=1.1, presence_penalty=0.1, frequency_penalty=0.1),
    SamplingParams(logit_bias={0: 1.0}, num_logprobs=1),
)
# The context length, in host memory, of the step that decides how blocks there are read.
_MEASURED_HOST_TOKENS = 4096
_NUM_MEASURED_STEPS = 4
# The numbers of rows up to which products have tiles of their own.
_NUMS_OF_ROWS = (16, 32, 64, 128, 256)
# The number of sequences that decode up to which kernels of attention are other ones than beyond.
_FEW_DECODES = 16
# The number of slots of the warm-up alone, which no plan of the engine core uses.
NUM_WARM_UP_SLOTS = len(_WAYS_TO_SAMPLE)


class WarmUp:
    """Warms up one rank. The ranks of a replica warm up together.

    Above all, every variant of a kernel is compiled, which takes longer than a step may. A prompt is
    computed, and continued by every way of sampling, alone and with a chunk of another prompt. Steps of the
    largest sizes, a chunk and a decode of every slot, run through one layer, which has all their shapes.
    Recording graphs drops the memory that torch keeps of the device and of the host, so steps that take it
    again come after.
    """

    def __init__(
        self,
        steps: StepRunner,
        host: HostKv | None,
        *,
        num_blocks: int,
        max_sequences: int,
        max_context_tokens: int,
        vocab_size: int,
        clock: Clock,
    ) -> None:
        """`num_blocks` are those of the device's KV, `host` has those in host memory."""
        self._steps = steps
        self._host = host
        self._block_tokens = steps.batch.block_tokens
        self._max_sequences = max_sequences
        self._most = min(max_context_tokens, num_blocks * self._block_tokens)
        self._vocab_size = vocab_size
        self._clock = clock
        self._slots = tuple(max_sequences + index for index in range(NUM_WARM_UP_SLOTS))

    def run(self, step_tokens: int, *, chooses_offload: bool, split_tokens: int = 0) -> None:
        """Warm up, with a chunk of up to `step_tokens`. `chooses_offload`: measure in which mode blocks in
        host memory are read faster, and use it. Short chunks behind `split_tokens`, unless 0, have kernels
        of their own."""
        self._warm_up_kinds(self._most)
        self._steps.record_graphs(self._steps.graph_sizes)
        self._steps.record_mixed(self._steps.mixed_sizes)
        if self._host is not None:
            if chooses_offload:
                self._choose_offload_mode(self._host)
            self._warm_up_host(self._host)
        self._warm_up_shapes(min(step_tokens, self._most))
        if 0 < split_tokens < self._most - 1:
            self._warm_up_long_context(split_tokens)
        if self._steps.runs_ahead:
            self._steps.queue.keep_staging()
            self._warm_up_kinds(self._most)

    def _warm_up_kinds(self, most: int) -> None:
        """Run a prompt, a step that decodes, and one with a chunk and sequences that decode, over at most
        `most` tokens each. As many are under way at a time as when the rank serves."""
        num_tokens = max(1, min(WARM_UP_TOKENS, most - _NUM_CONTINUED, self._vocab_size))
        tokens = np.arange(num_tokens, dtype="<u4").tobytes()
        slots, other = self._slots, 0
        starts = [
            SlotStart(
                params, (SlotSample(slot, 0, num_tokens - 1),), tokens if params.penalizes_prompt else b""
            )
            for slot, params in zip(slots, _WAYS_TO_SAMPLE, strict=True)
        ]
        starts.append(SlotStart(SamplingParams(), (SlotSample(other, 0, 0),)))
        tables = tuple(self._table(slot, min(num_tokens + _NUM_CONTINUED, most)) for slot in (*slots, other))
        prefill = BatchEntry(slots[0], 0, num_tokens, tokens, slots)
        decodes = np.array(slots, dtype="<u4").tobytes()
        plans = [StepPlan(0, starts=tuple(starts), tables=tables, entries=(prefill,))]
        if 2 < num_tokens <= most - _NUM_CONTINUED:
            targets = PromptTargets(0, tokens[8:], 1)
            chunk = BatchEntry(other, 0, num_tokens - 1, tokens[4:], (other,), targets, pools=True)
            plans += [StepPlan(0, decodes=decodes), StepPlan(0, entries=(chunk,), decodes=decodes)]
        plans.append(StepPlan(0, free_slots=(*slots, other)))
        queued: SimpleQueue[StepPlan | None] = SimpleQueue()
        for plan in (*plans, None):
            queued.put(plan)
        for ticket in launched(queued, self._steps.launch, MOST_LAUNCHED if self._steps.runs_ahead else 1):
            self._steps.collect(ticket)

    def _warm_up_host(self, host: HostKv) -> None:
        """Run a step that decodes, and one with a chunk, over tables whose first block is in host memory."""
        num_tokens = min(self._block_tokens, WARM_UP_TOKENS)
        if self._steps.batch.tables.shape[1] < 2 or num_tokens < 2:
            return
        host.kv[:1].zero_()
        slots = (0, *self._slots)
        ids = np.array([host.first_id, 0], "<u4").tobytes()
        starts = tuple(SlotStart(SamplingParams(), (SlotSample(slot, 0, 0),)) for slot in slots)
        tables = tuple(TableChange(slot, 0, ids) for slot in slots)
        self._steps.run(StepPlan(0, starts=starts, tables=tables))
        lengths = [1] * len(slots), [num_tokens, *[1] * len(self._slots)]
        for step in lengths:
            entries = tuple(
                BatchEntry(slot, self._block_tokens, count, bytes(4 * count), ())
                for slot, count in zip(slots, step, strict=True)
            )
            self._steps.rehearse(StepPlan(0, entries=entries))
        self._steps.run(StepPlan(0, free_slots=slots))

    def _warm_up_shapes(self, num_tokens: int) -> None:
        """Run a chunk of `num_tokens` and a decode of every slot through one layer, and read a piece of the
        chunk."""
        slots = tuple(range(self._max_sequences))
        starts = tuple(SlotStart(SamplingParams(), (SlotSample(slot, 0, 0),)) for slot in slots)
        tables = (self._table(0, num_tokens), *(self._table(slot, 1) for slot in slots[1:]))
        self._steps.run(StepPlan(0, starts=starts, tables=tables))
        num_read = min(num_tokens, self._steps.rows_of_piece)
        targets = PromptTargets(0, bytes(4 * num_read), 1)
        chunk = BatchEntry(0, 0, num_tokens, bytes(4 * num_tokens), (), targets)
        firsts = tuple(BatchEntry(slot, 0, 1, bytes(4), ()) for slot in slots)
        shorter = (
            (BatchEntry(0, 0, size, bytes(4 * size), ()),) for size in _NUMS_OF_ROWS if size < num_tokens
        )
        for entries in ((chunk,), firsts, *shorter):
            self._steps.rehearse(StepPlan(0, entries=entries), most_layers=1)
        self._steps.rehearse(StepPlan(0, entries=firsts[:_FEW_DECODES]))
        self._steps.run(StepPlan(0, free_slots=slots))

    def _warm_up_long_context(self, start: int) -> None:
        """Run a short chunk behind `start` tokens."""
        slot, num_tokens = self._slots[0], min(WARM_UP_TOKENS, self._most - start)
        starts = (SlotStart(SamplingParams(), (SlotSample(slot, 0, 0),)),)
        self._steps.run(StepPlan(0, starts=starts, tables=(self._table(slot, start + num_tokens),)))
        entry = BatchEntry(slot, start, num_tokens, bytes(4 * num_tokens), ())
        self._steps.rehearse(StepPlan(0, entries=(entry,)))
        self._steps.run(StepPlan(0, free_slots=(slot,)))

    def _table(self, slot: int, num_tokens: int) -> TableChange:
        """Give a slot the first blocks of the pool."""
        num_blocks = -(-num_tokens // self._block_tokens)
        return TableChange(slot, 0, np.arange(num_blocks, dtype="<u4").tobytes())

    def _choose_offload_mode(self, host: HostKv) -> None:
        """Choose the mode in which a decode step over a long context in host memory is faster. The ranks of a
        stage measure together, and may choose differently."""
        num_blocks = min(
            len(host.kv),
            -(-_MEASURED_HOST_TOKENS // self._block_tokens),
            self._steps.batch.tables.shape[1] - 1,
        )
        host.kv[:num_blocks].zero_()  # memory that was never written is not read from memory
        ids = np.arange(host.first_id, host.first_id + num_blocks + 1, dtype="<u4")
        ids[-1] = 0  # where the token is written
        slot, start = self._slots[0], num_blocks * self._block_tokens
        table = TableChange(slot, 0, ids.tobytes())
        self._steps.run(
            StepPlan(0, starts=(SlotStart(SamplingParams(), (SlotSample(slot, 0, 0),)),), tables=(table,))
        )
        step = StepPlan(0, entries=(BatchEntry(slot, start, 1, bytes(4), ()),))
        mode_to_s: dict[OffloadMode, float] = {}
        for mode in MODES:
            host.use(mode)
            times = []
            for _ in range(_NUM_MEASURED_STEPS):
                started_at = self._clock.now()
                self._steps.rehearse(step)
                times.append(self._clock.now() - started_at)
            mode_to_s[mode] = min(times)
        self._steps.run(StepPlan(0, free_slots=(slot,)))
        host.use(min(reversed(MODES), key=mode_to_s.__getitem__))
        taken = ", ".join(f"{mode} {time_s * 1e3:.1f} ms" for mode, time_s in mode_to_s.items())
        _log.info("blocks in host memory are read %s; a step takes: %s", host.mode, taken)
