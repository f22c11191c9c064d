"""The links that gateways open to an engine core, and the reports of the replica over them.

A link begins with the gateway's hello and carries messages until it ends.

News are collected during a step and sent as one `StepFrame` per gateway by `flush`. The engine core waits for
a gateway without a link (not yet, or not any more) during a short grace period; then its requests are
cancelled.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from kvtransfer.common.clock import Clock
from kvtransfer.errors import TransferError, shown
from kvtransfer.kv_events import KvEvents, KvSnapshot
from kvtransfer.rpc.stream import FrameStream
from workers.messages.link import (
    LINK_DOWN_CODEC,
    LINK_UP_CODEC,
    GatewayHello,
    GatewayKey,
    HandOverReport,
    IsolationReport,
    Leaving,
    LinkDown,
    LinkUp,
    LoadReport,
    MoveEnded,
    News,
    PrefillReport,
    PromptEmbedding,
    PromptLogprobs,
    QueueReport,
    ReplicaHello,
    RequestFailed,
    RoleChanged,
    StallReport,
    StepFrame,
    TokenDelta,
)

GATEWAY_GRACE_S = 3.0
LOAD_PERIOD_S = 0.2
# The shortest period between reports of changes of the queue to gateways.
QUEUE_PERIOD_S = 0.01
# The approximate bytes of prompt readings that go into one frame.
_READ_BYTES = 1 << 20

_log = logging.getLogger("tandem.engine_core")


class NewsStream(Protocol):
    """What takes the news of one gateway: a `FrameStream`, or the stream of a simulated link."""

    def send(self, frame: Any) -> None:
        """Send what `encode` has made of a message."""

    def close(self) -> None:
        """End the link."""


@dataclass(slots=True)
class _Port:
    stream: NewsStream | None
    lost_at: float
    news: list[News] = field(default_factory=list)
    load_sent_at: float = 0.0
    queue_seen_at: float = 0.0
    # The last state of the queue that was seen.
    queue: tuple[int, ...] = ()
    pauses_batch: bool = False


class GatewayLinks:
    """All gateways that this engine core knows, with the news that wait for each of them."""

    def __init__(self, clock: Clock, encode: Callable[[LinkUp], Any] = LINK_UP_CODEC.encode) -> None:
        """`encode` makes of a message what streams take: bytes, or whatever simulated ones pass on."""
        self._clock = clock
        self._encode = encode
        self._ports: dict[GatewayKey, _Port] = {}

    async def serve(
        self,
        stream: FrameStream,
        hello: Callable[[], ReplicaHello],
        on_message: Callable[[GatewayKey, LinkDown], None],
        on_lost: Callable[[GatewayKey], None],
    ) -> None:
        """Serve one link until it ends, passing on its messages and its end, unless another link of the same
        gateway has taken its place. A gateway that sends nonsense loses its link."""
        frame = await stream.receive()
        greeting = None if frame is None else LINK_DOWN_CODEC.decode(frame)
        if not isinstance(greeting, GatewayHello):
            return
        key = greeting.gateway_id, greeting.epoch
        self.connected(key, stream)
        self.send(key, hello())
        try:
            while (frame := await stream.receive()) is not None:
                if (message := LINK_DOWN_CODEC.decode_known(frame)) is not None:
                    on_message(key, message)
        except TransferError as error:
            _log.warning("gateway %s sent nonsense: %s", shown(greeting.gateway_id), error)
        finally:
            if self.disconnected(key, stream):
                on_lost(key)

    def connected(self, key: GatewayKey, stream: NewsStream) -> None:
        """Take in the link that a gateway has opened, and close an older one of the same gateway."""
        port = self._ports.setdefault(key, _Port(None, 0.0))
        if port.stream is not None:
            port.stream.close()
        port.stream = stream

    def connected_keys(self) -> set[GatewayKey]:
        """Return the gateways that have a link now."""
        return {key for key, port in self._ports.items() if port.stream is not None}

    def disconnected(self, key: GatewayKey, stream: NewsStream) -> bool:
        """Begin the grace period of a gateway whose link has ended; False where that was not its last one."""
        port = self._ports.get(key)
        if port is None or port.stream is not stream:
            return False
        port.stream, port.pauses_batch = None, False
        port.lost_at = self._clock.now()
        return True

    def pause_batch(self, key: GatewayKey, is_paused: bool) -> None:
        """Take the word of a gateway until its link ends."""
        if (port := self._ports.get(key)) is not None and port.stream is not None:
            port.pauses_batch = is_paused

    @property
    def is_batch_paused(self) -> bool:
        """Whether any gateway asks for the class `batch` to be paused."""
        return any(port.pauses_batch for port in self._ports.values())

    def expired(self) -> list[GatewayKey]:
        """Forget, and return, gateways whose grace period is over."""
        now = self._clock.now()
        gone = [
            key
            for key, port in self._ports.items()
            if port.stream is None and now > port.lost_at + GATEWAY_GRACE_S
        ]
        for key in gone:
            del self._ports[key]
        return gone

    def post(self, key: GatewayKey, news: News) -> None:
        """Add news to the next frame for this gateway."""
        port = self._ports.get(key)
        if port is None:
            port = self._ports[key] = _Port(None, self._clock.now())
        port.news.append(news)
        if isinstance(news, RequestFailed):
            # The gateway places the request again: it has to know at once what waits here.
            port.queue_seen_at = -math.inf

    def flush(self, load: Callable[[], LoadReport], queue: Callable[[], QueueReport]) -> None:
        """Send the posted news, one frame per gateway, with a report made by `load` when one is due; between
        two of them with what `queue` makes, where that has changed."""
        now = self._clock.now()
        current: QueueReport | None = None
        for port in self._ports.values():
            if port.stream is None:
                continue
            load_due = now >= port.load_sent_at + LOAD_PERIOD_S
            is_changed = False
            if not load_due and now >= port.queue_seen_at + QUEUE_PERIOD_S:
                port.queue_seen_at = now
                current = current or queue()
                is_changed, port.queue = port.queue != (seen := _taken(current)), seen
            if not (port.news or load_due or is_changed):
                continue
            if load_due:
                port.load_sent_at = port.queue_seen_at = now
            *parts, last = _parted(port.news)
            for news in parts:
                port.stream.send(self._encode(_frame(news, None, None)))
            frame = _frame(last, load() if load_due else None, current if is_changed else None)
            port.stream.send(self._encode(frame))
            port.news = []

    def flush_news(self) -> None:
        """Send the posted news at once, without a report of the load: tokens need not wait for the plan of
        the next step, which changes the load."""
        for port in self._ports.values():
            if port.stream is None or not port.news:
                continue
            for news in _parted(port.news):
                port.stream.send(self._encode(_frame(news, None, None)))
            port.news = []

    @property
    def next_load_at(self) -> float:
        """The time from which on `flush` sends a report that is due; inf without any gateway."""
        connected = [port.load_sent_at for port in self._ports.values() if port.stream is not None]
        return min(connected, default=math.inf) + LOAD_PERIOD_S

    def have_seen(self, queue: QueueReport) -> bool:
        """Whether every gateway knows this state of the queue, or what decides of it."""
        seen = _taken(queue)
        return all(port.queue == seen for port in self._ports.values() if port.stream is not None)

    def passed(self, times: Sequence[float]) -> None:
        """Take in that `flush` would have found nothing new at these times, at which no report was due."""
        for port in self._ports.values():
            for now in times:
                if now >= port.queue_seen_at + QUEUE_PERIOD_S:
                    port.queue_seen_at = now

    def broadcast(self, message: KvEvents | KvSnapshot | Leaving | RoleChanged) -> None:
        """Send a message to every connected gateway."""
        frame = self._encode(message)
        for port in self._ports.values():
            if port.stream is not None:
                port.stream.send(frame)

    def send(self, key: GatewayKey, message: LinkUp) -> None:
        """Send a message to one gateway, if it is connected."""
        port = self._ports.get(key)
        if port is not None and port.stream is not None:
            port.stream.send(self._encode(message))

    def close(self) -> None:
        """Close every link."""
        for port in self._ports.values():
            if port.stream is not None:
                port.stream.close()


def _taken(queue: QueueReport) -> tuple[int, ...]:
    """Return the numbers that decide whether gateways send more; context and free blocks change with every
    token."""
    return queue.num_running, queue.num_waiting, queue.num_landings, queue.num_backlog_tokens


def _parted(news: list[News]) -> list[list[News]]:
    """Divide news into those of one frame each, at least one, in their order: readings of prompts may be more
    than goes into a frame."""
    if not any(isinstance(item, PromptLogprobs | PromptEmbedding) for item in news):
        return [news]
    parts: list[list[News]] = [[]]
    num_bytes = 0
    for item in news:
        if isinstance(item, PromptLogprobs):
            num_bytes += item.logprobs.num_bytes
        elif isinstance(item, PromptEmbedding):
            num_bytes += len(item.vector)
        if num_bytes > _READ_BYTES and parts[-1]:
            parts.append([])
            num_bytes = 0
        parts[-1].append(item)
    return parts


def _frame(news: list[News], load: LoadReport | None, queue: QueueReport | None) -> StepFrame:
    deltas = tuple([item for item in news if isinstance(item, TokenDelta)])
    if len(deltas) == len(news):
        return StepFrame(deltas=deltas, load=load, queue=queue)
    others = [item for item in news if not isinstance(item, TokenDelta)]
    return StepFrame(
        deltas=deltas,
        prefills=tuple(item for item in others if isinstance(item, PrefillReport)),
        hand_overs=tuple(item for item in others if isinstance(item, HandOverReport)),
        failures=tuple(item for item in others if isinstance(item, RequestFailed)),
        load=load,
        moves=tuple(item for item in others if isinstance(item, MoveEnded)),
        isolations=tuple(item for item in others if isinstance(item, IsolationReport)),
        queue=queue,
        prompt_logprobs=tuple(item for item in others if isinstance(item, PromptLogprobs)),
        embeddings=tuple(item for item in others if isinstance(item, PromptEmbedding)),
        stalls=tuple(item for item in others if isinstance(item, StallReport)),
    )
