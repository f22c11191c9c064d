"""Several gateways share the replicas about as well as one does, in virtual time."""

from __future__ import annotations

import functools

import pytest
from slow_cases import slow_but

from benchmarks.gateways import PROMPT_TOKENS, TOK_S, Outcome, run


@functools.cache
def outcome(num_gateways: int) -> Outcome:
    return run(num_gateways, 800, 3)


@pytest.mark.parametrize("num_gateways", slow_but([4, 8], 4))
def test_gateways_do_not_meet_at_one_replica(num_gateways: int) -> None:
    together, alone = outcome(num_gateways), outcome(1)
    assert together.mean_s < 1.05 * min(alone.mean_s, PROMPT_TOKENS / TOK_S)
    # Whoever meets another request at an idle replica, and stays there, waits for all of it.
    assert together.p99_s < 1.15 * alone.p99_s
