"""The arrays that plans change in place, against a reader of plans in plain Python."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from plan_reader import PlanReader, Work
from plan_scripts import BLOCK, FIRST_HOST_ID, MAX_BLOCKS, MAX_SLOTS, Scripts

from workers.messages.rank_channel import BatchEntry, BlockCopy, SlotSample, SlotStart, StepPlan, TableChange
from workers.messages.sampling import SamplingParams
from workers.rank.collectives import RankGroups
from workers.rank.input_batch import InputBatch, InputTokens, PlannedRows
from workers.scheduler.step import pack_ids


def works(rows: PlannedRows, plan: StepPlan, batch: InputBatch) -> list[Work]:
    """The rows as the plain reader has them."""
    found: list[Work] = []
    for index, slot, start, length in zip(
        rows.indices.tolist(), rows.slots.tolist(), rows.starts.tolist(), rows.lengths.tolist(), strict=True
    ):
        tokens = plan.entries[index].tokens if index < len(plan.entries) else b""
        samples = rows.sample_slots[rows.sample_sources == len(found)].tolist()
        found.append(Work(slot, start, length, tokens, tuple(batch.table(slot)), tuple(samples)))
    return found


@given(st.data())
def test_arrays_hold_what_plans_say(data: st.DataObject) -> None:
    batch, reader, scripts = (
        InputBatch(MAX_SLOTS, MAX_BLOCKS, BLOCK, FIRST_HOST_ID),
        PlanReader(),
        Scripts(data),
    )
    for step in range(6):
        plan = scripts.plan(step)
        expected = reader.read(plan)
        rows = batch.change(plan)
        assert works(rows, plan, batch) == expected
        assert rows.sample_slots.tolist() == plan.sample_slots
        assert rows.sample_rows.tolist() == list(range(len(plan.sample_slots)))
        assert rows.num_tokens == plan.num_tokens
        assert np.flatnonzero(batch.is_started).tolist() == sorted(reader.tables)
        for slot, table in reader.tables.items():
            assert batch.table(slot) == table
            assert batch.in_host[slot] == (max(table, default=0) >= FIRST_HOST_ID)
        assert {slot: batch.positions[slot] for slot in reader.positions} == reader.positions
        kept = np.array(
            data.draw(st.lists(st.booleans(), min_size=len(expected), max_size=len(expected))), bool
        )
        part = rows.only(kept)
        assert works(part, plan, batch) == [work for work, keep in zip(expected, kept, strict=True) if keep]
        assert [plan.sample_slots[row] for row in part.sample_rows] == part.sample_slots.tolist()
        sampling = [place for place, work in enumerate(works(part, plan, batch)) if work.sample_slots]
        assert part.sampling.tolist() == sampling


def test_a_block_that_comes_back_from_host_memory_leaves_its_table_on_the_device() -> None:
    batch = InputBatch(MAX_SLOTS, MAX_BLOCKS, BLOCK, FIRST_HOST_ID)
    start = SlotStart(SamplingParams(), (SlotSample(2, 0, 1),))
    batch.change(StepPlan(1, starts=(start,), tables=(TableChange(2, 0, pack_ids([1000, 4, 1001])),)))
    for index, is_left in ((0, True), (2, False)):
        batch.change(
            StepPlan(2, copies=(BlockCopy(1000, 7),), tables=(TableChange(2, index, pack_ids([7 + index])),))
        )
        assert bool(batch.in_host[2]) is is_left
    assert batch.table(2) == [7, 4, 9]


def test_a_freed_slot_forgets_where_it_was() -> None:
    batch = InputBatch(MAX_SLOTS, MAX_BLOCKS, BLOCK, FIRST_HOST_ID)
    start = SlotStart(SamplingParams(), (SlotSample(2, 0, 1),))
    entry = BatchEntry(2, 0, 3, bytes(12), (2,))
    batch.change(StepPlan(1, starts=(start,), entries=(entry,), tables=(TableChange(2, 0, pack_ids([1])),)))
    again = StepPlan(2, free_slots=(2,), starts=(start,), decodes=pack_ids([2]))
    with pytest.raises(AssertionError, match="slot 2 computes beyond its block table"):
        batch.change(again)


def test_tokens_are_the_newest_of_each_slot() -> None:
    groups = RankGroups(None, tp=1, pp=1, rank=0, device=torch.device("cpu"), host="")
    tokens = InputTokens(groups, MAX_SLOTS)
    starts = tuple(SlotStart(SamplingParams(), (SlotSample(slot, 0, 50 + slot),)) for slot in (1, 4))
    tokens.change(StepPlan(1, starts=starts))
    plan = StepPlan(1, entries=(BatchEntry(2, 0, 2, pack_ids([7, 8]), ()),), decodes=pack_ids([4, 1]))
    assert tokens.tokens(plan).tolist() == [7, 8, 54, 51]
    tokens.sampled(np.array([1], np.int32), np.array([99]))
    assert tokens.tokens(StepPlan(2, decodes=pack_ids([1, 4]))).tolist() == [99, 54]
    tokens.change(StepPlan(3, free_slots=(1,), starts=starts[:1]))
    assert tokens.tokens(StepPlan(3, decodes=pack_ids([1]))).tolist() == [51]
