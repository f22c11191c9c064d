"""Choose devices, their splits and replicas for a load: the fewest devices that hold a rate, or the rate that
given devices hold."""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from cluster.config import Role
from cluster.errors import ConfigError
from cluster.planning.device_profile import DeviceProfile
from cluster.planning.device_split import ROLES, DeviceSplit, device_splits, host_splits, refusal
from cluster.planning.planned_model import PlannedModel
from cluster.planning.replica_rate import (
    MAX_SEQUENCES,
    CapacityFinder,
    PlannedLoad,
    ReplicaCapacity,
    SplitMemory,
)
from cluster.planning.store_tiers import TierPlan

# Plans beside the best that are shown.
MAX_PLANS = 3


class PlannedPool(NamedTuple):
    """The replicas of one role on one kind of device, what each holds at most, and its state at the rate of
    the plan. The price is that of a device and an hour, None if it is not known."""

    capacity: ReplicaCapacity
    num_replicas: int
    profile: DeviceProfile
    price_of_device: float | None = None
    served: ReplicaCapacity | None = None

    @property
    def rate(self) -> float:
        return self.num_replicas * self.capacity.rate

    @property
    def num_devices(self) -> int:
        return self.num_replicas * self.capacity.split.num_devices


class Plan(NamedTuple):
    """Pools for a model and a load. `rate` is what they hold, `price_per_hour` that of all devices, None if
    that of one is not known. With a `refusal` the engine does not start such replicas, by this sentence.
    `tiers` are those of the store, if prefixes come back."""

    model: PlannedModel
    load: PlannedLoad
    pools: tuple[PlannedPool, ...]
    refusal: str = ""
    tiers: TierPlan | None = None

    @property
    def profile(self) -> DeviceProfile:
        """The devices that decode."""
        return self.pools[-1].profile

    @property
    def is_disaggregated(self) -> bool:
        return len(self.pools) > 1

    @property
    def num_devices(self) -> int:
        return sum(pool.num_devices for pool in self.pools)

    @property
    def devices(self) -> str:
        """The devices by kind: `4 H100`, or `2 H100 + 4 EPYC9755`."""
        counts: dict[str, int] = {}
        for pool in self.pools:
            counts[pool.profile.name] = counts.get(pool.profile.name, 0) + pool.num_devices
        return " + ".join(f"{count} {name}" for name, count in counts.items())

    @property
    def rate(self) -> float:
        return min(pool.rate for pool in self.pools)

    @property
    def price_per_hour(self) -> float | None:
        prices = [
            pool.price_of_device * pool.num_devices for pool in self.pools if pool.price_of_device is not None
        ]
        return sum(prices) if len(prices) == len(self.pools) else None

    def cost_per_million(self, rate: float) -> float | None:
        """Return the cost of a million tokens, prompts and answers together, at this rate of requests."""
        if self.price_per_hour is None:
            return None
        tokens_per_hour = 3600 * rate * (self.load.input_tokens + self.load.output_tokens)
        return 1e6 * self.price_per_hour / tokens_per_hour

    @property
    def order(self) -> tuple[float, int, bool, float]:
        """What better plans have less of: price, devices, pools, and the time of a token."""
        price = 0.0 if self.price_per_hour is None else self.price_per_hour
        tpot_s = max(pool.capacity.tpot_s for pool in self.pools)
        return price, self.num_devices, self.is_disaggregated, tpot_s


