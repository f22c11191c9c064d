"""The ids that gateways draw for requests."""

from __future__ import annotations

from cluster.identity.request_ids import draw_request_id, is_drawn_by


def test_a_drawn_id_names_its_gateway() -> None:
    drawn = {draw_request_id("gateway-abc123") for _ in range(100)}
    assert len(drawn) == 100
    assert all(it.startswith("abc123-") and is_drawn_by("gateway-abc123", it) for it in drawn)
    assert not any(is_drawn_by("gateway-abc", it) for it in drawn)
    assert not is_drawn_by("gateway-abc123", "abc123-mine")
