"""The exchange of placements among simulated gateways: the frames are those of
`cluster.gateway.fleet.placement_exchange`, and arrive after the time of the network."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from cluster.gateway.fleet.peer_placements import PeerPlacements
from cluster.gateway.fleet.placement_exchange import BATCH_S
from cluster.gateway.fleet.placement_feed import PlacementFeed
from cluster.simulation.simulated_peers import NETWORK_S
from cluster.simulation.virtual_time import EventQueue
from router.placements import Placement
from router.service import RouterService


class PlacementSender:
    """Observes the placements of one gateway (`router.load.PlacementObserver`), and sends them when
    `PlacementExchange` would: new ones at once, the rest a little later."""

    def __init__(self, events: EventQueue, send: Callable[[bytes], None]) -> None:
        self.feed = PlacementFeed(events.clock)
        self._events = events
        self._send = send
        self._send_at = math.inf

    def on_routed(self, placement: Placement) -> None:
        self.feed.on_routed(placement)
        self._schedule()

    def on_prefilled(self, placement: Placement) -> None:
        self.feed.on_prefilled(placement)
        self._schedule()

    def on_finished(self, placement: Placement) -> None:
        self.feed.on_finished(placement)
        self._schedule()

    def _schedule(self) -> None:
        if not self.feed.changed.is_set():
            return
        delay_s = 0.0 if self.feed.urgent.is_set() else BATCH_S
        send_at = self._events.clock.now() + delay_s
        if send_at < self._send_at:
            self._send_at = send_at
            self._events.at(send_at, lambda: self._flush(send_at))

    def _flush(self, send_at: float) -> None:
        if self._send_at == send_at:  # nothing more urgent has come since
            self._send_at = math.inf
            for frame in self.feed.take():
                self._send(frame)


class PlacementLinks:
    """Every gateway follows all others, unless their links are cut."""

    def __init__(self, events: EventQueue, num_gateways: int) -> None:
        self._events = events
        self._peers: list[tuple[int, PeerPlacements]] = []
        self._sends = [self._send_from(source) for source in range(num_gateways)]
        self.senders = [PlacementSender(events, send) for send in self._sends]
        self._routers: Sequence[RouterService] = ()
        self._is_cut = False

    def join(self, routers: Sequence[RouterService]) -> None:
        """Let these gateways, whose placements the senders observe, follow each other."""
        self._routers = routers
        for source in range(len(routers)):
            for router in routers:
                if router is not routers[source]:
                    peer = PeerPlacements(f"g{source}", router, self._events.clock)
                    self._peers.append((source, peer))
        for router in routers:
            router.set_shared(len(routers) > 1)
        self.connect()

    def connect(self) -> None:
        """Let every gateway send all its placements, and its changes from now on."""
        self._is_cut = False
        if len(self._routers) > 1:
            for router, sender, send in zip(self._routers, self.senders, self._sends, strict=True):
                for frame in sender.feed.snapshot(router.own_placements()):
                    send(frame)

    def cut(self) -> None:
        """Let nothing arrive from now on."""
        self._is_cut = True
        for sender in self.senders:
            sender.feed.stop()
        for _, peer in self._peers:
            peer.close()

    def _send_from(self, source: int) -> Callable[[bytes], None]:
        def send(frame: bytes) -> None:
            self._events.after(NETWORK_S, lambda: arrive(frame))

        def arrive(frame: bytes) -> None:
            for sender, peer in self._peers:
                if sender == source and not self._is_cut:
                    peer.on_frame(frame)

        return send