class ModelOnDevices:
    """A model on one kind of device: the splits that it can have, and what devices hold with each. Where the
    engine refuses all of them for a setting, the splits are those without it, and `refusal` is its sentence.

    `tries_host`: host memory may have some of the weights or of the KV even where devices hold all.
    """

    def __init__(self, model: PlannedModel, profile: DeviceProfile, *, tries_host: bool = False) -> None:
        self.model, self.profile, self._tries_host = model, profile, tries_host
        self.memory = SplitMemory(model, profile)
        self.splits = list(device_splits(model, profile))
        self.refusal = model.refusal
        if not self.splits:
            of_defaults = model._replace(kv_dtype="auto", latent_kv="replicated")
            self.splits = list(device_splits(of_defaults, profile))
            if self.splits:
                self.refusal = refusal(model, profile, self.splits[-1])

    def finder(self, load: PlannedLoad) -> CapacityFinder:
        """Return what finds the capacities of replicas for a load."""
        return CapacityFinder(self.model, self.profile, load, self.memory)

    def capacities(
        self, load: PlannedLoad, most_devices: int | None = None
    ) -> dict[Role, list[ReplicaCapacity]]:
        """Return what replicas of each role hold, by splits over at most so many devices. Host memory helps
        where nothing else meets the objectives, or where it may."""
        finder = self.finder(load)
        found = self._of(finder, self.splits, most_devices)
        is_served = found["both"] or (found["prefill"] and found["decode"])
        if is_served and not self._tries_host:
            return found
        num_tokens = load.input_tokens + load.output_tokens
        splits = host_splits(self.model, self.profile, num_tokens, MAX_SEQUENCES)
        of_host = self._of(finder, splits, most_devices)
        return {role: found[role] + of_host[role] for role in ROLES}

    @staticmethod
    def _of(
        finder: CapacityFinder, splits: Iterable[DeviceSplit], most_devices: int | None
    ) -> dict[Role, list[ReplicaCapacity]]:
        small = [it for it in splits if most_devices is None or it.num_devices <= most_devices]
        return {
            role: [found for split in small if (found := finder.find(split, role)) is not None]
            for role in ROLES
        }


