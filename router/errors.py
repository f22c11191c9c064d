"""The errors of routing.

RouterError
└── NoReplicaError    no replica can take the request now; the message names what is missing
"""

from __future__ import annotations


class RouterError(Exception):
    """Base of all errors of the router."""


class NoReplicaError(RouterError):
    """Raised when no replica is usable: none registered for a side, or all excluded, leaving or full."""

    def __init__(self, reason: str, retry_after_s: float = 1.0) -> None:
        super().__init__(reason)
        self.retry_after_s = retry_after_s
