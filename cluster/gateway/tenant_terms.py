"""The meaning of a tenant's settings for one of its requests."""

from __future__ import annotations

from cluster.errors import FieldViolation, InvalidRequestError
from cluster.identity.config import AuthConfig
from cluster.identity.identity import Identity
from cluster.proto.enums import name_of
from cluster.proto.tandem.v1 import inference_pb2 as pb
from kvtransfer.request_facts import SERVICE_CLASSES, Pooling, RequestFacts, ServiceClass


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

    def facts(
        self,
        request: pb.GenerateRequest,
        identity: Identity,
        service_class: ServiceClass,
        pooling: Pooling | None,
    ) -> RequestFacts:
        """Return the standing facts of the request."""
        tenant = request.tenant
        group = self._auth.sharing_group(tenant) if identity.names_tenants else identity.sharing_group
        return RequestFacts(
            tenant=tenant,
            sharing_group=group,
            priority=request.priority,
            service_class=service_class,
            session=f"{tenant} {request.session_id}" if request.session_id else "",
            kv_share=1.0 if self._kv_shares is None else self._kv_shares.of(group),
            is_private=request.cache_control == pb.CACHE_CONTROL_NO_STORE,
            pooling=pooling,
        )
