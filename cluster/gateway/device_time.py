"""What requests take of the replicas' devices, by what the replicas have measured of their steps.

A prompt takes every rank of its replica for the time of its chunks, and an output token the ranks of one
stage at a time: its own part of the step, and an equal share of what a step costs with any number of
sequences.
"""

from __future__ import annotations

from typing import Protocol

from cluster.gateway.replica_connections import ReplicaView
from cluster.metrics.tenant_usage import PoolTime
from workers.messages.link import LoadReport


class ReplicaViews(Protocol):
    """The part of `ReplicaConnections` that device time needs."""

    def find(self, replica_id: str) -> ReplicaView | None:
        """Return the listed or connected replica of this id."""


class DeviceTime:
    """Computes device time from the latest reports of the replicas. 0 of a replica that is gone or has not
    measured yet."""

    def __init__(self, views: ReplicaViews) -> None:
        self._views = views

    def of_prompt(self, replica_id: str, num_cached: int, num_computed: int) -> PoolTime:
        """Return the time to compute so many tokens behind those that were cached: the time in the slowest
        stage, in which all ranks belong to the prompt."""
        view = self._views.find(replica_id)
        if view is None or view.load is None:
            return PoolTime()
        load = view.load
        if load.prefill_token_s:
            attended = num_computed * (num_cached + 0.5 * num_computed)
            seconds = num_computed * load.prefill_token_s + attended * load.attention_token_s
        else:
            seconds = num_computed / load.prefill_tok_s if load.prefill_tok_s else 0.0
        num_stages = max(len(view.record.stages), 1)
        return PoolTime(view.record.pool, seconds * view.record.tp * num_stages)

    def of_output(self, replica_id: str, num_tokens: int, num_context_tokens: int) -> PoolTime:
        """Return the time of so many output tokens of a sequence with that context. The stages compute a step
        one after the other, so that each rank has it for the time of its own stage."""
        view = self._views.find(replica_id)
        if view is None or view.load is None:
            return PoolTime()
        return PoolTime(
            view.record.pool, num_tokens * _token_s(view.load, num_context_tokens) * view.record.tp
        )


def _token_s(load: LoadReport, num_context_tokens: int) -> float:
    num_running = max(load.num_running - load.num_paused, 1)
    if load.decode_base_s:
        own_s = load.decode_sequence_s + num_context_tokens * load.decode_context_s
        return load.decode_base_s / num_running + own_s
    return load.decode_step_s / num_running
