"""Which calls that resume a request are free: each call that the cluster broke may be resumed once.

    claim --> token used before? ------------------------------------> charged
                | no
                v
              this gateway ran the call --> it broke it, and the caller has more output than before?
                | another one did                     yes --> free        no, forgotten --> charged
                v
              the others are asked: none has seen the token, and the one that ran the call, if it
              still answers, says that it broke it?   yes --> free        no --> charged

A gateway breaks a call when it ends the call by no fault of the caller: no replica was left for it, or the
gateway itself leaves. A call that its caller cancelled, that ended, or that still runs was served, and is not
free a second time. Nobody knows how a call ended whose gateway is gone, so that it is free at first, whatever
output the caller claims; all gateways remember its token, so that it is free once. What does not fit into
the memory counts as used. Both are kept for each tenant: none makes another one's calls be forgotten.

Without I/O but for the question to the others, which is given. Times are unix times.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Awaitable, Callable
from typing import Annotated, NamedTuple

from msgspec import Meta, structs

from cluster.errors import OverloadedError, RequestError, UnavailableError
from cluster.identity.resume_tokens import ResumeToken, gateway_tag
from kvtransfer.codec import Message
from kvtransfer.common.clock import Clock

# Entries of one tenant: tokens that were used, and calls that this gateway broke.
MAX_USED = 4096
MAX_BROKEN = 4096
# Tenants of which either is remembered.
MAX_TENANTS = 1024
_MAX_NAME_CHARS = 128
_MAX_KEY_BYTES = 32
_MAX_COUNT = 1 << 53

# A tenant and the id of one of its requests.
RequestKey = tuple[str, str]


class ResumeClaim(Message, frozen=True):
    """Asks another gateway whether it knows why a call that resumes a request should not be free. From then
    on it has seen the token; `is_returned`: the call was refused after all, so that it has not."""

    tenant: Annotated[str, Meta(max_length=_MAX_NAME_CHARS)]
    request_id: Annotated[str, Meta(max_length=_MAX_NAME_CHARS)]
    token_key: Annotated[bytes, Meta(max_length=_MAX_KEY_BYTES)]
    issuer: Annotated[int, Meta(ge=0, lt=1 << 32)]
    expires_at: Annotated[int, Meta(ge=0, lt=1 << 32)]
    # Output that the caller has, of all samples.
    num_tokens: Annotated[int, Meta(ge=0, le=_MAX_COUNT)]
    is_returned: bool = False


class OtherGateways(NamedTuple):
    """The answers of the other gateways about a claim."""

    # No gateway that answered objects.
    is_free: bool
    # The gateway that ran the call answered.
    is_issuer_there: bool


class ResumeGrant(NamedTuple):
    """A call that resumes a request free of charge."""

    claim: ResumeClaim
    # Whether the gateway that ran the request before is not this one, and is gone.
    has_moved: bool
    is_issuer_gone: bool

    def is_from(self, gateway_id: str) -> bool:
        """Whether this gateway ran the request before."""
        return gateway_tag(gateway_id) == self.claim.issuer


class ResumedCalls:
    """A gateway's knowledge of calls that were broken, and of resume tokens that were used."""

    def __init__(
        self,
        gateway_id: str,
        clock: Clock,
        ask_others: Callable[[ResumeClaim], Awaitable[OtherGateways]],
    ) -> None:
        """`ask_others` puts a claim to all other gateways."""
        self._tag = gateway_tag(gateway_id)
        self._clock = clock
        self._ask_others = ask_others
        self._used = _TokensByTenant()
        self._broken: OrderedDict[str, OrderedDict[str, _BrokenCall]] = OrderedDict()

    async def claim(self, key: RequestKey, token: ResumeToken, num_tokens: int) -> ResumeGrant | None:
        """Return a grant where a call is free that resumes the request with this token, and whose caller has
        this amount of output; None: it is charged. A grant is used, unless it is given back."""
        claim = ResumeClaim(*key, token.key, token.issuer, token.expires_at, num_tokens)
        if not self.judge(claim):
            return None
        if claim.issuer == self._tag:
            return ResumeGrant(claim, has_moved=False, is_issuer_gone=False)
        others = await self._ask_others(claim)
        if not others.is_free:
            return None
        return ResumeGrant(claim, has_moved=True, is_issuer_gone=not others.is_issuer_there)

    async def give_back(self, grant: ResumeGrant) -> None:
        """Let the call be free once more: it was refused, by no fault of its caller."""
        returned = structs.replace(grant.claim, is_returned=True)
        self.judge(returned)
        if grant.has_moved:
            await self._ask_others(returned)

    def judge(self, claim: ResumeClaim) -> bool:
        """Return whether this gateway knows of nothing that keeps the call from being free. From then on it
        has seen the token."""
        wall = self._clock.wall()
        if claim.issuer != self._tag:
            if claim.is_returned:
                self._used.forget(claim.tenant, claim.token_key)
                return True
            return self._used.add(claim.tenant, claim.token_key, claim.expires_at, wall)
        calls = self._broken.get(claim.tenant)
        broken = None if calls is None else calls.get(claim.request_id)
        if broken is None:
            return False
        if claim.is_returned:
            broken.is_resumed = False
            return True
        if broken.is_resumed or not broken.num_before < claim.num_tokens <= broken.num_tokens:
            return False
        broken.is_resumed = True
        return True

    def ended(
        self, key: RequestKey, error: RequestError | None, *, num_before: int | None, num_tokens: int
    ) -> None:
        """Note how a call ended that may be resumed: with so much output, of which the caller had so much
        before where it was free; None: it was charged."""
        tenant, request_id = key
        calls = self._broken.get(tenant)
        if not isinstance(error, UnavailableError | OverloadedError):
            if calls is not None:
                calls.pop(request_id, None)
            return
        if calls is None:
            calls = self._broken[tenant] = OrderedDict()
            if len(self._broken) > MAX_TENANTS:
                self._broken.popitem(last=False)
        self._broken.move_to_end(tenant)
        calls[request_id] = _BrokenCall(-1 if num_before is None else num_before, num_tokens)
        calls.move_to_end(request_id)
        if len(calls) > MAX_BROKEN:
            calls.popitem(last=False)


