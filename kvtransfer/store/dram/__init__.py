"""The host tier: the arena, its books, and what is evicted first."""
