"""Quotas: what the requests of each tenant may use, whatever the replicas could serve (`TenantLimits`).

    accept --> admit --tokenizing--> take_prompt --> produced ... --> ended
               requests              prompt tokens   output tokens    concurrent tokens go back
               output tokens > 0     concurrent tokens

A call with several prompts takes as many requests, at once, before any of them begins. One that only counts
or translates tokens takes a request and nothing else.

A token bucket holds up to `burst_s` seconds' worth of its rate. Output is taken when it is there, so its
bucket may go below zero; then new requests are refused until it has recovered, and running streams continue.

Gateways share the buckets: each keeps a copy of every bucket, takes its own use from it at once, and what the
others have used when it reads their records (`merge`). The copies are too full by what the others used since,
which they lack afterwards, so that the rate holds over time. A gateway whose records the others do not see
takes 1/n of the limits of its n gateways, and the others leave that part to it.

Without I/O: times are arguments. `cluster.admission.shared_quotas` exchanges the records.
"""

from __future__ import annotations

import math
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Mapping
from typing import Annotated, Literal, NamedTuple

from msgspec import Meta

from cluster.errors import FieldViolation, InvalidRequestError, QuotaError
from cluster.identity.config import ANY_TENANT, AuthConfig, TenantLimits
from kvtransfer.codec import Message, Part
from kvtransfer.common.health import spread_s

Rate = Literal["requests_per_s", "prompt_tokens_per_s", "output_tokens_per_s"]
Limit = Rate | Literal["concurrent_tokens"]
_RATES: dict[Rate, str] = {
    "requests_per_s": "requests",
    "prompt_tokens_per_s": "prompt tokens",
    "output_tokens_per_s": "output tokens",
}
# Tenants whose buckets are kept at once; beyond that number, those that were used least recently start full
# again.
MAX_TENANTS = 1024
# The number of entries in `uses`: those with the most refusals, then those that have used most.
MAX_SHOWN = 16
# A gateway whose record is missing for this time is taken for one that cannot be counted.
GRACE_S = 1.0
# A tenant with full buckets is forgotten after this time.
_IDLE_S = 10.0
# The time to a retry: it is not known when concurrent tokens come back.
_CONCURRENT_TOKENS_RETRY_S = 1.0
# A shorter wait is none: a client that waits just for the time it was told finds enough.
_TOLERANCE_S = 1e-6
_MAX_COUNT = 1 << 53
_MAX_NAME_CHARS = 256

Count = Annotated[int, Meta(ge=0, le=_MAX_COUNT)]


class TenantRecord(Part, frozen=True):
    """A gateway's counts of one tenant; all but `num_held_tokens` only grow."""

    tenant: Annotated[str, Meta(max_length=_MAX_NAME_CHARS)]
    # An id that differs from the one before: the counts began again, at 0.
    count_id: Count
    num_requests: Count
    num_prompt_tokens: Count
    num_output_tokens: Count
    # Prompt and `max_tokens` of its requests that run or wait now.
    num_held_tokens: Count


class QuotaRecord(Message, frozen=True):
    """A gateway's counts, for the others."""

    tenants: Annotated[tuple[TenantRecord, ...], Meta(max_length=MAX_TENANTS)]


class QuotaUse(Part, frozen=True):
    """One tenant's use of its limits, by limit, for operators."""

    tenant: Annotated[str, Meta(max_length=_MAX_NAME_CHARS)]
    # The part that is used up now: 1 or more is all of it.
    used: dict[str, float]
    # Requests that were refused since the tenant was last idle.
    num_refused: dict[str, int]


class RateState(NamedTuple):
    """The rest of one rate of a tenant at this gateway."""

    # The content of the full bucket.
    capacity: float
    # The amount that may be used now; below zero: more than that was.
    level: float
    # The time until the bucket is full.
    full_in_s: float


class MovedRequest(NamedTuple):
    """The earlier place of a request that is resumed here: its tokens may be counted there still."""

    # Whether the request was at the gateway with this id.
    is_from: Callable[[str], bool]
    # That gateway does not answer: nothing runs there any more, whatever its last record says.
    is_gone: bool


