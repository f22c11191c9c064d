"""Find where a tenant's prompts diverge from known ones, which is the reason for a low hit rate.

Keeps hashes and counts only. Sans-I/O, bounded, not thread-safe.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvtransfer.common.recent_map import RecentMap

# Prompts of each tenant: the latest count.
MAX_PROMPTS = 200
MAX_TENANTS = 64
MAX_KEYS = 1 << 15
MAX_ANCHORS = 1 << 15
# Tokens of a prompt: those behind are not looked at.
MAX_TOKENS = 1 << 13
# An anchor is the hash of this number of tokens in a row, wherever they stand; one window of `_ONE_OF` is
# kept.
WINDOW_TOKENS = 16
_ONE_OF = 8
_BASE = 0x9E3779B97F4A7C15
_MIX = 0xBF58476D1CE4E5B9
_MASK = (1 << 64) - 1


@dataclass(slots=True)
class _Prompt:
    """Tokens of one prompt: all, those in the known prefix, and an estimate of known ones behind that."""

    num_tokens: int
    num_known: int
    num_repeated: int


class Reuse(NamedTuple):
    """The prefix reuse of one tenant's latest prompts. Sizes are tokens; the last four fields describe those
    that diverge at `diverge_at`, the place that costs most."""

    tenant: str
    num_prompts: int
    num_prompt_tokens: int
    num_known_tokens: int
    diverge_at: int = 0
    num_diverging: int = 0
    num_tokens_behind: int = 0
    num_repeated_behind: int = 0


class KnownSince:
    """The times at which the numbers that were used last were first seen: of at least half as many as
    `limit`, and at most of `limit`. Two dictionaries that take turns hold them, for some 80 bytes each: in an
    `OrderedDict` each took twice that, and a gateway grew for minutes until it was full."""

    def __init__(self, limit: int) -> None:
        self._limit = limit // 2
        self._newer: dict[int, float] = {}
        self._older: dict[int, float] = {}

    def __len__(self) -> int:
        return len(self._newer) + len(self._older)

    def get(self, number: int, default: float) -> float:
        """Return when the number was first seen, or the default."""
        since = self._newer.get(number)
        return self._older.get(number, default) if since is None else since

    def remember(self, numbers: Iterable[int], at: float) -> None:
        """Note that the numbers are used; those that are new are known since `at`."""
        for number in numbers:
            if number in self._newer:
                continue
            self._newer[number] = self._older.get(number, at)
            if len(self._newer) >= self._limit:
                self._newer, self._older = {}, self._newer


class PrefixTracker:
    """Finds the parts that a prompt shares with earlier prompts.

        saw(tenant, keys, prompt, ...) -->  leading keys that are known: the shared prefix
                                       -->  anchors behind it that are known: text that repeats, but is moved

    A block key names all tokens up to its end, so a set of keys shows the longest prefix shared with any
    earlier prompt. Behind it every key is new, whatever stands there; anchors see through that: windows of
    tokens chosen by their own hash, which are found again wherever they stand. Prompts that diverge early,
    with much behind that repeats, are those whose order costs a hit rate. Known is what had ended before the
    prompt began: that could have been cached.
    """

    def __init__(self, block_tokens: int) -> None:
        self._block_tokens = block_tokens
        # When the first prompt with it ended.
        self._keys = KnownSince(MAX_KEYS)
        self._anchors = KnownSince(MAX_ANCHORS)
        self._prompts: RecentMap[str, deque[_Prompt]] = RecentMap(MAX_TENANTS)

    def saw(
        self, tenant: str, block_keys: Sequence[bytes], prompt: bytes, began_at: float, ended_at: float
    ) -> tuple[int, int]:
        """Record the prompt of an ended request, token ids as uint32. Returns how many of them were examined,
        and how many of those are in a known prefix."""
        keys = [_short(key) for key in block_keys[: MAX_TOKENS // self._block_tokens]]
        num_known = 0
        for key in keys:
            if self._keys.get(key, began_at) >= began_at:
                break
            num_known += self._block_tokens
        tokens = np.frombuffer(prompt, dtype="<u4")[:MAX_TOKENS]
        starts, anchors = find_anchors(tokens, _salt(tenant))
        behind = anchors[starts >= num_known].tolist()
        num_behind = len(tokens) - num_known
        num_repeated = 0
        if behind:
            share = sum(self._anchors.get(anchor, began_at) < began_at for anchor in behind) / len(behind)
            num_repeated = round(share * num_behind)
        # The head of a chain is used last, so that it is forgotten last.
        self._keys.remember(reversed(keys), ended_at)
        self._anchors.remember(anchors.tolist(), ended_at)
        self._of(tenant).append(_Prompt(len(tokens), num_known, num_repeated))
        return len(tokens), num_known

    def reuse(self, num_tenants: int) -> tuple[Reuse, ...]:
        """Return the reuse of the tenants with the most prompts."""
        busiest = sorted(self._prompts.items(), key=lambda item: -len(item[1]))[:num_tenants]
        return tuple(_reuse(tenant, prompts) for tenant, prompts in busiest)

    def _of(self, tenant: str) -> deque[_Prompt]:
        prompts = self._prompts.use(tenant, lambda: deque(maxlen=MAX_PROMPTS))
        return prompts


def find_anchors(tokens: NDArray[np.uint32], salt: int) -> tuple[NDArray[np.int64], NDArray[np.uint64]]:
    """Return starts and hashes of the chosen windows. A hash depends on the window's tokens and salt alone.

    The sum of t[j] * B^j over a window, less its first power, by one running sum over all tokens; B is odd,
    so that it has an inverse modulo 2^64.
    """
    num_windows = len(tokens) - WINDOW_TOKENS + 1
    if num_windows <= 0:
        return np.zeros(0, np.int64), np.zeros(0, np.uint64)
    mixed = _mix(tokens.astype(np.uint64) + np.uint64(salt))
    powers, inverses = _powers(_BASE)[: len(tokens)], _powers(pow(_BASE, -1, 1 << 64))[:num_windows]
    sums = np.concatenate([np.zeros(1, np.uint64), np.cumsum(mixed * powers, dtype=np.uint64)])
    hashes = _mix((sums[WINDOW_TOKENS:] - sums[:num_windows]) * inverses)
    starts = np.flatnonzero(hashes % np.uint64(_ONE_OF) == 0)
    return starts, hashes[starts]


def _mix(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Spread every bit over all: modulo 2^64 the low bits of a sum see only low bits."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(_MIX)
    return values ^ (values >> np.uint64(31))


_POWERS: dict[int, NDArray[np.uint64]] = {}


def _powers(base: int) -> NDArray[np.uint64]:
    """Return base^0, base^1, ... modulo 2^64."""
    if base not in _POWERS:
        factors = np.full(MAX_TOKENS, base & _MASK, dtype=np.uint64)
        factors[0] = 1
        _POWERS[base] = np.cumprod(factors, dtype=np.uint64)
    return _POWERS[base]


def _salt(tenant: str) -> int:
    """Return the salt of a tenant's anchors, so that another tenant's prompts never find them."""
    return int.from_bytes(hashlib.blake2b(tenant.encode(), digest_size=7).digest(), "little")


def _short(key: bytes) -> int:
    """Return a number for a block key: it takes half the memory, and no two keys will ever have the same."""
    return int.from_bytes(key[:8], "little")


def _reuse(tenant: str, prompts: deque[_Prompt]) -> Reuse:
    places: dict[int, tuple[int, int, int]] = {}  # prompts that diverge there, tokens behind, repeated ones
    num_tokens = num_known = 0
    for prompt in prompts:
        num_tokens += prompt.num_tokens
        num_known += prompt.num_known
        count, behind, repeated = places.get(prompt.num_known, (0, 0, 0))
        behind += prompt.num_tokens - prompt.num_known
        places[prompt.num_known] = count + 1, behind, repeated + prompt.num_repeated
    # Most repeated text behind; where nothing repeats, where most prompts part.
    place, (count, behind, repeated) = max(places.items(), key=lambda item: (item[1][2], item[1][0]))
    return Reuse(tenant, len(prompts), num_tokens, num_known, place, count, behind, repeated)
