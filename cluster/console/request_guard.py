"""Which HTTP requests the console answers at all: pure functions over headers.

Where nobody need sign in, a page of another site must be kept from reading (DNS rebinding: its name leads
here), and always from sending orders in the name of who is signed in (by a form or a script)."""

from __future__ import annotations

from collections.abc import Mapping
from urllib.parse import urlsplit

MAX_BODY_BYTES = 4096
# On every answer: the page loads and reaches nothing but this console, and no other page frames or reads it.
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


def refused_order(headers: Mapping[str, str]) -> tuple[int, str] | None:
    """Return why a POST with these headers is refused, as (status, reason); None when it is not.

    A page of another site can send a POST, but neither of this type nor with this Origin without a preflight
    request, which is never granted here.
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


def _place(origin: str) -> str:
    """Return the `host:port` of an Origin header; "" where it has none ("null")."""
    try:
        return urlsplit(origin).netloc.lower()
    except ValueError:
        return ""
