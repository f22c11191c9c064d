"""Choose between loading and computing a prefix, by the measured rates of the replica's store."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

# The rates assumed until a load was measured, where the owner has measured nothing either.
ASSUMED_GB_S: Mapping[str, float] = {"dram": 4.0, "nvme": 1.0, "remote": 0.5}
_WEIGHT = 0.3
# A load that was not worth its time is not measured again; each refusal raises the believed rate by this
# factor, so that neither a bad moment nor a rate that was only assumed decides for ever.
_DRIFT = 1.05


class Borders(NamedTuple):
    """Where a prompt could be continued whose layers keep states. A sequence can use the first `num_usable`
    blocks as they are; the device has the KV of `num_here`, and `tiers` have that of those behind them.
    `states` maps numbers of blocks to the tier that has the state behind the last of them (None: the
    device)."""

    num_usable: int
    num_here: int
    tiers: Sequence[str]
    states: Mapping[int, str | None]


class TierCosts:
    """Tokens a second by tier, as blocks came from there; `block_bytes` of a block, and `state_bytes` of the
    states behind one, are those of all ranks together."""

    def __init__(self, block_tokens: int, block_bytes: int, state_bytes: int = 0) -> None:
        self._block_tokens = block_tokens
        self._block_bytes = max(block_bytes, 1)
        self._state_bytes = state_bytes
        self._tok_s: dict[str, float] = {}
        self._owner_gb_s: dict[str, float] = {}
        # By tiers that were not measured: how many times as fast as assumed they are believed to be.
        self._raised: dict[str, float] = {}

    @property
    def measured_tok_s(self) -> dict[str, float]:
        """The measured rates of the tiers from which something was loaded."""
        return dict(self._tok_s)

    def set_store_rates(self, gb_s: Mapping[str, float]) -> None:
        """Set the owner's rates, 1e9 bytes a second."""
        self._owner_gb_s = dict(gb_s)

    def tok_s(self, tier: str) -> float:
        """Return the believed rate of the tier."""
        if tier in self._tok_s:
            return self._tok_s[tier]
        gb_s = (self._owner_gb_s.get(tier) or ASSUMED_GB_S[tier]) * self._raised.get(tier, 1.0)
        return gb_s * 1e9 / self._block_bytes * self._block_tokens

    def measured(self, num_blocks_by_tier: Mapping[str, int], seconds: float) -> None:
        """Count a finished load for its main tier, unless another tier had a part in it."""
        total = sum(num_blocks_by_tier.values())
        tier, count = max(num_blocks_by_tier.items(), key=lambda item: item[1])
        if count == total and seconds > 0:
            tok_s = total * self._block_tokens / seconds
            old = self._tok_s.get(tier)
            self._tok_s[tier] = tok_s if old is None else (1 - _WEIGHT) * old + _WEIGHT * tok_s

    def num_worth_loading(self, tiers: Sequence[str], prefill_tok_s: float) -> int:
        """Return how many of the leading blocks, which lie in these tiers, to load, so that loading them and
        computing the rest takes least. All of them while the prefill rate is not known (0)."""
        if not prefill_tok_s:
            return len(tiers)
        best, best_saved, saved = 0, 0.0, 0.0
        for index, tier in enumerate(tiers):
            saved += 1 / prefill_tok_s - 1 / self.tok_s(tier)
            if saved > best_saved:
                best, best_saved = index + 1, saved
        self._refuse(tiers[best:])
        return best

    def best_border(self, borders: Borders, prefill_tok_s: float) -> int:
        """Return the number of blocks that are best made whole, with the state behind the last of them; 0:
        computing all takes least. The most blocks while the prefill rate is not known (0)."""
        if not prefill_tok_s:
            return max(borders.states, default=0)
        best, best_saved = 0, 0.0
        for end, tier in borders.states.items():
            saved = (end - borders.num_usable) / prefill_tok_s
            saved -= sum(1 / self.tok_s(its) for its in borders.tiers[: max(0, end - borders.num_here)])
            if tier is not None:
                saved -= self._state_bytes / self._block_bytes / self.tok_s(tier)
            if saved > best_saved:
                best, best_saved = end, saved
        self._refuse(borders.tiers[max(0, best - borders.num_here) :])
        return best

    def _refuse(self, tiers: Sequence[str]) -> None:
        for tier in set(tiers):
            if tier in self._tok_s:
                self._tok_s[tier] *= _DRIFT
            else:
                self._raised[tier] = self._raised.get(tier, 1.0) * _DRIFT
