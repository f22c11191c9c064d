"""What can go wrong in routing.

RouterError
└── NoReplicaError    no replica can take the request now; the text says what was missing
"""

from __future__ import annotations


class RouterError(Exception):
    """Base of all errors of router."""


class NoReplicaError(RouterError):
    """No usable replica: none registered for a side, or all excluded, leaving or full."""

    def __init__(self, reason: str, retry_after_s: float = 1.0) -> None:
        super().__init__(reason)
        self.retry_after_s = retry_after_s
