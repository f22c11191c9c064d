"""A device's state of every slot, so that a step needs one copy to it and nothing from it.

Block tables and last tokens lie on the device by slot. A plan's differences are copied there together with
the step's rows; tokens that are sampled are written next to them without passing through the host, which
learns them a step later. Sequences that decode in a CUDA graph are padded with rows of a slot of their own,
whose table names a scratch block throughout.

Runs on CPU tensors as well."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from workers.messages.rank_channel import StepPlan
from workers.model.attention.interface import DeviceStep
from workers.rank.device_queue import DeviceQueue
from workers.rank.input_batch import Ids, InputBatch, PlannedRows, grown_tables


class DeviceRows(NamedTuple):
    """The rows of a step on the device, int32: what each sequence computes, `slots`, `starts` and `lengths`
    [num_sequences]; the `last_rows` [num_sampling] of the tokens from which sequences sample, and the
    `sample_slots` [num_samples] that do."""

    slots: Tensor
    starts: Tensor
    lengths: Tensor
    last_rows: Tensor
    sample_slots: Tensor


class DeviceBatch:
    """`tables` [max_slots + 1, max_blocks], `group_tables` of the same shape and `last_tokens` [max_slots +
    1], int32 on the device, follow those of `batch`; the last row of each is for padding. `graph_rows` [4,
    most_rows] are the slots, starts and lengths of the step that a graph computes, and the slots that sample,
    -1 for padding. Their memory is never reallocated."""

    def __init__(
        self,
        batch: InputBatch,
        queue: DeviceQueue,
        *,
        most_rows: int,
        scratch_blocks: Sequence[int],
        most_chunk_tokens: int = 0,
    ) -> None:
        """`scratch_blocks` are what padding writes in each group of layers. A graph has at most `most_rows`
        sequences that decode, beside a chunk of at most `most_chunk_tokens`."""
        self._batch = batch
        self._queue = queue
        self.block_tokens = batch.block_tokens
        max_slots, max_blocks = batch.tables.shape
        self.padding_slot = max_slots
        self._num_table_words = batch.all_tables.size
        num_words = self._num_table_words + max_slots + 1
        assert num_words < 1 << 31, f"tables of {max_slots} slots and {max_blocks} blocks"
        # One tensor, so that one kernel changes all of it.
        self._words = torch.zeros(num_words, dtype=torch.int32, device=queue.device)
        every = self._words[: self._num_table_words].view(-1, max_slots + 1, max_blocks)
        self.tables, *self.group_tables = every.unbind()
        self.last_tokens = self._words[self._num_table_words :]
        every[:, max_slots] = torch.tensor(scratch_blocks, dtype=torch.int32)[:, None].to(queue.device)
        self.graph_rows = torch.zeros((4, most_rows), dtype=torch.int32, device=queue.device)
        self.pad_graph_rows()
        # The slot whose table is that of a chunk in a graph; the last one, which no plan of the engine core
        # uses, and what padding writes.
        self.chunk_slot = max_slots - 1
        self._scratch_blocks = np.array(scratch_blocks, np.int32)
        self._every = every
        # The rows of the step that a graph with a chunk computes: the slots whose tables they have, their
        # starts, the slots that sample (-1: none), those whose last token they take and give, and the rows of
        # the tokens that they sample from. And the tokens of the chunk.
        self.mixed_rows = torch.zeros((5, most_rows + 1), dtype=torch.int32, device=queue.device)
        self.chunk_tokens = torch.zeros(most_chunk_tokens, dtype=torch.int32, device=queue.device)

    def stage(
        self, plan: StepPlan, rows: PlannedRows, more: Sequence[Ids] = ()
    ) -> tuple[DeviceRows, Tensor, list[Tensor]]:
        """Copy to the device what `plan` changes, what it computes, `rows` as `InputBatch.change` returns
        them, and `more` arrays. Returns the rows there, the tokens [num_tokens] that go in, and `more`."""
        indices, values = self._changes(plan, self._started_tokens(plan))
        arrays = (*more, *_arrays(rows), _named_tokens(plan), indices, values)
        *staged, tokens, device_indices, device_values = self._queue.upload(arrays)
        self._apply(device_indices, device_values)
        device_rows = DeviceRows(*staged[len(more) :])
        if plan.decodes:
            last = self.last_tokens[device_rows.slots[len(plan.entries) :]]
            tokens = torch.cat((tokens, last)) if len(tokens) else last
        return device_rows, tokens, staged[: len(more)]

    def place(self, rows: PlannedRows) -> DeviceRows:
        """Copy rows to the device: some of a step's, of which the plan's changes are there already."""
        return DeviceRows(*self._queue.upload(_arrays(rows)))

    def stage_for_graph(
        self, plan: StepPlan, rows: PlannedRows, num_rows: int, more: Sequence[Ids] = ()
    ) -> list[Tensor]:
        """Copy to the device what `plan` changes, to `graph_rows` what it computes, padded to `num_rows`, and
        `more` arrays, which are returned. The sequences have one token each, which `last_tokens` takes where
        the plan names it, and sample for their own slots."""
        slot_to_token = self._started_tokens(plan)
        named = _named_tokens(plan).tolist()
        slot_to_token |= dict(zip(rows.slots[: len(named)].tolist(), named, strict=True))
        padded = self._padding(num_rows)
        padded[:, : rows.num_sequences] = rows.slots, rows.starts, rows.lengths, rows.slots
        indices, values = self._changes(plan, slot_to_token)
        arrays = (padded.reshape(-1), indices, values, *more)
        device_rows, device_indices, device_values, *more_on_device = self._queue.upload(arrays)
        self._apply(device_indices, device_values)
        self.graph_rows[:, :num_rows].copy_(device_rows.view(4, num_rows))
        return more_on_device

    def stage_mixed(
        self,
        plan: StepPlan,
        rows: PlannedRows,
        num_tokens: int,
        num_decodes: int,
        more: Sequence[Ids] = (),
    ) -> list[Tensor]:
        """Copy to the device what `plan` changes, what it computes, a chunk padded to `num_tokens` and
        decodes padded to `num_decodes`, and `more` arrays, which are returned."""
        (entry,) = plan.entries
        padded = self._mixed_padding(num_tokens, num_decodes)
        padded[:, 1 : rows.num_sequences] = (
            *(rows.slots[1:], rows.starts[1:], rows.slots[1:], rows.slots[1:]),
            num_tokens + np.arange(rows.num_sequences - 1, dtype=np.int32),
        )
        samples = entry.slot if entry.sample_slots else -1
        token_slot = entry.slot if entry.sample_slots else self.padding_slot
        padded[:, 0] = self.chunk_slot, entry.start, samples, token_slot, entry.num_tokens - 1
        tokens = np.zeros(num_tokens, np.int32)
        tokens[: entry.num_tokens] = _named_tokens(plan)
        tables = self._batch.all_tables[:, entry.slot].copy()
        num_blocks = -(-(entry.start + entry.num_tokens) // self.block_tokens)
        tables[:, num_blocks:] = self._scratch_blocks[:, None]
        indices, values = self._changes(plan, self._started_tokens(plan))
        arrays = (padded.reshape(-1), tokens, tables.reshape(-1), indices, values, *more)
        device_rows, device_tokens, device_tables, *changes = self._queue.upload(arrays)
        device_indices, device_values, *more_on_device = changes
        self._apply(device_indices, device_values)
        self._every[:, self.chunk_slot] = device_tables.view(tables.shape)
        self.mixed_rows[:, : 1 + num_decodes].copy_(device_rows.view(5, -1))
        self.chunk_tokens[:num_tokens].copy_(device_tokens)
        return more_on_device

    def pad_mixed_rows(self) -> None:
        """Make all of a step with a chunk padding."""
        num_tokens, num_decodes = len(self.chunk_tokens), self.mixed_rows.shape[1] - 1
        self.mixed_rows.copy_(torch.from_numpy(self._mixed_padding(num_tokens, num_decodes)))
        scratch = torch.from_numpy(self._scratch_blocks).to(self._every.device)
        self._every[:, self.chunk_slot] = scratch[:, None]
        self.chunk_tokens.zero_()

    def _mixed_padding(self, num_tokens: int, num_decodes: int) -> Ids:
        """Return `mixed_rows` that compute nothing of use."""
        row = np.array([[self.padding_slot], [0], [-1], [self.padding_slot], [0]], np.int32)
        padding = np.repeat(row, 1 + num_decodes, axis=1)
        padding[0, 0] = self.chunk_slot
        return padding

    def pad_graph_rows(self) -> None:
        """Make all rows of `graph_rows` padding."""
        self.graph_rows.copy_(torch.from_numpy(self._padding(self.graph_rows.shape[1])))

    def step(self, slots: Tensor, starts: Tensor, lengths: Tensor) -> DeviceStep:
        """Return what attention plans from, for these rows."""
        max_context_tokens = self._batch.tables.shape[1] * self.block_tokens
        return DeviceStep(self.tables, slots, starts, lengths, max_context_tokens, self.group_tables)

    def recorded_step(self, slots: Tensor, starts: Tensor, lengths: Tensor) -> DeviceStep:
        """Return the same of rows whose lengths every replay has."""
        return replace(self.step(slots, starts, lengths), is_recorded=True)

    def sampled(self, slots: Tensor, tokens: Tensor) -> None:
        """Take `tokens` [num_samples] as the newest of these slots."""
        self.last_tokens[slots] = tokens.to(torch.int32)

    def _padding(self, num_rows: int) -> Ids:
        """Return `graph_rows` that compute nothing of use."""
        return np.repeat(np.array([[self.padding_slot], [0], [1], [-1]], np.int32), num_rows, axis=1)

    def _changes(self, plan: StepPlan, slot_to_token: dict[int, int]) -> tuple[Ids, Ids]:
        """Return the places of words that the plan changes and their new values. A place that comes twice has
        the same value both times."""
        table = self._table_places(plan)
        tokens = np.fromiter(slot_to_token.keys(), np.int32, len(slot_to_token))
        indices = np.concatenate((table, tokens + np.int32(self._num_table_words)))
        of_tokens = np.fromiter(slot_to_token.values(), np.int32, len(slot_to_token))
        return indices, np.concatenate((self._batch.all_tables.reshape(-1)[table], of_tokens))

    def _table_places(self, plan: StepPlan) -> Ids:
        """Return the places in the flattened tables that a plan has changed."""
        max_blocks, of_group = np.int32(self._batch.tables.shape[1]), self._batch.all_tables[0].size
        slots, _ = grown_tables(plan)
        grown = slots * max_blocks + self._batch.num_blocks[slots] - 1
        if not plan.tables:
            return grown
        firsts = np.array(
            [it.group * of_group + it.slot * max_blocks + it.first for it in plan.tables], np.int32
        )
        lengths = np.array([len(change.block_ids) // 4 for change in plan.tables], np.int32)
        ends = np.cumsum(lengths, dtype=np.int32)
        changed = np.repeat(firsts - (ends - lengths), lengths) + np.arange(ends[-1], dtype=np.int32)
        return np.concatenate((changed, grown))

    def _apply(self, indices: Tensor, values: Tensor) -> None:
        if len(indices):
            self._words[indices] = values

    @staticmethod
    def _started_tokens(plan: StepPlan) -> dict[int, int]:
        return {sample.slot: sample.last_token for start in plan.starts for sample in start.samples}


def _arrays(rows: PlannedRows) -> tuple[Ids, ...]:
    """Return the fields of `DeviceRows`."""
    last_rows = (np.cumsum(rows.lengths, dtype=np.int32) - 1)[rows.sampling]
    return rows.slots, rows.starts, rows.lengths, last_rows, rows.sample_slots


def _named_tokens(plan: StepPlan) -> Ids:
    """Return the input tokens that a plan names, those of its entries."""
    return np.frombuffer(b"".join([entry.tokens for entry in plan.entries]), dtype="<i4")
