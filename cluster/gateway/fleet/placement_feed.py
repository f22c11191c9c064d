"""The placements of this gateway, as the other gateways hear of them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeVar

from cluster.gateway.fleet.messages import (
    MAX_COUNT,
    MAX_KEYS,
    MAX_PLACEMENTS,
    PLACEMENT_CODEC,
    Change,
    Finished,
    Placed,
    PlacementDelta,
    PlacementSnapshot,
    Prefilled,
)
from kvtransfer.common.clock import Clock
from router.load import STALE_REQUEST_S
from router.placements import Placement

# A frame ends with the change that exceeds this; none is longer than `MAX_PLACEMENT_FRAME_BYTES`.
_FULL_FRAME_BYTES = 256 << 10

C = TypeVar("C", bound=Change)


class PlacementFeed:
    """Collects this gateway's placements for the others. Nothing is kept while `is_followed` is false."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._changes: list[tuple[Callable[[Placement, float], Change], Placement]] = []
        # Placements that the followers know of.
        self._announced: set[str] = set()
        self.is_followed = False
        # Set while there is something to send, and something that should be sent at once.
        self.changed = asyncio.Event()
        self.urgent = asyncio.Event()

    def on_routed(self, placement: Placement) -> None:
        """Announce the placement unless too many are. One that is announced already is always updated."""
        is_known = placement.request_id in self._announced
        if is_known or (self.is_followed and len(self._announced) < MAX_PLACEMENTS):
            self._announced.add(placement.request_id)
            self._append(_placed, placement)
            self.urgent.set()

    def on_prefilled(self, placement: Placement) -> None:
        """Announce the first token of an announced placement."""
        if placement.request_id in self._announced:
            self._append(_prefilled, placement)

    def on_finished(self, placement: Placement) -> None:
        """Announce the end of an announced placement."""
        if placement.request_id in self._announced:
            self._announced.remove(placement.request_id)
            self._append(_finished, placement)

    def take(self) -> list[bytes]:
        """Return the frames of the changes since the last call."""
        now = self._clock.now()
        changes = [make(placement, now) for make, placement in self._changes]
        self._changes.clear()
        self.changed.clear()
        self.urgent.clear()
        return [PLACEMENT_CODEC.encode(PlacementDelta(tuple(part))) for part in _parts(changes)]

    def snapshot(self, placements: Iterable[Placement]) -> list[bytes]:
        """Return the frames of a snapshot, and announce changes from now on. `placements` are all of this
        gateway; earlier announcements must have been taken."""
        assert not self._changes
        now = self._clock.now()
        if not self.is_followed:
            self.is_followed = True
            recent = [it for it in placements if it.is_queued or now - it.routed_at < STALE_REQUEST_S]
            recent = recent[-MAX_PLACEMENTS:]
            self._announced = {placement.request_id for placement in recent}
        else:
            recent = [it for it in placements if it.request_id in self._announced]
        parts = list(_parts([_placed(placement, now) for placement in recent])) or [[]]
        return [
            PLACEMENT_CODEC.encode(PlacementSnapshot(tuple(part), is_last=part is parts[-1]))
            for part in parts
        ]

    def stop(self) -> None:
        """Announce nothing any more: nobody follows."""
        self.is_followed = False
        self._announced.clear()
        self._changes.clear()
        self.changed.clear()
        self.urgent.clear()

    def _append(self, make: Callable[[Placement, float], Change], placement: Placement) -> None:
        self._changes.append((make, placement))
        self.changed.set()


def _parts(changes: Sequence[C]) -> Iterator[Sequence[C]]:
    """Split the changes into frames of about `_FULL_FRAME_BYTES`."""
    first = num_bytes = 0
    for index, change in enumerate(changes):
        num_bytes += 100 + 3 * len(change.request_id)
        if isinstance(change, Placed):
            num_bytes += sum(map(len, change.block_keys)) + 2 * len(change.block_keys)
        if num_bytes >= _FULL_FRAME_BYTES:
            yield changes[first : index + 1]
            first, num_bytes = index + 1, 0
    if first < len(changes):
        yield changes[first:]


def _placed(placement: Placement, now: float) -> Placed:
    return Placed(
        request_id=placement.request_id,
        compute_id=placement.compute_id,
        decode_id=placement.decode_id,
        num_prefill_tokens=min(placement.num_prefill_tokens, MAX_COUNT),
        num_new_blocks=min(placement.num_new_blocks, MAX_COUNT),
        num_sequences=min(placement.num_sequences, MAX_COUNT),
        age_s=max(0.0, now - placement.routed_at),
        prefilled_age_s=None if placement.prefilled_at is None else max(0.0, now - placement.prefilled_at),
        block_keys=placement.block_keys[:MAX_KEYS],
        is_held=placement.is_queued,
    )


def _prefilled(placement: Placement, now: float) -> Prefilled:
    return Prefilled(placement.request_id, max(0.0, now - (placement.prefilled_at or now)))


def _finished(placement: Placement, now: float) -> Finished:
    return Finished(placement.request_id)