class TokenBucket:
    """Holds the amount that may be used now: grows by `rate` a second up to `burst_s` seconds' worth, of both
    the part `share`. Starts full."""

    __slots__ = ("_at", "_level", "_share", "capacity", "rate")

    def __init__(self, rate: float, burst_s: float, share: float, now: float) -> None:
        self.rate = rate
        self.capacity = rate * burst_s
        self._share = share
        self._level = self.capacity * share
        self._at = now

    def level(self, now: float) -> float:
        """Return the amount that may be used; below zero: more than that was."""
        if now > self._at:
            share = self._share
            level = self._level + (now - self._at) * self.rate * share
            self._level = min(level, max(self._level, self.capacity * share))
            self._at = now
        return self._level

    def missing_s(self, amount: float, now: float) -> float:
        """Return how long until so much is there; of more than the bucket holds, until it is full."""
        wanted = min(amount, self.capacity * self._share)
        wait_s = (wanted - self.level(now)) / (self.rate * self._share)
        return wait_s if wait_s > _TOLERANCE_S else 0.0

    def take(self, amount: float, now: float) -> None:
        """Take it, whether it is there or not."""
        self._level = self.level(now) - amount

    def give_back(self, amount: float, now: float) -> None:
        """Undo a `take`, as far as the bucket holds it."""
        self._level = max(self.level(now), min(self._level + amount, self.capacity * self._share))

    def used(self, now: float) -> float:
        """Return the part that is not there; above 1: more than all of it was taken."""
        return 1 - self.level(now) / (self.capacity * self._share)

    def state(self, now: float) -> RateState:
        """Return the part of it that a client may know."""
        return RateState(self.capacity * self._share, self.level(now), self.missing_s(math.inf, now))

    def is_full(self, now: float) -> bool:
        return self.level(now) >= self.capacity * self._share

    def set_share(self, share: float, now: float) -> None:
        """Continue with another part of rate and capacity. What is there is divided with the others when the
        part shrinks, and is not multiplied when it grows; a debt is, since they have the same."""
        level = self.level(now)
        if share < self._share or level < 0:
            self._level = level * share / self._share
        self._share = share


class _Tenant:
    """The buckets of one tenant, and what this gateway has counted for the others."""

    __slots__ = (
        "buckets",
        "count_id",
        "entry",
        "limits",
        "num_refused",
        "others_reserved",
        "output",
        "prompt",
        "requests",
        "reserved",
        "used",
        "used_at",
        "withdrawn",
    )

    def __init__(self, limits: TenantLimits, entry: str, count_id: int, share: float, now: float) -> None:
        self.limits = limits
        self.entry = entry
        self.count_id = count_id
        self.requests = _bucket(limits.requests_per_s, limits.burst_s, share, now)
        self.prompt = _bucket(limits.prompt_tokens_per_s, limits.burst_s, share, now)
        self.output = _bucket(limits.output_tokens_per_s, limits.burst_s, share, now)
        self.buckets = (self.requests, self.prompt, self.output)
        # The use since `count_id`: requests, prompt tokens, output tokens.
        self.used = [0, 0, 0]
        # The part of the use that was given back since, and that others may have counted.
        self.withdrawn = [0, 0, 0]
        self.reserved = self.others_reserved = 0
        self.num_refused: Counter[Limit] = Counter()
        self.used_at = now

    def take(self, kind: int, amount: int, now: float, *, is_shared: bool) -> None:
        """Take it from the bucket of this kind (its place in `used`), and count it where others share it: in
        place of what was given back before."""
        bucket = self.buckets[kind]
        if bucket is not None:
            bucket.take(amount, now)
        if is_shared:
            num_counted = min(amount, self.withdrawn[kind])
            self.withdrawn[kind] -= num_counted
            self.used[kind] += amount - num_counted
        self.used_at = now

    def give_back(self, kind: int, amount: int, now: float, *, is_shared: bool) -> None:
        """Undo a `take`."""
        bucket = self.buckets[kind]
        if bucket is not None:
            bucket.give_back(amount, now)
        if is_shared:
            self.withdrawn[kind] = min(self.withdrawn[kind] + amount, self.used[kind])

    def use(self, tenant: str, share: float, now: float) -> QuotaUse:
        used: dict[str, float] = {}
        for rate, bucket in zip(_RATES, self.buckets, strict=True):
            if bucket is not None:
                used[rate] = bucket.used(now)
        if (limit := self.limits.concurrent_tokens) is not None:
            used["concurrent_tokens"] = (self.reserved + self.others_reserved) / (limit * share)
        return QuotaUse(tenant, used, {name: num for name, num in self.num_refused.items()})

    def is_idle(self, now: float) -> bool:
        return (
            not self.reserved
            and not self.others_reserved
            and now > self.used_at + _IDLE_S
            and all(bucket is None or bucket.is_full(now) for bucket in self.buckets)
        )


