"""The tiers of a plan's store, and the prefixes that come back."""

from __future__ import annotations

import math
from typing import NamedTuple

from workers.config import EngineSettings

BLOCK_TOKENS = EngineSettings().block_tokens


class PrefixReuse(NamedTuple):
    """The prefixes that come back: the share of the prompts' tokens that are in an earlier request, the mean
    seconds until they are, with gaps as unlike as those of an exponential distribution, and what a GB of each
    tier costs an hour (0: it comes with the devices)."""

    hit_rate: float
    gap_s: float
    dram_price: float = 0.0
    nvme_price: float = 0.0

    def found(self, kept_s: float) -> float:
        """Return the share of the prompts' tokens that are found where all is kept for so long."""
        return self.hit_rate * -math.expm1(-kept_s / self.gap_s)


class NodeStorage(NamedTuple):
    """The most that a node has for each tier of the store; None: what its profile says."""

    dram_gb: float | None = None
    nvme_gb: float | None = None


class PlannedTier(NamedTuple):
    """A tier over the whole cluster: its size, how long it keeps what it holds, the share of the prompts'
    tokens that are found in it and in no faster one, and the time to load a block from it. `why` says what
    decided its size."""

    name: str
    num_bytes: float
    kept_s: float
    hit_rate: float
    block_load_s: float
    why: str


class TierPlan(NamedTuple):
    """The tiers of a plan, the fastest first. `block_s` is the time in which a replica computes a block."""

    reuse: PrefixReuse
    tiers: tuple[PlannedTier, ...]
    block_s: float
    num_nodes: int
    # What the devices' time for a token of a prompt costs, if prices are known.
    token_price: float | None

    @property
    def hit_rate(self) -> float:
        return sum(tier.hit_rate for tier in self.tiers)

    def load_s(self, input_tokens: int) -> float:
        """Return the time in which a mean prompt's found blocks are loaded."""
        return sum(tier.hit_rate * input_tokens / BLOCK_TOKENS * tier.block_load_s for tier in self.tiers)

    def total_bytes(self, name: str) -> float:
        """Return the size of a tier over all nodes."""
        return next((it.num_bytes for it in self.tiers if it.name == name), 0.0)
