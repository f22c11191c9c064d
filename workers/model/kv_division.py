"""The division of a node's memory for KV among its replicas. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class KvDemand(NamedTuple):
    """`num_replicas` replicas on one node, each of which can use up to `most_bytes` for KV."""

    num_replicas: int
    most_bytes: int


def divide_kv(free_bytes: int, demands: Sequence[KvDemand]) -> list[int]:
    """Divide memory among replicas: the bytes for each replica of each demand. All get the same; what some
    cannot use goes to the others."""
    left, num_left = max(free_bytes, 0), sum(demand.num_replicas for demand in demands)
    shares = [0] * len(demands)
    for index in sorted(range(len(demands)), key=lambda index: demands[index].most_bytes):
        demand = demands[index]
        shares[index] = min(demand.most_bytes, left // max(num_left, 1))
        left -= demand.num_replicas * shares[index]
        num_left -= demand.num_replicas
    return shares
