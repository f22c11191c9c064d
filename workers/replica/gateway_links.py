"""The links that gateways open to an engine core, and what the replica reports over them.

A link begins with the gateway's hello and carries messages until it ends.

News are collected during a step and sent as one `StepFrame` per gateway by `flush`. The engine core waits for
a gateway without a link (not yet, or not any more) during a short grace period; then its requests are
cancelled.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvtransfer.common.clock import Clock
from kvtransfer.errors import TransferError, shown
from kvtransfer.messages import KvEvents, KvSnapshot, ReplicaIdentity
from kvtransfer.rpc.stream import FrameStream
from workers.disagg.kv_receiver import KvReceiver
from workers.disagg.kv_sender import KvSender
from workers.disagg.migration import MigrationManager
from workers.disagg.peers import Peers
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
from workers.messages.rank_channel import RankReady
from workers.replica.step_loop import StepLoop
from workers.scheduler.block_pool import BlockPool
from workers.scheduler.scheduler import Scheduler
from workers.store_connector.connector import StoreConnector

GATEWAY_GRACE_S = 3.0
LOAD_PERIOD_S = 0.2
# How often gateways hear of changes of the queue, at most.
QUEUE_PERIOD_S = 0.01
# Of what is read of prompts, about so much goes into a frame.
_READ_BYTES = 1 << 20

_log = logging.getLogger("tandem.engine_core")


@dataclass(slots=True)
class _Port:
    stream: FrameStream | None
    lost_at: float
    news: list[News] = field(default_factory=list)
    load_sent_at: float = 0.0
    queue_seen_at: float = 0.0
    # What was seen last of the queue.
    queue: tuple[int, ...] = ()
    pauses_batch: bool = False


class GatewayLinks:
    """All gateways that this engine core knows, with the news that wait for each of them."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
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

    def connected(self, key: GatewayKey, stream: FrameStream) -> None:
        """Take in the link that a gateway has opened, and close an older one of the same gateway."""
        port = self._ports.setdefault(key, _Port(None, 0.0))
        if port.stream is not None:
            port.stream.close()
        port.stream = stream

    def disconnected(self, key: GatewayKey, stream: FrameStream) -> bool:
        """Begin the grace period of a gateway whose link has ended; False where that was not its last one."""
        port = self._ports.get(key)
        if port is None or port.stream is not stream:
            return False
        port.stream, port.pauses_batch = None, False
        port.lost_at = self._clock.now()
        return True

    def pause_batch(self, key: GatewayKey, is_paused: bool) -> None:
        """Take the word of a gateway for as long as its link lasts."""
        if (port := self._ports.get(key)) is not None and port.stream is not None:
            port.pauses_batch = is_paused

    @property
    def is_batch_paused(self) -> bool:
        """Whether any gateway asks for it."""
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
        """Add to the next frame for this gateway."""
        port = self._ports.get(key)
        if port is None:
            port = self._ports[key] = _Port(None, self._clock.now())
        port.news.append(news)

    def flush(self, load: Callable[[], LoadReport], queue: Callable[[], QueueReport]) -> None:
        """Send what was posted, one frame per gateway, with a report made by `load` when one is due; between
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
                port.stream.send(LINK_UP_CODEC.encode(_frame(news, None, None)))
            frame = _frame(last, load() if load_due else None, current if is_changed else None)
            port.stream.send(LINK_UP_CODEC.encode(frame))
            port.news = []

    def broadcast(self, message: KvEvents | KvSnapshot | Leaving | RoleChanged) -> None:
        """Send to every connected gateway."""
        frame = LINK_UP_CODEC.encode(message)
        for port in self._ports.values():
            if port.stream is not None:
                port.stream.send(frame)

    def send(self, key: GatewayKey, message: LinkUp) -> None:
        """Send to one gateway, if it is connected."""
        port = self._ports.get(key)
        if port is not None and port.stream is not None:
            port.stream.send(LINK_UP_CODEC.encode(message))

    def close(self) -> None:
        """Close every link."""
        for port in self._ports.values():
            if port.stream is not None:
                port.stream.close()


def _taken(queue: QueueReport) -> tuple[int, ...]:
    """What decides whether gateways send more; context and free blocks change with every token."""
    return queue.num_running, queue.num_waiting, queue.num_landings, queue.num_backlog_tokens


def _parted(news: list[News]) -> list[list[News]]:
    """Divide news into those of one frame each, at least one, in their order: what is read of prompts may be
    more than goes into a frame."""
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
    others = [item for item in news if not isinstance(item, TokenDelta)] if len(deltas) < len(news) else []
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


# ----------------------------------------------------------------------------------------------
# Reports: statistics, KV events, and whether every block is accounted for.


class ReplicaReports:
    """Makes the reports, each with its sequence number, from the components of the engine core."""

    def __init__(
        self,
        *,
        identity: ReplicaIdentity,
        pool: BlockPool,
        scheduler: Scheduler,
        steps: StepLoop,
        kv_sender: KvSender,
        kv_receiver: KvReceiver,
        migration: MigrationManager,
        peers: Peers,
        connector: StoreConnector | None = None,
        ready: Sequence[RankReady] = (),
    ) -> None:
        """`ready` are the reports of all ranks that they have loaded."""
        self._identity = identity
        self._pool = pool
        self._scheduler = scheduler
        self._steps = steps
        self._kv_sender = kv_sender
        self._kv_receiver = kv_receiver
        self._migration = migration
        self._peers = peers
        self._connector = connector
        self._backend = ", ".join(sorted({rank.backend for rank in ready if rank.backend}))
        self._load_s = tuple(rank.load_s for rank in ready)
        self._warm_up_s = tuple(rank.warm_up_s for rank in ready)
        self._kv_sequence = 0
        self._load_sequence = 0
        self._num_steps_checked = 0

    def kv_events(self) -> KvEvents | None:
        """Changes of the prefix cache, and of the node's store, since the last call; None: there are none."""
        stored, removed = self._pool.take_events()
        if self._connector is not None:
            stored_there, removed_there = self._connector.view.take_events()
            stored, removed = stored + stored_there, removed + removed_there
        if not (stored or removed):
            return None
        self._kv_sequence += 1
        return KvEvents(self._identity, self._kv_sequence, stored, removed)

    def kv_snapshot(self) -> KvSnapshot:
        """The whole content of both; send outstanding events before it."""
        stored = self._pool.snapshot()
        if self._connector is not None:
            stored += self._connector.view.snapshot()
        return KvSnapshot(self._identity, self._kv_sequence, stored)

    def queue(self) -> QueueReport:
        """What waits and runs at this moment; who is paused makes way for others, and does not count."""
        landings = self._kv_receiver.landings
        return QueueReport(
            num_running=self._scheduler.num_running - self._scheduler.num_paused,
            num_waiting=self._scheduler.num_waiting,
            num_landings=landings.num_open + landings.num_waiting,
            num_backlog_tokens=self._scheduler.num_backlog_tokens,
            num_free_blocks=self._pool.num_free,
            num_context_tokens=self._scheduler.num_context_tokens,
        )

    def load(self) -> LoadReport:
        """The state of this moment."""
        self._load_sequence += 1
        scheduler, pool, landings = self._scheduler, self._pool, self._kv_receiver.landings
        pushes = self._kv_sender.sends.counters
        return LoadReport(
            identity=self._identity,
            sequence=self._load_sequence,
            num_running=scheduler.num_running,
            num_waiting=scheduler.num_waiting,
            num_paused=scheduler.num_paused,
            max_sequences=scheduler.max_sequences,
            max_batch_tokens=scheduler.max_batch_tokens,
            num_context_tokens=scheduler.num_context_tokens,
            num_landings=landings.num_open + landings.num_waiting,
            num_backlog_tokens=scheduler.num_backlog_tokens,
            num_free_blocks=pool.num_free,
            num_cached_blocks=pool.num_cached,
            num_quarantined_blocks=pool.num_quarantined,
            num_total_blocks=pool.num_total,
            num_leaked_blocks=pool.num_references - scheduler.num_references - self._num_other_references,
            prefill_tok_s=self._steps.rates.prefill_tok_s,
            decode_step_s=self._steps.rates.decode_step_s,
            stalled_s=self._steps.stalled_s,
            num_steps=self._steps.num_steps,
            num_checksum_failures=self._kv_receiver.num_checksum_failures,
            num_preemptions=scheduler.num_preemptions,
            transfer_gb_s=pushes.gb_s,
            num_moved_bytes={str(each): count for each, count in pushes.num_bytes.items()},
            num_lost_landings={str(cause): count for cause, count in self._kv_receiver.num_lost.items()},
            paths=self._peers.paths(),
            num_offloaded_blocks=scheduler.num_offloaded_blocks,
            num_waiting_landings=landings.num_waiting,
            num_moved_streams=self._migration.num_migrated,
            num_failed_moves=self._migration.num_failed,
            num_unfilled_tokens=scheduler.num_unfilled_tokens,
            num_transport_bytes=dict(pushes.num_bytes_by_transport),
            transport_s=dict(pushes.seconds_by_transport),
            load_s=self._load_s,
            backend=self._backend,
            warm_up_s=self._warm_up_s,
            **self._steps.costs.coefficients(),
            **self._steps.stats.totals(),
            **self._of_the_store(),
        )

    def _of_the_store(self) -> dict[str, Any]:
        """The fields that concern the node's store."""
        connector = self._connector
        if connector is None:
            return {}
        return {
            "load_tok_s": connector.costs.measured_tok_s,
            "num_loaded_tokens": dict(connector.loader.num_loaded_tokens),
            "num_announced_prompts": connector.announced.num_announced,
            "num_announced_blocks": connector.announced.num_loaded_blocks,
            "num_stored_blocks": connector.saver.num_stored,
            "num_unstored_blocks": dict(connector.saver.num_unstored),
            "num_store_checksum_failures": connector.loader.num_checksum_failures,
        }

    @property
    def _num_other_references(self) -> int:
        """Of landings, and of copies to and from the store."""
        return self._kv_receiver.landings.num_references + (
            0 if self._connector is None else self._connector.num_references
        )

    def check_when_idle(self) -> None:
        """Assert every invariant of pool, sequences and landings, once after each time of work."""
        if self._scheduler.is_idle and self._steps.num_steps != self._num_steps_checked:
            self._num_steps_checked = self._steps.num_steps
            self._scheduler.check(self._num_other_references)
            self._kv_receiver.landings.check()
