"""A replica's connection to the tiered store: loads blocks from it and saves blocks to it."""
