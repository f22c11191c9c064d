"""Read the size of a feed-forward, which some families compute from others. No torch."""

from __future__ import annotations

from workers.model.config_values import ConfigValues


def feed_forward_size(values: ConfigValues, key: str) -> int:
    """Return the columns between the products of a feed-forward that is no expert's, by the `key`.

    Where `block_auto_adjust_ff_dim` is set, two thirds of its value times a factor are rounded up
    to a multiple."""
    size = values.count(key)
    if not values.raw.get("block_auto_adjust_ff_dim"):
        return size
    multiple = values.count("block_multiple_of")
    size = int(values.number("block_ffn_dim_multiplier", values.raw, 1.0) * int(2 * size / 3))
    return -(-size // multiple) * multiple
