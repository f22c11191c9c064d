"""The rest of a tenant's quotas, as the headers that clients of OpenAI's API read."""

from __future__ import annotations

import math
from collections.abc import Mapping

from cluster.admission.quotas import Quotas, Rate

_NAMES: Mapping[Rate, str] = {
    "requests_per_s": "requests",
    "prompt_tokens_per_s": "tokens",
    "output_tokens_per_s": "output-tokens",
}


def rate_limit_headers(quotas: Quotas, tenant: str, now: float) -> dict[str, str]:
    """Return the headers `x-ratelimit-*` of the tenant: how much may be used at once, how much of it is left,
    and when all of it is there again. Empty where nothing is limited."""
    headers = {}
    for rate, state in quotas.rates(tenant, now).items():
        name = _NAMES[rate]
        headers[f"x-ratelimit-limit-{name}"] = str(math.floor(state.capacity))
        headers[f"x-ratelimit-remaining-{name}"] = str(max(0, math.floor(state.level)))
        headers[f"x-ratelimit-reset-{name}"] = f"{math.ceil(1e3 * state.full_in_s)}ms"
    return headers
