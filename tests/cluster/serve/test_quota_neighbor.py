"""A tenant over its quota, or one whose texts are tokenized all the time, does not slow its neighbor down.
`tests/support/quota_neighbor.py` prints the figures, and judges them where nothing else runs."""

from __future__ import annotations

import pytest
from quota_neighbor import ATTACKS, NUM_ROUNDS, measure

pytestmark = pytest.mark.slow
# Beyond the limit, on a machine that runs other tests too.
_GENEROSITY = 3.0


@pytest.mark.parametrize("name", ATTACKS)
async def test_a_tenant_that_is_loud_does_not_slow_its_neighbor_down(name: str) -> None:
    figures, attack = await measure(name), ATTACKS[name]
    print(figures.as_json())
    assert set(figures.statuses) == {attack.status}
    assert figures.statuses[attack.status] >= NUM_ROUNDS * attack.least
    assert figures.loud_s <= _GENEROSITY * figures.limit_s, figures