class _Peer:
    """Another gateway: its last record by tenant, and when it was there."""

    def __init__(self, now: float) -> None:
        self.records: dict[str, TenantRecord] = {}
        self.seen_at = now
        self.is_missing = False
        # Whether its counts are known from their beginning, or from a record before.
        self.was_read = False


class Quotas:
    """The quotas of all tenants at one gateway. Tenants without limits cost next to nothing."""

    def __init__(self, auth: AuthConfig, seeds: Callable[[], int] = lambda: 0) -> None:
        """`seeds` draws integers, for jitter."""
        self._auth = auth
        self._seeds = seeds
        self._tenants: OrderedDict[str, _Tenant] = OrderedDict()
        self._peers: dict[str, _Peer] = {}
        self._num_counts = 0
        # From a `divide` to the next `merge`, and before the first: what is taken then comes from a part of
        # this gateway's own, which the others do not count.
        self._is_divided = True
        # The part of all limits that this gateway and those whose records it reads may use.
        self.share = 1.0
        # Gateways that cannot be counted.
        self.missing: tuple[str, ...] = ()
        self.is_limited = any(_has_quota(limits) for limits in auth.tenants.values())

    # ------------------------------------------------------------------------------- of each request

    def admit(self, tenant: str, now: float, count: int = 1) -> None:
        """Take requests, all or none of them, before they cost anything; raise `QuotaError` where a bucket is
        exhausted. More of them than the bucket ever holds are taken when it is full, and what exceeds it is
        missing afterwards."""
        found = self._find(tenant, now)
        if found is None:
            return
        if found.output is not None and (wait_s := found.output.missing_s(0, now)):
            raise self._used_up(tenant, found, "output_tokens_per_s", wait_s)
        if found.requests is not None and (wait_s := found.requests.missing_s(count, now)):
            raise self._used_up(tenant, found, "requests_per_s", wait_s, count)
        found.take(0, count, now, is_shared=not self._is_divided)

    def withdraw(self, tenant: str, num_prompt_tokens: int, now: float, count: int = 1) -> None:
        """Give an admitted request back that is not taken, or not submitted, by no fault of its tenant, with
        this many tokens of its prompt, or `count` of them. Other gateways may have counted it: the next one
        is counted in its place."""
        found = self._find(tenant, now)
        if found is not None:
            for kind, amount in enumerate((count, num_prompt_tokens)):
                found.give_back(kind, amount, now, is_shared=not self._is_divided)

    def take_prompt(
        self,
        tenant: str,
        num_prompt_tokens: int,
        max_tokens: int,
        now: float,
        *,
        is_free: bool = False,
        moved: MovedRequest | None = None,
    ) -> int:
        """Take the prompt of an admitted request, and reserve its concurrent tokens until `end`. `max_tokens`
        is that of all its samples. Returns how many tokens were reserved.

        Raises `QuotaError`, and `InvalidRequestError` where the request alone exceeds its limit. The prompt
        of one that `is_free` was paid for before. Such a request reserves its tokens, or is refused, as any
        other, but for those that its former gateway is still thought to reserve (`moved`).
        """
        found = self._find(tenant, now)
        if found is None:
            return 0
        num_tokens = num_prompt_tokens + max_tokens
        self._check_reserved(tenant, found, num_tokens, moved)
        if not is_free:
            if found.prompt is not None and (wait_s := found.prompt.missing_s(num_prompt_tokens, now)):
                raise self._used_up(tenant, found, "prompt_tokens_per_s", wait_s)
            found.take(1, num_prompt_tokens, now, is_shared=not self._is_divided)
        found.reserved += num_tokens
        found.used_at = now
        return num_tokens

    def produced(self, tenant: str, num_tokens: int, now: float) -> None:
        """Take output that has arrived."""
        found = self._find(tenant, now)
        if found is not None:
            found.take(2, num_tokens, now, is_shared=not self._is_divided)

    def end(self, tenant: str, num_tokens: int) -> None:
        """Give the concurrent tokens of a request back."""
        if num_tokens:
            self._tenants[tenant].reserved -= num_tokens

    def rates(self, tenant: str, now: float) -> dict[Rate, RateState]:
        """Return the rest of the tenant's rates, of those that are limited."""
        found = self._find(tenant, now)
        if found is None:
            return {}
        named = zip(_RATES, found.buckets, strict=True)
        return {rate: bucket.state(now) for rate, bucket in named if bucket is not None}

    # -------------------------------------------------------------------------------- to operators

    def uses(self, now: float) -> tuple[QuotaUse, ...]:
        """Return the tenants' use now, `MAX_SHOWN` at most."""
        return _most([found.use(name, self.share, now) for name, found in self._tenants.items()])

    # ------------------------------------------------------------------------ between the gateways

    def record(self, now: float) -> QuotaRecord:
        """Return the counts that the other gateways have to know."""
        self._forget_idle(now)
        records = [
            TenantRecord(name, found.count_id, found.used[0], found.used[1], found.used[2], found.reserved)
            for name, found in self._tenants.items()
            if found.reserved or any(found.used)
        ]
        return QuotaRecord(tuple(records[-MAX_TENANTS:]))

    def merge(self, records: Mapping[str, QuotaRecord | None], now: float) -> None:
        """Count the use of each other known gateway since the last time; None: it has no record."""
        peers: dict[str, _Peer] = {}
        missing = []
        for name, record in records.items():
            peer = peers[name] = self._peers.get(name) or _Peer(now)
            if record is not None or self._is_divided:
                peer.seen_at, peer.is_missing = now, False
            elif now > peer.seen_at + GRACE_S:
                peer.is_missing = True
            if peer.is_missing:
                missing.append(name)
        self._peers = peers
        self.missing = tuple(missing)
        self._set_share((1 + len(records) - len(missing)) / (1 + len(records)), now)
        for name, record in records.items():
            if record is not None:
                self._count(peers[name], record, now)
        self._is_divided = False
        self._count_others(peers.values(), now)

    def divide(self, num_others: int, now: float) -> None:
        """Continue with this gateway's own part of all limits: nothing is known of the other gateways."""
        self._forget_idle(now)
        self._is_divided = True
        self.missing = ()
        self._count_others((), now)
        self._set_share(1 / (1 + num_others), now)

    # --------------------------------------------------------------------------------------- private

    def _find(self, tenant: str, now: float) -> _Tenant | None:
        """Return the tenant's buckets; None where it has no limits."""
        if not self.is_limited:
            return None
        found = self._tenants.get(tenant)
        if found is None:
            limits = self._auth.limits(tenant)
            if not _has_quota(limits):
                return None
            if len(self._tenants) >= MAX_TENANTS:
                self._forget_one()
            entry = tenant if tenant in self._auth.tenants else ANY_TENANT
            found = _Tenant(limits, entry, self._draw_count_id(), self.share, now)
            self._tenants[tenant] = found
        else:
            self._tenants.move_to_end(tenant)
        return found

    def _forget_idle(self, now: float) -> None:
        for tenant in [name for name, found in self._tenants.items() if found.is_idle(now)]:
            del self._tenants[tenant]

    def _forget_one(self) -> None:
        """Forget the tenant that was used least recently of those that reserve nothing here."""
        name = next((name for name, found in self._tenants.items() if not found.reserved), None)
        if name is not None:
            del self._tenants[name]

    def _check_reserved(
        self, tenant: str, found: _Tenant, num_tokens: int, moved: MovedRequest | None
    ) -> None:
        limit = found.limits.concurrent_tokens
        if limit is None:
            return
        setting = f"auth.tenants.{found.entry}.concurrent_tokens"
        if num_tokens > limit:
            problem = f"prompt and max_tokens are {num_tokens} tokens, tenant {tenant!r} may have {limit}"
            raise InvalidRequestError(
                FieldViolation("max_tokens", f"{problem} at once ({setting}); ask for less")
            )
        num_reserved = found.reserved + found.others_reserved - self._num_moved(tenant, num_tokens, moved)
        if num_reserved and num_reserved + num_tokens > limit * self.share:
            because = (
                f"tenant {tenant!r} may have {limit} tokens of prompts and max_tokens at once ({setting}), "
                f"and has {num_reserved}; this request needs {num_tokens} more: wait for others to end"
            )
            raise self._refused(found, "concurrent_tokens", because, _CONCURRENT_TOKENS_RETRY_S)

    def _num_moved(self, tenant: str, num_tokens: int, moved: MovedRequest | None) -> int:
        """Return how many of the concurrent tokens of other gateways are counted here no more."""
        if moved is None:
            return 0
        num_reserved = sum(
            peer.records[tenant].num_held_tokens
            for name, peer in self._peers.items()
            if not peer.is_missing and tenant in peer.records and moved.is_from(name)
        )
        return num_reserved if moved.is_gone else min(num_reserved, num_tokens)

    def _used_up(self, tenant: str, found: _Tenant, rate: Rate, wait_s: float, count: int = 1) -> QuotaError:
        """Count a refusal, and return its error."""
        what = f"{getattr(found.limits, rate):g} {_RATES[rate]} a second"
        setting = f"auth.tenants.{found.entry}.{rate}"
        because = f"tenant {tenant!r} may use {what} ({setting}) and has used them up"
        if count > 1:
            because = f"{count} requests at once: {because}"
        return self._refused(found, rate, f"{because}; try again in {wait_s:.3g} s", wait_s)

    def _refused(self, found: _Tenant, limit: Limit, because: str, wait_s: float) -> QuotaError:
        """Count a refusal, and return its error: the tenant's clients come back one after the other, and none
        too soon."""
        found.num_refused[limit] += 1
        return QuotaError(because, spread_s(wait_s, self._seeds()), limit)

    def _count(self, peer: _Peer, record: QuotaRecord, now: float) -> None:
        """Take from the buckets the use of this gateway since its last record."""
        before, was_read = peer.records, peer.was_read
        peer.was_read = True
        peer.records = {each.tenant: each for each in record.tenants}
        if self._is_divided and not was_read:
            return  # it is this gateway that begins
        for each in record.tenants:
            known = before.get(each.tenant)
            if known == each:
                continue
            if known is not None and known.count_id != each.count_id:
                known = None
            used = [max(0, total - past) for total, past in zip(_used(each), _used(known), strict=True)]
            found = self._find(each.tenant, now) if any(used) else None
            if found is None:
                continue
            for bucket, amount in zip(found.buckets, used, strict=True):
                if bucket is None:
                    continue
                most = math.inf
                if self._is_divided:  # it may have shared its limits since with others than this one
                    most = bucket.rate * GRACE_S
                elif not was_read:  # more may be in its record than it used since it is known here
                    most = bucket.capacity
                bucket.take(min(amount, most), now)

    def _count_others(self, peers: Iterable[_Peer], now: float) -> None:
        tenant_to_reserved: defaultdict[str, int] = defaultdict(int)
        for peer in peers:
            for each in () if peer.is_missing else peer.records.values():
                tenant_to_reserved[each.tenant] += each.num_held_tokens
        for name, tenant in self._tenants.items():
            tenant.others_reserved = tenant_to_reserved.pop(name, 0)
        for name, num_reserved in tenant_to_reserved.items():
            if num_reserved and (found := self._find(name, now)) is not None:
                found.others_reserved = num_reserved

    def _set_share(self, share: float, now: float) -> None:
        if share == self.share:
            return
        self.share = share
        for found in self._tenants.values():
            for bucket in found.buckets:
                if bucket is not None:
                    bucket.set_share(share, now)

    def _draw_count_id(self) -> int:
        self._num_counts += 1
        return self._num_counts


