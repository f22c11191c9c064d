"""Find the cheapest choice of a request over all replicas in compiled code (`native.cpp`).

The formulas are those of `router.policies.cost_policy`, term by term and in the same order, so that both find
the same costs to the last bit: `Decision.candidates`, which are made only where somebody reads them, show
them one by one. A row is filled in again when the load of its replica has changed.
"""

from __future__ import annotations

import ctypes
import math
import struct
import zlib
from collections.abc import Callable, Mapping, Sequence, Set

from router.config import RouterConfig
from router.current_load import CurrentLoad
from router.load import LoadTracker
from router.messages import TimeLimit
from router.native import RouterKernel
from router.policies.cheapest_choice import OVERLAP, Choice
from router.policies.cost_policy import NEVER_FITS_S, NO_SPACE_S, STALE_S, WORK_PART
from router.policies.replica_cost import RouteQuery
from router.prefix_match import Match
from router.radix import PrefixTree

# The structs of native.cpp, field by field.
_SETTINGS = struct.Struct("6d2q")
_ROW_IDENTITY = struct.Struct("5q")
_ROW_LOAD = struct.Struct("9q16d")
_QUERY = struct.Struct("7q5d")
_RESULT = struct.Struct("4d3q")
_TABLE = struct.Struct("2Pq2P")
_COSTS_BYTES = 13 * 8
_ROW_BYTES = _ROW_IDENTITY.size + _ROW_LOAD.size

_COMPUTES, _DECODES = 1, 2
_ROLES = {"both": 0, "prefill": 1, "decode": 2}
_NONE = -1


