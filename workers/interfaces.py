"""The interfaces that the parts of an engine core receive from the layers above them, so that no part imports
its owner."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from kvtransfer.messages import ReplicaIdentity
from workers.messages.link import GatewayKey, HandOverTarget, News
from workers.messages.peer_link import PeerLinkMessage
from workers.messages.rank_channel import RankDown
from workers.stats_record import PathMeasure


class RankChannel(Protocol):
    """Sends plans and orders to the ranks of the replica."""

    def send(self, message: RankDown) -> None:
        """Send a message to every rank."""

    def send_to(self, rank: int, message: RankDown) -> None:
        """Send a message to one rank; a rank that has left receives nothing."""


class BlockSharing(Protocol):
    """Gives blocks that landed in parts on among the ranks that hold copies of them."""

    def give(self, block_ids: tuple[int, ...], then: Callable[[], None]) -> None:
        """Let the ranks give one another these blocks, and call `then` when all have them."""


class GatewayNews(Protocol):
    """Collects news that gateways will receive in the next frame."""

    def post(self, key: GatewayKey, news: News) -> None:
        """Add news to the next frame for this gateway."""


class PrefillSide(Protocol):
    """The writer of KV (`workers.disagg.kv_sender.KvSender`): receives the messages of decode replicas, and
    the outcome of `PeerLinks.ensure`."""

    def message(self, peer: ReplicaIdentity, message: PeerLinkMessage) -> None: ...
    def peer_ready(self, peer: ReplicaIdentity) -> None: ...
    def peer_failed(self, peer: ReplicaIdentity, reason: str) -> None: ...


class PeerLinks(Protocol):
    """The links to other replicas, as those who send over them see them: `workers.disagg.peers.Peers`, or the
    links of a simulated replica."""

    def ensure(self, target: HandOverTarget, side: PrefillSide) -> None:
        """Open a link to `target` unless there is one. `peer_failed` may be called before this returns."""

    def connection(self, peer: ReplicaIdentity) -> bytes | None:
        """Return the id of the measured data connection to `peer`; None while there is none."""

    def send_to_reader(self, peer: ReplicaIdentity, message: PeerLinkMessage) -> None:
        """Send a message to a decode replica; dropped when the link is gone."""

    def send_to_writer(self, writer: ReplicaIdentity, message: PeerLinkMessage) -> None:
        """Send a message to a replica that writes here; dropped when its link is gone."""

    def paths(self) -> tuple[PathMeasure, ...]:
        """Return the measured paths, one for each lane, for reports."""


class EngineControl(Protocol):
    """The engine core, as its parts see it."""

    def wake(self) -> None:
        """Plan again after all events of this turn of the event loop have been taken in."""

    def kill_ranks(self, reason: str) -> None:
        """End all ranks, and with them the replica."""

    def fail(self, error: BaseException) -> None:
        """End the replica after an error of ours: its state can no longer be trusted."""
