"""Which requests over HTTP are answered at all, where nobody need sign in: pure functions over headers."""

from __future__ import annotations

import ipaddress
from collections.abc import Collection
from urllib.parse import urlsplit


def refused_host(host: str | None, names: Collection[str]) -> str:
    """Return why a request with this Host header is refused; "" when it is not.

    A name that somebody else owns can be made to resolve to this host; an address, `localhost` and the names
    in `names` (lower case) cannot.
    """
    if host is None:
        return "the Host header is missing"
    name = _name(host)
    if name is None:
        return f"the Host header {host[:100]!r} is not a host and a port"
    if name == "localhost" or name in names or _is_address(name):
        return ""
    return f"this port is not known as {name[:100]!r}; to allow it, add it to gateway.console_hosts"


def _name(host: str) -> str | None:
    """Return the host's name in lower case: `localhost` of `localhost:8781`, `::1` of `[::1]:8781`."""
    try:
        parts = urlsplit(f"//{host}")
        _ = parts.port  # refuses what is no number
        name = parts.hostname
    except ValueError:
        return None
    is_plain = parts.netloc == host and parts.username is None and parts.password is None
    return name.lower() if name and is_plain else None


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name.partition("%")[0])
    except ValueError:
        return False
    return True
