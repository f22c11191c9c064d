"""What the settings of a tenant mean for one of its requests."""

from __future__ import annotations

from dataclasses import replace

from cluster.errors import FieldViolation, InvalidRequestError
from cluster.identity.config import AuthConfig
from cluster.identity.identity import Identity
from cluster.proto.enums import name_of
from cluster.proto.tandem.v1 import inference_pb2 as pb
from cluster.text.validation import ServingLimits
from workers.messages.link import SERVICE_CLASSES, ServiceClass


class TenantTerms:
    """Class, sharing group and share of the KV of requests, by `auth.tenants`."""

    def __init__(self, auth: AuthConfig) -> None:
        self._auth = auth
        shares = auth.shares("device_kv_share")
        self._kv_shares = shares if shares.is_limited else None

    def weight(self, tenant: str) -> float:
        """Return the tenant's weight among the others of a class."""
        return self._auth.limits(tenant).weight

    def service_class(self, request: pb.GenerateRequest, identity: Identity) -> ServiceClass:
        """Return the class of the request; raise `InvalidRequestError` where its tenant may not name it."""
        limits = self._auth.limits(request.tenant)
        named = name_of(pb.ServiceClass, request.service_class)
        if not named:
            return limits.default_class
        if limits.classes and named not in limits.classes:
            allowed = ", ".join(limits.classes)
            raise InvalidRequestError(
                FieldViolation(
                    "service_class", f"{identity.name} may use {allowed}; leave it out, or name one"
                )
            )
        return next(name for name in SERVICE_CLASSES if name == named)

    def sharing_group(self, identity: Identity, tenant: str) -> str:
        """Return whose prefixes the request shares."""
        return self._auth.sharing_group(tenant) if identity.names_tenants else identity.sharing_group

    def within_share(
        self, limits: ServingLimits, group: str, num_blocks: int, block_tokens: int
    ) -> ServingLimits:
        """Return the limits of a request of this sharing group, where each replica has so many blocks."""
        share = 1.0 if self._kv_shares is None or not num_blocks else self._kv_shares.of(group)
        if share == 1:
            return limits
        return replace(limits, kv_share=share, max_share_tokens=int(num_blocks * share) * block_tokens)
