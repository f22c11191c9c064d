"""The owner of a node's tiers: its process, who may come in, what can be had and from where."""
