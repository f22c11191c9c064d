"""Graphs of decoding steps: a whole step, from embedding to sampled token, is queued with one call.

A graph computes a fixed number of rows in memory that stays where it is. Steps are padded to the next size
that was recorded: 1, 2, 4 and 8 rows, then every 8. Rows of padding write to a scratch block, and what they
sample is not read. Recording and replaying is all that depends on CUDA, see `workers.rank.device_queue`."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from workers.messages.rank_channel import StepPlan
from workers.model.attention.interface import AttentionBackend, StepInput
from workers.model.rank_memory import graph_sizes
from workers.rank.containment import Containment
from workers.rank.device_batch import DeviceBatch
from workers.rank.device_queue import DeviceQueue, Event, Graph
from workers.rank.device_sampler import DeviceSampler
from workers.rank.input_batch import PlannedRows
from workers.rank.rank_model import RankModel
from workers.rank.tickets import DrawnRows, Results


class Decoded(NamedTuple):
    """The results of a graph: int32 `tokens` [num_rows] and float32 `logits` [num_rows, vocab_size] in memory
    of the graph, which its next replay and those of other graphs overwrite."""

    tokens: Tensor
    logits: Tensor


class DecodeGraphs:
    """The graphs of a rank. `sizes` are the numbers of rows for which there may be one."""

    def __init__(
        self,
        model: RankModel,
        attention: AttentionBackend,
        batch: DeviceBatch,
        sampler: DeviceSampler | None,
        queue: DeviceQueue,
    ) -> None:
        """`sampler` is None at ranks that do not sample; they get the tokens of the rank that does."""
        self.sizes = graph_sizes(batch.graph_rows.shape[1])
        self._decoder, self._groups, self._unfinished, _ = model
        self._attention = attention
        self._batch = batch
        self._sampler = sampler
        self._queue = queue
        self._recorder = queue.recorder()
        self._size_to_graph: dict[int, Graph] = {}
        self._recorded: list[int] = []

    @property
    def can_record(self) -> bool:
        """Whether attention, experts and sampler leave nothing of a step to the host."""
        can_sample = self._sampler is None or self._sampler.can_capture
        return self._attention.can_capture and can_sample and not self._decoder.split_experts

    def record(self, sizes: Sequence[int]) -> None:
        """Record the graphs of some sizes, the largest first, so that its memory holds what the others need,
        and replay each once, which takes what else it needs of the device. Their slots are those of padding,
        which write to the scratch block."""
        sizes = sorted(sizes, reverse=True)
        self._batch.pad_graph_rows()
        for size in sizes:
            self._work(size)()  # compiles what is compiled at first use: a recording must not
        with self._decoder.separate_workspace():
            for size in sizes:
                work = self._work(size)
                self._size_to_graph[size] = self._recorder.record(work)
        self._recorded = sorted(self._size_to_graph)
        for size in sizes:
            self._replay(size)
        self._queue.event().synchronize()

    def size_for(self, num_rows: int) -> int | None:
        """Return the size of the smallest graph that serves `num_rows` rows; None if there is none."""
        place = bisect_left(self._recorded, num_rows)
        return self._recorded[place] if num_rows and place < len(self._recorded) else None

    def run(
        self, plan: StepPlan, rows: PlannedRows, size: int, containment: Containment
    ) -> tuple[Event, Results | None]:
        """Compute a step by the graph of a size: its `rows` have one token each and sample for their own
        slots. Returns its end, and at the rank that samples its results."""
        changes = () if self._sampler is None else self._sampler.changes()
        device_changes = containment.retry_after_freeing_cache(
            partial(self._batch.stage_for_graph, plan, rows, size, changes)
        )
        if self._sampler is not None:
            self._sampler.change(device_changes)
        decoded = self._replay(size)
        if self._sampler is None:
            return self._queue.event(), None
        # The next replay writes to its memory.
        tokens = containment.retry_after_freeing_cache(decoded.tokens[: rows.num_sequences].clone)
        drawn = begin_logprobs(self._sampler, rows, decoded.logits, tokens, containment)
        copied = self._queue.copy_out(tokens, self._queue.host_memory(tokens))
        return copied.event, Results(copied, drawn)

    def _replay(self, size: int) -> Decoded:
        """Queue the graph of a size. Its rows are staged."""
        return Decoded(*self._size_to_graph[size].replay())

    def _work(self, num_rows: int) -> Callable[[], Decoded]:
        """Return what a graph of `num_rows` computes: nothing that it reads at the host ever changes."""
        batch, sampler = self._batch, self._sampler
        slots, starts, lengths, sample_slots = batch.graph_rows[:, :num_rows]
        device = batch.step(slots, starts, lengths)
        step = StepInput.on_device(device, np.ones(num_rows, np.int32), batch.block_tokens)

        def work() -> Decoded:
            self._unfinished.begin(num_rows, num_rows)
            hidden = self._decoder.embed(batch.last_tokens[slots].long())
            hidden = self._decoder.run_layers(hidden, self._attention.plan(step))
            logits = self._decoder.logits(hidden)
            if sampler is not None:
                tokens = sampler.draw_captured(logits, sample_slots)
            else:
                tokens = torch.zeros(num_rows, dtype=torch.int32, device=hidden.device)
            if self._groups.tp > 1:
                self._groups.broadcast(tokens)
            batch.sampled(slots, tokens)
            return Decoded(tokens, logits)

        return work


def begin_logprobs(
    sampler: DeviceSampler, rows: PlannedRows, logits: Tensor, tokens: Tensor, containment: Containment
) -> list[DrawnRows]:
    """Begin to compute the log-probabilities that go with a graph's tokens, in parts where memory lacks.
    The graph is not replayed again, for it has counted its tokens: a sequence whose log-probabilities
    cannot be computed alone is reported as failed, and is as intact as at the other ranks."""
    drawn: list[DrawnRows] = []
    pending = [(rows, 0)]
    while pending:
        part, first = pending.pop()
        places = slice(first, first + part.num_sequences)
        begin = partial(sampler.logprobs, logits[places], part.slots, tokens[places])
        logprobs = containment.attempt(begin)
        if logprobs is not None:
            drawn.append(DrawnRows(part, logprobs))
        elif part.num_sequences == 1:
            containment.withhold(part)
        else:
            middle = part.num_sequences // 2
            is_first = np.arange(part.num_sequences) < middle
            pending += [(part.only(~is_first), first + middle), (part.only(is_first), first)]
    return drawn
