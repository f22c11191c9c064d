"""API keys, of which the cluster knows salted hashes.

    tandem_k3vq7yab_Zm9v...   `tandem_`, the key's id (8 characters), `_`, its secret (43 characters)

A secret is 256 random bits, so one round of SHA-256 is as good as a slow hash.
"""

from __future__ import annotations

import hashlib
import hmac
import re
from datetime import UTC, datetime
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

from cluster.identity.config import AuthConfig, Tenant
from cluster.identity.identity import MAX_PRIORITY, Identity, Role
from kvtransfer.common.patterns import Matches

KEY_PREFIX = "tandem_"
SALT_BYTES, SECRET_BYTES, ID_BYTES = 16, 32, 5
_MARK_CHARS = 16

_KEY = re.compile(r"tandem_([a-z2-7]{8})_([A-Za-z0-9_-]{43})")


class KeyEntry(BaseModel):
    """A key of the file."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    id: Annotated[
        str, Matches(r"^[a-z2-7]{8}$", "8 lower-case letters or digits from 2 to 7, such as k3vq7yab")
    ]
    # Hexadecimal: random bytes, and SHA-256 over them and the secret.
    salt: Annotated[str, Matches(r"^([0-9a-f]{2}){16,64}$", "16 to 64 bytes in lower-case hexadecimal")]
    hash: Annotated[str, Matches(r"^[0-9a-f]{64}$", "32 bytes in lower-case hexadecimal: a SHA-256")]
    tenant: Tenant
    roles: tuple[Role, ...] = Field(default=("user",), min_length=1)
    # Where they are given, they replace the tenant's own limits.
    max_priority: Annotated[int, Field(ge=-MAX_PRIORITY, le=MAX_PRIORITY)] | None = None
    models: tuple[str, ...] | None = None
    created: datetime
    expires: datetime | None = None
    note: str = ""

    @property
    def expires_at(self) -> float | None:
        """Unix time; a time without zone is UTC."""
        if self.expires is None:
            return None
        zoned = self.expires if self.expires.tzinfo is not None else self.expires.replace(tzinfo=UTC)
        return zoned.timestamp()

    @property
    def mark(self) -> str:
        """What another key of the same id has another one of; it tells nothing of the secret."""
        return hashlib.sha256(f"{self.salt}{self.hash}".encode()).hexdigest()[:_MARK_CHARS]

    def opens_with(self, secret: str) -> bool:
        """Whether this is the key's secret; takes the same time for every answer."""
        return hmac.compare_digest(bytes.fromhex(self.hash), hash_secret(bytes.fromhex(self.salt), secret))

    def identity(self, config: AuthConfig) -> Identity:
        """Return the identity that calls with this key."""
        limits = config.limits(self.tenant)
        models = limits.models if self.models is None else self.models
        return Identity(
            name=f"key:{self.id}",
            tenant=self.tenant,
            roles=frozenset(self.roles),
            sharing_group=config.sharing_group(self.tenant),
            max_priority=limits.max_priority if self.max_priority is None else self.max_priority,
            models=frozenset(models) or None,
            method="key",
            expires_at=self.expires_at,
        )


def split_key(token: str) -> tuple[str, str] | None:
    """Return id and secret of an API key; None for a text that has not the form of one."""
    found = _KEY.fullmatch(token)
    return (found[1], found[2]) if found is not None else None


# Compared with where the id is unknown, so that an answer's time does not tell which ids exist.
NO_ENTRY = KeyEntry(
    id="aaaaaaaa",
    salt="00" * SALT_BYTES,
    hash="00" * 32,
    tenant="none",
    created=datetime.fromtimestamp(0, UTC),
)


def hash_secret(salt: bytes, secret: str) -> bytes:
    """Return the hash that the file has in place of the secret."""
    return hashlib.sha256(salt + secret.encode()).digest()
