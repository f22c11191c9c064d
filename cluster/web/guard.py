"""Which HTTP requests the console answers at all: pure functions over headers.

Nobody signs in to read, so a page of another site must neither read (DNS rebinding: its name leads here) nor
send orders (a form or a script of its own).
"""

from __future__ import annotations

import ipaddress
from collections.abc import Collection, Mapping
from urllib.parse import urlsplit

MAX_BODY_BYTES = 4096
MAX_TOKEN_CHARS = 4096
HEADERS: Mapping[str, str] = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "Cache-Control": "no-store",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "Server": "tandem",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
}
"""On every answer: the page loads and reaches nothing but this console, and nobody frames or reads it."""


def refused_host(host: str | None, names: Collection[str]) -> str:
    """Why a request with this Host header is not answered; "" when it is.

    A name that somebody else owns can be made to lead here; an address, `localhost` and the names in
    `names` (lower case) cannot.
    """
    if host is None:
        return "the Host header is missing"
    name = _name(host)
    if name is None:
        return f"the Host header {host[:100]!r} is not a host and a port"
    if name == "localhost" or name in names or _is_address(name):
        return ""
    return f"the console is not known as {name[:100]!r}; if it shall be, add that to gateway.console_hosts"


def refused_order(headers: Mapping[str, str]) -> tuple[int, str] | None:
    """Why a POST with these headers is not answered, as (status, reason); None when it is.

    A page of another site can send a POST, but neither of this type nor with this Origin without asking
    first, which is never allowed here.
    """
    kind = headers.get("Content-Type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        return 415, f"the Content-Type must be application/json, not {kind[:100]!r}"
    origin = headers.get("Origin")
    if origin is not None and _place(origin) != headers.get("Host", "").lower():
        return 403, f"orders from pages of {origin[:100]!r} are not taken"
    if headers.get("Sec-Fetch-Site", "same-origin") not in ("same-origin", "none"):
        return 403, "orders from pages of other sites are not taken"
    return None


def bearer_token(authorization: str) -> str:
    """The token of the Authorization header; "" where there is none, or none that could be one."""
    scheme, _, token = authorization.strip().partition(" ")
    token = token.strip()
    is_sane = token.isascii() and token.isprintable() and len(token) <= MAX_TOKEN_CHARS
    return token if scheme.lower() == "bearer" and is_sane else ""


def _name(host: str) -> str | None:
    """`localhost` of `localhost:8781`, `::1` of `[::1]:8781`, in lower case."""
    try:
        parts = urlsplit(f"//{host}")
        _ = parts.port  # refuses what is no number
        name = parts.hostname
    except ValueError:
        return None
    is_plain = parts.netloc == host and parts.username is None and parts.password is None
    return name.lower() if name and is_plain else None


def _place(origin: str) -> str:
    """`host:port` of an Origin header; "" where it has none ("null")."""
    try:
        return urlsplit(origin).netloc.lower()
    except ValueError:
        return ""


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name.partition("%")[0])
    except ValueError:
        return False
    return True
