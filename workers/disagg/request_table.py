"""One record for each request on a replica, which the stages of the request extend.

The record exists from the `Submission` (or from the hand-over that joined here) until the last sample ends,
the attempt fails or is cancelled, or the request continues at another replica. `Scheduler` keeps apart what
it computes, because the simulator runs it without a replica.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from typing import Protocol

from kvtransfer.messages import ReplicaIdentity
from kvtransfer.protocol.actions import Pushed, PushEnded
from workers.interfaces import EngineControl, GatewayNews
from workers.messages.link import (
    GatewayKey,
    HandOverTarget,
    News,
    PromptEmbedding,
    RequestFailed,
    RequestKey,
    Submission,
    TokenDelta,
)


class Push(Protocol):
    """The transfer of one request's KV to another replica, and what follows from each of its events.

    `KvSender` owns every push. A `PromptPush` hands over a prompt, a `Migration` hands over a running stream.
    """

    @property
    def target(self) -> HandOverTarget:
        """The replica that receives the KV."""

    def peer_ready(self) -> None:
        """Take in that the path to the target is measured."""

    def peer_failed(self, reason: str) -> None:
        """Take in that there is no path to the target; called before pushes to it are stopped."""

    def granted(self) -> None:
        """Take in that the target has reserved blocks."""

    def pushed(self, pushed: Pushed) -> None:
        """Take in that every rank has written a chunk."""

    def handed_over(self) -> None:
        """Take in that all KV is written, and the state of the request is being sent."""

    def ended(self, ended: PushEnded) -> None:
        """Take in that the landing is over: joined at the target, or not."""


@dataclass(slots=True, eq=False)
class ActiveRequest:
    """A replica's record of one request, apart from what the scheduler computes of it."""

    key: RequestKey
    gateway: GatewayKey
    # Whether the prompt is handed over to another replica, which decodes.
    decodes_remotely: bool
    open_samples: set[int]
    push: Push | None = None
    # Named moments of the prompt's chunks and pushes, on this replica's clock.
    trace: list[tuple[str, float]] = field(default_factory=list)
    # The time that steps should have taken before it arrived (`workers.scheduler.expected_time`).
    work_before_s: float = 0.0


class RequestTable:
    """All requests of one replica by (request id, attempt), and their news for the gateways."""

    def __init__(self, gateways: GatewayNews, control: EngineControl) -> None:
        self._gateways = gateways
        self._control = control
        self._records: dict[RequestKey, ActiveRequest] = {}

    def __len__(self) -> int:
        return len(self._records)

    def __contains__(self, key: RequestKey) -> bool:
        return key in self._records

    def __iter__(self) -> Iterator[ActiveRequest]:
        """Yield the requests of this moment; they may end while they are visited."""
        return iter(list(self._records.values()))

    def get(self, key: RequestKey) -> ActiveRequest | None:
        """Return the request, if it is still here."""
        return self._records.get(key)

    def pushing_to(self, peer: ReplicaIdentity) -> list[tuple[ActiveRequest, Push]]:
        """Return the requests whose KV goes to this replica."""
        return [
            (record, record.push)
            for record in self._records.values()
            if record.push is not None and record.push.target.identity == peer
        ]

    def add(self, submission: Submission, gateway: GatewayKey) -> ActiveRequest:
        """Enter a request that the scheduler has accepted."""
        key = submission.request_id, submission.attempt
        samples = {sample.index for sample in submission.samples}
        record = ActiveRequest(key, gateway, submission.decode is not None, samples)
        self._records[key] = record
        return record

    def remove(self, key: RequestKey) -> ActiveRequest | None:
        """Forget the request, which is over here or continues at another replica; return it if it was
        here."""
        record = self._records.pop(key, None)
        self._control.wake()
        return record

    def post(self, key: RequestKey, news: News) -> None:
        """Send news of a request to its gateway, if the request is still here."""
        record = self._records.get(key)
        if record is not None:
            self._gateways.post(record.gateway, news)

    def post_delta(self, delta: TokenDelta) -> ActiveRequest | None:
        """Send tokens of one sample. Return the request when that was the end of its last sample here."""
        key = delta.request_id, delta.attempt
        record = self._records.get(key)
        if record is None:
            return None
        self._gateways.post(record.gateway, delta)
        if delta.finish:
            record.open_samples.discard(delta.sample)
        if record.open_samples or record.decodes_remotely:
            return None
        del self._records[key]
        return record

    def post_embedding(self, embedding: PromptEmbedding) -> None:
        """Send the embedding of a prompt, which is the end of its request."""
        record = self._records.pop((embedding.request_id, embedding.attempt), None)
        if record is not None:
            self._gateways.post(record.gateway, embedding)

    def fail(self, failure: RequestFailed) -> None:
        """End the attempt and report the failure to its gateway."""
        record = self.remove((failure.request_id, failure.attempt))
        if record is not None:
            self._gateways.post(record.gateway, failure)

    def fail_all(self, reason: str, suspects: Collection[RequestKey]) -> None:
        """End every attempt; one of the `suspects` may have caused the fault."""
        for key, record in self._records.items():
            failure = RequestFailed(*key, "internal", reason, suspect=key in suspects)
            self._gateways.post(record.gateway, failure)
        self._records.clear()
