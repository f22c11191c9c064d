"""The unit of fairness: the requests of one tenant in one service class."""

from __future__ import annotations

from typing import NamedTuple

from kvtransfer.request_facts import ServiceClass


class Flow(NamedTuple):
    """Whose requests share a place in the order."""

    tenant: str
    service_class: ServiceClass
