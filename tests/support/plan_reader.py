"""Reads step plans as a rank must: what a plan says of a slot holds until a later one changes it. Written
without the rank's arrays, so that both can be compared with the scheduler's own tables."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from workers.messages.rank_channel import StepPlan
from workers.scheduler.scheduler import Scheduler
from workers.scheduler.sequence import Sequence
from workers.scheduler.step import unpack_ids


class Work(NamedTuple):
    """The work of one sequence by a plan; `tokens` b"": the slot's newest token. `windows` are its tables in
    groups with a window, by index."""

    slot: int
    start: int
    num_tokens: int
    tokens: bytes
    block_ids: tuple[int, ...]
    sample_slots: tuple[int, ...]
    windows: tuple[Mapping[int, int], ...] = ()


class PlanReader:
    """The tables and positions of all slots."""

    def __init__(self, num_windows: int = 0) -> None:
        self.tables: dict[int, list[int]] = {}
        self.windows: dict[int, list[dict[int, int]]] = {}
        self._num_windows = num_windows
        self.positions: dict[int, int] = {}

    def read(self, plan: StepPlan) -> list[Work]:
        """Return the plan's entries, then its decodes."""
        for slot in plan.free_slots:
            del self.tables[slot], self.windows[slot]
            self.positions.pop(slot, None)
        for slot in plan.started_slots:
            assert slot not in self.tables, "the slot is in use"
            self.tables[slot] = []
            self.windows[slot] = [{} for _ in range(self._num_windows)]
        for change in plan.tables:
            table, ids = self.tables[change.slot], unpack_ids(change.block_ids)
            assert ids
            if change.group:
                self.windows[change.slot][change.group - 1].update(enumerate(ids, change.first))
                continue
            assert change.first <= len(table), "a hole in the table"
            table[change.first : change.first + len(ids)] = ids
        grown = unpack_ids(plan.grown)
        for slot, block_id in zip(grown[::2], grown[1::2], strict=True):
            self.tables[slot].append(block_id)
        works: list[Work] = []
        for entry in plan.entries:
            tables = tuple(self.tables[entry.slot]), entry.sample_slots, self._windows_of(entry.slot)
            works.append(Work(entry.slot, entry.start, entry.num_tokens, entry.tokens, *tables))
            assert len(entry.tokens) == 4 * entry.num_tokens > 0
            end = entry.start + entry.num_tokens
            self.positions |= dict.fromkeys((entry.slot, *entry.sample_slots), end)
        for slot in unpack_ids(plan.decodes):
            start = self.positions[slot]
            works.append(Work(slot, start, 1, b"", tuple(self.tables[slot]), (slot,), self._windows_of(slot)))
            self.positions[slot] = start + 1
        slots = [work.slot for work in works]
        assert len(set(slots)) == len(slots), "a sequence is named twice"
        return works

    def _windows_of(self, slot: int) -> tuple[Mapping[int, int], ...]:
        return tuple(dict(table) for table in self.windows[slot])


def slotted(scheduler: Scheduler) -> list[Sequence]:
    """Return all sequences that have a slot."""
    return [sequence for sequence in scheduler.life._sequences() if sequence.slot >= 0]


def known_tables(sequences: Iterable[Sequence]) -> dict[int, dict[int, int]]:
    """Return, by slot, what the ranks should know of each table, by index, now that the newest plan is
    made."""
    return {
        sequence.slot: {
            index: block_id
            for index, block_id in enumerate(sequence.block_ids[: sequence.num_sent_blocks])
            if index not in sequence.replaced
        }
        for sequence in sequences
    }


class ExpectedSlots:
    """The ranks' knowledge of every slot once they have taken in the scheduler's newest plan."""

    def __init__(self, scheduler: Scheduler) -> None:
        issued, sequences = scheduler.issued[-1], slotted(scheduler)
        self._tables = known_tables(sequences)
        named = issued.sequences
        self._whole = {sequence.slot: list(sequence.block_ids) for sequence in named}
        self._windows = {
            sequence.slot: [
                {index: it.block(index) for index in range(it.first, it.end) if it.has(index)}
                for it in sequence.group_tables
            ]
            for sequence in named
        }
        samplers = [sampler for entry in issued.entries for sampler in entry.samplers]
        self._positions = {sequence.slot: sequence.slot_position for sequence in (*named, *samplers)}

    def check_windows(self, windows: Mapping[int, list[dict[int, int]]]) -> None:
        """Assert that these have the scheduler's tables of sequences that the plan names, in groups with a
        window."""
        for slot, expected in self._windows.items():
            for found, table in zip(windows[slot], expected, strict=True):
                assert {index: found.get(index) for index in table} == table

    def check(self, tables: Mapping[int, list[int]], positions: Mapping[int, int]) -> None:
        """Assert that these are the scheduler's: of sequences that the plan names the whole table, of the
        others the part that was sent."""
        assert tables.keys() == self._tables.keys()
        for slot, known in self._tables.items():
            assert {index: tables[slot][index] for index in known} == known
        assert {slot: tables[slot] for slot in self._whole} == self._whole
        assert {slot: positions[slot] for slot in self._positions} == self._positions
