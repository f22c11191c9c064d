"""Client certificates: which names they carry, and who has such a name. TLS has verified them before."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from cluster.errors import UnauthenticatedError
from cluster.identity.config import AuthConfig, CertificateConfig
from cluster.identity.identity import Identity

# Properties of a gRPC connection.
_GRPC_NAMES = ("x509_common_name", "x509_subject_alternative_name")


def names_of_auth_context(auth_context: Mapping[str, Iterable[bytes]]) -> tuple[str, ...]:
    """Return the names of the peer's certificate, from a gRPC call's `auth_context()`."""
    return tuple(
        value.decode("utf-8", "replace") for field in _GRPC_NAMES for value in auth_context.get(field) or ()
    )


def identify_certificate(names: Sequence[str], settings: CertificateConfig, config: AuthConfig) -> Identity:
    """Return who has one of these names; `UnauthenticatedError` when nobody has."""
    for entry in settings.identities:
        if entry.name in names:
            limits = config.limits(entry.tenant)
            return Identity(
                name=f"cert:{entry.name}",
                tenant=entry.tenant,
                roles=frozenset(entry.roles),
                sharing_group=config.sharing_group(entry.tenant),
                max_priority=limits.max_priority,
                models=frozenset(limits.models) or None,
                method="certificate",
            )
    raise UnauthenticatedError("the client certificate has no name that is known here")
