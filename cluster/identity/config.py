"""Settings under `auth:` of the cluster's file: the callers, and the limits of each tenant."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal, Self, get_args

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, WithJsonSchema, model_validator

from cluster.identity.identity import MAX_PRIORITY, TENANT_PATTERN, Role, checked_tenant, is_tenant
from kvtransfer.common.group_shares import GroupShares
from kvtransfer.common.patterns import Matches
from kvtransfer.request_facts import ServiceClass

Algorithm = Literal["RS256", "ES256", "EdDSA"]
ANY_TENANT = "*"

Share = Annotated[float, Field(gt=0, le=1)]
ShareField = Literal["device_kv_share", "dram_share", "nvme_share"]
SHARE_FIELDS: tuple[ShareField, ...] = get_args(ShareField)
STORE_SHARE_FIELDS: tuple[ShareField, ...] = ("dram_share", "nvme_share")
Tenant = Annotated[
    str, AfterValidator(checked_tenant), WithJsonSchema({"type": "string", "pattern": TENANT_PATTERN})
]


class _Settings(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class JwtConfig(_Settings):
    """Accepts JSON web tokens of one issuer, with an expiry, a subject and a tenant."""

    # Public keys of the issuer: PEM, or a JWKS (JSON). Read again when it changes; relative to the file that
    # names it.
    keys_file: Path
    # The required `iss` and `aud`.
    issuer: str = Field(min_length=1)
    audience: str = Field(min_length=1)
    algorithms: tuple[Algorithm, ...] = Field(default=("RS256", "ES256", "EdDSA"), min_length=1)
    # How far the issuer's clock may be off.
    leeway_s: float = Field(default=30.0, ge=0)
    # The claim that names the tenant.
    tenant_claim: str = Field(default="tenant", min_length=1)
    # The claim with the roles, a list or one string; a token without it has the role `user`.
    roles_claim: str = Field(default="roles", min_length=1)


class CertificateIdentity(_Settings):
    """Gives an identity to the client certificates that carry a name."""

    # The common name, or a subject alternative name (DNS or URI).
    name: str = Field(min_length=1)
    tenant: Tenant
    roles: tuple[Role, ...] = Field(default=("user",), min_length=1)


class CertificateConfig(_Settings):
    """Requests a certificate from clients in TLS. It is required of every client of these ports, also where
    an API key identifies the caller; a client without one can use `gateway.health_port` alone."""

    # PEM of the authorities whose client certificates are accepted. Read again when it changes; relative to
    # the file that names it.
    ca_file: Path
    # The first entry that a certificate has the name of decides.
    identities: tuple[CertificateIdentity, ...] = ()
    # The gRPC ports that ask for certificates.
    ports: tuple[Literal["inference", "admin"], ...] = Field(default=("inference", "admin"), min_length=1)


class TenantLimits(_Settings):
    """Limits the resources that the requests of a tenant may use."""

    # A higher priority of a request is cut to this.
    max_priority: int = Field(default=0, ge=-MAX_PRIORITY, le=MAX_PRIORITY)
    # Names of the models that it may use; empty: all.
    models: tuple[str, ...] = ()
    # The tenant's part of the replicas' time, next to the other tenants whose requests wait.
    weight: float = Field(default=1.0, gt=0)
    # The class of its requests that name none, and the classes that they may name; empty: all.
    default_class: ServiceClass = "standard"
    classes: tuple[ServiceClass, ...] = ()
    # What all its requests together may take, at all gateways; None: no limit. Up to `burst_s` seconds' worth
    # is saved up.
    requests_per_s: float | None = Field(default=None, gt=0)
    prompt_tokens_per_s: float | None = Field(default=None, gt=0)
    output_tokens_per_s: float | None = Field(default=None, gt=0)
    burst_s: float = Field(default=10.0, gt=0)
    # Prompt and `max_tokens` of its requests that run or wait.
    concurrent_tokens: int | None = Field(default=None, ge=1)
    # Tenants of the same group share cached prefixes, and can find out which of each other's prompts are
    # cached; "": the tenant's own name, a group of one.
    sharing_group: Annotated[
        str,
        Matches(
            r"^[A-Za-z0-9._:-]{0,64}$",
            "at most 64 letters, digits, dots, colons, dashes or underscores, such as team-a",
        ),
    ] = ""
    # The share of each replica's KV blocks that its running requests and landings may use, together with
    # those of its sharing group, and of its slots (`engine.max_sequences`), rounded up. Cached blocks beyond
    # it stay while nobody wants the space.
    device_kv_share: Share = 1.0
    # The share of a node's host memory for KV that its sharing group may take while others want it, and that
    # of its NVMe.
    dram_share: Share = 1.0
    nvme_share: Share = 1.0


class AuditConfig(_Settings):
    """Configures the audit log."""

    # Where each gateway writes its JSON lines; None: to its log alone (the logger `tandem.audit`). Relative
    # to the file that names it.
    folder: Path | None = None
    # The size at which a file is closed and the next one begins, and how many closed ones are kept: of acts,
    # of reads, and of refusals.
    max_mb: float = Field(default=64.0, gt=0)
    keep: int = Field(default=8, ge=1)


class AuthConfig(_Settings):
    """Configures the callers' access. Keys and tokens are read in files of their own, never in this one."""

    # `none`: every caller may do everything, and names the tenant itself; listens on loopback only, unless
    # `insecure`. `required`: every call needs a key, a token or a certificate; health checks do not.
    mode: Literal["none", "required"] = "none"
    # With `mode: none`: listen on other addresses too, for whoever reaches them.
    insecure: bool = False
    # API keys, salted and hashed, as `tandem key` writes them. Read again when it changes.
    keys_file: Path | None = None
    jwt: JwtConfig | None = None
    certificates: CertificateConfig | None = None
    # Limits by tenant; "*" is for tenants without an entry.
    tenants: dict[str, TenantLimits] = {}
    # How long after `accepted` a client may resume a stream.
    resume_s: float = Field(default=3600.0, gt=0)
    # How long after signing in to the console one must sign in again.
    session_s: float = Field(default=8 * 3600.0, gt=0)
    # The secrets under which block keys are made, one or two lines `<id> <base64 of 32 bytes>`, the newest
    # first, the same at each gateway. None: drawn at start, which serves one host, and kept as `key-root` in
    # `store.nvme_path`, if there is one, so that its records are found again. Read again when it changes.
    key_root_file: Path | None = None
    audit: AuditConfig = AuditConfig()

    @model_validator(mode="after")
    def _somebody_can_call(self) -> Self:
        has_method = self.keys_file is not None or self.jwt is not None or self.certificates is not None
        if self.mode == "required" and not has_method:
            raise ValueError("mode required needs at least one of keys_file, jwt and certificates")
        if self.mode == "required" and self.insecure:
            raise ValueError("insecure contradicts mode required; remove it")
        if self.mode == "none" and has_method:
            raise ValueError(
                "keys_file, jwt and certificates have no effect with mode none; set mode: required"
            )
        return self

    @model_validator(mode="after")
    def _tenants_can_be_named(self) -> Self:
        for name in self.tenants:
            if name != ANY_TENANT and not is_tenant(name):
                raise ValueError(
                    f"tenants: {name[:100]!r} must be 1 to 64 letters, digits, dots, colons, dashes or "
                    'underscores, or "*"'
                )
        return self

    @model_validator(mode="after")
    def _a_group_has_one_share(self) -> Self:
        group_to_tenant: dict[str, str] = {}
        for tenant, limits in self.tenants.items():
            other = group_to_tenant.setdefault(limits.sharing_group or tenant, tenant)
            for field in SHARE_FIELDS:
                mine, theirs = getattr(limits, field), getattr(self.tenants[other], field)
                if mine != theirs:
                    raise ValueError(
                        f"tenants.{tenant}.{field}: is {mine:g}, and {theirs:g} for {other} of the same "
                        "sharing group, which has one cache; give both the same"
                    )
        return self

    def limits(self, tenant: str) -> TenantLimits:
        """Return the limits of a tenant: its own, else those of "*", else the defaults."""
        return self.tenants.get(tenant) or self.tenants.get(ANY_TENANT) or _DEFAULTS

    def sharing_group(self, tenant: str) -> str:
        """Return the group whose cached prefixes the tenant's requests share."""
        return self.limits(tenant).sharing_group or tenant

    def shares(self, field: ShareField) -> GroupShares:
        """Return the part that each sharing group may take of a memory."""
        default: float = getattr(self.limits(ANY_TENANT), field)
        by_group: dict[str, float] = {
            self.sharing_group(tenant): getattr(limits, field)
            for tenant, limits in self.tenants.items()
            if tenant != ANY_TENANT
        }
        return GroupShares(default, {it: share for it, share in by_group.items() if share != default})

    def located(self, folder: Path) -> Self:
        """Return a copy with all paths relative to `folder`."""
        changes: dict[str, Any] = {}
        for field in ("keys_file", "key_root_file"):
            if (path := getattr(self, field)) is not None:
                changes[field] = folder / path
        if self.jwt is not None:
            changes["jwt"] = self.jwt.model_copy(update={"keys_file": folder / self.jwt.keys_file})
        if self.certificates is not None:
            ca_file = folder / self.certificates.ca_file
            changes["certificates"] = self.certificates.model_copy(update={"ca_file": ca_file})
        if self.audit.folder is not None:
            changes["audit"] = self.audit.model_copy(update={"folder": folder / self.audit.folder})
        return self.model_copy(update=changes)


_DEFAULTS = TenantLimits()
