"""JSON web tokens: signed by an issuer whose public keys are in a file, PEM or JWKS."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jwt
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa
from cryptography.hazmat.primitives.serialization import load_pem_public_key

from cluster.errors import UnauthenticatedError
from cluster.identity.config import AuthConfig, JwtConfig
from cluster.identity.identity import ROLES, Identity, Role, is_tenant
from cluster.identity.watched_file import WatchedFile
from kvtransfer.common.clock import Clock
from kvtransfer.common.recent_map import RecentMap

FIELD = "auth.jwt.keys_file"
# Verified tokens that are remembered, because a signature takes long to verify.
MAX_REMEMBERED = 4096
MIN_RSA_BITS = 2048
_MAX_NAME_CHARS = 128

_PEM = re.compile(rb"-----BEGIN ([A-Z ]+)-----.*?-----END \1-----", re.DOTALL)
_INVALID = "the token is not valid here"


class IssuerKey(NamedTuple):
    """A public key, the only algorithm that it is used with, and its id; "": it has none."""

    key: Any
    algorithm: str
    key_id: str


class JwtVerifier:
    """Makes identities of tokens. The signature of a token is verified once, until it expires or the keys
    change."""

    def __init__(self, settings: JwtConfig, config: AuthConfig, clock: Clock) -> None:
        """Read the keys; `ConfigError` when that cannot be done."""
        self.keys = WatchedFile(settings.keys_file, FIELD, parse_issuer_keys)
        self._settings = settings
        self._config = config
        self._clock = clock
        self._verified: RecentMap[bytes, Identity] = RecentMap(MAX_REMEMBERED)
        self._version = self.keys.version

    def identify(self, token: str) -> Identity:
        """Return the identity that the token names; `UnauthenticatedError` when it is not valid."""
        if self._version != self.keys.version:
            self._verified.clear()
            self._version = self.keys.version
        digest = hashlib.sha256(token.encode()).digest()
        known = self._verified.get(digest)
        if known is None:
            known = self._identity(self._claims(token))
            self._verified.put(digest, known)
        assert known.expires_at is not None
        if self._clock.wall() >= known.expires_at + self._settings.leeway_s:
            self._verified.pop(digest, None)
            raise UnauthenticatedError("the token has expired")
        return known

    def _claims(self, token: str) -> Mapping[str, Any]:
        """Return the claims of a token that one of the keys has signed."""
        try:
            header = jwt.get_unverified_header(token)
            if "crit" in header:
                raise UnauthenticatedError(_INVALID)
            for key in self._candidates(header):
                try:
                    return jwt.decode(
                        token,
                        key.key,
                        algorithms=[key.algorithm],
                        issuer=self._settings.issuer,
                        audience=self._settings.audience,
                        # Times are compared with this process's clock, which is an argument.
                        options={
                            "require": ["exp", "iss", "aud", "sub"],
                            "verify_exp": False,
                            "verify_nbf": False,
                            "verify_iat": False,
                        },
                    )
                except jwt.InvalidSignatureError:
                    continue
                except (jwt.InvalidAudienceError, jwt.InvalidIssuerError) as error:
                    raise UnauthenticatedError("the token is of another issuer or audience") from error
        except (jwt.PyJWTError, ValueError, TypeError, RecursionError) as error:
            raise UnauthenticatedError(_INVALID) from error
        raise UnauthenticatedError(_INVALID)

    def _candidates(self, header: Mapping[str, Any]) -> Sequence[IssuerKey]:
        """Return the keys that may have signed a token with this header: by its key id where it has one."""
        algorithm, key_id = header.get("alg"), header.get("kid")
        if algorithm not in self._settings.algorithms:
            return ()
        suited = [key for key in self.keys.content if key.algorithm == algorithm]
        named = [key for key in suited if key_id is not None and key.key_id == key_id]
        return named or [key for key in suited if not key.key_id or key_id is None]

    def _identity(self, claims: Mapping[str, Any]) -> Identity:
        now = self._clock.wall()
        leeway_s = self._settings.leeway_s
        expires_at = _time(claims, "exp")
        if expires_at is None:
            raise UnauthenticatedError(_INVALID)
        for claim in ("nbf", "iat"):
            if (begins_at := _time(claims, claim)) is not None and begins_at > now + leeway_s:
                raise UnauthenticatedError("the token is not valid yet")
        subject, tenant = claims.get("sub"), claims.get(self._settings.tenant_claim)
        if not isinstance(subject, str) or not subject:
            raise UnauthenticatedError(_INVALID)
        if not isinstance(tenant, str) or not is_tenant(tenant):
            raise UnauthenticatedError(f"the token's claim {self._settings.tenant_claim!r} names no tenant")
        limits = self._config.limits(tenant)
        return Identity(
            name=f"jwt:{_printable(subject)}",
            tenant=tenant,
            roles=self._roles(claims),
            sharing_group=self._config.sharing_group(tenant),
            max_priority=limits.max_priority,
            models=frozenset(limits.models) or None,
            method="jwt",
            expires_at=expires_at,
        )

    def _roles(self, claims: Mapping[str, Any]) -> frozenset[Role]:
        """Return the roles that we know; others of the issuer's mean nothing here."""
        listed = claims.get(self._settings.roles_claim, "user")
        names = listed.split() if isinstance(listed, str) else listed
        if not isinstance(names, list):
            raise UnauthenticatedError(f"the token's claim {self._settings.roles_claim!r} is no list")
        return frozenset(role for role in ROLES if role in names)


