"""Counts of prompts that begin behind cached KV, where this takes more than KV of all tokens."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class SnapshotCounts:
    """Of models whose layers partly have windows or keep states, the prompts that could begin behind all
    cached KV of theirs (hits), those that could not, and the cached tokens that these compute again: of those
    the ones up to a snapshot that was evicted before it was used, where others never had one."""

    num_hits: int = 0
    num_misses: int = 0
    num_recomputed_tokens: int = 0
    num_evicted_tokens: int = 0

    def add(self, num_cached_tokens: int, num_used_tokens: int, num_evicted_tokens: int = 0) -> None:
        """Count a prompt of which the KV of `num_cached_tokens` is cached, and the first `num_used_tokens`
        are not computed again. The last snapshot there that was evicted was behind `num_evicted_tokens`."""
        if num_used_tokens < num_cached_tokens:
            self.num_misses += 1
            self.num_recomputed_tokens += num_cached_tokens - num_used_tokens
            self.num_evicted_tokens += max(0, num_evicted_tokens - num_used_tokens)
        elif num_cached_tokens:
            self.num_hits += 1
