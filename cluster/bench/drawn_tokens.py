"""Drawn prompts: tokens that are equal wherever they are drawn for the same purpose with the same seed."""

from __future__ import annotations

import numpy as np

from cluster.bench.dataset_load import DatasetSettings, RunSettings

# What numbers are drawn for; each has a seed of its own.
PREFIX, PROMPT, ANSWER, LENGTHS, THINK, BLOCK = range(6)


def drawn_tokens(num: int, vocab_size: int, *key: int) -> list[int]:
    """Draw token ids; equal keys give equal ids."""
    return list(np.random.default_rng(key).integers(0, vocab_size, num).tolist())


def shared_prefix(settings: DatasetSettings, run: RunSettings, number: int, num_tokens: int) -> list[int]:
    """Return the first tokens of the session or request `number`, which those of its group share."""
    return drawn_tokens(num_tokens, run.vocab_size, run.seed, PREFIX, number % settings.num_groups)
