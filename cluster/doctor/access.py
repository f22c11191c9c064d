"""Access to the cluster: authentication, its files, open ports, the cluster's secrets."""

from __future__ import annotations

import stat
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path

from cluster.config import LOOPBACK, ClusterConfig
from cluster.doctor.check_context import Check, CheckContext
from cluster.doctor.checks import CheckResult, error, note, ok, warning
from cluster.errors import ConfigError, StartError
from cluster.identity.api_key_file import read_keys
from cluster.identity.api_keys import KeyEntry
from cluster.identity.audit import check_audit_folder
from cluster.identity.jwt_tokens import parse_issuer_keys
from cluster.identity.key_roots import KEPT_NAME, parse_key_roots
from kvtransfer.rpc.trust import MIN_SECRET_BYTES

GROUP = "access"
# Credentials that end within this time are to be renewed.
SOON_DAYS = 14.0
DAY_S = 86_400.0
_NEW_KEY = "`tandem key new --tenant TENANT` makes one"
_DOC = "docs/security.md"


def authentication(context: CheckContext) -> Iterator[CheckResult]:
    """Check whether callers are authenticated, and how."""
    auth, host = context.config.auth, context.config.gateway.host
    if auth.mode == "required":
        methods = {
            "API keys": auth.keys_file,
            "JSON Web Tokens": auth.jwt,
            "client certificates": auth.certificates,
        }
        listed = ", ".join(name for name, settings in methods.items() if settings is not None)
        yield ok(f"callers are authenticated, by {listed}", mode=auth.mode)
        return
    seen = "callers are NOT authenticated (auth.mode none)"
    harm = "is served, names any tenant, reads every tenant's requests and administers the cluster"
    remedy = f"`tandem key new`, then auth.keys_file and auth.mode: required ({_DOC})"
    if host in LOOPBACK:
        yield note(seen, f"whoever runs a program on this machine {harm}", remedy, mode=auth.mode)
    else:
        yield warning(
            f"{seen}, and the gateways listen on {host}",
            f"whoever reaches them {harm}",
            remedy,
            mode=auth.mode,
        )


def exposure(context: CheckContext) -> Iterator[CheckResult]:
    """Check who can reach the ports for operators."""
    gateway = context.config.gateway
    listed = f"administration (gateway.admin_port {gateway.admin_port or 'a free one'})"
    if gateway.console_port is not None:
        listed += f" and console (gateway.console_port {gateway.console_port or 'a free one'})"
    if gateway.host in LOOPBACK:
        yield ok(f"{listed} can be reached from this machine alone")
        return
    remedy = "let only operators through to these ports (firewall, NetworkPolicy); gateway.console_port: null"
    seen = f"{listed} can be reached from other hosts, on {gateway.host}"
    if context.config.auth.mode == "none":
        yield warning(seen, "nobody is authenticated there", f"auth.mode: required, and {remedy}")
    else:
        yield note(seen, "they ask for the role viewer or operator, and everybody may try", remedy)


def api_keys(context: CheckContext) -> Iterator[CheckResult]:
    """Check the file with the API keys: readable, not writable for others, with keys that are valid."""
    path = context.config.auth.keys_file
    if path is None:
        return
    field = f"auth.keys_file: {path}"
    try:
        keys = read_keys(path)
        mode = stat.S_IMODE(path.stat().st_mode)
    except (ConfigError, OSError) as problem:
        yield error(
            f"auth.keys_file: {problem}",
            "gateways do not start; one that runs keeps the keys that it has read",
            f"let this user read it, and correct what is wrong there; {_NEW_KEY}",
        )
        return
    if mode & 0o022:
        yield warning(
            f"{field} has the mode {mode:04o}",
            "who can write it can make a key for any tenant and role",
            f"`chmod 600 {path}`",
            mode=f"{mode:04o}",
        )
    elif mode & 0o004:
        yield note(
            f"{field} has the mode {mode:04o}",
            "other users see tenants and ids of keys; the keys themselves are hashed",
            f"`chmod 600 {path}`",
            mode=f"{mode:04o}",
        )
    yield from _validity_of_keys(field, keys, datetime.fromtimestamp(context.clock.wall(), UTC))
    if not any("operator" in roles for roles in _given_roles(context.config, keys)):
        yield warning(
            "nobody has the role operator: no API key and no client certificate, and no tokens are accepted",
            "nobody can scale, purge, verify or split traffic; the commands are refused",
            "`tandem key new --tenant TENANT --role operator`",
        )


def _validity_of_keys(field: str, keys: Sequence[KeyEntry], now: datetime) -> Iterator[CheckResult]:
    valid = 0
    for entry in keys:
        seen = f"the API key {entry.id} of tenant {entry.tenant}" + (f" ({entry.note})" if entry.note else "")
        left_s = None if entry.expires_at is None else entry.expires_at - now.timestamp()
        if left_s is not None and left_s <= 0:
            yield note(f"{seen} has expired", "it is refused", f"`tandem key revoke {entry.id}`")
            continue
        valid += 1
        if left_s is not None and left_s < SOON_DAYS * DAY_S:
            yield warning(
                f"{seen} expires in {left_s / DAY_S:.0f} days",
                "its holder is refused then",
                f"`tandem key new` for the same tenant, hand it over, then `tandem key revoke {entry.id}`",
                days_left=round(left_s / DAY_S, 1),
            )
    if valid:
        tenants = {entry.tenant for entry in keys}
        yield ok(f"{field} has {valid} valid keys, of {len(tenants)} tenants", num_keys=valid)
    else:
        yield warning(f"{field} has no valid key", "nobody can call with an API key", _NEW_KEY)


