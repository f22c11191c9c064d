"""Chooses a prefill and a decode replica for each request; knows blocks and costs, no engines."""
