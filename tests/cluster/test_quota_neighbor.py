"""A tenant over its quota, or one whose texts are tokenized all the time, does not slow its neighbor down.
`tests/support/quota_neighbor.py` prints the figures."""

from __future__ import annotations

import pytest
from quota_neighbor import ATTACKS, measure

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("name", [name for name in ATTACKS if ATTACKS[name].probe == "first token"])
async def test_refused_lists_move_a_neighbors_first_token_by_a_tenth_at_most(name: str) -> None:
    figures = await measure(name)
    assert figures.num_calls > 30
    assert figures.ratio <= 1.10, figures


async def test_long_texts_of_a_tenant_move_a_neighbors_tokenizing_by_20_ms_at_most() -> None:
    figures = await measure("250,000 digits")
    assert figures.num_calls > 3
    assert figures.loud_s - figures.quiet_s <= 0.020, figures
