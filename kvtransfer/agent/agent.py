"""The transfer agent of a rank: carries out the engine core's transfer orders on threads, and reports.

As a writer it holds `WriterConnection`s and the `PushFence`; as a target it holds listeners and the `Gate`.
The rank's own thread calls `handle`, which never waits; `report` is called from any thread, one call at a
time, and must not wait for anything that another report brings.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable, Sequence

from kvtransfer.agent.lanes import WriterContext
from kvtransfer.agent.path_health import PathHealth
from kvtransfer.agent.qos import TrafficGovernor
from kvtransfer.agent.writer import WriterConnection
from kvtransfer.blocks.layout import intersect
from kvtransfer.blocks.pool import KvPool
from kvtransfer.common.clock import Clock
from kvtransfer.common.faults import Faults
from kvtransfer.common.host import host_id
from kvtransfer.errors import PathError
from kvtransfer.messages import RankEndpoints, ReplicaIdentity, Shard
from kvtransfer.protocol.fence import PushFence
from kvtransfer.protocol.gate import Gate
from kvtransfer.rpc.trust import Trust
from kvtransfer.transfer_orders import (
    CloseLanding,
    ClosePeer,
    ConnectPeer,
    OpenLanding,
    PieceCheck,
    PushOrder,
    StopPush,
    TransferOrder,
    TransferSettings,
    VerifyOrder,
)
from kvtransfer.transfer_reports import TransferReport, Verified
from kvtransfer.transports import TRANSPORTS
from kvtransfer.transports.base import Listener, TargetRank, WriterRank, any_with_layers, pools_by_group

# The names of the threads without which nothing moves or is verified start with this.
TRANSFER_THREADS = "kv-"

_log = logging.getLogger(__name__)


class TransferAgent:
    """Owns everything of a rank that moves KV. Listens from its construction until `close`."""

    def __init__(
        self,
        *,
        identity: ReplicaIdentity,
        rank: int,
        pools: Sequence[KvPool],
        trust: Trust,
        clock: Clock,
        faults: Faults,
        report: Callable[[TransferReport], None],
        settings: TransferSettings,
    ) -> None:
        """Offers those of `settings.transports` to writers that can listen here, and logs why the others
        cannot; `ValueError` for an unknown one. `pools` are those of all groups of layers. They stay the
        caller's."""
        unknown = sorted(set(settings.transports) - set(TRANSPORTS))
        if unknown:
            raise ValueError(f"unknown transports {unknown}; there are {sorted(TRANSPORTS)}")
        self._faults = faults
        self._unlocked_report = report
        self._report_lock = threading.RLock()
        self._rank = rank
        self._pools = pools_by_group(pools)
        any_pool = any_with_layers(pools)
        self._shard = any_pool.layout.shard
        # Decides about every copy of the rank that has a traffic class.
        self.governor = TrafficGovernor(settings, clock, any_pool.device)
        self._gate = Gate(self._report)
        self._fence = PushFence(self._report)
        self._connections: dict[bytes, WriterConnection] = {}
        self._checks: queue.SimpleQueue[VerifyOrder | None] = queue.SimpleQueue()
        self._verifier = threading.Thread(
            target=self._verify_all, name=f"{TRANSFER_THREADS}verify", daemon=True
        )
        self._verifier.start()
        self._listeners, unoffered = _listen(TargetRank(rank, pools, self._gate, trust, settings))
        self._context = WriterContext(
            {
                group: WriterRank(identity, rank, pool, trust, faults, settings)
                for group, pool in self._pools.items()
            },
            settings,
            host_id(),
            frozenset(listener.endpoint.transport for listener in self._listeners),
            unoffered,
            PathHealth(settings.error_budget, settings.cool_down_s, settings.max_cool_down_s),
            clock,
        )

    def endpoints(self) -> RankEndpoints:
        """Return how writers reach this rank."""
        return RankEndpoints(
            self._rank,
            self._shard,
            self._context.host_id,
            tuple(listener.endpoint for listener in self._listeners),
        )

    def handle(self, order: TransferOrder) -> None:
        """Start or carry out an order; the answers come as reports."""
        match order:
            case PushOrder():
                if self._fence.submit(order):
                    self._connections[order.connection_id].submit(order)
                    self.governor.wake()
            case StopPush():
                self._fence.stop(order.landing_id)
                self.governor.wake()
            case OpenLanding():
                self._gate.open(order)
            case CloseLanding():
                self._gate.close(order.landing_id)
            case VerifyOrder():
                self._checks.put(order)
            case ConnectPeer():
                self._connect(order)
            case ClosePeer():
                connection = self._connections.get(order.connection_id)
                if connection is not None:  # kept until its thread has ended: `close` waits for that
                    connection.close()
                    self.governor.wake()

    def close(self) -> None:
        """End every connection and thread; pushes that still run fail."""
        self._gate.shut()
        for connection in self._connections.values():
            connection.close()
        self.governor.wake()
        self._checks.put(None)
        for connection in self._connections.values():
            connection.join()
        self._verifier.join()
        for listener in self._listeners:
            listener.close()

    def _connect(self, order: ConnectPeer) -> None:
        for connection_id in [key for key, each in self._connections.items() if each.has_ended]:
            del self._connections[connection_id]
        self._connections[order.connection_id] = WriterConnection(
            order,
            context=self._context,
            fence=self._fence,
            governor=self.governor,
            report=self._report,
        )

    def _report(self, report: TransferReport) -> None:
        with self._report_lock:
            self._unlocked_report(report)

    def _verify_all(self) -> None:
        while (order := self._checks.get()) is not None:
            self._faults.at("verify")
            bad = _bad_blocks(self._pools.get(order.group), order.pieces)
            self._report(Verified(order.landing_id, tuple(sorted(bad))))


def _bad_blocks(pool: KvPool | None, pieces: Sequence[PieceCheck]) -> set[int]:
    """Return the indices of blocks with a piece that has another sum, or that the pool cannot hold: peers may
    lie."""
    if pool is None:
        return {piece.block_index for piece in pieces}
    bad: set[int] = set()
    batches: dict[Shard, list[PieceCheck]] = {}
    for piece in pieces:
        is_held = intersect(pool.layout.shard, piece.shard) == piece.shard
        if is_held and 0 <= piece.block_id < pool.num_blocks and pool.layout.num_layers(piece.shard):
            batches.setdefault(piece.shard, []).append(piece)
        else:
            bad.add(piece.block_index)
    found = pool.sums_of([([piece.block_id for piece in batch], shard) for shard, batch in batches.items()])
    for batch, sums in zip(batches.values(), found, strict=True):
        bad |= {
            piece.block_index
            for piece, checksum in zip(batch, sums, strict=True)
            if piece.checksum != checksum
        }
    return bad


def _listen(target: TargetRank) -> tuple[list[Listener], dict[str, str]]:
    """Return the listeners of the offered transports, and why the other configured transports are not
    offered."""
    listeners: list[Listener] = []
    unoffered: dict[str, str] = {}
    for name in target.settings.transports:
        try:
            listeners.append(TRANSPORTS[name].listen(target))
        except PathError as error:
            unoffered[name] = str(error)
            _log.info("rank %d does not offer %s: %s", target.rank, name, error)
    level = logging.INFO if listeners else logging.WARNING
    _log.log(level, "rank %d offers %s", target.rank, [listener.endpoint for listener in listeners])
    return listeners, unoffered
