"""Requests of one conversation go to the same replicas where their costs are equal, at every gateway."""

from __future__ import annotations

from collections import Counter

from kvtransfer.common.clock import ManualClock
from kvtransfer.messages import ReplicaIdentity
from kvtransfer.request_facts import RequestFacts
from router.config import RouterConfig
from router.messages import RouteRequest
from router.service import RouterService


def opened(gateway_id: str, *, is_shared: bool = True) -> RouterService:
    router = RouterService(RouterConfig(), 16, ManualClock(), 1, salt=gateway_id)
    for index in range(6):
        router.add_replica(ReplicaIdentity(f"both-{index}", 1), "both")
    router.set_shared(is_shared)
    return router


def chosen(gateway_id: str, request_id: str, session: str = "") -> str:
    """Where a request goes when nothing else is there."""
    request = RouteRequest(request_id, RequestFacts("t", session=session), (), 40, 8)
    return opened(gateway_id).route(request).decode


def test_a_session_stays_together_at_all_gateways() -> None:
    asked = [(gateway, f"r{number}") for gateway in ("g0", "g1") for number in range(8)]
    assert len({chosen(gateway, request_id, "talk") for gateway, request_id in asked}) == 1
    spread = Counter(chosen("g0", f"r{number}", f"talk-{number}") for number in range(40))
    assert len(spread) > 3
    assert len({chosen(gateway, request_id) for gateway, request_id in asked}) > 3


def test_a_gateway_alone_lets_replicas_take_turns() -> None:
    router = opened("g0", is_shared=False)
    requests = [RouteRequest(f"r{number}", RequestFacts("t"), (), 40, 8) for number in range(12)]
    decodes = [router.route(request).decode for request in requests]
    assert decodes[:6] == decodes[6:]
    assert len(set(decodes)) == 6
