"""Access to a gateway: the callers' identities, the facts that one gateway vouches for to another, the
console's sessions, and the audit log of all this."""

from __future__ import annotations

from collections.abc import Mapping

from cluster.identity.audit import NOBODY, OK, AuditEntry, AuditLog
from cluster.identity.authenticator import Authenticator
from cluster.identity.config import AuthConfig
from cluster.identity.relay_tokens import RelayTokens
from cluster.identity.sessions import Sessions
from kvtransfer.common.clock import Clock
from kvtransfer.rpc.trust import Trust


class AccessControl:
    """The access control of one gateway. `follow` keeps it up to date, `close` ends the audit log's file."""

    def __init__(self, config: AuthConfig, gateway_id: str, trust: Trust, clock: Clock) -> None:
        """Read all files; `ConfigError` or `StartError` names the setting that cannot be used."""
        self.config = config
        self.clock = clock
        self.authenticator = Authenticator(config, clock)
        self.audit = AuditLog(config.audit, gateway_id, clock)
        self.sessions = Sessions(trust, self.authenticator, clock)
        self.relays = RelayTokens(trust, clock)

    async def follow(self) -> None:
        """Read credentials again when their files change, until cancelled; each change is recorded."""
        await self.authenticator.follow(self._record)

    def close(self) -> None:
        """Close the audit log."""
        self.audit.close()

    def _record(self, field: str, changes: Mapping[str, str]) -> None:
        what = {"file": field, **changes}
        self.audit.record(AuditEntry(who=NOBODY, method="credentials/reload", what=what, result=OK))