def merged_uses(parts: Iterable[QuotaUse]) -> tuple[QuotaUse, ...]:
    """Return the use of tenants at several gateways. Each of these has counted what the others know; what one
    has refused is its own."""
    tenant_to_use: dict[str, QuotaUse] = {}
    for part in parts:
        known = tenant_to_use.get(part.tenant)
        if known is not None:
            used = {name: max(part.used.get(name, 0.0), known.used.get(name, 0.0)) for name in part.used}
            part = QuotaUse(part.tenant, used, {**Counter(known.num_refused) + Counter(part.num_refused)})
        tenant_to_use[part.tenant] = part
    return _most(list(tenant_to_use.values()))


def _most(uses: list[QuotaUse]) -> tuple[QuotaUse, ...]:
    def order(use: QuotaUse) -> tuple[float, ...]:
        return -sum(use.num_refused.values()), -max(use.used.values(), default=0.0)

    return tuple(sorted(uses, key=order)[:MAX_SHOWN])


def _bucket(rate: float | None, burst_s: float, share: float, now: float) -> TokenBucket | None:
    return None if rate is None else TokenBucket(rate, burst_s, share, now)


def _has_quota(limits: TenantLimits) -> bool:
    return limits.concurrent_tokens is not None or any(getattr(limits, rate) is not None for rate in _RATES)


def _used(record: TenantRecord | None) -> tuple[int, int, int]:
    if record is None:
        return 0, 0, 0
    return record.num_requests, record.num_prompt_tokens, record.num_output_tokens
