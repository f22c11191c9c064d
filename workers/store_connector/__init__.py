"""A replica's connection to the tiered store: blocks loaded from it and saved to it."""
