"""The free resources of the Ray cluster, and whether more replicas would fit: pure functions over resource
counts, and one reader of Ray's state API."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

# Ray counts resources in units of 1/10000.
QUANTUM = 1e-4


class ReplicaDemand(NamedTuple):
    """Represents one replica of a pool: the resources that its engine core and its stages request, on one
    node unless `may_spread`."""

    pool: str
    bundles: tuple[dict[str, float], ...]
    may_spread: bool = False

    def total(self) -> dict[str, float]:
        """Return the resources that all of it requests."""
        return add_up(self.bundles)

    def parts(self) -> list[dict[str, float]]:
        """Return the parts that must each be on one node."""
        return [dict(bundle) for bundle in self.bundles] if self.may_spread else [self.total()]


def add_up(resources: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """Return the sum of each resource."""
    sums: dict[str, float] = {}
    for part in resources:
        for name, amount in part.items():
            sums[name] = sums.get(name, 0.0) + amount
    return sums


def amount_text(amount: float) -> str:
    """Return `0.05` for 0.0500."""
    return f"{amount:.4f}".rstrip("0").rstrip(".")


def shortages(
    wanted: Sequence[ReplicaDemand],
    free: Sequence[Mapping[str, float]],
    total: Sequence[Mapping[str, float]],
) -> list[str]:
    """Return why `wanted` cannot be placed on nodes with `free` of `total` resources; empty when it can.

    Each replica, or each stage of one that may spread, must fit on one node; the largest are placed first,
    each on the first node where it fits.
    """
    lines = [
        f"{name}: {amount_text(amount)} wanted, {amount_text(add_up(free).get(name, 0.0))} free of "
        f"{amount_text(add_up(total).get(name, 0.0))} in the cluster"
        for name, amount in sorted(add_up([demand.total() for demand in wanted]).items())
        if amount > add_up(free).get(name, 0.0) + QUANTUM / 2
    ]
    return lines or _misfits(wanted, free)


def _misfits(wanted: Sequence[ReplicaDemand], free: Sequence[Mapping[str, float]]) -> list[str]:
    left = [dict(node) for node in free]
    lines = []
    parts = [(demand, part) for demand in wanted for part in demand.parts()]
    for demand, part in sorted(parts, key=lambda pair: sorted(pair[1].items()), reverse=True):
        node = next((node for node in left if _fits(part, node)), None)
        if node is None:
            asked = ", ".join(f"{name}: {amount_text(amount)}" for name, amount in sorted(part.items()))
            what = "stage" if demand.may_spread else "replica"
            lines.append(f"pool {demand.pool}: no single node has {asked} left for one {what}")
            continue
        for name, amount in part.items():
            node[name] -= amount
    return list(dict.fromkeys(lines))


def _fits(total: Mapping[str, float], node: Mapping[str, float]) -> bool:
    return all(amount <= node.get(name, 0.0) + QUANTUM / 2 for name, amount in total.items())
