"""Sessions of the console's users: a cookie stands for the API key that was shown when it was made.

    key --sign in--> cookie: key id, mark of the key, end, session id, and their HMAC under the cluster secret
    cookie --each request--> the key is looked up again: revoked or expired, it ends the session

Any gateway that ran when the session began accepts the cookie. One that started later does not: it cannot
know which sessions were ended before. What ends with a sign-out is kept by the gateways themselves, within
bounds that never make an ended session valid (`cluster.identity.ended_sessions`).
"""

from __future__ import annotations

import base64
import binascii
import hmac
import math
from typing import NamedTuple

from cluster.errors import UnauthenticatedError
from cluster.identity.authenticator import Authenticator, require
from cluster.identity.ended_sessions import EndedSession, EndedSessions
from cluster.identity.identity import Identity
from kvtransfer.codec import Codec, Part
from kvtransfer.common.clock import Clock
from kvtransfer.errors import WireError
from kvtransfer.rpc.handshake import draw_id
from kvtransfer.rpc.trust import Trust

MAX_COOKIE_CHARS = 512
_MAC_BYTES = 32


class _Claims(Part, frozen=True):
    """The content of a cookie."""

    key_id: str
    # A mark that differs between two keys of one id.
    key_mark: str
    # Unix time.
    ends_at: float
    session_id: bytes
    began_at: float


_CODEC: Codec[_Claims] = Codec(_Claims)


class NewSession(NamedTuple):
    """A session that begins."""

    identity: Identity
    cookie: str
    lifetime_s: float


class Sessions:
    """Makes cookies of API keys, and identities of cookies."""

    def __init__(self, trust: Trust, authenticator: Authenticator, clock: Clock) -> None:
        self._key = trust.key_for("tandem-console-session-1")
        self._authenticator = authenticator
        self._clock = clock
        self._ended = EndedSessions()
        # Sessions that began before were perhaps ended before, which this process was not there to learn.
        self._started_at = clock.wall()

    def begin(self, api_key: str) -> NewSession:
        """Sign in with a key of the role `viewer`; raise the `RequestError` that says why that cannot be."""
        entry = self._authenticator.key_entry(api_key)
        identity = entry.identity(self._authenticator.config)
        require(identity, "viewer")
        now = self._clock.wall()
        ends_at = min(now + self._authenticator.config.session_s, identity.expires_at or math.inf)
        # A clock that was set back does not keep anybody out.
        began_at = max(now, self._started_at, math.nextafter(self._ended.floor(entry.id), math.inf))
        body = _CODEC.encode(_Claims(entry.id, entry.mark, ends_at, draw_id(), began_at))
        return NewSession(identity, _text(self._mac(body) + body), ends_at - now)

    def identify(self, cookie: str) -> Identity:
        """Return the identity that signed in; `UnauthenticatedError` when the session is over."""
        claims = self._claims(cookie)
        identity = self._authenticator.recheck(claims.key_id, claims.key_mark)
        require(identity, "viewer")
        return identity

    def end(self, cookie: str) -> EndedSession:
        """Sign out; `UnauthenticatedError` when the session is over already."""
        claims = self._claims(cookie)
        ended = EndedSession(claims.session_id, claims.ends_at, claims.key_id, claims.began_at)
        self.forget(ended)
        return ended

    def forget(self, ended: EndedSession) -> None:
        """Accept the session no more, which ended here or at another gateway."""
        self._ended.add(ended, self._clock.wall())

    def _claims(self, cookie: str) -> _Claims:
        data = _data(cookie)
        mac, body = data[:_MAC_BYTES], data[_MAC_BYTES:]
        if not hmac.compare_digest(mac, self._mac(body)):
            raise UnauthenticatedError("the session is not one of this cluster: sign in again")
        try:
            claims = _CODEC.decode(body)
        except WireError as error:
            raise UnauthenticatedError("the session is one of another version: sign in again") from error
        began_at = claims.began_at
        if (
            claims.ends_at <= self._clock.wall()
            or began_at < self._started_at
            or self._ended.includes(claims.key_id, claims.session_id, began_at)
        ):
            raise UnauthenticatedError("the session has ended: sign in again")
        return claims

    def _mac(self, body: bytes) -> bytes:
        return hmac.digest(self._key, body, "sha256")


def _text(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).decode().rstrip("=")


def _data(text: str) -> bytes:
    """Return the bytes of a cookie; b"" for a text that is none."""
    if len(text) > MAX_COOKIE_CHARS:
        return b""
    try:
        return base64.b64decode(text + "=" * (-len(text) % 4), altchars=b"-_", validate=True)
    except (binascii.Error, ValueError):
        return b""
