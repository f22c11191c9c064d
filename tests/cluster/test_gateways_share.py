"""Several gateways share the replicas about as well as one does, in virtual time."""

from __future__ import annotations

import pytest

from benchmarks.gateways import PROMPT_TOKENS, TOK_S, Outcome, run


def outcome(num_gateways: int, *, is_exchanging: bool = True) -> Outcome:
    return run(num_gateways, 3000, 3, is_exchanging=is_exchanging, has_prefixes=False, has_cut=False)


@pytest.mark.parametrize("num_gateways", [4])
def test_gateways_do_not_meet_at_one_replica(num_gateways: int) -> None:
    together = outcome(num_gateways)
    assert together.mean_s < 1.05 * PROMPT_TOKENS / TOK_S
    # Whoever meets another request at an idle replica, and stays there, waits for all of it.
    assert together.p99_s < 1.85 * PROMPT_TOKENS / TOK_S
