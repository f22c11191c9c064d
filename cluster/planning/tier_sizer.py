"""Find the sizes of the store's tiers that pay: how long each keeps what requests leave, how much of that
comes back in this time, and whether loading it takes less than computing it again."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from cluster.planning.plan import ClusterPlanner, Plan
from cluster.planning.replica_rate import PlannedLoad
from cluster.planning.step_times import StepTimes
from cluster.planning.store_tiers import BLOCK_TOKENS, NodeStorage, PlannedTier, PrefixReuse, TierPlan

# A larger tier finds no more than a twentieth of what comes back.
_MOST_TIMES = 3.0
# The part of a node's host memory that the store may have.
_DRAM_SHARE = 0.5
_NUM_BISECTIONS = 60
# The share of time in which the rate of a tier is used at most.
_MOST_BUSY = 0.8
# The rate of hits and the devices depend on each other: rounds until they agree, and how well.
_NUM_ROUNDS, _FREE_ROUNDS, _AGREEMENT = 8, 4, 0.002

_OF_PROFILE = NodeStorage()


class TierSizer:
    """Sizes the tiers of a plan at a rate of requests."""

    def __init__(
        self,
        plan: Plan,
        rate: float,
        reuse: PrefixReuse,
        storage: NodeStorage = _OF_PROFILE,
    ) -> None:
        self._plan, self._rate, self._reuse = plan, rate, reuse
        self._pool = plan.pools[0]  # which computes prompts
        profile, split = self._pool.profile, self._pool.capacity.split
        self._times = StepTimes(plan.model, profile, split)
        self._num_nodes = math.ceil(self._pool.num_devices / profile.devices_per_node)
        dram_gb, nvme_gb = storage
        self._dram_gb = _DRAM_SHARE * profile.host_memory_gb if dram_gb is None else dram_gb
        self._nvme_gb = profile.nvme_gb if nvme_gb is None else nvme_gb
        load = plan.load
        self._token_s = self._times.prefill(load.input_tokens).busy_s * split.pp / load.input_tokens

    def plan(self) -> TierPlan:
        """Return the tiers, each as large as it pays."""
        profile, token_bytes = self._pool.profile, self._times.token_bytes
        dram_s = BLOCK_TOKENS * token_bytes * self._times.kv_share / (1e9 * profile.host_link_gb_s)
        nvme_s = max(dram_s, BLOCK_TOKENS * token_bytes / (1e9 * profile.nvme_gb_s))
        device = self._on_devices()
        tiers = [device]
        price = self._reuse.dram_price, self._reuse.nvme_price
        num_loading = self._pool.num_replicas, self._num_nodes
        for name, block_load_s, most_gb, gb_price, num_at_once in (
            ("dram", dram_s, self._dram_gb, price[0], num_loading[0]),
            ("nvme", nvme_s, self._nvme_gb, price[1], num_loading[1]),
        ):
            tier = self._of_host(name, block_load_s, most_gb, gb_price, tiers)
            tiers.append(self._as_read(tier, num_at_once))
        return TierPlan(
            self._reuse, tuple(tiers), BLOCK_TOKENS * self._token_s, self._num_nodes, self._token_price
        )

    def held_bytes(self, kept_s: float) -> float:
        """Return the bytes in the store of all KV that requests touched within so many seconds."""
        return self._held_tokens(kept_s) * self._plan.model.stored_token_bytes

    def _held_tokens(self, kept_s: float) -> float:
        """Return the tokens that requests touched within so many seconds.

        A request leaves L tokens, of which h I will come back, each after its own gap of S seconds in the
        mean. What has come back is counted where it was touched last, so in T seconds R requests a second
        leave R ((L - h I) T + h I S (1 - e^(-T/S))) tokens.
        """
        load, reuse = self._plan.load, self._reuse
        returning = reuse.hit_rate * load.input_tokens
        once = (load.input_tokens + load.output_tokens - returning) * kept_s
        again = returning * reuse.gap_s * -math.expm1(-kept_s / reuse.gap_s)
        return self._rate * (once + again)

    @property
    def _token_price(self) -> float | None:
        """What the devices' time for a token of a prompt costs."""
        if self._pool.price_of_device is None:
            return None
        # Of each device a stage's part of the time.
        return self._token_s * self._pool.capacity.split.tp * self._pool.price_of_device / 3600

    def _on_devices(self) -> PlannedTier:
        """Return what the replicas' KV memory keeps beside running sequences."""
        capacity = self._pool.served or self._pool.capacity
        running = capacity.mean_batch * self._plan.load.mean_context
        free_tokens = max(0.0, capacity.memory.kv_tokens - running) * self._pool.num_replicas
        num_bytes = free_tokens * self._times.token_bytes
        kept_s = self._kept_s(free_tokens)
        return PlannedTier(
            "device", num_bytes, kept_s, self._reuse.found(kept_s), 0.0, "KV memory beside running sequences"
        )

    def _of_host(
        self, name: str, block_load_s: float, most_gb: float, gb_price: float, faster: Sequence[PlannedTier]
    ) -> PlannedTier:
        """Return a tier beside the faster ones, which hold copies of the same; none where it does not pay."""
        block_s, kept_s = BLOCK_TOKENS * self._token_s, max(it.kept_s for it in faster)

        def without(why: str) -> PlannedTier:
            return PlannedTier(name, 0.0, 0.0, 0.0, block_load_s, why)

        if block_load_s >= block_s:
            return without("a block is computed sooner than loaded")
        useful_s, why = _MOST_TIMES * self._reuse.gap_s, "finds 95 % of what comes back"
        if gb_price and self._token_price is not None:
            useful_s = min(useful_s, self._paying_s(gb_price))
            if useful_s < _MOST_TIMES * self._reuse.gap_s:
                why = "a larger one costs more than it saves"
        num_bytes = self.held_bytes(useful_s)
        if num_bytes > 1e9 * most_gb * self._num_nodes:
            num_bytes, why = 1e9 * most_gb * self._num_nodes, f"all that nodes have: {most_gb:,.0f} GB"
        its_s = self._kept_s(num_bytes / self._plan.model.stored_token_bytes)
        if its_s <= kept_s * 1.01:
            return without("faster tiers keep as much as pays")
        hit_rate = self._reuse.found(its_s) - self._reuse.found(kept_s)
        return PlannedTier(name, num_bytes, its_s, hit_rate, block_load_s, why)

    def _as_read(self, tier: PlannedTier, num_at_once: int) -> PlannedTier:
        """Return the tier with no more found than can be loaded, by so many at a time."""
        blocks_s = self._rate * self._plan.load.input_tokens / BLOCK_TOKENS
        most = _MOST_BUSY * num_at_once / (tier.block_load_s * blocks_s)
        if tier.hit_rate <= most:
            return tier
        return tier._replace(hit_rate=most, why=f"{tier.why}; finds no more than can be read")

    def _paying_s(self, gb_price: float) -> float:
        """Return how long it pays to keep KV: until another second's bytes cost more than the devices' time
        that they save."""
        reuse, load = self._reuse, self._plan.load
        assert self._token_price is not None
        saved = self._token_price * 3600 * self._rate * load.input_tokens

        def pays(kept_s: float) -> bool:
            gained = reuse.found(kept_s + 1.0) - reuse.found(kept_s)
            more_gb = (self.held_bytes(kept_s + 1.0) - self.held_bytes(kept_s)) / 1e9
            return saved * gained > gb_price * more_gb

        return _greatest(_MOST_TIMES * reuse.gap_s, pays)

    def _kept_s(self, num_tokens: float) -> float:
        """Return how long a tier for so many tokens keeps what it holds, if the longest unused goes first."""
        most_s = 1.0
        while self._held_tokens(most_s) < num_tokens:
            most_s *= 2
        return _greatest(most_s, lambda kept_s: self._held_tokens(kept_s) <= num_tokens)