class PriceTable:
    """The replicas that may be chosen for any request that neither excludes nor pins some."""

    def __init__(
        self,
        kernel: RouterKernel,
        config: RouterConfig,
        block_tokens: int,
        load: LoadTracker,
        tree: PrefixTree,
        ids: Sequence[str],
        sides: tuple[Set[str], Set[str]],
        turn_of: Callable[[str], int],
    ) -> None:
        """`sides` has those of the ids that may compute prompts for others, and those that may decode. Of
        equal costs the replica with the least turn is chosen, and of equal turns the first one."""
        self.ids = ids
        # Whether each may compute prompts for others, and whether each may decode.
        self.sides = [each in sides[0] for each in ids], [each in sides[1] for each in ids]
        self.turns = [turn_of(each) for each in self.ids]
        self.states: list[CurrentLoad] = [load.state(each) for each in self.ids]
        self._find_cheapest = kernel.find_cheapest
        self._load = load
        self._turn_of = turn_of
        self._row_of = {replica_id: row for row, replica_id in enumerate(self.ids)}
        lengths = [len(each.encode()) for each in self.ids]
        self._lengths = sorted(set(lengths))
        self._rows = bytearray(_ROW_BYTES * len(self.ids))
        self._query = bytearray(_QUERY.size)
        self._result = bytearray(_RESULT.size)
        load.take_changed()
        for row, replica_id in enumerate(self.ids):
            computes, decodes = (side[row] for side in self.sides)
            _ROW_IDENTITY.pack_into(
                self._rows,
                row * _ROW_BYTES,
                tree.slot(replica_id),
                _COMPUTES * computes + _DECODES * decodes,
                _ROLES[self.states[row].role],
                zlib.crc32(replica_id.encode()),
                self._lengths.index(lengths[row]),
            )
            self._fill_in(row)
        self._settings = bytearray(
            _SETTINGS.pack(
                WORK_PART,
                OVERLAP,
                NO_SPACE_S,
                STALE_S,
                NEVER_FITS_S,
                config.decode_steps,
                block_tokens,
                config.skip_prefill_tokens,
            )
        )
        # The buffers that the compiled code writes while it looks for the cheapest choice.
        self._costs = [bytearray(_COSTS_BYTES * len(self.ids)) for _ in range(2)]
        addresses = [_address(each) for each in (self._settings, self._rows, *self._costs)]
        self._table = bytearray(_TABLE.pack(*addresses[:2], len(self.ids), *addresses[2:]))
        self._addresses = [_address(each) for each in (self._table, self._query, self._result)]

    def refresh(self) -> None:
        """Take over the changes."""
        row_of, states, load = self._row_of, self.states, self._load
        for replica_id in load.take_changed():
            row = row_of.get(replica_id)
            if row is not None:
                states[row] = load.state(replica_id)
                self._fill_in(row)

    def cheapest(
        self,
        query: RouteQuery,
        match: Match,
        waits: Mapping[str, float],
        queued_part: float,
        oldest: float,
        seed: int | None,
        *,
        finds_other: bool = False,
        before: tuple[str, str] | None = None,
        limit: TimeLimit | None = None,
    ) -> Choice | None:
        """Return the cheapest choice within the limit, as `router.policies.cheapest_choice.choose` does; with
        `finds_other` also the cost of the cheapest one that computes elsewhere, and the cost of the prefill
        and decode replica of `before`. Of equal costs the first one wins by `router.membership.hashed` with
        this seed; None: by turn."""
        before_rows = _NONE, _NONE
        if before is not None:
            # A prefill replica that is not in the table is not "none", with which the other serves alone.
            unknown = len(self.ids)
            prefill = self._row_of.get(before[0], unknown) if before[0] else _NONE
            before_rows = prefill, self._row_of.get(before[1], unknown)
        _QUERY.pack_into(
            self._query,
            0,
            match.num_slots,
            query.num_tokens,
            query.num_growth_tokens,
            query.may_stay,
            finds_other,
            *before_rows,
            query.kv_share,
            queued_part,
            oldest,
            *(limit or TimeLimit()),
        )
        table, asked, result = self._addresses
        self._find_cheapest(
            table,
            asked,
            match.counts,
            self._waits(waits) if waits else None,
            None if seed is None else self._moved(seed),
            result,
        )
        pair_s, local_s, other_s, before_s, prefill, decode, local = _RESULT.unpack_from(self._result)
        if local != _NONE and local_s <= pair_s:
            return Choice("", self.ids[local], pair_s, local_s, other_s, before_s)
        if prefill == _NONE:
            return None
        return Choice(self.ids[prefill], self.ids[decode], pair_s, local_s, other_s, before_s)

    def _fill_in(self, row: int) -> None:
        state = self.states[row]
        report, rates = state.report, state.rates
        self.turns[row] = turn = self._turn_of(self.ids[row])
        _ROW_LOAD.pack_into(
            self._rows,
            row * _ROW_BYTES + _ROW_IDENTITY.size,
            turn,
            state.backlog_tokens - state.num_queued_tokens,
            state.num_queued_tokens,
            state.num_sent_sequences,
            state.num_queued_sequences,
            state.num_free_blocks,
            report.num_total_blocks,
            report.max_local_tokens,
            report.window_tokens,
            report.received_at,
            state.num_places,
            state.place_s,
            rates.token_s,
            rates.product_s,
            rates.attention_s,
            rates.mixed_s,
            rates.transfer_s,
            rates.dram_s,
            rates.nvme_s,
            rates.present_step_s,
            rates.step_s,
            rates.stretch,
            rates.disturbed_part,
            rates.state_s,
            rates.window_token_s,
        )

    def _waits(self, waits: Mapping[str, float]) -> ctypes.Array[ctypes.c_double]:
        """Return the waits by row; NaN: none is given."""
        values = (ctypes.c_double * len(self.ids))(*[math.nan] * len(self.ids))
        for replica_id, wait_s in waits.items():
            if (row := self._row_of.get(replica_id)) is not None:
                values[row] = wait_s
        return values

    def _moved(self, seed: int) -> ctypes.Array[ctypes.c_uint32]:
        """Return the bits by which the checksums of ids differ from those with the seed: all of one length
        by the same."""
        moved = [zlib.crc32(bytes(it), seed) ^ zlib.crc32(bytes(it)) for it in self._lengths]
        return (ctypes.c_uint32 * len(moved))(*moved)


def _address(memory: bytearray) -> int:
    """Return where the memory lies, which stays there while it keeps its size."""
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))
