"""The facts of a request that stay the same from the gateway to the engines.

Gateway, router, scheduler and hand-over carry them as one object. To add a property to requests, append a
field with a default here (docs/upgrades.md), fill it in `cluster/gateway/tenant_terms.py`, and read it where
it is needed. Nothing between has to name it.
"""

from __future__ import annotations

from typing import Literal, get_args

from kvtransfer.codec import Part

ServiceClass = Literal["interactive", "standard", "batch"]
SERVICE_CLASSES: tuple[ServiceClass, ...] = get_args(ServiceClass)
# How an embedding is made of a prompt: "last" is the hidden state of the last token.
Pooling = Literal["last"]


class RequestFacts(Part, frozen=True):
    """Whose request it is, and how the cluster treats it."""

    tenant: str = ""
    # The group of tenants that reuse each other's KV. The KV of the request counts to its share.
    sharing_group: str = ""
    # The higher goes first. How much a step is worth: docs/overload.md.
    priority: int = 0
    service_class: ServiceClass = "standard"
    # The conversation of the request, prefixed by the tenant; "": the client named none.
    session: str = ""
    # The part of each replica's KV blocks that the sharing group may use, at most 1.
    kv_share: float = 1.0
    # No other request may reuse the KV, and no store keeps it.
    is_private: bool = False
    # If set, the request returns an embedding of its prompt, and no token is generated.
    pooling: Pooling | None = None

    @property
    def limited_group(self) -> str:
        """The sharing group, if it may use only a part of the KV blocks; "": it may use all of them."""
        return self.sharing_group if self.kv_share < 1 else ""

    @property
    def decodes(self) -> bool:
        """Whether the request generates tokens; if not, it ends with its prompt."""
        return self.pooling is None
