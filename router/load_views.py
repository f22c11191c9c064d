"""Loads by a part of what is known of them, for the policies that compare the parts."""

from __future__ import annotations

from dataclasses import replace
from typing import Protocol

from router.current_load import CurrentLoad
from router.load import LoadTracker
from router.placements import Placement, PlacementObserver, PlacementSums


class LoadView(Protocol):
    """Shows the loads by which choices are priced: those of `LoadTracker`, or one of the classes below."""

    def state(self, replica_id: str) -> CurrentLoad:
        """Return the load as of now of a known replica."""


class ReportedLoads:
    """The loads that replicas report, without what was placed there since."""

    def __init__(self, loads: LoadTracker) -> None:
        self._loads = loads
        self._nothing = (PlacementSums(), PlacementSums(), PlacementSums())

    def state(self, replica_id: str) -> CurrentLoad:
        """Return the load by the last report."""
        return self._loads.state_with(replica_id, self._nothing, counts_report=True)


class OwnLoads:
    """The loads by this gateway's own placements alone, whatever replicas report and other gateways place."""

    def __init__(self, loads: LoadTracker, own: OwnPlacements) -> None:
        self._loads = loads
        self._own = own

    def state(self, replica_id: str) -> CurrentLoad:
        """Return the load by own placements."""
        return self._loads.state_with(replica_id, self._own.sums_of(replica_id), counts_report=False)


class OwnPlacements:
    """Sums of this gateway's own placements by replica, each from its decision to its end."""

    def __init__(self) -> None:
        # By request: the placement as it was counted.
        self._counted: dict[str, Placement] = {}
        # By replica: what is to be computed, stays and is expected there.
        self._sums: dict[str, tuple[PlacementSums, PlacementSums, PlacementSums]] = {}

    def sums_of(self, replica_id: str) -> tuple[PlacementSums, PlacementSums, PlacementSums]:
        """Return what is to be computed, stays and is expected at the replica."""
        return self._sums.get(replica_id) or (PlacementSums(), PlacementSums(), PlacementSums())

    def on_routed(self, placement: Placement) -> None:
        """Count a placement, in place of an earlier one of the request."""
        self.on_finished(placement)
        self._counted[placement.request_id] = counted = replace(placement)
        computing, staying, _ = self._counting(counted.compute_id)
        if counted.compute_id and counted.prefilled_at is None:
            computing.add(counted)
        if counted.compute_id and not counted.decode_id:
            staying.add(counted)
        if counted.decode_id:
            self._counting(counted.decode_id)[2].add(counted)

    def on_prefilled(self, placement: Placement) -> None:
        """Count nothing to compute any more."""
        if (counted := self._counted.get(placement.request_id)) is not None:
            self._counting(counted.compute_id)[0].drop(counted)

    def on_finished(self, placement: Placement) -> None:
        """Stop counting a request."""
        counted = self._counted.pop(placement.request_id, None)
        if counted is None:
            return
        for replica_id in {counted.compute_id, counted.decode_id}:
            for sums in self._counting(replica_id):
                sums.drop(counted)
            if not any(sums.placements for sums in self._sums[replica_id]):
                del self._sums[replica_id]

    def check(self) -> None:
        """Assert that the sums are those of the counted placements."""
        counted = set(self._counted.values())
        for each in self._sums.values():
            for sums in each:
                sums.check()
                assert sums.placements <= counted

    def _counting(self, replica_id: str) -> tuple[PlacementSums, PlacementSums, PlacementSums]:
        return self._sums.setdefault(replica_id, (PlacementSums(), PlacementSums(), PlacementSums()))


class PlacementObservers:
    """Passes on the own placements to several observers."""

    def __init__(self, *observers: PlacementObserver) -> None:
        self._observers = observers

    def on_routed(self, placement: Placement) -> None:
        """Pass on."""
        for observer in self._observers:
            observer.on_routed(placement)

    def on_prefilled(self, placement: Placement) -> None:
        """Pass on."""
        for observer in self._observers:
            observer.on_prefilled(placement)

    def on_finished(self, placement: Placement) -> None:
        """Pass on."""
        for observer in self._observers:
            observer.on_finished(placement)
