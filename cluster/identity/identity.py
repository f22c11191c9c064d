"""The identity of a caller, and the caller's rights."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal, get_args

from cluster.errors import ForbiddenError

# `user` sends requests as a tenant, `viewer` reads what concerns the whole cluster, `operator` changes it and
# reads all that a viewer does.
Role = Literal["user", "viewer", "operator"]
ROLES: tuple[Role, ...] = get_args(Role)
TENANT_PATTERN = r"^[A-Za-z0-9._:-]{1,64}$"
# The highest priority that a request may have at all.
MAX_PRIORITY = 100

_TENANT = re.compile(TENANT_PATTERN)


@dataclass(frozen=True, slots=True)
class Identity:
    """Represents an authenticated caller."""

    # The name in logs and in the audit log: `key:<id>`, `jwt:<subject>`, `cert:<name>` or `local`.
    name: str
    # Owner of its requests; "" where the caller names the tenant itself, or is none.
    tenant: str
    roles: frozenset[Role]
    # The group whose prefixes the identity's requests share; "": the tenant's own.
    sharing_group: str
    max_priority: int
    # Names of the models that it may use; None: all.
    models: frozenset[str] | None
    method: Literal["key", "jwt", "certificate", "none"]
    # Unix time; None: does not expire by itself.
    expires_at: float | None = None

    def has_role(self, role: Role) -> bool:
        """Whether it has the role, or one that includes it."""
        return role in self.roles or (role == "viewer" and "operator" in self.roles)

    def may_use(self, model: str) -> bool:
        """Whether it may use the model of this name."""
        return self.models is None or model in self.models

    def check_may_use(self, model: str) -> None:
        """Raise `ForbiddenError` where it may not use the model of this name."""
        if not self.may_use(model):
            raise ForbiddenError(f"{self.name} may not use the model {model!r}")

    @property
    def owner(self) -> str:
        """Whose its requests are, within the tenant. API keys of a tenant are one owner, so that a client can
        change its key while a stream runs; users of a token's issuer and certificates are not."""
        return self.method if self.method == "key" else self.name

    @property
    def party(self) -> str:
        """Whose bounds its calls count against: the tenant's, whatever keys it has, or its own where it has
        no tenant."""
        return f"tenant:{self.tenant}" if self.tenant else self.name

    @property
    def names_tenants(self) -> bool:
        """Whether its requests name their tenant themselves: nobody is authenticated here."""
        return self.method == "none"


# The caller of a cluster that authenticates nobody.
LOCAL = Identity(
    name="local",
    tenant="",
    roles=frozenset(ROLES),
    sharing_group="",
    max_priority=MAX_PRIORITY,
    models=None,
    method="none",
)


def is_tenant(name: str) -> bool:
    """Whether the text can name a tenant."""
    return _TENANT.fullmatch(name) is not None


def checked_tenant(name: str) -> str:
    """Return the name of a tenant; raise `ValueError` where the text cannot be one."""
    if not is_tenant(name):
        raise ValueError(
            f"{name[:100]!r} names no tenant: 1 to 64 letters, digits, dots, colons, dashes or underscores "
            "do, such as team-a"
        )
    return name
