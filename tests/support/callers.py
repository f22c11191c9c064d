"""Callers with credentials: API keys of a file, tokens of an issuer, and what a stranger tries."""

from __future__ import annotations

import base64
import itertools
import json
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import jwt
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa

from cluster.api.channel import ClientCredentials
from cluster.identity.api_key_file import add_key
from cluster.identity.identity import Role
from kvtransfer.common.clock import SystemClock

ISSUER, AUDIENCE = "https://issuer.example", "tandem"
CREATED = datetime(2026, 1, 1, tzinfo=UTC)
_DRAWS = itertools.count(1)


def draw(num_bytes: int) -> bytes:
    """Draw bytes that differ from call to call."""
    return next(_DRAWS).to_bytes(num_bytes, "big")


def key_of(path: Path, tenant: str, *roles: Role, **fields: Any) -> str:
    """Add a new key to the file and return it."""
    return add_key(path, draw, tenant=tenant, roles=roles or ("user",), created=CREATED, **fields)


def bearing(token: str) -> ClientCredentials:
    return ClientCredentials(bearer=token)


class Issuer:
    """Issues JWTs that its public key verifies."""

    def __init__(self, algorithm: str = "ES256", key_id: str = "") -> None:
        self.algorithm = algorithm
        self.key_id = key_id
        self.key: Any
        if algorithm == "RS256":
            self.key = rsa.generate_private_key(public_exponent=65537, key_size=2048)
        elif algorithm == "ES256":
            self.key = ec.generate_private_key(ec.SECP256R1())
        else:
            self.key = ed25519.Ed25519PrivateKey.generate()

    def pem(self) -> bytes:
        """Return the public key."""
        encoded: bytes = self.key.public_key().public_bytes(
            serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
        )
        return encoded

    def jwk(self) -> dict[str, Any]:
        """Return the public key in a JWKS."""
        kinds: dict[str, Any] = {
            "RS256": jwt.algorithms.RSAAlgorithm,
            "ES256": jwt.algorithms.ECAlgorithm,
            "EdDSA": jwt.algorithms.OKPAlgorithm,
        }
        found: dict[str, Any] = kinds[self.algorithm].to_jwk(self.key.public_key(), as_dict=True)
        return found | ({"kid": self.key_id} if self.key_id else {})

    def token(self, *, headers: dict[str, Any] | None = None, **claims: Any) -> str:
        """Return a token for tenant `acme`, valid for a minute; None as a claim leaves it out."""
        complete = {
            "iss": ISSUER,
            "aud": AUDIENCE,
            "sub": "someone",
            "tenant": "acme",
            "exp": SystemClock().wall() + 60,
            **claims,
        }
        given = {name: value for name, value in complete.items() if value is not None}
        known = {"kid": self.key_id} if self.key_id else {}
        return jwt.encode(given, self.key, algorithm=self.algorithm, headers=known | (headers or {}))


def write_jwks(path: Path, issuers: Sequence[Issuer]) -> Path:
    path.write_text(json.dumps({"keys": [issuer.jwk() for issuer in issuers]}))
    return path


def unsigned(token: str) -> str:
    """Return a token with the same claims and the algorithm `none`."""
    header = base64.urlsafe_b64encode(b'{"alg":"none","typ":"JWT"}').decode().rstrip("=")
    return f"{header}.{token.split('.')[1]}."


def jwt_config(keys_file: Path, **fields: Any) -> dict[str, Any]:
    """Return a section `auth.jwt`."""
    return {"keys_file": str(keys_file), "issuer": ISSUER, "audience": AUDIENCE, **fields}
