"""Attention over paged KV: an interface, and the backends behind it."""
