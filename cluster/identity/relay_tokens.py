"""Proofs of the names in a caller's certificate, which a gateway makes when it relays the call to another
gateway of the same cluster secret."""

from __future__ import annotations

import hmac

import msgspec

from cluster.identity.token_encoding import decode_token, encode_token
from kvtransfer.codec import Part
from kvtransfer.common.clock import Clock
from kvtransfer.rpc.trust import Trust

_MAC_BYTES = 32
# How long a relayed call may take from one gateway to the next, their clocks' difference included.
RELAY_S = 60.0


class RelayedCaller(Part, frozen=True):
    """The facts that a gateway vouches for: the names of a caller's certificate, for one request."""

    certificate_names: tuple[str, ...]
    request_id: str


class RelayTokens:
    """Vouches for the certificate of a caller whose request one gateway relays to another."""

    def __init__(self, trust: Trust, clock: Clock) -> None:
        self._key = trust.key_for("tandem-relay-1")
        self._clock = clock

    def issue(self, caller: RelayedCaller) -> str:
        """Return a token that holds the names and the request's id."""
        body = msgspec.msgpack.encode((self._clock.wall() + RELAY_S, caller))
        return encode_token(hmac.digest(self._key, body, "sha256") + body)

    def caller(self, token: str) -> RelayedCaller | None:
        """Return the content of the token; None when no gateway of this secret has issued it recently."""
        data = decode_token(token)
        mac, body = data[:_MAC_BYTES], data[_MAC_BYTES:]
        if not hmac.compare_digest(mac, hmac.digest(self._key, body, "sha256")):
            return None
        try:
            expires_at, caller = msgspec.msgpack.decode(body, type=tuple[float, RelayedCaller])
        except msgspec.ValidationError:  # of a gateway of another version
            return None
        return caller if self._clock.wall() < expires_at else None
