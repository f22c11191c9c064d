"""The host tier: the arena, its slots, the catalog of records, and the order of eviction."""