def _given_roles(config: ClusterConfig, keys: Sequence[KeyEntry]) -> Iterator[Sequence[str]]:
    """Yield the roles that anybody may have."""
    yield from (entry.roles for entry in keys)
    if config.auth.certificates is not None:
        yield from (entry.roles for entry in config.auth.certificates.identities)
    if config.auth.jwt is not None:
        yield ("operator",)  # the issuer decides


def jwt_keys(context: CheckContext) -> Iterator[CheckResult]:
    """Check the public keys of the tokens' issuer."""
    settings = context.config.auth.jwt
    if settings is None:
        return
    try:
        keys = parse_issuer_keys(settings.keys_file.read_bytes())
    except (OSError, ValueError) as problem:
        yield error(
            f"auth.jwt.keys_file: {settings.keys_file}: {problem}",
            "gateways do not start; one that runs keeps the keys that it has read",
            "put the issuer's JWKS there (often /.well-known/jwks.json), or its public keys as PEM",
        )
        return
    algorithms = sorted({key.algorithm for key in keys})
    if used := sorted(set(settings.algorithms) & set(algorithms)):
        listed = ", ".join(used)
        yield ok(
            f"tokens of {settings.issuer} are verified by {len(keys)} keys ({listed})", num_keys=len(keys)
        )
    else:
        yield error(
            f"auth.jwt.keys_file: {settings.keys_file} has keys for {', '.join(algorithms)} only, and "
            f"auth.jwt.algorithms allows {', '.join(settings.algorithms)}",
            "every token is refused",
            "allow the issuer's algorithm, or give its other keys",
        )


def key_root(context: CheckContext) -> Iterator[CheckResult]:
    """Check the root of block keys: there, readable by its owner only, and kept where KV is kept on disk."""
    path, nvme_path = context.config.auth.key_root_file, context.config.store.nvme_path
    if path is None:
        if nvme_path is not None:
            kept = nvme_path / KEPT_NAME
            yield note(
                f"the root of block keys is kept at {kept}, beside the KV on that disk",
                "who takes the disk has both, and can check guesses of what was prompted",
                f"auth.key_root_file on another disk, or in a Secret: move {kept} there",
            )
        return
    field = f"auth.key_root_file: {path}"
    try:
        roots = parse_key_roots(path.read_bytes())
        mode = stat.S_IMODE(path.stat().st_mode)
    except (OSError, ValueError) as problem:
        yield error(
            f"{field}: {problem}",
            "gateways do not start; one that runs keeps the roots that it has read",
            f"`tandem key root {path}` writes one; with another root, KV on disk is not found again",
        )
        return
    yield from _mode_of_secret(field, path, mode, "who can read it can check guesses of what was prompted")
    if len(roots) > 1:
        yield note(
            f"{field} has two roots: {roots[0].id} replaces {roots[1].id}",
            "while both are used, each prompt's keys are made twice",
            f"`tandem key root {path} --end` when what is under the older root is no longer worth finding",
        )
    else:
        yield ok(f"{field} has the root {roots[0].id}")


def audit_folder(context: CheckContext) -> Iterator[CheckResult]:
    """Check whether gateways can write their audit log."""
    settings = context.config.auth.audit
    if settings.folder is None:
        return
    try:
        check_audit_folder(settings)
    except StartError as problem:
        yield error(str(problem), "gateways do not start", "name a folder that this user can write to")
    else:
        yield ok(f"the audit log is written to {settings.folder}")


def secret(context: CheckContext) -> Iterator[CheckResult]:
    """Check the cluster's secret file: there, long enough, readable by its owner only."""
    path = context.config.secret_file
    if path is None:
        return
    try:
        num_bytes, mode = len(path.read_bytes().strip()), stat.S_IMODE(path.stat().st_mode)
    except OSError as problem:
        yield error(
            f"secret_file: {problem}", "the cluster does not start", "create it, or leave secret_file out"
        )
        return
    if num_bytes < MIN_SECRET_BYTES:
        yield error(
            f"secret_file: {path} has {num_bytes} bytes",
            "the cluster does not start",
            f"`openssl rand -hex 32 > {path}`",
        )
        return
    yield from _mode_of_secret(
        f"secret_file: {path}", path, mode, "who can read it can read every prompt and write KV"
    )
    if not mode & 0o077:
        yield ok(f"secret_file: {path} has {num_bytes} bytes")


def _mode_of_secret(field: str, path: Path, mode: int, harm: str) -> Iterator[CheckResult]:
    if mode & 0o077:
        yield warning(f"{field} has the mode {mode:04o}", harm, f"`chmod 600 {path}`", mode=f"{mode:04o}")


CHECKS = (
    Check("auth", GROUP, "Whether callers are authenticated, and how", authentication),
    Check("exposure", GROUP, "Who can reach administration and console over the network", exposure),
    Check(
        "api-keys",
        GROUP,
        "Whether the file of API keys is readable, others cannot write it, and no key expires soon",
        api_keys,
    ),
    Check("jwt-keys", GROUP, "The public keys of the tokens' issuer", jwt_keys),
    Check(
        "key-root",
        GROUP,
        "Whether the root of block keys is private, and where it is kept if KV is on disk",
        key_root,
    ),
    Check("audit", GROUP, "Whether gateways can write the audit log", audit_folder),
    Check("secret", GROUP, "The cluster's secret file", secret),
)
