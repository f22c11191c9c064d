"""Order copies of experts that many tokens choose, step by step, as the loads of a replica's experts
change."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from workers.messages.rank_channel import ExpertCopy
from workers.model.model_config import ModelConfig
from workers.model.sizes import part
from workers.replica.copy_placement import CopyRules, place_copies
from workers.replica.expert_load import ExpertLoad

_RULES = CopyRules()


class ExpertCopies:
    """The slots of all layers as the ranks have them when they have carried out the orders that were taken.

    Layers are looked at one at a time, so that no step waits for the decisions of all. Times are seconds of
    one clock."""

    def __init__(
        self,
        *,
        num_experts: int = 0,
        num_parts: int = 1,
        num_slots: int = 0,
        expert_bytes: float = 0.0,
        rules: CopyRules = _RULES,
        now: float = 0.0,
    ) -> None:
        """Each of `num_parts` parts of the ranks has `num_slots` in every layer, 0: there are no copies. An
        expert has `expert_bytes`, those of all ranks that share it together."""
        self._num_slots, self._expert_bytes, self._rules = num_slots, expert_bytes, rules
        self._is_owned = np.zeros((num_experts, num_parts), dtype=bool)
        for number in range(num_parts):
            owned = part(num_experts, number, num_parts)
            self._is_owned[owned.start : owned.stop, number] = True
        self._no_copies = np.full((num_parts, num_slots), -1)
        self._layer_to_slots: dict[int, NDArray[np.int64]] = {}
        self._due: deque[int] = deque()
        self._orders: deque[ExpertCopy] = deque()
        self._most_bytes = max(expert_bytes, rules.burst_s * rules.bytes_per_s)
        self._allowed_bytes, self._now = self._most_bytes, now

    @classmethod
    def of(cls, config: ModelConfig, ep: int, num_slots: int, item_bytes: int, now: float) -> ExpertCopies:
        """Return those of a model whose weights have `item_bytes` each."""
        if (shape := config.mixture) is None:
            return cls()
        return cls(
            num_experts=shape.rule.num_experts,
            num_parts=ep,
            num_slots=num_slots,
            expert_bytes=item_bytes * shape.weights_of_expert(config.hidden_size),
            now=now,
        )

    @property
    def num_copies(self) -> int:
        """The copies in the slots of all layers, each at all ranks of its part."""
        return sum(int((slots >= 0).sum()) for slots in self._layer_to_slots.values())

    def look_at(self, layers: Iterable[int]) -> None:
        """Note that the loads of these layers have changed."""
        if self._num_slots:
            self._due.extend(layer for layer in layers if layer not in self._due)

    def take(self, load: ExpertLoad, now: float) -> tuple[ExpertCopy, ...]:
        """Return the orders to be carried out with the next step, and count them as done."""
        if not (self._due or self._orders):
            return ()
        if not self._orders:
            layer = self._due.popleft()
            if (loads := load.loads(layer)) is not None:
                self._decide(layer, np.array(loads))
        self._advance(now)
        taken: list[ExpertCopy] = []
        while self._orders and self._is_allowed(self._orders[0]):
            order = self._orders.popleft()
            slots = self._layer_to_slots.setdefault(order.layer, self._no_copies.copy())
            slots[order.part, order.slot] = order.expert
            taken.append(order)
        return tuple(taken)

    def _decide(self, layer: int, loads: NDArray[np.float64]) -> None:
        slots = self._layer_to_slots.get(layer, self._no_copies)
        is_held = self._is_owned.copy()
        for number, experts in enumerate(slots):
            is_held[experts[experts >= 0], number] = True
        wanted = place_copies(loads, self._is_owned, is_held, self._num_slots, self._rules)
        self._orders.extend(_changes(layer, slots, wanted & ~self._is_owned))

    def _advance(self, now: float) -> None:
        elapsed_s, self._now = now - self._now, now
        self._allowed_bytes += elapsed_s * self._rules.bytes_per_s
        self._allowed_bytes = min(self._allowed_bytes, self._most_bytes)

    def _is_allowed(self, order: ExpertCopy) -> bool:
        """Return whether an order may be taken now, and count its bytes."""
        num_bytes = self._expert_bytes if order.expert >= 0 else 0.0
        if num_bytes > self._allowed_bytes:
            return False
        self._allowed_bytes -= num_bytes
        return True


def _changes(layer: int, slots: NDArray[np.int64], is_copied: NDArray[np.bool_]) -> list[ExpertCopy]:
    """Return the orders that make `slots` [num_parts, num_slots] hold the copies `is_copied` [num_experts,
    num_parts], first those that free slots. A copy that stays keeps its slot."""
    freed: list[ExpertCopy] = []
    filled: list[ExpertCopy] = []
    for number, experts in enumerate(slots.tolist()):
        wanted = set(np.flatnonzero(is_copied[:, number]).tolist())
        missing = sorted(wanted.difference(experts))
        for slot, expert in enumerate(experts):
            if expert in wanted:
                continue
            if missing:
                filled.append(ExpertCopy(layer, number, slot, missing.pop()))
            elif expert >= 0:
                freed.append(ExpertCopy(layer, number, slot, -1))
    return freed + filled
