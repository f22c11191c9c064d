"""The persistent batch of a rank: the state of every slot as plans have given it, in arrays that they change
in place.

A slot is an index: its row of `tables`, its position, its last token. Plans carry differences only, so the
work of a step does not grow with context, and nothing here runs in Python per sequence.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from workers.messages.rank_channel import BatchEntry, StepPlan, TableChange
from workers.rank.collectives import RankGroups

Ids = NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class PlannedRows:
    """The rows that a step computes, or a part of it: sequences in the order of the plan (its entries, then
    its decodes), and the slots that sample for them.

    `indices` [num_sequences] are places in the plan; `slots`, `starts` and `lengths` say who computes which
    tokens. `sample_slots` [num_samples] sample from the last token of the sequences `sample_sources`, and
    their tokens are the rows `sample_rows` of the report.
    """

    indices: Ids
    slots: Ids
    starts: Ids
    lengths: Ids
    sample_slots: Ids
    sample_sources: Ids
    sample_rows: Ids

    @property
    def num_sequences(self) -> int:
        return len(self.slots)

    @property
    def num_tokens(self) -> int:
        return int(self.lengths.sum())

    @property
    def sampling(self) -> Ids:
        """The sequences that sample, each once, in their order."""
        every = np.arange(len(self.slots), dtype=np.int32)
        return every if np.array_equal(self.sample_sources, every) else np.unique(self.sample_sources)

    def stays_in_block(self, block_tokens: int) -> NDArray[np.bool_]:
        """Mark the sequences [num_sequences] whose last new token is in the block of the token before their
        first."""
        is_same: NDArray[np.bool_] = (self.starts - 1) // block_tokens == (
            self.starts + self.lengths - 1
        ) // block_tokens
        return is_same & (self.starts > 0)

    def only(self, kept: NDArray[np.bool_]) -> PlannedRows:
        """Return the part with the sequences that `kept` [num_sequences] marks."""
        if kept.all():
            return self
        sampled = kept[self.sample_sources]
        places = np.cumsum(kept, dtype=np.int32) - 1
        return PlannedRows(
            self.indices[kept],
            self.slots[kept],
            self.starts[kept],
            self.lengths[kept],
            self.sample_slots[sampled],
            places[self.sample_sources[sampled]],
            self.sample_rows[sampled],
        )


class InputBatch:
    """`tables` [max_slots, max_blocks] are the block tables, of which the first `num_blocks` [max_slots] of a
    row are valid; `positions` [max_slots] is where each slot continues. Block ids from `first_host_id` on
    denote host memory; `in_host` [max_slots] says whether a table has any.

    `group_tables` are those of each group of layers behind the first, of which the blocks within a slot's
    window are valid, and the rest are any that there are. `all_tables` [num_groups, max_slots + 1,
    max_blocks] has them all, and a row more in each."""

    def __init__(
        self,
        max_slots: int,
        max_blocks: int,
        block_tokens: int,
        first_host_id: int,
        num_windows: int = 0,
    ) -> None:
        self.all_tables: Ids = np.zeros((1 + num_windows, max_slots + 1, max_blocks), np.int32)
        self.tables: Ids = self.all_tables[0, :max_slots]
        self.group_tables: tuple[Ids, ...] = tuple(self.all_tables[1:, :max_slots])
        self.num_blocks: Ids = np.zeros(max_slots, np.int32)
        self.positions: Ids = np.zeros(max_slots, np.int32)
        self.is_started: NDArray[np.bool_] = np.zeros(max_slots, np.bool_)
        self.in_host: NDArray[np.bool_] = np.zeros(max_slots, np.bool_)
        self.block_tokens = block_tokens
        self._first_host_id = first_host_id

    @property
    def max_slots(self) -> int:
        return len(self.tables)

    def table(self, slot: int) -> list[int]:
        """Return the block table of a slot, as it is now."""
        ids: list[int] = self.tables[slot, : self.num_blocks[slot]].tolist()
        return ids

    def change(self, plan: StepPlan) -> PlannedRows:
        """Take in a plan: free and start slots, change tables. Returns what it computes; the slots then stand
        behind that."""
        for slot in plan.free_slots:
            assert self._holds(slot), f"slot {slot} is freed but was never started"
            self.is_started[slot] = self.in_host[slot] = False
            self.num_blocks[slot] = 0
        for slot in plan.started_slots:
            assert 0 <= slot < self.max_slots, f"slot {slot} is not below {self.max_slots}"
            assert not self.is_started[slot], f"slot {slot} is already in use"
            self.is_started[slot] = True
        for change in plan.tables:
            self._change_table(change)
        if plan.grown:
            self._grow(*grown_tables(plan))
        rows = self._rows(plan)
        ends = rows.starts + rows.lengths
        lacking = np.flatnonzero(self.num_blocks[rows.slots] * self.block_tokens < ends)
        assert not len(lacking), f"slot {rows.slots[lacking[0]]} computes beyond its block table"
        self.positions[rows.sample_slots] = ends[rows.sample_sources]
        self.positions[rows.slots] = ends
        return rows

    def _holds(self, slot: int) -> bool:
        return 0 <= slot < self.max_slots and bool(self.is_started[slot])

    def _change_table(self, change: TableChange) -> None:
        assert self._holds(change.slot), f"slot {change.slot} has a table but was never started"
        ids = np.frombuffer(change.block_ids, dtype="<u4")
        end = change.first + len(ids)
        if change.group:
            assert end <= self.tables.shape[1], f"slot {change.slot}: {end} blocks in its table"
            self.group_tables[change.group - 1][change.slot, change.first : end] = ids
            return
        num_blocks = int(self.num_blocks[change.slot])
        assert change.first <= num_blocks, f"slot {change.slot}: no block {num_blocks} in its table"
        assert end <= self.tables.shape[1], f"slot {change.slot}: {end} blocks in its table"
        table = self.tables[change.slot]
        table[change.first : end] = ids
        self.num_blocks[change.slot] = num_blocks = max(num_blocks, end)
        if self.in_host[change.slot] or int(ids.max(initial=0)) >= self._first_host_id:
            self.in_host[change.slot] = int(table[:num_blocks].max()) >= self._first_host_id

    def _grow(self, slots: Ids, block_ids: Ids) -> None:
        """Give each of these slots one more block."""
        num_blocks = self.num_blocks[slots]
        is_right = self.is_started[slots] & (num_blocks < self.tables.shape[1])
        is_right &= block_ids < self._first_host_id
        assert is_right.all(), f"slot {slots[np.argmin(is_right)]} cannot have one more block"
        self.tables[slots, num_blocks] = block_ids
        self.num_blocks[slots] = num_blocks + 1

    def _rows(self, plan: StepPlan) -> PlannedRows:
        decodes = np.frombuffer(plan.decodes, dtype="<u4").astype(np.int32)
        unknown = np.flatnonzero(~self.is_started[decodes]) if len(decodes) else decodes
        assert not len(unknown), f"slot {decodes[unknown[0]]} continues but was never started"
        own = np.arange(plan.num_sequences, dtype=np.int32)
        starts, lengths = self.positions[decodes], np.ones(len(decodes), np.int32)
        if not plan.entries:
            return PlannedRows(own, decodes, starts, lengths, decodes, own, own)
        for entry in plan.entries:
            self._check(entry)
        sampled = [(slot, index) for index, entry in enumerate(plan.entries) for slot in entry.sample_slots]
        num_entries = len(plan.entries)
        return PlannedRows(
            own,
            np.concatenate((_ids([entry.slot for entry in plan.entries]), decodes)),
            np.concatenate((_ids([entry.start for entry in plan.entries]), starts)),
            np.concatenate((_ids([entry.num_tokens for entry in plan.entries]), lengths)),
            np.concatenate((_ids([slot for slot, _ in sampled]), decodes)),
            np.concatenate((_ids([index for _, index in sampled]), own[num_entries:])),
            np.arange(len(sampled) + len(decodes), dtype=np.int32),
        )

    def _check(self, entry: BatchEntry) -> None:
        assert self._holds(entry.slot), f"slot {entry.slot} computes but was never started"
        for slot in entry.sample_slots:
            assert self._holds(slot), f"slot {slot} samples but was never started"
        num_tokens = len(entry.tokens) // 4
        assert 0 < entry.num_tokens == num_tokens, f"slot {entry.slot}: {len(entry.tokens)} bytes"


class InputTokens:
    """The tokens that a rank of the first stage embeds: tokens that plans name, and the last token of each
    slot.

    If the sampler is another rank, its messages come in the order of the plans that sample, and are awaited
    when a slot's token is needed. `_unread` holds the slots of messages that have not been read;
    `_messages` [max_slots] the number of the message with the slot's newest token (0: there is none).
    """

    def __init__(self, groups: RankGroups, max_slots: int) -> None:
        self._groups = groups
        self._last: NDArray[np.int64] = np.zeros(max_slots, np.int64)
        self._messages: NDArray[np.int64] = np.zeros(max_slots, np.int64)
        self._unread: deque[Ids] = deque()
        self._num_read = 0
        # With more plans than can be in flight, the sampler has reported the oldest, so its tokens are sent.
        self._most_unread = groups.pp + 1

    def change(self, plan: StepPlan) -> None:
        """Take the last tokens of the slots that the plan starts."""
        for start in plan.starts:
            for sample in start.samples:
                self._last[sample.slot] = sample.last_token
                self._messages[sample.slot] = 0

    def tokens(self, plan: StepPlan) -> NDArray[np.int64]:
        """Return the input tokens [num_tokens] of a plan: those of its entries, then the last ones of its
        decodes."""
        decodes = np.frombuffer(plan.decodes, dtype="<u4")
        if len(decodes):
            newest = int(self._messages[decodes].max())
            while self._num_read < newest:
                self._read()
        last: NDArray[np.int64] = self._last[decodes]
        if not plan.entries:
            return last
        named = np.frombuffer(b"".join([entry.tokens for entry in plan.entries]), dtype="<u4")
        return np.concatenate((named.astype(np.int64), last))

    def expect(self, step: int, slots: Ids) -> None:
        """Expect another rank to sample for these slots. Called before the step is computed."""
        if self._groups.is_sampler or not len(slots):
            return
        self._groups.expect_tokens(step, len(slots))
        self._unread.append(slots)
        self._messages[slots] = self._num_read + len(self._unread)
        if len(self._unread) > self._most_unread:
            self._read()

    def sampled(self, slots: Ids, tokens: NDArray[np.int64]) -> None:
        """Take the tokens that this rank itself sampled."""
        self._last[slots] = tokens

    def _read(self) -> None:
        _, tokens = self._groups.receive_tokens()
        self._num_read += 1
        slots = self._unread.popleft()
        is_newest = self._messages[slots] == self._num_read  # else it was freed, or sampled again
        self._last[slots[is_newest]] = tokens[is_newest]


def grown_tables(plan: StepPlan) -> tuple[Ids, Ids]:
    """Return the slots whose tables gain one block by a plan, and these blocks."""
    pairs = np.frombuffer(plan.grown, dtype="<i4").reshape(-1, 2)
    return pairs[:, 0], pairs[:, 1]


def _ids(values: list[int]) -> Ids:
    return np.array(values, dtype=np.int32)