def parse_issuer_keys(text: bytes) -> tuple[IssuerKey, ...]:
    """Parse public keys, PEM or JWKS; `ValueError` describes the fault."""
    keys = _parse_pem(text) if b"-----BEGIN " in text else _parse_jwks(text)
    if not keys:
        raise ValueError("holds no public key for RS256, ES256 or EdDSA")
    return tuple(keys)


def _parse_pem(text: bytes) -> list[IssuerKey]:
    keys = []
    for found in _PEM.finditer(text):
        if b"PRIVATE" in found[1]:
            raise ValueError("holds a private key; give the public one")
        try:
            key = load_pem_public_key(found[0])
        except (ValueError, UnsupportedAlgorithm) as error:
            raise ValueError(f"a key cannot be read: {error}") from error
        if algorithm := _algorithm(key):
            keys.append(IssuerKey(key, algorithm, ""))
    return keys


def _parse_jwks(text: bytes) -> list[IssuerKey]:
    try:
        listed = json.loads(text)["keys"]
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise ValueError("neither PEM nor a JWKS, a JSON object with `keys`") from error
    if not isinstance(listed, list):
        raise ValueError("`keys` is no list")
    keys = []
    for fields in listed:
        if not isinstance(fields, dict):
            raise ValueError("a key is no JSON object")
        if "d" in fields or fields.get("kty") == "oct":
            raise ValueError("holds a private key; give the public one")
        if fields.get("use", "sig") != "sig":
            continue
        try:
            key = jwt.PyJWK.from_dict(fields).key
        except (jwt.PyJWTError, ValueError, TypeError, KeyError) as error:
            raise ValueError(f"a key cannot be read: {error}") from error
        if algorithm := _algorithm(key):
            keys.append(IssuerKey(key, algorithm, str(fields.get("kid", ""))))
    return keys


def _algorithm(key: Any) -> str:
    """Return the one algorithm that this kind of key is used with; "" where we use none with it."""
    if isinstance(key, rsa.RSAPublicKey):
        if key.key_size < MIN_RSA_BITS:
            raise ValueError(f"an RSA key has {key.key_size} bits; at least {MIN_RSA_BITS} are needed")
        return "RS256"
    if isinstance(key, ec.EllipticCurvePublicKey) and isinstance(key.curve, ec.SECP256R1):
        return "ES256"
    return "EdDSA" if isinstance(key, ed25519.Ed25519PublicKey) else ""


def _time(claims: Mapping[str, Any], claim: str) -> float | None:
    """Return a claim that is a Unix time; None where it is absent."""
    value = claims.get(claim)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1 << 53:
        raise UnauthenticatedError(_INVALID)
    return float(value)


def _printable(subject: str) -> str:
    """Return a subject that cannot forge a line of a log."""
    return "".join(char if char.isprintable() else "?" for char in subject[:_MAX_NAME_CHARS])
