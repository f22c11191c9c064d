"""Describe the heads of the gated delta rule. No torch."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True, slots=True)
class DeltaHeads:
    """Heads of the gated delta rule: all of a model, or those of a rank. Each key head has a query and a key
    of `key_dim`, and serves as many consecutive value heads, of `value_dim`, as there are for each."""

    num_key_heads: int
    num_value_heads: int
    key_dim: int
    value_dim: int

    @property
    def values_per_key(self) -> int:
        """The value heads of a key head."""
        return self.num_value_heads // self.num_key_heads

    @property
    def channels_per_key(self) -> int:
        """The channels of a key head: its query, its key, and the values of its value heads."""
        return 2 * self.key_dim + self.values_per_key * self.value_dim

    @property
    def num_channels(self) -> int:
        """The channels of all key heads, one head after another."""
        return self.num_key_heads * self.channels_per_key

    def part(self, num_parts: int) -> DeltaHeads:
        """Return the heads of one of `num_parts` equal parts, each of whole key heads.

        Raises ValueError where they do not divide."""
        if self.num_key_heads % num_parts:
            raise ValueError(f"{self.num_key_heads} key heads do not divide into {num_parts} equal parts")
        return dataclasses.replace(
            self,
            num_key_heads=self.num_key_heads // num_parts,
            num_value_heads=self.num_value_heads // num_parts,
        )
