"""Client certificates: the names that they carry, and the identities with these names. TLS has verified them
before."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

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


def names_of_peer(certificate: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the names of the peer's certificate, from `ssl.SSLObject.getpeercert()`: as gRPC has them."""
    subject = [pair for part in certificate.get("subject", ()) for pair in part]
    common = [value for kind, value in subject if kind == "commonName"]
    others = [value for _, value in certificate.get("subjectAltName", ()) if isinstance(value, str)]
    return (*common, *others)


class CertificateIdentities:
    """Finds the identity of a certificate by the names in it."""

    def __init__(self, settings: CertificateConfig, config: AuthConfig) -> None:
        self._known: dict[str, tuple[int, Identity]] = {}
        for place, entry in enumerate(settings.identities):
            limits = config.limits(entry.tenant)
            identity = Identity(
                name=f"cert:{entry.name}",
                tenant=entry.tenant,
                roles=frozenset(entry.roles),
                sharing_group=config.sharing_group(entry.tenant),
                max_priority=limits.max_priority,
                models=frozenset(limits.models) or None,
                method="certificate",
            )
            self._known.setdefault(entry.name, (place, identity))

    def identify(self, names: Sequence[str]) -> Identity:
        """Return the identity with one of these names, by the first entry that names one;
        `UnauthenticatedError` when there is none."""
        found = [self._known[name] for name in names if name in self._known]
        if not found:
            raise UnauthenticatedError("the client certificate has no name that is known here")
        return min(found, key=lambda item: item[0])[1]
