"""The charge of a call that resumes a request: nothing, or that of a new one."""

from __future__ import annotations

import contextlib
from typing import NamedTuple

from cluster.admission.quotas import MovedRequest, Quotas
from cluster.errors import QuotaError, RequestError
from cluster.gateway.resumed_calls import ResumedCalls, ResumeGrant
from cluster.identity.identity import Identity
from cluster.identity.resume_tokens import ResumeTokens, resume_digest
from cluster.proto.tandem.v1 import inference_pb2 as pb


class Charge(NamedTuple):
    """The charge of a call: that of a new one, or nothing, as it continues a call that the cluster broke."""

    # The digest of all fields that decide the tokens of the request.
    digest: bytes
    # None: it is charged.
    grant: ResumeGrant | None = None
    # The value to which `max_tokens` was cut where the request began; 0: it was not.
    capped_max_tokens: int = 0

    @property
    def is_free(self) -> bool:
        """Whether it costs no request and no prompt tokens, and is not judged by the load."""
        return self.grant is not None

    @property
    def moved(self) -> MovedRequest | None:
        """The place where the request was before; None: here, or nowhere."""
        if self.grant is None or not self.grant.has_moved:
            return None
        return MovedRequest(self.grant.is_from, self.grant.is_issuer_gone)


class ResumeCharges(NamedTuple):
    """Decides by a call's resume token and the known facts of the call before."""

    tokens: ResumeTokens
    resumed: ResumedCalls
    quotas: Quotas

    async def charge(self, request: pb.GenerateRequest, identity: Identity, now: float) -> Charge:
        """Return the charge of the call, of which nothing is taken yet. A token that is refused has cost as
        much as a request: it is counted as one."""
        tenant, digest = request.tenant, resume_digest(request)
        try:
            token = self.tokens.check(
                request.resume_token, identity, tenant, request.request_id, request.seed, digest
            )
        except RequestError:
            with contextlib.suppress(QuotaError):
                self.quotas.admit(tenant, now)
            raise
        num_tokens = sum(len(it.token_ids) for it in request.resume)
        grant = await self.resumed.claim((tenant, request.request_id), token, num_tokens)
        return Charge(digest, grant, token.capped_max_tokens)
