"""Tandem's service, and its Python client: `from cluster import Client, BlockingClient, GenerateOptions`."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cluster.api.admin_client import AdminClient
    from cluster.api.blocking_client import BlockingAdminClient, BlockingClient
    from cluster.api.channel import ClientCredentials
    from cluster.api.client import Client
    from cluster.api.generate_options import GenerateOptions
    from cluster.errors import CallError

__all__ = [
    "AdminClient",
    "BlockingAdminClient",
    "BlockingClient",
    "CallError",
    "Client",
    "ClientCredentials",
    "GenerateOptions",
]
_NAME_TO_MODULE = {
    "AdminClient": "cluster.api.admin_client",
    "BlockingAdminClient": "cluster.api.blocking_client",
    "BlockingClient": "cluster.api.blocking_client",
    "CallError": "cluster.errors",
    "Client": "cluster.api.client",
    "ClientCredentials": "cluster.api.channel",
    "GenerateOptions": "cluster.api.client",
}


def __getattr__(name: str) -> Any:
    """Import a public name on its first use, so that importing a part of `cluster` costs no more."""
    if name not in _NAME_TO_MODULE:
        raise AttributeError(f"module 'cluster' has no attribute {name!r}")
    return getattr(importlib.import_module(_NAME_TO_MODULE[name]), name)
