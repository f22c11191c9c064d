"""Exports the statistics of replicas and stores, in processes that import nothing of gateways: each metric
names the field that it shows."""

from __future__ import annotations

from cluster.metrics.buckets import cumulative
from cluster.metrics.definitions import SECTIONS
from cluster.metrics.metric import BATCH_SIZE
from cluster.metrics.registry import MetricsRegistry
from cluster.metrics.replica_metrics import STORES
from kvtransfer.store.messages.admin_requests import StoreStat
from workers.stats_record import ReplicaStats

_GB = 1e9
_REPLICA = [m for title in ("Engines", "KV", "Transfer") for m in SECTIONS[title] if m.field]
_TIERS = [metric for metric in STORES if metric.field and "tier" in metric.labels]
_INDEX = [metric for metric in STORES if metric.field and "tier" not in metric.labels]
_INDEX_STATES = ("off", "up", "slow", "down")


class ReplicaMetrics:
    """Exports the statistics of one replica, whose pool, id and model the registry knows."""

    def __init__(self, registry: MetricsRegistry, block_tokens: int) -> None:
        self._registry = registry
        self._block_tokens = block_tokens
        self._paths: dict[tuple[str, ...], dict[str, str]] = {}
        self._role = ""

    def update(self, stats: ReplicaStats, role: str) -> None:
        """Set and count every statistic; `role` is the one that is in effect."""
        registry = self._registry
        registry.export(_REPLICA, stats)
        for rank, memory in enumerate(stats.memory):
            registry.set("device_memory_used_bytes", memory.used_bytes, rank=str(rank))
            registry.set("device_memory_total_bytes", memory.total_bytes, rank=str(rank))
        for name, seconds in (
            ("replica_load_seconds", stats.load_s),
            ("replica_warm_up_seconds", stats.warm_up_s),
        ):
            for rank, value in enumerate(seconds):
                registry.set(name, value, rank=str(rank))
        if stats.num_steps_by_batch:
            batches = cumulative(BATCH_SIZE, stats.num_steps_by_batch)
            registry.histogram("batch_size", batches, stats.num_batched_sequences)
        self._update_experts(stats)
        self._update_kv(stats)
        self._update_role(role)
        self._update_paths(stats)

    def _update_experts(self, stats: ReplicaStats) -> None:
        if not stats.expert_imbalance:  # there are no experts, or their loads are not known yet
            return
        self._registry.set("expert_imbalance_ratio", stats.expert_imbalance)
        self._registry.set("expert_rank_imbalance_ratio", stats.expert_rank_imbalance)
        self._registry.set("expert_uncopied_imbalance_ratio", stats.expert_uncopied_imbalance)
        self._registry.set("expert_copies", stats.num_expert_copies)
        self._registry.set("hottest_expert_ratio", stats.hottest_expert_share)
        self._registry.set("idle_experts", stats.num_idle_experts)

    def _update_kv(self, stats: ReplicaStats) -> None:
        num_held = stats.num_total_blocks - stats.num_free_blocks - stats.num_quarantined_blocks
        num_slots = (num_held + stats.num_offloaded_blocks) * self._block_tokens
        usage = num_held / stats.num_total_blocks if stats.num_total_blocks else 0.0
        fragmentation = min(1.0, stats.num_unfilled_tokens / num_slots) if num_slots else 0.0
        self._registry.set("kv_tokens", stats.num_total_blocks * self._block_tokens)
        self._registry.set("kv_usage_ratio", usage)
        self._registry.set("kv_fragmentation_ratio", fragmentation)

    def _update_role(self, role: str) -> None:
        if self._role and self._role != role:
            self._registry.set("replica_role", 0, role=self._role)
        self._role = role
        self._registry.set("replica_role", 1, role=role)

    def _update_paths(self, stats: ReplicaStats) -> None:
        gone, self._paths = self._paths, {}
        for path in stats.paths:
            labels = {
                "peer": path.peer.replica_id,
                "rank": str(path.rank),
                "peer_rank": str(path.peer_rank),
                "transport": path.transport or "none",
                "device": path.device,
            }
            self._paths[tuple(labels.values())] = labels
            self._registry.set("path_bytes_per_second", path.gb_s * _GB, **labels)
            self._registry.set("path_latency_seconds", path.latency_us * 1e-6, **labels)
        for key, labels in gone.items():
            if key not in self._paths:  # 0 until Ray forgets the series: it carries nothing
                self._registry.set("path_bytes_per_second", 0.0, **labels)
                self._registry.set("path_latency_seconds", 0.0, **labels)


class StoreMetrics:
    """Exports the statistics of one node's store, whose node the registry knows."""

    def __init__(self, registry: MetricsRegistry) -> None:
        self._registry = registry

    def update(self, stat: StoreStat) -> None:
        """Set and count every statistic."""
        registry = self._registry
        for tier in stat.tiers:
            registry.export(_TIERS, tier, tier=tier.tier)
            if tier.tier == "nvme":  # the host tier is also written when blocks are read from another tier
                amplification = tier.num_written_bytes / tier.num_put_bytes if tier.num_put_bytes else 0.0
                registry.set("store_write_amplification", amplification)
        registry.export(_INDEX, stat.index)
        for state in _INDEX_STATES:
            registry.set("store_index_state", float(state == stat.index.state), state=state)
