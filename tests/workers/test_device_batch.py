"""What the device knows of every slot, on CPU tensors, against the arrays of the host."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st
from plan_scripts import BLOCK, FIRST_HOST_ID, MAX_BLOCKS, MAX_SLOTS, Scripts

from workers.messages.rank_channel import BatchEntry, SlotSample, SlotStart, StepPlan, TableChange
from workers.messages.sampling import SamplingParams
from workers.rank.collectives import RankGroups
from workers.rank.device_batch import DeviceBatch
from workers.rank.device_queue import CpuQueue
from workers.rank.input_batch import InputBatch, InputTokens, PlannedRows
from workers.scheduler.step import pack_ids

MOST_ROWS = 8
SCRATCH = 999


def make() -> tuple[InputBatch, DeviceBatch]:
    batch = InputBatch(MAX_SLOTS, MAX_BLOCKS, BLOCK, FIRST_HOST_ID)
    return batch, DeviceBatch(batch, CpuQueue(), most_rows=MOST_ROWS, scratch_blocks=[SCRATCH])


def as_tokens(values: torch.Tensor) -> list[int]:
    return values.numpy().view(np.uint32).tolist()  # type: ignore[no-any-return]


def is_decode(rows: PlannedRows) -> bool:
    return bool((rows.lengths == 1).all()) and np.array_equal(rows.slots, rows.sample_slots)


@given(st.data())
def test_the_device_holds_what_the_host_holds(data: st.DataObject) -> None:
    """Over random plans, with tokens that are sampled in between: tables, input tokens and rows. A plan whose
    sequences all have one token and sample may go to a graph instead."""
    batch, there = make()
    groups = RankGroups(None, tp=1, pp=1, rank=0, device=torch.device("cpu"), host="")
    inputs, scripts = InputTokens(groups, MAX_SLOTS), Scripts(data)
    for step in range(6):
        plan = scripts.plan(step)
        rows = batch.change(plan)
        inputs.change(plan)
        expected = inputs.tokens(plan).tolist()
        if is_decode(rows) and data.draw(st.booleans()):
            num_rows = data.draw(st.integers(rows.num_sequences, MOST_ROWS))
            there.stage_for_graph(plan, rows, num_rows)
            slots, starts, lengths, sample_slots = there.graph_rows[:, :num_rows]
            num_padded = num_rows - rows.num_sequences
            assert slots.tolist() == [*rows.slots.tolist(), *[MAX_SLOTS] * num_padded]
            assert starts.tolist() == [*rows.starts.tolist(), *[0] * num_padded]
            assert lengths.tolist() == [1] * num_rows
            assert sample_slots.tolist() == [*rows.slots.tolist(), *[-1] * num_padded]
            assert as_tokens(there.last_tokens[slots[: rows.num_sequences]]) == expected
        else:
            staged, tokens, _ = there.stage(plan, rows)
            assert staged.slots.tolist() == rows.slots.tolist()
            assert staged.starts.tolist() == rows.starts.tolist()
            assert staged.lengths.tolist() == rows.lengths.tolist()
            assert as_tokens(tokens) == expected
            assert staged.sample_slots.tolist() == rows.sample_slots.tolist()
            row_ends = np.cumsum(rows.lengths)
            assert staged.last_rows.tolist() == (row_ends[rows.sampling] - 1).tolist()
            parts = there.place(rows)
            assert all(torch.equal(part, whole) for part, whole in zip(parts, staged, strict=True))
        for slot in np.flatnonzero(batch.is_started).tolist():
            assert there.tables[slot, : batch.num_blocks[slot]].tolist() == batch.table(slot)
        assert (there.tables[MAX_SLOTS] == SCRATCH).all()
        sampled = np.arange(len(rows.sample_slots)) + 100 * (step + 1)
        inputs.sampled(rows.sample_slots, sampled)
        there.sampled(torch.from_numpy(rows.sample_slots), torch.from_numpy(sampled))


def test_a_named_token_precedes_the_one_of_the_slots_start() -> None:
    """A graph takes both from the same place: the entry's token is what it computes."""
    batch, there = make()
    start = SlotStart(SamplingParams(), (SlotSample(2, 0, last_token=50),))
    plan = StepPlan(
        1,
        starts=(start,),
        tables=(TableChange(2, 0, pack_ids([7])),),
        entries=(BatchEntry(2, 0, 1, pack_ids([33]), (2,)),),
    )
    (more,) = there.stage_for_graph(plan, batch.change(plan), 1, (np.arange(3, dtype=np.int32),))
    assert int(there.last_tokens[2]) == 33
    assert more.tolist() == [0, 1, 2]


def test_memory_stays_where_graphs_expect_it() -> None:
    batch, there = make()
    before = [it.data_ptr() for it in (there.tables, there.last_tokens, there.graph_rows)]
    start = SlotStart(SamplingParams(), tuple(SlotSample(slot, 0, slot) for slot in range(MAX_SLOTS)))
    tables = tuple(TableChange(slot, 0, pack_ids(range(MAX_BLOCKS))) for slot in range(MAX_SLOTS))
    plan = StepPlan(1, starts=(start,), tables=tables)
    there.stage(plan, batch.change(plan))
    decodes = StepPlan(2, decodes=pack_ids(range(MAX_SLOTS)))
    there.stage_for_graph(decodes, batch.change(decodes), MOST_ROWS)
    assert [it.data_ptr() for it in (there.tables, there.last_tokens, there.graph_rows)] == before