def _greatest(most: float, holds: Callable[[float], bool]) -> float:
    """Return the greatest number up to `most` for which it holds, if it holds for all that are smaller."""
    low, high = 0.0, most
    for _ in range(_NUM_BISECTIONS):
        middle = (low + high) / 2
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low


def plans_with_tiers(
    planner: ClusterPlanner,
    load: PlannedLoad,
    reuse: PrefixReuse,
    storage: NodeStorage = _OF_PROFILE,
    *,
    rate: float | None,
    num_devices: int = 1,
) -> list[Plan]:
    """Return plans whose prompts are found again as far as the tiers of the best one keep them, which has
    these; for a rate, or for devices without one. Raises `ConfigError` where there is none."""
    hits = load._replace(hit_rate=reuse.hit_rate)
    for number in range(_NUM_ROUNDS):
        plans = planner.for_rate(rate, hits) if rate is not None else planner.for_devices(num_devices, hits)
        tiers = TierSizer(plans[0], rate or plans[0].rate, reuse, storage).plan()
        gained = tiers.hit_rate - hits.hit_rate
        # Where they swing, devices for fewer hits than there are suffice.
        if abs(gained) < _AGREEMENT or (number >= _FREE_ROUNDS and gained > 0):
            break
        hits = load._replace(hit_rate=tiers.hit_rate, load_s=tiers.load_s(load.input_tokens))
    return [plans[0]._replace(tiers=tiers), *plans[1:]]
