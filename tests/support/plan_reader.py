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
    """The work of one sequence by a plan; `tokens` b"": the slot's newest token."""

    slot: int
    start: int
    num_tokens: int
    tokens: bytes
    block_ids: tuple[int, ...]
    sample_slots: tuple[int, ...]


class PlanReader:
    """The tables and positions of all slots."""

    def __init__(self) -> None:
        self.tables: dict[int, list[int]] = {}
        self.positions: dict[int, int] = {}

    def read(self, plan: StepPlan) -> list[Work]:
        """Return the plan's entries, then its decodes."""
        for slot in plan.free_slots:
            del self.tables[slot]
            self.positions.pop(slot, None)
        for slot in plan.started_slots:
            assert slot not in self.tables, "the slot is in use"
            self.tables[slot] = []
        for change in plan.tables:
            table, ids = self.tables[change.slot], unpack_ids(change.block_ids)
            assert ids
            assert change.first <= len(table), "a hole in the table"
            table[change.first : change.first + len(ids)] = ids
        grown = unpack_ids(plan.grown)
        for slot, block_id in zip(grown[::2], grown[1::2], strict=True):
            self.tables[slot].append(block_id)
        works: list[Work] = []
        for entry in plan.entries:
            table = self.tables[entry.slot]
            works.append(
                Work(
                    entry.slot, entry.start, entry.num_tokens, entry.tokens, tuple(table), entry.sample_slots
                )
            )
            assert len(entry.tokens) == 4 * entry.num_tokens > 0
            end = entry.start + entry.num_tokens
            self.positions |= dict.fromkeys((entry.slot, *entry.sample_slots), end)
        for slot in unpack_ids(plan.decodes):
            start = self.positions[slot]
            works.append(Work(slot, start, 1, b"", tuple(self.tables[slot]), (slot,)))
            self.positions[slot] = start + 1
        slots = [work.slot for work in works]
        assert len(set(slots)) == len(slots), "a sequence is named twice"
        return works


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
        issued, sequences = scheduler._issued[-1], slotted(scheduler)
        self._tables = known_tables(sequences)
        named = issued.sequences
        self._whole = {sequence.slot: list(sequence.block_ids) for sequence in named}
        samplers = [sampler for entry in issued.entries for sampler in entry.samplers]
        self._positions = {sequence.slot: sequence.slot_position for sequence in (*named, *samplers)}

    def check(self, tables: Mapping[int, list[int]], positions: Mapping[int, int]) -> None:
        """Assert that these are the scheduler's: of sequences that the plan names the whole table, of the
        others the part that was sent."""
        assert tables.keys() == self._tables.keys()
        for slot, known in self._tables.items():
            assert {index: tables[slot][index] for index in known} == known
        assert {slot: tables[slot] for slot in self._whole} == self._whole
        assert {slot: positions[slot] for slot in self._positions} == self._positions
