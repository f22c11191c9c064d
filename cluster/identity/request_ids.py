"""Ids of requests whose clients choose none: they begin with the gateway that drew them."""

from __future__ import annotations

import re
import secrets

_RANDOM_BYTES = 12
_PREFIX = "gateway-"
_DRAWN = re.compile(rf"(.+)-[0-9a-f]{{{2 * _RANDOM_BYTES}}}")


def draw_request_id(gateway_id: str) -> str:
    """Draw an id that names the gateway: `<its unique part>-<random>`."""
    return f"{gateway_id.removeprefix(_PREFIX)}-{secrets.token_hex(_RANDOM_BYTES)}"


def is_drawn_by(gateway_id: str, request_id: str) -> bool:
    """Whether this gateway may have drawn the id: it is the first to ask where the request went."""
    found = _DRAWN.fullmatch(request_id)
    return found is not None and found[1] == gateway_id.removeprefix(_PREFIX)
