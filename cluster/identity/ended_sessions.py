"""Which sessions of the console have ended before their time: a bounded memory that fails closed.

    a session ends --> remembered under its key --memory full--> floor: nothing of the key that began by then
                                                                 is accepted

Nothing is forgotten without raising a floor, so that an ended session is never accepted again. The sessions
of a key end early only by ends of that same key's sessions, unless very many keys are in use.
"""

from __future__ import annotations

import math
from typing import NamedTuple

# Ended sessions that are remembered of one key.
MAX_ENDED_OF_KEY = 100
# Keys of which ended sessions are remembered.
MAX_KEYS = 1000


class EndedSession(NamedTuple):
    """A session that was ended by its user, and when it would have ended by itself (Unix time)."""

    session_id: bytes
    ends_at: float
    # The key that it stands for, and when it began (Unix time, by the clock of the gateway where it did).
    key_id: str
    began_at: float


class EndedSessions:
    """Remembers at most `max_of_key` ended sessions of each of `max_keys` keys."""

    def __init__(self, max_of_key: int = MAX_ENDED_OF_KEY, max_keys: int = MAX_KEYS) -> None:
        self._max_of_key = max_of_key
        self._max_keys = max_keys
        self._by_key: dict[str, _OfKey] = {}
        # No session of any key that began by then is accepted.
        self._floor = -math.inf

    def add(self, ended: EndedSession, now: float) -> None:
        """Accept the session no more; `now` is Unix time."""
        if self.includes(ended.key_id, ended.session_id, ended.began_at):
            return
        of_key = self._by_key.setdefault(ended.key_id, _OfKey())
        of_key.add(ended, now, self._max_of_key)
        if len(self._by_key) > self._max_keys:
            first = min(self._by_key, key=lambda key_id: self._by_key[key_id].newest)
            self._floor = max(self._floor, self._by_key.pop(first).newest)

    def includes(self, key_id: str, session_id: bytes, began_at: float) -> bool:
        """Whether the session has ended, or may have."""
        if began_at <= self.floor(key_id):
            return True
        of_key = self._by_key.get(key_id)
        return of_key is not None and session_id in of_key.sessions

    def floor(self, key_id: str) -> float:
        """Return until when sessions of the key must have begun to be refused, whether they have ended or
        not."""
        of_key = self._by_key.get(key_id)
        return self._floor if of_key is None else max(self._floor, of_key.floor)

    def num_remembered(self) -> int:
        """Return how many ended sessions are remembered, of all keys."""
        return sum(len(it.sessions) for it in self._by_key.values())

    def num_keys(self) -> int:
        """Return of how many keys something is remembered."""
        return len(self._by_key)


class _OfKey:
    """Ended sessions of one key."""

    def __init__(self) -> None:
        self.sessions: dict[bytes, EndedSession] = {}
        # No session of the key that began by then is accepted.
        self.floor = -math.inf
        # When the newest of those that have ended began.
        self.newest = -math.inf

    def add(self, ended: EndedSession, now: float, most: int) -> None:
        self.sessions[ended.session_id] = ended
        self.newest = max(self.newest, ended.began_at)
        # A session that is over by itself is refused by its time; the floor holds where a clock is set back.
        for each in [it for it in self.sessions.values() if it.ends_at <= now]:
            self._forget(each)
        if len(self.sessions) > most:
            self._forget(min(self.sessions.values(), key=lambda it: it.began_at))

    def _forget(self, ended: EndedSession) -> None:
        del self.sessions[ended.session_id]
        self.floor = max(self.floor, ended.began_at)
