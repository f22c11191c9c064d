"""How many calls and connections one caller may have at once."""

from __future__ import annotations

import contextlib
from collections import Counter, defaultdict
from collections.abc import Hashable, Iterator

from cluster.errors import OverloadedError

_RETRY_AFTER_S = 1.0


class CallerLimits:
    """Counts the calls that run for each party, over gRPC and HTTP, and the connections that are known to be
    its own: those of HTTP from their first request to their end, those of gRPC while calls run on them."""

    def __init__(self, max_calls: int, max_connections: int) -> None:
        self.max_calls = max_calls
        self.max_connections = max_connections
        self._party_to_calls: Counter[str] = Counter()
        # Holders of a connection, by party and connection.
        self._connections: defaultdict[str, Counter[Hashable]] = defaultdict(Counter)

    @contextlib.contextmanager
    def call(self, party: str) -> Iterator[None]:
        """Count a call while the block runs; raise `OverloadedError` where the party has too many."""
        if self._party_to_calls[party] >= self.max_calls:
            raise self._refusal(self.max_calls, "calls", "admission.max_caller_calls")
        self._party_to_calls[party] += 1
        try:
            yield
        finally:
            self._party_to_calls[party] -= 1
            if not self._party_to_calls[party]:
                del self._party_to_calls[party]

    def connect(self, party: str, connection: Hashable) -> None:
        """Count a connection once more; raise `OverloadedError` where it is new and the party has too
        many."""
        known = self._connections[party]
        if connection not in known and len(known) >= self.max_connections:
            raise self._refusal(self.max_connections, "connections", "admission.max_caller_connections")
        known[connection] += 1

    def disconnect(self, party: str, connection: Hashable) -> None:
        """Undo one `connect`."""
        known = self._connections[party]
        known[connection] -= 1
        if not known[connection]:
            del known[connection]
        if not known:
            del self._connections[party]

    def num_calls(self, party: str) -> int:
        """Return how many calls of this party run."""
        return self._party_to_calls[party]

    def num_connections(self, party: str) -> int:
        """Return how many connections this party is known to have."""
        return len(self._connections[party]) if party in self._connections else 0

    def _refusal(self, most: int, what: str, setting: str) -> OverloadedError:
        return OverloadedError(
            f"you have {most} {what} at this gateway, the most for one caller ({setting}); use those again",
            _RETRY_AFTER_S,
        )
