"""The paths of one connection: which transport carries each of its lanes, and why no better one does.

A lane takes the first transport, in order of preference, that suits both ranks, is offered, is not cooling
down after failures, connects, and is measured at or above the minimum rate. One that cannot suit the pair
(shm to another host) is *not applicable*, which is expected; one that could but is not used is *passed
over*, which `LanePath.instead_of` and the log say.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from kvtransfer.agent.path_health import PathHealth, PathKey
from kvtransfer.common.clock import Clock
from kvtransfer.errors import PathError, TransferError
from kvtransfer.transfer_orders import ConnectPeer, Lane, TransferSettings
from kvtransfer.transfer_reports import LanePath
from kvtransfer.transports import TRANSPORTS
from kvtransfer.transports.base import Channel, Measured, WriterRank

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class WriterContext:
    """What all connections of a rank share: who writes the blocks of each group of layers of which it has
    some, which transports it offers itself (so its host has them) and why not the others, and which paths
    have failed."""

    ranks: Mapping[int, WriterRank]
    settings: TransferSettings
    host_id: str
    offered: frozenset[str]
    unoffered: Mapping[str, str]
    health: PathHealth
    clock: Clock


@dataclass(frozen=True)
class OpenLane:
    """A lane with its open channel and what was measured of it."""

    lane: Lane
    channel: Channel
    path: LanePath


class RejectedPaths:
    """Collects the transports that were not taken, each with its reason."""

    def __init__(self) -> None:
        self.not_applicable: list[str] = []
        self.passed_over: list[str] = []
        # Whether one of them should have worked.
        self.is_news = False

    def pass_over(self, name: str, reason: str, *, is_news: bool = True) -> None:
        self.passed_over.append(f"{name}: {reason}")
        self.is_news |= is_news

    def __str__(self) -> str:
        return "; ".join(self.not_applicable + self.passed_over) or "no transport is allowed"


class Paths:
    """Opens the channels of one connection and knows which are open. Any thread may call it; `close_all`
    comes last."""

    def __init__(self, order: ConnectPeer, context: WriterContext, on_lost: Callable[[str], None]) -> None:
        self._order = order
        self._context = context
        self._on_lost = on_lost
        self._lock = threading.Lock()
        self._channels: list[Channel] = []
        self._is_interrupted = False

    def open(self, lane: Lane, names: Sequence[str]) -> OpenLane:
        """Open the best path of `lane` among the transports `names`; the text of `PathError` gives the reason
        for each."""
        rejected = RejectedPaths()
        for name in names:
            if self._is_interrupted:
                raise PathError("closed on request")
            address = self._address(lane, name, rejected)
            if address is None:
                continue
            try:
                channel, measured = self._connect(lane, name, address)
            except TransferError as error:
                self._note_failure(lane, name, str(error))
                rejected.pass_over(name, str(error))
                continue
            is_slow = measured.gb_s < self._order.min_gb_s
            slow = f"{measured.gb_s:.3g} GB/s is below the floor of {self._order.min_gb_s:g} GB/s"
            if is_slow and self._order.refuse_slow:
                self.close(channel)
                if self._context.health.reason(self._key(lane, name)):
                    self._note_failure(lane, name, slow)  # it was tried again after it had failed
                rejected.pass_over(name, slow)
                continue
            if is_slow:
                rejected.pass_over(name, f"{slow}, but used as configured")
            self._log_path(lane, channel, measured, rejected)
            path = LanePath(
                lane.target.rank,
                channel.transport,
                channel.device,
                measured.gb_s,
                measured.latency_us,
                "; ".join(rejected.passed_over),
            )
            return OpenLane(lane, channel, path)
        raise PathError(f"no path to rank {lane.target.rank}: {rejected}")

    def better(self, opened: OpenLane) -> tuple[str, ...]:
        """Return all transports preferred to the lane's present one, when one of them failed before and may
        be tried again; else none."""
        names = self._order.transports
        better = names[: names.index(opened.path.transport)]
        now = self._context.clock.now()
        is_due = any(self._context.health.is_due(self._key(opened.lane, name), now) for name in better)
        return better if is_due else ()

    def note_lost(self, opened: OpenLane) -> None:
        """Note that the lane's channel broke."""
        self._note_failure(opened.lane, opened.channel.transport, opened.channel.lost)

    def note_success(self, opened: OpenLane) -> None:
        """Note that a push went through the lane."""
        self._context.health.succeeded(self._key(opened.lane, opened.channel.transport))

    def interrupt(self) -> None:
        """End all waiting for the peer soon, now and later."""
        with self._lock:
            self._is_interrupted = True
            for channel in self._channels:
                channel.interrupt()

    def close(self, channel: Channel) -> None:
        """Close one channel."""
        with self._lock:
            self._channels.remove(channel)
        channel.close()

    def close_all(self) -> None:
        for channel in list(self._channels):
            self.close(channel)

    def _address(self, lane: Lane, name: str, rejected: RejectedPaths) -> str | None:
        """Return where to reach the lane's target over the transport; None when there is a reason not to
        try."""
        transport = TRANSPORTS.get(name)
        if transport is None:
            rejected.pass_over(name, "no such transport")
            return None
        device = self._context.ranks[lane.group].pool.device
        unsuited = transport.unsuited(device, lane.target.host_id == self._context.host_id)
        if unsuited:
            rejected.not_applicable.append(f"{name}: {unsuited}")
            return None
        address = next((each.address for each in lane.target.endpoints if each.transport == name), None)
        if address is None:
            ours = name in self._context.offered
            why = self._context.unoffered.get(name, "")
            here = f"not offered: {why}" if why else "not offered"
            rejected.pass_over(name, "not offered by the peer" if ours else here, is_news=ours)
            return None
        key = self._key(lane, name)
        cooling_s = self._context.health.cooling_s(key, self._context.clock.now())
        if cooling_s > 0:
            reason = self._context.health.reason(key)
            rejected.pass_over(name, f"failed ({reason}), not tried again for {cooling_s:.1f} s")
            return None
        return address

    def _connect(self, lane: Lane, name: str, address: str) -> tuple[Channel, Measured]:
        channel = TRANSPORTS[name].connect(
            self._context.ranks[lane.group], lane, address, self._order.connection_id, self._on_lost
        )
        with self._lock:
            self._channels.append(channel)
            if self._is_interrupted:
                channel.interrupt()
        try:
            return channel, channel.measure(self._context.clock)
        except TransferError:
            self.close(channel)
            raise

    def _key(self, lane: Lane, name: str) -> PathKey:
        return PathKey(self._order.peer, lane.target.rank, name)

    def _note_failure(self, lane: Lane, name: str, reason: str) -> None:
        if not self._is_interrupted:  # a channel that we closed ourselves has not failed
            self._context.health.failed(self._key(lane, name), reason, self._context.clock.now())

    def _log_path(self, lane: Lane, channel: Channel, measured: Measured, rejected: RejectedPaths) -> None:
        _log.log(
            logging.WARNING if rejected.is_news else logging.INFO,
            "rank %d -> %s rank %d over %s (%s): %.2f GB/s, %.0f us%s%s",
            self._context.ranks[lane.group].rank,
            self._order.peer.replica_id,
            lane.target.rank,
            channel.transport,
            channel.device,
            measured.gb_s,
            measured.latency_us,
            f"; instead of {'; '.join(rejected.passed_over)}" if rejected.passed_over else "",
            f"; not applicable: {'; '.join(rejected.not_applicable)}" if rejected.not_applicable else "",
        )
