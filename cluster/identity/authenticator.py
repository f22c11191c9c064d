"""The one place where callers are authenticated, for gRPC and HTTP alike."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from cluster.errors import ForbiddenError, UnauthenticatedError
from cluster.identity.api_key_file import parse_keys
from cluster.identity.api_keys import KEY_PREFIX, NO_ENTRY, KeyEntry, split_key
from cluster.identity.certificates import CertificateIdentities
from cluster.identity.config import AuthConfig
from cluster.identity.identity import LOCAL, Identity, Role
from cluster.identity.jwt_tokens import JwtVerifier
from cluster.identity.watched_file import WatchedFile
from kvtransfer.common.clock import Clock

MAX_AUTHORIZATION_CHARS = 16 << 10
# Called with the setting whose file was read again, and with what has changed in it.
OnReload = Callable[[str, Mapping[str, str]], None]
# The credential to send, over HTTP and over gRPC.
HEADER = "the header `Authorization: Bearer KEY`"
_METADATA = "the metadata `authorization: Bearer KEY`"


@dataclass(frozen=True, slots=True)
class Credentials:
    """The credentials of a call: the value of `authorization`, and the names of a certificate that TLS has
    verified."""

    authorization: str = ""
    certificate_names: tuple[str, ...] = ()
    # The credential to send, for a caller who shows none.
    wanted: str = _METADATA


class Authenticator:
    """Makes an identity of a call's credentials. `follow` keeps the content of its files up to date."""

    def __init__(self, config: AuthConfig, clock: Clock) -> None:
        """Read all files; `ConfigError` names the setting whose file cannot be used."""
        self.config = config
        self._clock = clock
        self._keys = (
            WatchedFile(config.keys_file, "auth.keys_file", parse_keys)
            if config.keys_file is not None
            else None
        )
        # Entries by the id of the key, with the identity of each.
        self._key_identities: dict[str, tuple[KeyEntry, Identity]] = {}
        self._key_version = 0
        certificates = config.certificates
        self._certificates = CertificateIdentities(certificates, config) if certificates is not None else None
        self._jwt = JwtVerifier(config.jwt, config, clock) if config.jwt is not None else None

    @property
    def is_required(self) -> bool:
        """Whether a call without credentials is refused."""
        return self.config.mode == "required"

    def identify(self, credentials: Credentials) -> Identity:
        """Return the caller's identity; `UnauthenticatedError` when it is not proven. A key or token goes
        before a certificate."""
        if not self.is_required:
            return LOCAL
        if credentials.authorization:
            return self._by_token(_bearer(credentials.authorization, credentials.wanted))
        if credentials.certificate_names and self._certificates is not None:
            return self._certificates.identify(credentials.certificate_names)
        raise UnauthenticatedError(f"no credentials: send {credentials.wanted}")

    def key_entry(self, api_key: str) -> KeyEntry:
        """Return the entry of this API key; `UnauthenticatedError` when it is not valid."""
        key_id, secret = split_key(api_key) or ("", "")
        entry = self._keys.content.get(key_id) if self._keys is not None else None
        if not (entry or NO_ENTRY).opens_with(secret) or entry is None:
            raise UnauthenticatedError("the key or token is not valid here")
        return self._unexpired(entry)

    def recheck(self, key_id: str, mark: str) -> Identity:
        """Return the identity that signed in with a key that was valid then, by its id and mark;
        `UnauthenticatedError` when it is not valid any more."""
        entry = self._keys.content.get(key_id) if self._keys is not None else None
        if entry is None or entry.mark != mark:
            raise UnauthenticatedError("the key of this session is not valid any more")
        return self._identity(self._unexpired(entry))

    def reload(self) -> None:
        """Read the files that have changed; blocks."""
        for file in self._files():
            file.reload()

    async def follow(self, on_reload: OnReload | None = None) -> None:
        """Keep the contents of all files up to date, until cancelled."""
        follows = []
        if (keys := self._keys) is not None:
            before = keys.content

            def on_keys() -> None:
                nonlocal before
                before, last = keys.content, before
                if on_reload is not None:
                    on_reload("auth.keys_file", _key_changes(last, before))

            follows.append(keys.follow(self._clock, on_keys))
        if self._jwt is not None:
            on_issuer = functools.partial(on_reload, "auth.jwt.keys_file", {}) if on_reload else None
            follows.append(self._jwt.keys.follow(self._clock, on_issuer))
        await asyncio.gather(*follows)

    def _files(self) -> list[WatchedFile[Any]]:
        issuer = self._jwt.keys if self._jwt is not None else None
        return [file for file in (self._keys, issuer) if file is not None]

    def _by_token(self, token: str) -> Identity:
        if token.startswith(KEY_PREFIX) and self._keys is not None:
            return self._identity(self.key_entry(token))
        if self._jwt is not None and not token.startswith(KEY_PREFIX):
            return self._jwt.identify(token)
        raise UnauthenticatedError("the key or token is not valid here")

    def _identity(self, entry: KeyEntry) -> Identity:
        """Return the identity that has the key; made once for each content of the file."""
        assert self._keys is not None
        if self._key_version != self._keys.version:
            self._key_identities.clear()
            self._key_version = self._keys.version
        known = self._key_identities.get(entry.id)
        if known is None or known[0] is not entry:
            known = entry, entry.identity(self.config)
            self._key_identities[entry.id] = known
        return known[1]

    def _unexpired(self, entry: KeyEntry) -> KeyEntry:
        expires_at = entry.expires_at
        if expires_at is not None and self._clock.wall() >= expires_at:
            raise UnauthenticatedError(f"the key {entry.id} has expired")
        return entry


def _key_changes(before: Mapping[str, KeyEntry], after: Mapping[str, KeyEntry]) -> dict[str, str]:
    """Return the ids of the keys that came, went and were changed."""
    both = before.keys() & after.keys()
    ids = {
        "added": after.keys() - before.keys(),
        "removed": before.keys() - after.keys(),
        "changed": {key_id for key_id in both if before[key_id] != after[key_id]},
    }
    return {kind: ", ".join(sorted(found)) for kind, found in ids.items() if found}


def require(identity: Identity, role: Role) -> None:
    """Raise `ForbiddenError` unless the identity has the role."""
    if not identity.has_role(role):
        raise ForbiddenError(f"{identity.name} lacks the role {role!r}")


def _bearer(authorization: str, wanted: str) -> str:
    scheme, _, token = authorization.partition(" ")
    token = token.strip()
    is_sane = token.isascii() and token.isprintable() and len(authorization) <= MAX_AUTHORIZATION_CHARS
    if scheme.lower() != "bearer" or not token or not is_sane:
        raise UnauthenticatedError(f"the credentials cannot be read: send {wanted}")
    return token
