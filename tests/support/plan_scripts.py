"""Draws valid plans over a few slots."""

from __future__ import annotations

from hypothesis import strategies as st

from workers.messages.rank_channel import BatchEntry, SlotSample, SlotStart, StepPlan, TableChange
from workers.messages.sampling import SamplingParams
from workers.scheduler.step import pack_ids

MAX_SLOTS = 6
MAX_BLOCKS = 9
BLOCK = 4
FIRST_HOST_ID = 1000


class Scripts:
    """Draws valid plans over a few slots, and keeps what it knows of them."""

    def __init__(self, data: st.DataObject) -> None:
        self._data = data
        self._tables: dict[int, int] = {}  # blocks of each started slot
        self._positions: dict[int, int] = {}

    def plan(self, step: int) -> StepPlan:
        draw = self._data.draw
        frees = draw(st.lists(st.sampled_from(sorted(self._tables)), unique=True)) if self._tables else []
        for slot in frees:
            del self._tables[slot]
            self._positions.pop(slot, None)
        free = [slot for slot in range(MAX_SLOTS) if slot not in self._tables]
        starts = draw(st.lists(st.sampled_from(free), unique=True)) if free else []
        tables: list[TableChange] = []
        for slot in starts:
            self._tables[slot] = 0
        for slot in self._tables:
            if draw(st.booleans()):
                tables += self._changes(slot)
        ready = [slot for slot, count in self._tables.items() if count]
        named = draw(st.lists(st.sampled_from(ready), unique=True)) if ready else []
        entries: list[BatchEntry] = []
        decodes: list[int] = []
        others = [slot for slot in self._tables if slot not in named]
        for slot in named:
            capacity = BLOCK * self._tables[slot]
            position = self._positions.get(slot)
            if position is not None and position < capacity and draw(st.booleans()):
                decodes.append(slot)
                self._positions[slot] = position + 1
                continue
            start = draw(st.integers(0, capacity - 1))
            num_tokens = draw(st.integers(1, capacity - start))
            forks = draw(st.sampled_from([(), (slot,), (slot, *others[:2])]))
            others = [it for it in others if it not in forks]  # nobody samples twice
            first = draw(st.integers(0, 2**32 - 1))
            tokens = pack_ids([(first + number) % 2**32 for number in range(num_tokens)])
            entries.append(BatchEntry(slot, start, num_tokens, tokens, forks))
            self._positions |= dict.fromkeys((slot, *forks), start + num_tokens)
        return StepPlan(
            step,
            free_slots=tuple(frees),
            starts=tuple(SlotStart(SamplingParams(), (SlotSample(slot, 0, 50 + slot),)) for slot in starts),
            entries=tuple(entries),
            tables=tuple(tables),
            decodes=pack_ids(decodes),
        )

    def _changes(self, slot: int) -> list[TableChange]:
        count = self._tables[slot]
        first = self._data.draw(st.integers(0, min(count, MAX_BLOCKS - 1)))
        ids = self._data.draw(st.lists(st.integers(0, 1020), min_size=1, max_size=MAX_BLOCKS - first))
        self._tables[slot] = max(count, first + len(ids))
        return [TableChange(slot, first, pack_ids(ids))]
