"""Choose devices, their splits and replicas for a load: the fewest devices that hold a rate, or the rate that
given devices hold."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from cluster.config import Role
from cluster.errors import ConfigError
from cluster.planning.device_profile import DeviceProfile
from cluster.planning.device_split import ROLES, device_splits, held_memory
from cluster.planning.planned_model import PlannedModel
from cluster.planning.replica_rate import MAX_SEQUENCES, CapacityFinder, PlannedLoad, ReplicaCapacity

# Plans beside the best that are shown.
MAX_PLANS = 3


class PlannedPool(NamedTuple):
    """The replicas of one role, what each holds at most, and its state at the rate of the plan."""

    capacity: ReplicaCapacity
    num_replicas: int
    served: ReplicaCapacity | None = None

    @property
    def rate(self) -> float:
        return self.num_replicas * self.capacity.rate

    @property
    def num_devices(self) -> int:
        return self.num_replicas * self.capacity.split.num_devices


class Plan(NamedTuple):
    """Pools on one kind of device. `rate` is what they hold, `price_per_hour` that of all devices, None if
    that of one is not known."""

    model: PlannedModel
    profile: DeviceProfile
    load: PlannedLoad
    pools: tuple[PlannedPool, ...]
    price_of_device: float | None = None

    @property
    def is_disaggregated(self) -> bool:
        return len(self.pools) > 1

    @property
    def num_devices(self) -> int:
        return sum(pool.num_devices for pool in self.pools)

    @property
    def rate(self) -> float:
        return min(pool.rate for pool in self.pools)

    @property
    def price_per_hour(self) -> float | None:
        return None if self.price_of_device is None else self.price_of_device * self.num_devices

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


class ClusterPlanner:
    """Plans a model on several kinds of devices. Prices are those of a device and an hour, by its name."""

    def __init__(
        self,
        model: PlannedModel,
        profiles: Sequence[DeviceProfile],
        load: PlannedLoad,
        prices: Mapping[str, float],
    ) -> None:
        self._model, self._load, self._prices = model, load, prices
        self._profiles = profiles
        self._role_to_found: dict[tuple[str, Role], list[ReplicaCapacity]] = {}
        self._name_to_finder: dict[str, CapacityFinder] = {}
        for profile in profiles:
            finder = self._name_to_finder[profile.name] = CapacityFinder(model, profile, load)
            splits = list(device_splits(model, profile))
            for role in ROLES:
                found = [finder.find(split, role) for split in splits]
                self._role_to_found[profile.name, role] = [it for it in found if it is not None]

    def for_rate(self, rate: float) -> list[Plan]:
        """Return plans that hold so many requests a second, the best first. Raises `ConfigError` where none
        does."""
        plans: list[Plan] = []
        for profile in self._profiles:
            of_role = {
                role: min(
                    (PlannedPool(it, math.ceil(rate / it.rate)) for it in self._found(profile, role)),
                    key=lambda pool: (pool.num_devices, pool.capacity.tpot_s, pool.capacity.ttft_s),
                    default=None,
                )
                for role in ROLES
            }
            plans += self._of_pools(profile, of_role["both"])
            plans += self._of_pools(profile, of_role["prefill"], of_role["decode"])
        return [self._served(plan, rate) for plan in self._best(plans)]

    def for_devices(self, num_devices: int) -> list[Plan]:
        """Return the plans with at most so many devices that hold most, the best first. Raises `ConfigError`
        where none fits."""
        plans: list[Plan] = []
        for profile in self._profiles:
            own = [
                plan
                for capacity in self._found(profile, "both")
                for plan in self._of_pools(
                    profile, PlannedPool(capacity, num_devices // capacity.split.num_devices)
                )
            ]
            plans += own + list(self._divided(profile, num_devices))
        return [self._served(plan, plan.rate) for plan in self._best(plans, by_rate=True)]

    def _divided(self, profile: DeviceProfile, num_devices: int) -> Iterator[Plan]:
        """Yield every division of the devices between the two phases."""
        for prefill in self._found(profile, "prefill"):
            for decode in self._found(profile, "decode"):
                size, other = prefill.split.num_devices, decode.split.num_devices
                for num_prefill in range(1, (num_devices - other) // size + 1):
                    num_decode = (num_devices - num_prefill * size) // other
                    pools = PlannedPool(prefill, num_prefill), PlannedPool(decode, num_decode)
                    yield from self._of_pools(profile, *pools)

    def _served(self, plan: Plan, rate: float) -> Plan:
        """Return the plan with the state of its replicas, which share the rate evenly."""
        finder = self._name_to_finder[plan.profile.name]
        pools = []
        for pool in plan.pools:
            share = min(rate / pool.num_replicas, pool.capacity.rate)
            served = finder.at(pool.capacity.split, pool.capacity.role, share)
            pools.append(pool._replace(served=served))
        return plan._replace(pools=tuple(pools))

    def _found(self, profile: DeviceProfile, role: Role) -> list[ReplicaCapacity]:
        return self._role_to_found[profile.name, role]

    def _of_pools(self, profile: DeviceProfile, *pools: PlannedPool | None) -> Iterator[Plan]:
        """Yield the plan of these pools, if there are all of them."""
        of_plan = tuple(pool for pool in pools if pool is not None and pool.num_replicas)
        if len(of_plan) == len(pools):
            price = self._prices.get(profile.name)
            yield Plan(self._model, profile, self._load, of_plan, price)

    def _best(self, plans: list[Plan], *, by_rate: bool = False) -> list[Plan]:
        """Return the best of the plans, each with another kind of device or another division in pools."""
        if not plans:
            raise ConfigError(self._why_none())
        plans.sort(key=lambda plan: (-plan.rate if by_rate else 0.0, *plan.order))
        name_to_plan: dict[tuple[str, bool], Plan] = {}
        for plan in plans:
            name_to_plan.setdefault((plan.profile.name, plan.is_disaggregated), plan)
        return list(name_to_plan.values())[:MAX_PLANS]

    def _why_none(self) -> str:
        """Say what is missing: a split, memory for the weights, time, or devices."""
        what = f"{self._model.source}: {', '.join(profile.name for profile in self._profiles)}"
        splits = [(profile, it) for profile in self._profiles for it in device_splits(self._model, profile)]
        if not splits:
            return f"{what}: the model cannot be divided over them, or not with these settings"
        if all(held_memory(self._model, *split, MAX_SEQUENCES) is None for split in splits):
            return (
                f"{what}: {self._model.weight_bytes / 1e9:.1f} GB of weights do not fit beside KV; take a "
                "smaller --precision, or larger devices"
            )
        roles = [role for role in ROLES if any(self._found(it, role) for it in self._profiles)]
        if "both" not in roles and not {"prefill", "decode"} <= set(roles):
            return (
                f"{what}: even one request at a time does not meet the objectives; raise --slo-ttft-ms or "
                "--slo-tpot-ms, or take faster devices"
            )
        return f"{what}: too few devices for a replica; raise --devices"
