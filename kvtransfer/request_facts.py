"""The standing facts of a request: what does not change on its way from the gateway through the engines.

Everything that routes, runs or moves a request carries them whole. A new property of requests is a field
here, last and with a default (docs/upgrades.md), and is named besides only where it comes from and is used.
"""

from __future__ import annotations

from typing import Literal, get_args

from kvtransfer.codec import Part

ServiceClass = Literal["interactive", "standard", "batch"]
SERVICE_CLASSES: tuple[ServiceClass, ...] = get_args(ServiceClass)
# The state that is taken of an embedded prompt: the last token's hidden state.
Pooling = Literal["last"]


class RequestFacts(Part, frozen=True):
    """Whose request it is, and how it may be treated."""

    tenant: str = ""
    # The group whose prefixes it shares, and to which its KV belongs.
    sharing_group: str = ""
    # Among the requests of its tenant and class; higher goes first.
    priority: int = 0
    service_class: ServiceClass = "standard"
    # The conversation that it belongs to, among those of all tenants; "": none is named.
    session: str = ""
    # The part of each replica's KV blocks that its sharing group may use.
    kv_share: float = 1.0
    # Its KV is found by no other request, and not stored.
    is_private: bool = False
    # The prompt is embedded: no token is generated.
    pooling: Pooling | None = None

    @property
    def decodes(self) -> bool:
        """Whether tokens are generated; otherwise the request ends with its prompt."""
        return self.pooling is None
