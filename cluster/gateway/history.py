"""The history of a gateway's latest requests: where their time went, and what their prompts share."""

from __future__ import annotations

import hashlib
from collections import OrderedDict, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from cluster.metrics.ended_request import EndedRequest, Summary
from cluster.proto.tandem.v1 import admin_pb2 as admin_pb
from kvtransfer.common.clock import Clock

MAX_REQUESTS = 256
MAX_AGE_S = 600.0
# Tenants in a status.
NUM_TENANTS = 8


class _Done(NamedTuple):
    """A finished request; times are milliseconds."""

    at: float
    ttft_ms: float
    queue_ms: float
    prefill_ms: float
    transfer_ms: float
    tpot_ms: float
    num_prompt_tokens: int
    num_cached_tokens: int
    num_attempts: int


class _Hits(NamedTuple):
    """Prompt tokens of a tenant's finished requests: looked at, of them known, of them cached."""

    num_tokens: int
    num_known: int
    num_cached: int


class RequestHistory:
    """The latest requests of a gateway, bounded. `ended` is an `Observer`. Not thread-safe."""

    def __init__(self, block_tokens: int, clock: Clock) -> None:
        self._clock = clock
        self._prefixes = PrefixTracker(block_tokens)
        self._done: deque[_Done] = deque(maxlen=MAX_REQUESTS)
        self._hits: OrderedDict[str, deque[_Hits]] = OrderedDict()

    def ended(self, request: EndedRequest) -> None:
        """Record a request. However it ended, its prompt counts as known from now on, unless it is private:
        then nothing is kept of it beside times."""
        prepared, summary = request.prepared, request.summary
        if prepared is None:
            return  # refused
        num_tokens = num_known = 0
        if not prepared.is_private:
            num_tokens, num_known = self._prefixes.saw(
                prepared.tenant, prepared.block_keys, prepared.prompt, request.started_at, request.ended_at
            )
        if request.state != "finished" or summary is None or summary.prefill is None:
            return  # also a resumed request that missed nothing
        self._done.append(_done(summary, request.ended_at))
        if prepared.is_private:
            return
        num_cached = min(summary.prefill.num_cached_tokens, num_tokens)
        hits = self._hits.setdefault(prepared.tenant, deque(maxlen=MAX_REQUESTS))
        hits.append(_Hits(num_tokens, num_known, num_cached))
        self._hits.move_to_end(prepared.tenant)
        if len(self._hits) > MAX_TENANTS:
            self._hits.popitem(last=False)

    def summary(self) -> admin_pb.RecentRequests:
        """Return percentiles, and the stages of slow requests, of the last ten minutes."""
        oldest = self._clock.now() - MAX_AGE_S
        done = [item for item in self._done if item.at >= oldest]
        if not done:
            return admin_pb.RecentRequests()
        by_ttft = sorted(done, key=lambda item: item.ttft_ms)
        slow = by_ttft[-max(len(done) // 10, 1) :]
        tpots = sorted(item.tpot_ms for item in done if item.tpot_ms)
        return admin_pb.RecentRequests(
            num_requests=len(done),
            window_s=self._clock.now() - done[0].at,
            ttft_p50_ms=percentile([item.ttft_ms for item in by_ttft], 0.5),
            ttft_p90_ms=percentile([item.ttft_ms for item in by_ttft], 0.9),
            tpot_p50_ms=percentile(tpots, 0.5),
            tpot_p90_ms=percentile(tpots, 0.9),
            slow_ttft_ms=_mean([item.ttft_ms for item in slow]),
            slow_queue_ms=_mean([item.queue_ms for item in slow]),
            slow_prefill_ms=_mean([item.prefill_ms for item in slow]),
            slow_prompt_tokens=round(_mean([item.num_prompt_tokens for item in slow])),
            slow_cached_tokens=round(_mean([item.num_cached_tokens for item in slow])),
            transfer_p90_ms=percentile(sorted(item.transfer_ms for item in done), 0.9),
            num_retried=sum(item.num_attempts > 1 for item in done),
        )

    def prefixes(self) -> list[admin_pb.PrefixReuse]:
        """Return the prefix reuse of the tenants with the most recent prompts."""
        return [self._reuse(reuse._asdict()) for reuse in self._prefixes.reuse(NUM_TENANTS)]

    def _reuse(self, fields: dict[str, Any]) -> admin_pb.PrefixReuse:
        hits = self._hits.get(fields["tenant"], ())
        return admin_pb.PrefixReuse(
            **fields,
            num_finished_tokens=sum(item.num_tokens for item in hits),
            num_finished_known_tokens=sum(item.num_known for item in hits),
            num_cached_tokens=sum(item.num_cached for item in hits),
        )


def _done(summary: Summary, ended_at: float) -> _Done:
    num_after_first = sum(item.num_tokens for item in summary.samples) - len(summary.samples)
    assert summary.prefill is not None
    return _Done(
        at=ended_at,
        ttft_ms=1e3 * summary.ttft_s,
        queue_ms=1e3 * summary.queue_s,
        prefill_ms=1e3 * summary.prefill_s,
        transfer_ms=1e3 * summary.transfer_s,
        # Samples are decoded beside each other.
        tpot_ms=1e3 * summary.decode_s * len(summary.samples) / num_after_first
        if num_after_first > 0
        else 0.0,
        num_prompt_tokens=summary.num_prompt_tokens,
        num_cached_tokens=summary.prefill.num_cached_tokens,
        num_attempts=summary.num_attempts,
    )


def percentile(ordered: Sequence[float], share: float) -> float:
    """Return the least of sorted values that this share of them does not exceed; 0 without values."""
    if not ordered:
        return 0.0
    return ordered[min(int(share * len(ordered)), len(ordered) - 1)]


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


# ----------------------------------------------------------------------------------------------
# Where a tenant's prompts diverge from known ones: the reason for a low hit rate, found in the prompts. Keeps
# hashes and counts only. Sans-I/O, bounded, not thread-safe.

# Of each tenant: the latest count.
MAX_PROMPTS = 200
MAX_TENANTS = 64
MAX_KEYS = 1 << 15
MAX_ANCHORS = 1 << 15
# Of a prompt: what comes after is not looked at.
MAX_TOKENS = 1 << 13
# An anchor is the hash of so many tokens in a row, wherever they stand; one window of `_ONE_OF` is kept.
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
    """When each of the numbers used last was first seen: of at least half as many as `limit`, and at most of
    `limit`. Two dictionaries that take turns hold them, for some 80 bytes each: in an `OrderedDict` each took
    twice that, and a gateway grew for minutes until it was full."""

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
    """Finds what a prompt shares with earlier prompts.

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
        self._prompts: OrderedDict[str, deque[_Prompt]] = OrderedDict()

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
        prompts = self._prompts.setdefault(tenant, deque(maxlen=MAX_PROMPTS))
        self._prompts.move_to_end(tenant)
        if len(self._prompts) > MAX_TENANTS:
            self._prompts.popitem(last=False)
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
    """base^0, base^1, ... modulo 2^64."""
    if base not in _POWERS:
        factors = np.full(MAX_TOKENS, base & _MASK, dtype=np.uint64)
        factors[0] = 1
        _POWERS[base] = np.cumprod(factors, dtype=np.uint64)
    return _POWERS[base]


def _salt(tenant: str) -> int:
    """Anchors of one tenant are never found by another's prompts."""
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
