"""The interfaces that the parts of an engine core receive from the layers above them, so that no part imports
its owner."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from workers.messages.link import GatewayKey, News
from workers.messages.rank_channel import RankDown


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


class EngineControl(Protocol):
    """The engine core, as its parts see it."""

    def wake(self) -> None:
        """Plan again after all events of this turn of the event loop have been taken in."""

    def kill_ranks(self, reason: str) -> None:
        """End all ranks, and with them the replica."""

    def fail(self, error: BaseException) -> None:
        """End the replica after an error of ours: its state can no longer be trusted."""
