"""The one place where callers are authenticated, for gRPC and HTTP alike."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from cluster.errors import ForbiddenError, UnauthenticatedError
from cluster.identity.api_keys import KEY_PREFIX, NO_ENTRY, KeyEntry, parse_keys, split_key
from cluster.identity.certificates import identify_certificate
from cluster.identity.config import AuthConfig
from cluster.identity.identity import LOCAL, Identity, Role
from cluster.identity.jwt_tokens import JwtVerifier
from cluster.identity.watched_file import WatchedFile
from kvtransfer.common.clock import Clock

MAX_AUTHORIZATION_CHARS = 16 << 10
_REMEDY = "send the metadata `authorization: Bearer KEY`"


@dataclass(frozen=True, slots=True)
class Credentials:
    """What a call shows: the value of `authorization`, and the names of a certificate that TLS has
    verified."""

    authorization: str = ""
    certificate_names: tuple[str, ...] = ()


class Authenticator:
    """Makes an identity of a call's credentials. `follow` keeps what it reads from files up to date."""

    def __init__(self, config: AuthConfig, clock: Clock) -> None:
        """Read all files; `ConfigError` names the setting whose file cannot be used."""
        self.config = config
        self._clock = clock
        self._keys = (
            WatchedFile(config.keys_file, "auth.keys_file", parse_keys)
            if config.keys_file is not None
            else None
        )
        self._jwt = JwtVerifier(config.jwt, config, clock) if config.jwt is not None else None

    @property
    def is_required(self) -> bool:
        """Whether a call without credentials is refused."""
        return self.config.mode == "required"

    def identify(self, credentials: Credentials) -> Identity:
        """Return who calls; `UnauthenticatedError` when that is not proven. A key or token goes before a
        certificate."""
        if not self.is_required:
            return LOCAL
        if credentials.authorization:
            return self._by_token(_bearer(credentials.authorization))
        if credentials.certificate_names and self.config.certificates is not None:
            return identify_certificate(credentials.certificate_names, self.config.certificates, self.config)
        raise UnauthenticatedError(f"no credentials: {_REMEDY}")

    def reload(self) -> None:
        """Read the files that have changed; blocks."""
        for file in self._files():
            file.reload()

    async def follow(self) -> None:
        """Keep the contents of all files up to date, until cancelled."""
        await asyncio.gather(*(file.follow(self._clock) for file in self._files()))

    def _files(self) -> list[WatchedFile[Any]]:
        issuer = self._jwt.keys if self._jwt is not None else None
        return [file for file in (self._keys, issuer) if file is not None]

    def _by_token(self, token: str) -> Identity:
        if token.startswith(KEY_PREFIX) and self._keys is not None:
            return self._by_key(token, self._keys.content)
        if self._jwt is not None and not token.startswith(KEY_PREFIX):
            return self._jwt.identify(token)
        raise UnauthenticatedError("the key or token is not valid here")

    def _by_key(self, token: str, entries: Mapping[str, KeyEntry]) -> Identity:
        key_id, secret = split_key(token) or ("", "")
        entry = entries.get(key_id)
        if not (entry or NO_ENTRY).opens_with(secret) or entry is None:
            raise UnauthenticatedError("the key or token is not valid here")
        expires_at = entry.expires_at
        if expires_at is not None and self._clock.wall() >= expires_at:
            raise UnauthenticatedError(f"the key {entry.id} has expired")
        return entry.identity(self.config)


def require(identity: Identity, role: Role) -> None:
    """Raise `ForbiddenError` unless the identity has the role."""
    if not identity.has_role(role):
        raise ForbiddenError(f"{identity.name} lacks the role {role!r}")


def _bearer(authorization: str) -> str:
    scheme, _, token = authorization.partition(" ")
    token = token.strip()
    is_sane = token.isascii() and token.isprintable() and len(authorization) <= MAX_AUTHORIZATION_CHARS
    if scheme.lower() != "bearer" or not token or not is_sane:
        raise UnauthenticatedError(f"the credentials cannot be read: {_REMEDY}")
    return token
