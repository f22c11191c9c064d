"""Routed requests as the router counts them: placements, those of one gateway, and sums over some of them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import chain
from typing import Protocol


@dataclass(slots=True, eq=False)
class Placement:
    """A routed request: computed at `compute_id`, then handed over to `decode_id` ("" if it stays there).

    For a stream that migrates to `decode_id`, `compute_id` is "": nothing is left to compute. `gateway_id` is
    "" for a placement of this gateway. `block_keys` are those that later requests will find.
    """

    request_id: str
    compute_id: str
    decode_id: str
    block_keys: tuple[bytes, ...]
    num_prefill_tokens: int
    num_new_blocks: int
    num_sequences: int
    routed_at: float
    prefilled_at: float | None = None
    gateway_id: str = ""
    # It waits in its gateway, and its replicas know nothing of it.
    is_queued: bool = False
    # The times to compute it, before any correction, and to load its stored blocks; 0: not known.
    prefill_s: float = 0.0
    load_s: float = 0.0
    # The time until it is computed, as predicted when it was sent.
    wait_s: float = 0.0
    # Its sharing group, if that may use only a part of the KV blocks (`RequestFacts.limited_group`).
    limited_group: str = ""


class PlacementObserver(Protocol):
    """Hears of this gateway's own placements: `cluster.gateway.fleet.placement_feed.PlacementFeed`."""

    def on_routed(self, placement: Placement) -> None:
        """Handle that the request is counted, in place of an earlier placement of it."""

    def on_prefilled(self, placement: Placement) -> None:
        """Handle that nothing is left to compute."""

    def on_finished(self, placement: Placement) -> None:
        """Handle that the request is not counted any more."""


class GatewayPlacements:
    """The placements of one gateway by request: those that it holds, and those that were sent, the oldest
    first."""

    def __init__(self) -> None:
        self._held: dict[str, Placement] = {}
        self._sent: dict[str, Placement] = {}

    def __len__(self) -> int:
        return len(self._held) + len(self._sent)

    def __iter__(self) -> Iterator[Placement]:
        return chain(self._sent.values(), self._held.values())

    def find(self, request_id: str) -> Placement | None:
        return self._sent.get(request_id) or self._held.get(request_id)

    def add(self, placement: Placement) -> None:
        (self._held if placement.is_queued else self._sent)[placement.request_id] = placement

    def pop(self, request_id: str) -> Placement | None:
        return self._sent.pop(request_id, None) or self._held.pop(request_id, None)

    def oldest_sent(self) -> Placement | None:
        return next(iter(self._sent.values()), None)


@dataclass(slots=True, eq=False)
class PlacementSums:
    """Placements at one replica, and their running sums."""

    placements: set[Placement] = field(default_factory=set)
    num_prefill_tokens: int = 0
    num_sequences: int = 0
    # The parts of these sums from placements that are held.
    num_queued_tokens: int = 0
    num_queued_sequences: int = 0
    # The parts from placements that are not held: only sent requests take blocks.
    num_sent: int = 0
    num_new_blocks: int = 0
    # How many of the placements are handed over to another replica.
    num_handed_over: int = 0

    def add(self, placement: Placement) -> None:
        self.placements.add(placement)
        self._count(placement, 1)

    def drop(self, placement: Placement) -> None:
        if placement in self.placements:
            self.placements.remove(placement)
            self._count(placement, -1)

    def _count(self, placement: Placement, sign: int) -> None:
        self.num_prefill_tokens += sign * placement.num_prefill_tokens
        self.num_sequences += sign * placement.num_sequences
        if placement.decode_id:
            self.num_handed_over += sign
        if placement.is_queued:
            self.num_queued_tokens += sign * placement.num_prefill_tokens
            self.num_queued_sequences += sign * placement.num_sequences
        else:
            self.num_sent += sign
            self.num_new_blocks += sign * placement.num_new_blocks

    def check(self) -> None:
        """Assert that the sums are those of the placements."""
        items = self.placements
        held, sent = [it for it in items if it.is_queued], [it for it in items if not it.is_queued]
        assert self.num_prefill_tokens == sum(item.num_prefill_tokens for item in items)
        assert self.num_sequences == sum(item.num_sequences for item in items)
        assert self.num_queued_tokens == sum(item.num_prefill_tokens for item in held)
        assert self.num_queued_sequences == sum(item.num_sequences for item in held)
        assert self.num_sent == len(sent)
        assert self.num_handed_over == sum(bool(item.decode_id) for item in items)
        assert self.num_new_blocks == sum(item.num_new_blocks for item in sent)
