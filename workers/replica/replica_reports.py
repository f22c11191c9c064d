"""Report statistics and KV events of a replica, and check that every block is accounted for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvtransfer.kv_events import KvEvents, KvSnapshot
from kvtransfer.messages import ReplicaIdentity
from workers.disagg.kv_hand_overs import KvHandOvers
from workers.interfaces import PeerLinks
from workers.messages.link import LoadReport, QueueReport
from workers.messages.rank_channel import RankReady
from workers.replica.block_marks import BlockMarks
from workers.replica.layer_groups import LayerGroups
from workers.replica.snapshot_parts import SnapshotParts
from workers.replica.step_loop import StepLoop
from workers.scheduler.block_pool import BlockPool
from workers.scheduler.scheduler import Scheduler
from workers.store_connector.connector import StoreConnector


def slowest_start(ready: Sequence[RankReady]) -> RankReady:
    """Return the report of the rank whose start took longest."""
    return max(ready, key=lambda it: sum(it.phase_to_s.values()))


class ReplicaReports:
    """Makes the reports, each with its sequence number, from the components of the engine core."""

    def __init__(
        self,
        *,
        identity: ReplicaIdentity,
        pool: BlockPool,
        scheduler: Scheduler,
        steps: StepLoop,
        hand_overs: KvHandOvers,
        peers: PeerLinks,
        connector: StoreConnector | None = None,
        ready: Sequence[RankReady] = (),
    ) -> None:
        """`ready` are the reports of all ranks that they have loaded."""
        self._identity = identity
        self._pool = pool
        self._scheduler = scheduler
        self._steps = steps
        self._kv_sender, self._kv_receiver, self._migration = hand_overs
        self._peers = peers
        self._connector = connector
        group_pools = scheduler.life.tables.groups.pools
        view = None if connector is None else connector.view
        self._layer_groups = LayerGroups(ready[0].compatibility, pool, group_pools) if ready else None
        self._marks = BlockMarks(group_pools, pool.block_tokens, view)
        self._snapshot_parts = SnapshotParts(pool, self._marks, view)
        self._slowest = slowest_start(ready) if ready else None
        self._backend = ", ".join(sorted({rank.backend for rank in ready if rank.backend}))
        self._load_s = tuple(rank.load_s for rank in ready)
        self._warm_up_s = tuple(rank.warm_up_s for rank in ready)
        self._kv_sequence = 0
        self._load_sequence = 0
        self._num_steps_checked = 0

    def kv_events(self) -> KvEvents | None:
        """Return the changes of the prefix cache, and of the node's store, since the last call; None: there
        are none."""
        stored, removed = self._pool.take_events()
        if self._connector is not None:
            stored_there, removed_there = self._connector.view.take_events()
            stored, removed = stored + stored_there, removed + removed_there
        marked, unmarked = self._marks.take_events()
        if not (stored or removed or marked or unmarked):
            return None
        self._kv_sequence += 1
        return KvEvents(self._identity, self._kv_sequence, stored, removed, marked, unmarked)

    def kv_snapshot(self) -> KvSnapshot:
        """Return the whole content of both; send outstanding events before it."""
        stored = self._pool.snapshot()
        if self._connector is not None:
            stored += self._connector.view.snapshot()
        marks = self._marks
        return KvSnapshot(self._identity, self._kv_sequence, stored, marks.snapshot(), marks.num_needed)

    def kv_snapshot_part(self, part: int) -> KvSnapshot:
        """Return a part of the content of both; send outstanding events before it."""
        stored, marked, next_part = self._snapshot_parts.part(part)
        num_needed = self._marks.num_needed
        return KvSnapshot(self._identity, self._kv_sequence, stored, marked, num_needed, part, next_part)

    def queue(self) -> QueueReport:
        """Return the numbers of requests that wait and run at this moment; paused ones make way for others,
        and do not count."""
        landings = self._kv_receiver.landings
        return QueueReport(
            num_running=self._scheduler.counts.num_running - self._scheduler.counts.num_paused,
            num_waiting=self._scheduler.counts.num_waiting,
            num_landings=landings.num_open + landings.num_waiting,
            num_backlog_tokens=self._scheduler.counts.num_backlog_tokens,
            num_free_blocks=self._pool.num_free,
            num_context_tokens=self._scheduler.counts.num_context_tokens,
        )

    def load(self) -> LoadReport:
        """Return the state of this moment."""
        self._load_sequence += 1
        scheduler, pool, landings = self._scheduler, self._pool, self._kv_receiver.landings
        pushes = self._kv_sender.sends.counters
        return LoadReport(
            identity=self._identity,
            sequence=self._load_sequence,
            num_running=scheduler.counts.num_running,
            num_waiting=scheduler.counts.num_waiting,
            num_paused=scheduler.counts.num_paused,
            max_sequences=scheduler.config.max_sequences,
            max_batch_tokens=scheduler.config.max_batch_tokens,
            tpot_objective_s=scheduler.config.tpot_objective_s or 0.0,
            num_context_tokens=scheduler.counts.num_context_tokens,
            num_landings=landings.num_open + landings.num_waiting,
            num_backlog_tokens=scheduler.counts.num_backlog_tokens,
            num_free_blocks=pool.num_free,
            num_cached_blocks=pool.num_cached,
            num_quarantined_blocks=pool.num_quarantined,
            num_total_blocks=pool.num_total,
            num_leaked_blocks=self._num_leaked_blocks,
            prefill_tok_s=self._steps.rates.prefill_tok_s,
            decode_step_s=self._steps.rates.decode_step_s,
            stalled_s=self._steps.stalled_s,
            num_steps=self._steps.num_steps,
            num_checksum_failures=self._kv_receiver.num_checksum_failures,
            num_preemptions=scheduler.life.num_preemptions,
            transfer_gb_s=pushes.gb_s,
            num_moved_bytes={str(each): count for each, count in pushes.num_bytes.items()},
            num_lost_landings={str(cause): count for cause, count in self._kv_receiver.num_lost.items()},
            paths=self._peers.paths(),
            num_offloaded_blocks=scheduler.life.tables.host.num_used,
            num_waiting_landings=landings.num_waiting,
            num_moved_streams=self._migration.num_migrated,
            num_failed_moves=self._migration.num_failed,
            num_unfilled_tokens=scheduler.counts.num_unfilled_tokens,
            num_transport_bytes=dict(pushes.num_bytes_by_transport),
            transport_s=dict(pushes.seconds_by_transport),
            load_s=self._load_s,
            backend=self._backend,
            warm_up_s=self._warm_up_s,
            num_expert_copies=self._steps.copies.num_copies,
            **self._of_the_start(),
            **self._steps.costs.coefficients(),
            **self._steps.stats.totals(),
            **self._of_layer_groups(),
            **self._of_the_store(),
        )

    def _of_layer_groups(self) -> dict[str, Any]:
        """Return the fields that concern groups of layers."""
        counts = self._scheduler.life.tables.snapshot_counts
        return {
            "num_snapshot_hits": counts.num_hits,
            "num_snapshot_misses": counts.num_misses,
            "num_recomputed_tokens": counts.num_recomputed_tokens,
            "num_evicted_snapshot_tokens": counts.num_evicted_tokens,
            **(self._layer_groups.statistics() if self._layer_groups else {}),
        }

    def _of_the_start(self) -> dict[str, Any]:
        """Return the fields that concern the start of the ranks."""
        slowest = self._slowest
        if slowest is None:
            return {}
        return {"start_phase_s": slowest.phase_to_s, "kernels_s": slowest.kernels_s}

    def _of_the_store(self) -> dict[str, Any]:
        """Return the fields that concern the node's store."""
        connector = self._connector
        if connector is None:
            return {}
        return {
            "load_tok_s": connector.costs.measured_tok_s,
            "num_loaded_tokens": dict(connector.loader.num_loaded_tokens),
            "num_announced_prompts": connector.announced.num_announced,
            "num_announced_blocks": connector.announced.num_loaded_blocks,
            "num_stored_blocks": connector.saver.num_stored,
            "num_stored_states": connector.saver.num_stored_states,
            "num_unstored_blocks": dict(connector.saver.num_unstored),
            "num_store_checksum_failures": connector.loader.num_checksum_failures,
        }

    @property
    def _num_leaked_blocks(self) -> int:
        """References that nobody has, to blocks of every group of layers."""
        life = self._scheduler.life
        leaked = self._pool.num_references - life.num_references - self._num_other_references
        if not (pools := life.tables.groups.pools):
            return leaked
        of_groups = sum(pool.num_references for pool in pools)
        return leaked + of_groups - life.num_group_references - sum(self._num_other_group_references)

    @property
    def _num_other_references(self) -> int:
        """The references of landings, and of copies to and from the store."""
        return self._kv_receiver.num_references + (
            0 if self._connector is None else self._connector.num_references
        )

    @property
    def _num_other_group_references(self) -> tuple[int, ...]:
        """The same in each group with a window."""
        of_landings = self._kv_receiver.landings.num_group_references
        if self._connector is None:
            return of_landings
        of_copies = self._connector.num_group_references
        return tuple(sum(both) for both in zip(of_landings, of_copies, strict=True))

    def check_when_idle(self) -> None:
        """Assert every invariant of pool, sequences and landings, once after each time of work."""
        if self._scheduler.is_idle and self._steps.num_steps != self._num_steps_checked:
            self._num_steps_checked = self._steps.num_steps
            self._scheduler.check(self._num_other_references, self._num_other_group_references)
            self._kv_receiver.landings.check()
