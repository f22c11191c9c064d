"""What a gateway vouches for when it relays a call."""

from __future__ import annotations

from cluster.identity.relay_tokens import RELAY_S, RelayedCaller, RelayTokens
from kvtransfer.common.clock import ManualClock
from kvtransfer.rpc.trust import Trust

TRUST = Trust(b"s" * 32)
OTHER = Trust(b"t" * 32)


def test_a_relaying_gateway_vouches_for_names_for_a_while() -> None:
    clock = ManualClock(100.0)
    relays = RelayTokens(TRUST, clock)
    caller = RelayedCaller(("ops", "spiffe://x"), "r")
    token = relays.issue(caller)
    assert RelayTokens(TRUST, clock).caller(token) == caller
    assert RelayTokens(OTHER, clock).caller(token) is None
    clock.advance(RELAY_S)
    assert relays.caller(token) is None
