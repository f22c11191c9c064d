"""Every statistic of a replica reaches metrics and status by its name, and comes back from the status."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from cluster.metrics.definitions import SECTIONS
from cluster.metrics.replica_stats import RENAMED, load_of, stats_of
from cluster.proto.tandem.v1 import admin_pb2 as admin_pb
from router.messages import ReplicaLoad
from workers.messages.link import LoadReport
from workers.replica.step_stats import StepStats
from workers.stats_record import ReplicaStats

# Statistics that no metric shows by itself, with the metrics that the exporter makes of them.
COMPUTED = {
    "paths": "path_bytes_per_second",
    "memory": "device_memory_used_bytes",
    "load_s": "replica_load_seconds",
    "warm_up_s": "replica_warm_up_seconds",
    "num_steps_by_batch": "batch_size",
    "num_batched_sequences": "batch_size",
    "num_unfilled_tokens": "kv_fragmentation_ratio",
    # Shown by the status alone, as a part of the landings.
    "num_waiting_landings": "landings",
    # Shown where there are experts.
    "expert_imbalance": "expert_imbalance_ratio",
    "expert_rank_imbalance": "expert_rank_imbalance_ratio",
    "num_idle_experts": "idle_experts",
    "hottest_expert_share": "hottest_expert_ratio",
    "expert_uncopied_imbalance": "expert_uncopied_imbalance_ratio",
    "num_expert_copies": "expert_copies",
}
# Shown by the status alone, as no number that says how much.
STATUS_ONLY = {"backend", "hottest_expert_layer", "hottest_expert"}
# A setting, for the router.
SETTINGS = {"tpot_objective_s"}
# What the router knows of a replica beside its statistics.
ROUTER_ONLY = {
    *("identity", "received_at", "transfer_tok_s", "max_local_tokens"),
    *("window_tokens", "window_token_ratio", "state_tokens"),
}
FIELDS = set(ReplicaStats.__struct_fields__)


def filled() -> ReplicaStats:
    """Every field has another value."""
    defaults = msgspec.structs.asdict(ReplicaStats())
    scalars: dict[type, Callable[[int], object]] = {
        int: lambda n: n,
        float: lambda n: n + 0.5,
        str: lambda n: f"text {n}",
        dict: lambda n: {"a": n},
    }
    values: dict[str, Any] = {
        name: scalars[type(default)](number)
        for number, (name, default) in enumerate(defaults.items(), 1)
        if type(default) in scalars
    }
    return ReplicaStats(**values)


def test_every_statistic_is_exported_by_its_name_or_named_as_an_exception() -> None:
    metrics = [metric for title in ("Engines", "KV", "Transfer") for metric in SECTIONS[title]]
    exported = {metric.field for metric in metrics if metric.field}
    assert exported <= FIELDS
    assert exported.isdisjoint(COMPUTED)
    assert exported | COMPUTED.keys() | STATUS_ONLY | SETTINGS == FIELDS
    assert set(COMPUTED.values()) <= {metric.name for metric in metrics}


def test_a_mapping_is_exported_under_the_last_label_of_its_metric() -> None:
    stats = ReplicaStats()
    for metric in (metric for title in ("Engines", "KV", "Transfer") for metric in SECTIONS[title]):
        if metric.field:
            is_mapping = isinstance(getattr(stats, metric.field), dict)
            assert is_mapping == (
                metric.labels[-1] in ("tier", "cause", "class", "transport", "layers", "phase")
            ), metric.name


def test_every_field_of_a_load_has_its_source() -> None:
    names = {field.name for field in admin_pb.Load.DESCRIPTOR.fields}
    renamed = {renamed.stat for renamed in RENAMED.values()}
    assert renamed <= FIELDS
    assert names - FIELDS == {*RENAMED, "age_s"}
    message = load_of(filled())
    assert {field.name for field, _ in message.ListFields()} == names - {"age_s"}


def test_what_the_status_says_comes_back_as_the_same_statistics() -> None:
    stats = filled()
    values = stats_of(load_of(stats))
    assert values == {name: getattr(stats, name) for name in values}
    assert values.keys() <= FIELDS


def test_the_router_reads_statistics_by_their_names() -> None:
    assert set(ReplicaLoad.__struct_fields__) - FIELDS == ROUTER_ONLY


def test_a_report_is_the_statistics_with_a_sender_and_a_number() -> None:
    assert set(LoadReport.__struct_fields__) - FIELDS == {"identity", "sequence"}


def test_the_totals_of_the_steps_are_statistics() -> None:
    totals = StepStats().totals()
    assert totals.keys() <= FIELDS
    assert {"num_steps_by_batch", "num_hit_tokens", "mfu", "memory", "busy_s"} <= totals.keys()
    assert all(type(totals[name]) is type(getattr(ReplicaStats(), name)) for name in totals)
