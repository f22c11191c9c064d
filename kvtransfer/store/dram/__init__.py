"""The host tier: the arena, its slots, the catalog of its records, and the order of eviction."""
