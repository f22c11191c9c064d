"""What a replica reports of itself: its statistics, KV events, and whether every block is accounted for."""

from __future__ import annotations

from typing import Any

from kvtransfer.messages import KvEvents, KvSnapshot, ReplicaIdentity
from workers.disagg.kv_receiver import KvReceiver
from workers.disagg.kv_sender import KvSender
from workers.disagg.peers import Peers
from workers.messages import LoadReport
from workers.replica.step_loop import StepLoop
from workers.scheduler.block_pool import BlockPool
from workers.scheduler.scheduler import Scheduler
from workers.store_connector.connector import StoreConnector


class ReplicaReports:
    """Makes the reports, each with its sequence number, from the components of the engine core."""

    def __init__(
        self,
        *,
        identity: ReplicaIdentity,
        pool: BlockPool,
        scheduler: Scheduler,
        steps: StepLoop,
        outbound: KvSender,
        inbound: KvReceiver,
        peers: Peers,
        tiers: StoreConnector | None = None,
    ) -> None:
        self._identity = identity
        self._pool = pool
        self._scheduler = scheduler
        self._steps = steps
        self._outbound = outbound
        self._inbound = inbound
        self._peers = peers
        self._tiers = tiers
        self._kv_sequence = 0
        self._load_sequence = 0
        self._num_steps_checked = 0

    def kv_events(self) -> KvEvents | None:
        """Changes of the prefix cache, and of the node's store, since the last call; None: there are none."""
        stored, removed = self._pool.take_events()
        if self._tiers is not None:
            stored_there, removed_there = self._tiers.view.take_events()
            stored, removed = stored + stored_there, removed + removed_there
        if not (stored or removed):
            return None
        self._kv_sequence += 1
        return KvEvents(self._identity, self._kv_sequence, stored, removed)

    def kv_snapshot(self) -> KvSnapshot:
        """The whole content of both; send outstanding events before it."""
        stored = self._pool.snapshot()
        if self._tiers is not None:
            stored += self._tiers.view.snapshot()
        return KvSnapshot(self._identity, self._kv_sequence, stored)

    def load(self) -> LoadReport:
        """The state of this moment."""
        self._load_sequence += 1
        scheduler, pool, landings = self._scheduler, self._pool, self._inbound.book
        pushes = self._outbound.book.counters
        return LoadReport(
            identity=self._identity,
            sequence=self._load_sequence,
            num_running=scheduler.num_running,
            num_waiting=scheduler.num_waiting,
            num_landings=landings.num_open + landings.num_waiting,
            num_backlog_tokens=scheduler.num_backlog_tokens,
            num_free_blocks=pool.num_free,
            num_cached_blocks=pool.num_cached,
            num_quarantined_blocks=pool.num_quarantined,
            num_total_blocks=pool.num_total,
            num_leaked_blocks=pool.num_references - scheduler.num_references - self._num_other_references,
            prefill_tok_s=self._steps.rates.prefill_tok_s,
            decode_step_s=self._steps.rates.decode_step_s,
            num_steps=self._steps.num_steps,
            num_checksum_failures=self._inbound.num_checksum_failures,
            num_preemptions=scheduler.num_preemptions,
            transfer_gb_s=pushes.gb_s,
            num_moved_bytes={str(each): count for each, count in pushes.num_bytes.items()},
            num_lost_landings={str(cause): count for cause, count in self._inbound.num_lost.items()},
            paths=self._peers.paths(),
            num_offloaded_blocks=scheduler.num_offloaded_blocks,
            num_waiting_landings=landings.num_waiting,
            num_moved_streams=self._outbound.moving.num_moved,
            num_failed_moves=self._outbound.moving.num_failed,
            num_unfilled_tokens=scheduler.num_unfilled_tokens,
            num_transport_bytes=dict(pushes.num_bytes_by_transport),
            transport_s=dict(pushes.seconds_by_transport),
            **self._steps.stats.totals(),
            **self._of_the_store(),
        )

    def _of_the_store(self) -> dict[str, Any]:
        """The fields that concern the node's store."""
        tiers = self._tiers
        if tiers is None:
            return {}
        return {
            "load_tok_s": tiers.costs.measured_tok_s,
            "num_loaded_tokens": dict(tiers.num_loaded_tokens),
            "num_stored_blocks": tiers.saver.num_stored,
            "num_unstored_blocks": dict(tiers.saver.num_unstored),
            "num_store_checksum_failures": tiers.loader.num_checksum_failures,
        }

    @property
    def _num_other_references(self) -> int:
        """Of landings, and of copies to and from the store."""
        return self._inbound.book.num_references + (0 if self._tiers is None else self._tiers.num_references)

    def check_when_idle(self) -> None:
        """Assert every invariant of pool, sequences and landings, once after each time of work."""
        if self._scheduler.is_idle and self._steps.num_steps != self._num_steps_checked:
            self._num_steps_checked = self._steps.num_steps
            self._scheduler.check(self._num_other_references)
            self._inbound.book.check()
