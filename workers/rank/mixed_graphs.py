"""Graphs of steps that compute a chunk of one prompt, beside sequences that decode or alone.

Such a step is padded to a number of tokens of the chunk and a number of sequences that decode. A chunk alone
has graphs without rows of others, and only if it is short: the first token of an idle replica would wait for
the launches of its prompt's kernels, where those of a longer prompt take the device longer than the host.

Tokens of padding follow the chunk in its own sequence: no token before them attends to them, and what they
write lies behind the chunk, in its last block, which a later chunk overwrites, or in the scratch block. So
the chunk has a table of its own, the row of a slot that no plan uses, whose entries behind the chunk's last
block are the scratch block. Not yet validated on a card.

They are recorded where `engine.mixed_graphs` says so: `benchmarks.gpu mixed` prints the share of such steps
in which a device waits for launches, and above 5 % of it graphs are worth their memory."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np
import torch

from workers.messages.rank_channel import StepPlan
from workers.model.attention.interface import AttentionBackend, StepInput
from workers.rank.containment import Containment
from workers.rank.decode_graphs import Decoded, begin_logprobs
from workers.rank.device_batch import DeviceBatch
from workers.rank.device_queue import DeviceQueue, Event, Graph
from workers.rank.device_sampler import DeviceSampler
from workers.rank.input_batch import PlannedRows
from workers.rank.rank_model import RankModel
from workers.rank.tickets import Results

# The tokens of chunks, and the sequences beside them, for which there are graphs.
_CHUNK_TOKENS = (128, 256, 512, 1024, 2048)
_NUM_DECODES = (8, 32, 64, 128, 256)
# The tokens of chunks that are alone.
_LONE_TOKENS = (64, 128, 256)


class MixedSize(NamedTuple):
    """The tokens of the chunk and the sequences that decode; without any, it is for chunks that are alone."""

    chunk_tokens: int
    num_decodes: int

    def serves(self, num_tokens: int, num_decodes: int) -> bool:
        """Whether a chunk of `num_tokens` beside `num_decodes` sequences can be padded to this size."""
        is_alike = bool(self.num_decodes) == bool(num_decodes)
        return is_alike and self.chunk_tokens >= num_tokens and self.num_decodes >= num_decodes


def mixed_sizes(most_tokens: int, most_sequences: int) -> tuple[MixedSize, ...]:
    """Return the sizes for steps of up to `most_tokens` of a chunk, alone or beside up to `most_sequences`:
    those that take the most memory last."""
    lone = [MixedSize(size, 0) for size in _LONE_TOKENS if size <= most_tokens]
    chunks = [size for size in _CHUNK_TOKENS if size <= most_tokens]
    end = bisect_left(_NUM_DECODES, most_sequences) + 1
    return (*lone, *(MixedSize(chunk, decodes) for chunk in chunks for decodes in _NUM_DECODES[:end]))


class MixedGraphs:
    """The graphs of a rank that samples and has no others beside it."""

    def __init__(
        self,
        model: RankModel,
        attention: AttentionBackend,
        batch: DeviceBatch,
        sampler: DeviceSampler,
        queue: DeviceQueue,
    ) -> None:
        self._decoder, _, self._unfinished, _ = model
        self._attention = attention
        self._batch = batch
        self._sampler = sampler
        self._queue = queue
        self._recorder = queue.recorder()
        self._size_to_graph: dict[MixedSize, Graph] = {}

    @property
    def can_record(self) -> bool:
        """Whether attention, experts and sampler leave nothing of a step to the host (attention of chunks
        over latents does), and no layer keeps a state, which tokens of padding would change."""
        can_capture = self._attention.can_capture and self._sampler.can_capture
        config = self._decoder.config
        is_plain = config.state is None and config.latent is None
        return can_capture and is_plain and not self._decoder.split_experts

    def record(self, sizes: Sequence[MixedSize]) -> None:
        """Record the graphs of some sizes, the largest first, and replay each once. Their rows are
        padding."""
        sizes = sorted(sizes, reverse=True)
        self._batch.pad_mixed_rows()
        for size in sizes:
            self._work(size)()  # compiles what is compiled at first use: a recording must not
        with self._decoder.separate_workspace():
            for size in sizes:
                self._size_to_graph[size] = self._recorder.record(self._work(size))
        for size in sizes:
            self._size_to_graph[size].replay()
        self._queue.event().synchronize()

    def size_for(self, plan: StepPlan, rows: PlannedRows) -> MixedSize | None:
        """Return the smallest size that serves a plan; None: it has no chunk, or several, or one that does
        more than sample for its own sequence, or is too large."""
        if not self._size_to_graph or len(plan.entries) != 1:
            return None
        (entry,), split_tokens = plan.entries, self._attention.split_tokens
        is_plain = entry.targets is None and not entry.pools and entry.num_tokens > 1
        samples_itself = entry.sample_slots in ((), (entry.slot,))
        is_short = 0 < split_tokens <= entry.start  # another kernel may be faster
        if not (is_plain and samples_itself) or is_short or self._batch.chunk_slot in rows.slots:
            return None
        needed = entry.num_tokens, rows.num_sequences - 1
        return min((size for size in self._size_to_graph if size.serves(*needed)), default=None)

    def run(
        self, plan: StepPlan, rows: PlannedRows, size: MixedSize, containment: Containment
    ) -> tuple[Event, Results | None]:
        """Compute a step by the graph of a size. Returns its end and, if a sequence samples, its results."""
        retry = containment.retry_after_freeing_cache
        changes = self._sampler.changes()
        stage = partial(self._batch.stage_mixed, plan, rows, size.chunk_tokens, size.num_decodes, changes)
        self._sampler.change(retry(stage))
        decoded = Decoded(*self._size_to_graph[size].replay())
        if not len(rows.sample_slots):
            return self._queue.event(), None
        sampling = rows.only(np.isin(rows.slots, rows.sample_slots))
        first = rows.num_sequences - sampling.num_sequences  # 1 if the chunk does not sample
        places = slice(first, rows.num_sequences)
        # The next replay writes to its memory.
        tokens = retry(decoded.tokens[places].clone)
        drawn = begin_logprobs(self._sampler, sampling, decoded.logits[places], tokens, containment)
        copied = self._queue.copy_out(tokens, self._queue.host_memory(tokens))
        return copied.event, Results(copied, drawn)

    def _work(self, size: MixedSize) -> Callable[[], Decoded]:
        """Return what the graph of a size computes: nothing that it reads at the host ever changes."""
        batch, num_rows = self._batch, 1 + size.num_decodes
        slots, starts, sample_slots, token_slots, last_rows = batch.mixed_rows[:, :num_rows]
        lengths = np.ones(num_rows, np.int32)
        lengths[0] = size.chunk_tokens
        device = batch.recorded_step(slots, starts, torch.from_numpy(lengths).to(slots.device))
        step = StepInput.on_device(device, lengths, batch.block_tokens)

        def work() -> Decoded:
            self._unfinished.begin(size.chunk_tokens + size.num_decodes, num_rows)
            named = batch.chunk_tokens[: size.chunk_tokens]
            tokens = torch.cat((named, batch.last_tokens[token_slots[1:]]))
            hidden = self._decoder.embed(tokens.long())
            hidden = self._decoder.run_layers(hidden, self._attention.plan(step))
            logits = self._decoder.logits(hidden[last_rows])
            drawn = self._sampler.draw_captured(logits, sample_slots)
            batch.sampled(token_slots, drawn)
            return Decoded(drawn, logits)

        return work
