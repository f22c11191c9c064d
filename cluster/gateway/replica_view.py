"""What a gateway knows of one replica, and who hears of changes."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol

from cluster.roster.messages import ReplicaRecord
from kvtransfer.messages import ReplicaIdentity
from kvtransfer.rpc.stream import FrameStream
from workers.messages import CachePurged, LoadReport, PathMeasure, ReplicaHello, StepFrame


class LinkEvents(Protocol):
    """Who carries the requests."""

    def on_step(self, source: ReplicaIdentity, frame: StepFrame) -> None:
        """News of a replica's step."""

    def on_lost(self, source: ReplicaIdentity, reason: str) -> None:
        """The Link to this life of the replica has ended."""

    def on_streams(self, source: ReplicaIdentity, may_stay: bool) -> None:
        """Whether streams may go on at this life of the replica: not if it leaves, or plays "prefill"."""

    def on_members(self) -> None:
        """A replica came, left or goes: what can be served may have changed."""


class ReplicaState(StrEnum):
    """Of one replica, as this gateway sees it."""

    CONNECTING = "connecting"
    READY = "ready"
    LEAVING = "leaving"
    # It serves another model or block size than the others; see `note`.
    REFUSED = "refused"


@dataclass(slots=True)
class ReplicaView:
    """What is known of one replica of the roster. `hello` is None until it was connected."""

    record: ReplicaRecord
    state: ReplicaState = ReplicaState.CONNECTING
    note: str = ""
    hello: ReplicaHello | None = None
    load: LoadReport | None = None
    load_at: float = 0.0
    paths: tuple[PathMeasure, ...] = ()
    stream: FrameStream | None = field(default=None, repr=False)
    # What it was asked to forget and has not answered yet, by number.
    purges: dict[int, asyncio.Future[CachePurged]] = field(default_factory=dict, repr=False)

    @property
    def epoch(self) -> int:
        """Of the life that was connected last; 0 before the first."""
        return self.hello.identity.epoch if self.hello else 0

    @property
    def role(self) -> str:
        """The one that it plays now."""
        return self.hello.role if self.hello else self.record.role

    @property
    def takes_requests(self) -> bool:
        return self.state is ReplicaState.READY and self.stream is not None