class ClusterPlanner:
    """Plans a model on several kinds of devices. Prices are those of a device and an hour, by its name."""

    def __init__(
        self,
        model: PlannedModel,
        profiles: Sequence[DeviceProfile],
        load: PlannedLoad,
        prices: Mapping[str, float],
        *,
        tries_host: bool = False,
    ) -> None:
        self._model, self._load, self._prices = model, load, prices
        self._kinds = [ModelOnDevices(model, profile, tries_host=tries_host) for profile in profiles]

    def for_rate(self, rate: float, load: PlannedLoad | None = None) -> list[Plan]:
        """Return plans that hold so many requests a second, of another load if that is given, the best first.
        Raises `ConfigError` where none does."""
        plans: list[Plan] = []
        load = load or self._load
        role_to_pools: list[dict[Role, PlannedPool | None]] = []
        for kind in self._kinds:
            capacities = kind.capacities(load)
            role_to_pools.append(
                {
                    role: min(
                        (self._pool(kind, it, math.ceil(rate / it.rate)) for it in capacities[role]),
                        key=lambda pool: (pool.num_devices, pool.capacity.tpot_s, pool.capacity.ttft_s),
                        default=None,
                    )
                    for role in ROLES
                }
            )
        for number, pools in enumerate(role_to_pools):
            plans += self._of_pools(load, pools["both"])
            # Kinds are compared by their prices, and so are two kinds with one.
            others = role_to_pools if self._prices else role_to_pools[number : number + 1]
            for decoding in others:
                plans += self._of_pools(load, pools["prefill"], decoding["decode"])
        return [self._served(plan, rate) for plan in self._best(plans)]

    def for_devices(self, num_devices: int, load: PlannedLoad | None = None) -> list[Plan]:
        """Return the plans with at most so many devices that hold most, of another load if that is given, the
        best first. Raises `ConfigError` where none fits."""
        plans: list[Plan] = []
        load = load or self._load
        for kind in self._kinds:
            capacities = kind.capacities(load, num_devices)
            for capacity in capacities["both"]:
                pool = self._pool(kind, capacity, num_devices // capacity.split.num_devices)
                plans += self._of_pools(load, pool)
            plans += self._divided(kind, load, capacities, num_devices)
        return [self._served(plan, plan.rate) for plan in self._best(plans, by_rate=True)]

    def _divided(
        self,
        kind: ModelOnDevices,
        load: PlannedLoad,
        capacities: Mapping[Role, list[ReplicaCapacity]],
        num_devices: int,
    ) -> Iterator[Plan]:
        """Yield the best divisions of the devices between the two phases: the first in which prefill is not
        the slower one, and the one before. All others have a slower phase with fewer replicas."""
        for prefill, decode in itertools.product(capacities["prefill"], capacities["decode"]):
            size, other = prefill.split.num_devices, decode.split.num_devices

            def num_decode(num_prefill: int, size: int = size, other: int = other) -> int:
                return (num_devices - num_prefill * size) // other

            counts = range(1, (num_devices - other) // size + 1)
            fast = bisect.bisect_left(
                counts, True, key=lambda count: count * prefill.rate >= num_decode(count) * decode.rate
            )
            for num_prefill in counts[max(0, fast - 1) : fast + 1]:
                pools = (
                    self._pool(kind, prefill, num_prefill),
                    self._pool(kind, decode, num_decode(num_prefill)),
                )
                yield from self._of_pools(load, *pools)

    def _served(self, plan: Plan, rate: float) -> Plan:
        """Return the plan with the state of its replicas, which share the rate evenly."""
        name_to_kind = {kind.profile.name: kind for kind in self._kinds}
        pools = []
        for pool in plan.pools:
            share = min(rate / pool.num_replicas, pool.capacity.rate)
            finder = name_to_kind[pool.profile.name].finder(plan.load)
            served = finder.at(pool.capacity.split, pool.capacity.role, share)
            pools.append(pool._replace(served=served))
        return plan._replace(pools=tuple(pools))

    def _pool(self, kind: ModelOnDevices, capacity: ReplicaCapacity, num_replicas: int) -> PlannedPool:
        return PlannedPool(capacity, num_replicas, kind.profile, self._prices.get(kind.profile.name))

    def _of_pools(self, load: PlannedLoad, *pools: PlannedPool | None) -> Iterator[Plan]:
        """Yield the plan of these pools, if there are all of them."""
        of_plan = tuple(pool for pool in pools if pool is not None and pool.num_replicas)
        if len(of_plan) == len(pools):
            names = {pool.profile.name for pool in of_plan}
            reasons = (kind.refusal for kind in self._kinds if kind.profile.name in names)
            yield Plan(self._model, load, of_plan, next(filter(None, reasons), ""))

    def _best(self, plans: list[Plan], *, by_rate: bool = False) -> list[Plan]:
        """Return the best of the plans, each with other kinds of devices or another division in pools."""
        if not plans:
            raise ConfigError(self._why_none())
        plans.sort(key=lambda plan: (-plan.rate if by_rate else 0.0, *plan.order))
        kinds_to_plan: dict[tuple[str, ...], Plan] = {}
        for plan in plans:
            kinds_to_plan.setdefault(tuple(pool.profile.name for pool in plan.pools), plan)
        found = list(kinds_to_plan.values())
        # Whether to disaggregate at all is always shown.
        other = next((it for it in found if it.is_disaggregated != found[0].is_disaggregated), None)
        shown = found[:MAX_PLANS]
        return [*shown[:-1], other] if other is not None and other not in shown else shown

    def _why_none(self) -> str:
        """Say what is missing: a split, memory for the weights, time, or devices."""
        names = ", ".join(kind.profile.name for kind in self._kinds)
        what = f"{self._model.source}: {names}"
        if not any(kind.splits for kind in self._kinds):
            reason = refusal(self._model, self._kinds[0].profile, DeviceSplit(1))
            return f"{what}: the model cannot be divided over them: {reason}"
        held = (kind.memory.of(split) for kind in self._kinds for split in kind.splits)
        if all(it is None for it in held):
            return (
                f"{what}: {self._model.weight_bytes / 1e9:.1f} GB of weights do not fit beside KV; take a "
                "smaller --precision, or larger devices"
            )
        capacities = [kind.capacities(self._load) for kind in self._kinds]
        roles = [role for role in ROLES if any(it[role] for it in capacities)]
        if "both" not in roles and not {"prefill", "decode"} <= set(roles):
            return (
                f"{what}: even one request at a time does not meet the objectives; raise --slo-ttft-ms or "
                "--slo-tpot-ms, or take faster devices"
            )
        return f"{what}: too few devices for a replica; raise --devices"