class _BrokenCall:
    """A call that this gateway broke; one that resumes it is free if its caller has more output than at the
    beginning of the broken one, and no more than that has brought."""

    __slots__ = ("is_resumed", "num_before", "num_tokens")

    def __init__(self, num_before: int, num_tokens: int) -> None:
        self.num_before = num_before
        self.num_tokens = num_tokens
        self.is_resumed = False


class _TokensByTenant:
    """Tokens that were used and have not expired. Those that were dropped for others, and all that expire no
    later, count as used."""

    def __init__(self) -> None:
        self._tenants: OrderedDict[str, _UsedTokens] = OrderedDict()
        # The latest expiry among the tokens of tenants that were dropped.
        self._dropped_until = 0

    def add(self, tenant: str, key: bytes, expires_at: int, wall: float) -> bool:
        """Whether the token was not used before; from now on it is."""
        tokens = self._tenants.get(tenant)
        if tokens is None:
            tokens = self._tenants[tenant] = _UsedTokens(self._dropped_until)
            if len(self._tenants) > MAX_TENANTS:
                _, dropped = self._tenants.popitem(last=False)
                self._dropped_until = max(self._dropped_until, dropped.last_expiry())
        self._tenants.move_to_end(tenant)
        return tokens.add(key, expires_at, wall)

    def forget(self, tenant: str, key: bytes) -> None:
        """Take the token for one that was not used."""
        if tenant in self._tenants:
            self._tenants[tenant].key_to_expiry.pop(key, None)


class _UsedTokens:
    """The used tokens of one tenant."""

    def __init__(self, dropped_until: int) -> None:
        # Tokens in the order of their use.
        self.key_to_expiry: OrderedDict[bytes, int] = OrderedDict()
        self._dropped_until = dropped_until

    def last_expiry(self) -> int:
        """Return by when all tokens have expired that were used."""
        return max(self._dropped_until, *self.key_to_expiry.values(), 0)

    def add(self, key: bytes, expires_at: int, wall: float) -> bool:
        if expires_at <= self._dropped_until or key in self.key_to_expiry:
            return False
        self.key_to_expiry[key] = expires_at
        while len(self.key_to_expiry) > MAX_USED:
            _, expiry = self.key_to_expiry.popitem(last=False)
            if expiry > wall:
                self._dropped_until = max(self._dropped_until, expiry)
        return True
