"""A map of the latest entries, beside a list."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvtransfer.common.recent_map import RecentMap


@given(st.lists(st.tuples(st.sampled_from(["put", "use", "pop"]), st.integers(0, 6), st.integers())))
def test_the_latest_entries_stay(steps: list[tuple[str, int, int]]) -> None:
    recent: RecentMap[int, int] = RecentMap(3)
    model: list[tuple[int, int]] = []
    for action, key, value in steps:
        known = dict(model).get(key)
        model = [it for it in model if it[0] != key]
        if action == "pop":
            assert recent.pop(key, None) == known
            continue
        if action == "use" and known is not None:
            value = known
        model.append((key, value))
        oldest = model.pop(0) if len(model) > 3 else None
        if action == "put":
            assert recent.put(key, value) == oldest
        else:
            assert recent.use(key, lambda value=value: value) == value  # type: ignore[misc]
        assert list(recent.items()) == model
