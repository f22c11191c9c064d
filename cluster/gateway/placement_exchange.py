"""Gateways exchange their placements, so that they do not all choose the replica that was free a moment ago.

    RouterService --PlacementObserver--> PlacementFeed --frames--> every gateway that follows this one
    RouterService <--placements--------- PeerPlacements <--frames-- every other gateway

A stream goes to the other gateway's port for gateways (`cluster.gateway.fleet`), which sends a snapshot of
its placements, and then what changes, within `BATCH_S` and new placements at once. A stream that ends takes
that gateway's placements along: this gateway goes on with its own view and with those that it hears, says so
in its log, status and metrics, and tries again. A gateway that proves the secret may still be wrong: its
frames, numbers and placements are bounded, and replicas that are not known here are ignored.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

from cluster.roster.messages import GatewayRecord
from kvtransfer.codec import Codec, Message
from kvtransfer.common.clock import Clock
from kvtransfer.common.health import Backoff
from kvtransfer.common.tasks import SupervisedTasks
from kvtransfer.errors import TransferError, WireError, shown
from kvtransfer.rpc.stream import FrameStream, open_tcp
from kvtransfer.rpc.trust import Trust
from router.load import STALE_REQUEST_S, Placement
from router.service import RouterService

PLACEMENT_PROTOCOL = 2
# A new placement is sent at once, since others may choose the same replica at the same time, but not sooner
# than `FRAME_GAP_S` after the frame before. First tokens and ends wait for this time so that others can go
# with them.
BATCH_S = 0.005
FRAME_GAP_S = 0.001
# How long a new gateway waits for the placements of the others before it serves.
SNAPSHOT_WAIT_S = 2.0
# A frame ends with the change that exceeds this; none is longer than `MAX_PLACEMENT_FRAME_BYTES`.
_FULL_FRAME_BYTES = 256 << 10
MAX_PLACEMENT_FRAME_BYTES = 2 << 20
# A follower that leaves more than this unread is cut off, and gets a snapshot when it comes again.
_MAX_UNSENT_BYTES = 8 << 20
# Placements of one gateway. A request beyond is not announced: it counts at the others once its replica
# reports it.
MAX_PLACEMENTS = 16_384
# Keys of the prompt of one placement; the keys beyond are not predicted elsewhere.
MAX_KEYS = 16_384
_MAX_KEY_BYTES = 64
_MAX_ID_CHARS = 256
# Counts of one placement: tokens, blocks and sequences.
MAX_COUNT = 1 << 24
# The predictions of one gateway in a period of this many seconds.
_MAX_PREDICTED_KEYS = 1 << 20
_PREDICTED_PERIOD_S = 5.0
_FIRST_PAUSE_S = 0.1
_MAX_PAUSE_S = 2.0
_MAX_REASON_CHARS = 300

_log = logging.getLogger(__name__)


class FollowPlacements(Message, frozen=True):
    """First frame of a stream: whom it means to reach. Placements come back on it until it ends."""

    protocol: int
    gateway_id: str


class PlacementsRefused(Message, frozen=True):
    """Ends a stream: the receiver has no placements for it."""

    reason: str


class Placed(Message, frozen=True):
    """A placement, as in `router.load.Placement`, in place of earlier ones of the request. Ages are seconds
    at the sender when the frame was made; `prefilled_age_s` None: there is no token yet. One that `is_held`
    waits at the sender until it is placed again."""

    request_id: str
    compute_id: str
    decode_id: str
    num_prefill_tokens: int
    num_new_blocks: int
    num_sequences: int
    age_s: float
    prefilled_age_s: float | None
    block_keys: tuple[bytes, ...]
    is_held: bool


class Prefilled(Message, frozen=True):
    """The first token of a request came this many seconds ago."""

    request_id: str
    age_s: float


class Finished(Message, frozen=True):
    """A request, or an attempt of it, has ended."""

    request_id: str


class PlacementSnapshot(Message, frozen=True):
    """All placements of the sender, as first frames of a stream; `is_last`: changes follow."""

    placed: tuple[Placed, ...]
    is_last: bool


class PlacementDelta(Message, frozen=True):
    """The changes, in order."""

    changes: tuple[Placed | Prefilled | Finished, ...]


Change = Placed | Prefilled | Finished
PLACEMENT_CODEC: Codec[PlacementSnapshot | PlacementDelta | PlacementsRefused] = Codec(
    PlacementSnapshot | PlacementDelta | PlacementsRefused
)
FOLLOW_CODEC: Codec[FollowPlacements] = Codec(FollowPlacements)

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


class PeerPlacements:
    """The placements of one other gateway, in the router of this one."""

    def __init__(self, gateway_id: str, router: RouterService, clock: Clock) -> None:
        assert gateway_id
        self._gateway_id = gateway_id
        self._router = router
        self._clock = clock
        self._request_ids: set[str] = set()
        # Whether the snapshot has come.
        self.is_current = False
        self._period_ends_at = 0.0
        self._num_predicted_keys = 0

    def on_frame(self, frame: bytes) -> None:
        """Apply a frame, or raise `WireError`, which ends the stream."""
        if len(frame) > MAX_PLACEMENT_FRAME_BYTES:
            raise WireError(f"a frame of {len(frame)} bytes, where {MAX_PLACEMENT_FRAME_BYTES} are the most")
        message = PLACEMENT_CODEC.decode_known(frame)
        if message is None:
            return
        if isinstance(message, PlacementsRefused):
            raise WireError(f"it refuses: {shown(message.reason, _MAX_REASON_CHARS)}")
        if isinstance(message, PlacementSnapshot) == self.is_current:
            raise WireError("a snapshot among changes" if self.is_current else "changes before the snapshot")
        changes: Sequence[Change] = (
            message.placed if isinstance(message, PlacementSnapshot) else message.changes
        )
        for change in changes:
            _check(change)
        now = self._clock.now()
        for change in changes:
            self._apply(change, now)
        if isinstance(message, PlacementSnapshot):
            self.is_current = message.is_last

    @property
    def num_placements(self) -> int:
        """Number of its requests that are counted here."""
        return len(self._request_ids)

    def close(self) -> None:
        """Forget the placements: they are not heard of any more."""
        self.is_current = False
        self._request_ids.clear()
        self._router.remove_gateway(self._gateway_id)

    def _apply(self, change: Change, now: float) -> None:
        request_id = change.request_id
        match change:
            case Placed():
                self._request_ids.add(request_id)
                if len(self._request_ids) > MAX_PLACEMENTS:
                    raise WireError(f"more than {MAX_PLACEMENTS} placements")
                placement = Placement(
                    request_id=request_id,
                    compute_id=change.compute_id,
                    decode_id=change.decode_id,
                    block_keys=change.block_keys,
                    num_prefill_tokens=change.num_prefill_tokens,
                    num_new_blocks=change.num_new_blocks,
                    num_sequences=change.num_sequences,
                    routed_at=now - change.age_s,
                    prefilled_at=None if change.prefilled_age_s is None else now - change.prefilled_age_s,
                    gateway_id=self._gateway_id,
                    is_queued=change.is_held,
                )
                may_predict = self._may_predict(len(change.block_keys), now)
                self._router.on_remote_routed(placement, is_predicted=may_predict)
            case Prefilled():
                may_predict = self._may_predict(0, now)
                self._router.on_remote_prefilled(
                    self._gateway_id, request_id, now - change.age_s, is_predicted=may_predict
                )
            case Finished():
                self._request_ids.discard(request_id)
                self._router.on_remote_finished(self._gateway_id, request_id)

    def _may_predict(self, num_keys: int, now: float) -> bool:
        """Count predicted keys, of which the tree takes a limited number in a period from one gateway."""
        if now >= self._period_ends_at:
            self._period_ends_at, self._num_predicted_keys = now + _PREDICTED_PERIOD_S, 0
        self._num_predicted_keys += num_keys
        return self._num_predicted_keys <= _MAX_PREDICTED_KEYS


@dataclass(slots=True)
class _Followed:
    """Another gateway: its life, the placements heard of it, and why none are ("": it is heard)."""

    record: GatewayRecord
    placements: PeerPlacements
    reason: str = "not connected yet"
    has_failed: bool = False
    task: asyncio.Task[None] | None = None


class PlacementExchange:
    """Follows the placements of all other gateways, and sends this one's to those that follow it."""

    def __init__(
        self, gateway_id: str, router: RouterService, feed: PlacementFeed, trust: Trust, clock: Clock
    ) -> None:
        self._gateway_id = gateway_id
        self._router = router
        self._feed = feed
        self._trust = trust
        self._clock = clock
        self._followed: dict[str, _Followed] = {}
        # The streams on which this gateway's placements go out.
        self.followers: set[FrameStream] = set()
        # Set when one of the followed gateways became current or failed.
        self._news = asyncio.Event()
        self._tasks = SupervisedTasks()

    def start(self) -> None:
        """Send changes from now on; must be called on the event loop."""
        self._tasks.spawn(self._send_changes(), "placements")

    async def stop(self) -> None:
        """Follow nobody, and send nothing any more."""
        for stream in tuple(self.followers):
            stream.close()
        await self._tasks.close()
        for followed in self._followed.values():
            followed.placements.close()
        self._followed.clear()

    def update(self, gateways: Iterable[GatewayRecord]) -> None:
        """Follow these gateways, except this one, from now on, and forget the placements of all others."""
        records = {it.gateway_id: it for it in gateways if it.gateway_id != self._gateway_id and it.fleet}
        for gateway_id, followed in list(self._followed.items()):
            record = records.get(gateway_id)
            if record is None or (record.epoch, record.fleet) != (
                followed.record.epoch,
                followed.record.fleet,
            ):
                assert followed.task is not None
                followed.task.cancel()
                followed.placements.close()
                del self._followed[gateway_id]
                self._news.set()
        for gateway_id, record in records.items():
            if gateway_id not in self._followed:
                placements = PeerPlacements(gateway_id, self._router, self._clock)
                followed = self._followed[gateway_id] = _Followed(record, placements)
                followed.task = self._tasks.spawn(self._follow(followed), f"placements of {gateway_id}")
        self._router.set_shared(bool(records))

    async def wait_current(self, limit_s: float) -> dict[str, str]:
        """Return when the snapshots of all followed gateways are here, or after `limit_s`; returns `missing`
        of that time."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(limit_s):
                while self.missing():
                    self._news.clear()
                    await self._news.wait()
        return self.missing()

    def missing(self) -> dict[str, str]:
        """Return why its placements are not known, by the id of each gateway that is not heard."""
        return {name: it.reason for name, it in sorted(self._followed.items()) if it.reason}

    @property
    def heard(self) -> list[str]:
        """The ids of the gateways whose placements are counted here."""
        return [name for name, it in self._followed.items() if not it.reason]

    @property
    def num_placements(self) -> int:
        """Number of requests of other gateways that are counted here."""
        return sum(it.placements.num_placements for it in self._followed.values())

    # --------------------------------------------------------------------------- what this gateway places

    async def serve(self, follow: FollowPlacements, stream: FrameStream) -> None:
        """Send the placements of this gateway until the stream ends."""
        if (follow.protocol, follow.gateway_id) != (PLACEMENT_PROTOCOL, self._gateway_id):
            reason = f"this is gateway {self._gateway_id} with placement protocol {PLACEMENT_PROTOCOL}"
            stream.send(PLACEMENT_CODEC.encode(PlacementsRefused(reason)))
            return
        self._flush()
        for frame in self._feed.snapshot(self._router.own_placements()):
            stream.send(frame)
        self.followers.add(stream)
        try:
            if await stream.receive() is not None:
                raise WireError("a follower of placements has nothing to say")
        finally:
            self.followers.discard(stream)
            if not self.followers:
                self._feed.stop()

    async def _send_changes(self) -> None:
        while True:
            await self._feed.changed.wait()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(BATCH_S):
                    await self._feed.urgent.wait()
            self._flush()
            await self._clock.sleep(FRAME_GAP_S)

    def _flush(self) -> None:
        frames = self._feed.take()
        for stream in tuple(self.followers):
            for frame in frames:
                stream.send(frame)
            if stream.num_unsent_bytes > _MAX_UNSENT_BYTES:
                _log.warning("%s does not read the placements that it follows, and is cut off", stream.name)
                stream.abort()

    # -------------------------------------------------------------------------------- what others place

    async def _follow(self, followed: _Followed) -> None:
        """Receive the placements of another gateway until this task is cancelled."""
        backoff = Backoff(_FIRST_PAUSE_S, _MAX_PAUSE_S)
        name = followed.record.gateway_id
        while True:
            try:
                await self._hear(followed, backoff)
                reason = "its stream ended"
            except TransferError as error:
                reason = str(error)[:_MAX_REASON_CHARS]
            followed.placements.close()
            followed.reason = f"its placements are not heard: {reason}"
            if not followed.has_failed:
                _log.warning("gateway %s: %s; routing goes on without them", name, followed.reason)
            followed.has_failed = True
            self._news.set()
            await self._clock.sleep(backoff.failed())

    async def _hear(self, followed: _Followed, backoff: Backoff) -> None:
        record = followed.record
        stream = await open_tcp(
            record.fleet,
            self._trust,
            self._gateway_id,
            has_heartbeat=True,
            max_bytes=MAX_PLACEMENT_FRAME_BYTES,
        )
        try:
            stream.send(FOLLOW_CODEC.encode(FollowPlacements(PLACEMENT_PROTOCOL, record.gateway_id)))
            while (frame := await stream.receive()) is not None:
                followed.placements.on_frame(frame)
                if followed.placements.is_current and followed.reason:
                    if followed.has_failed:
                        _log.warning("gateway %s: its placements are heard again", record.gateway_id)
                    followed.reason, followed.has_failed = "", False
                    backoff.reset()
                    self._news.set()
        finally:
            stream.abort()


# ---------------------------------------------------------------------------------- frames and their bounds


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


def _check(change: Change) -> None:
    """Raise `WireError` for ids, counts and ages that no gateway sends."""
    ids = [change.request_id]
    ages: list[float] = []
    counts: list[int] = []
    if isinstance(change, Placed):
        ids += [change.compute_id, change.decode_id]
        counts = [change.num_prefill_tokens, change.num_new_blocks, change.num_sequences]
        ages = [change.age_s, change.prefilled_age_s or 0.0]
        if len(change.block_keys) > MAX_KEYS or any(len(key) > _MAX_KEY_BYTES for key in change.block_keys):
            raise WireError(f"more than {MAX_KEYS} block keys, or one of more than {_MAX_KEY_BYTES} bytes")
    elif isinstance(change, Prefilled):
        ages = [change.age_s]
    if any(len(each) > _MAX_ID_CHARS for each in ids):
        raise WireError(f"an id of more than {_MAX_ID_CHARS} characters")
    if not all(0 <= count <= MAX_COUNT for count in counts):
        raise WireError(f"counts {counts}, which must be from 0 to {MAX_COUNT}")
    if not all(0.0 <= age < math.inf for age in ages):
        raise WireError(f"ages {ages}, which must be finite and not negative")
