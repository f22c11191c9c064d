"""Ports, addresses and clock of this machine, the Ray cluster to join, the secret, the gateway's
certificate."""

from __future__ import annotations

import errno
import socket
import ssl
import stat
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

from cryptography import x509

from cluster.config import LOOPBACK
from cluster.doctor.checks import Check, CheckContext, CheckResult, error, note, ok, warning

GROUP = "network and Ray"
_REACH_S = 5.0
MIN_TOKEN_CHARS = 16
_ERRORS = {errno.EADDRNOTAVAIL: "no such address here", errno.EACCES: "not allowed to this user"}


def ports(context: CheckContext) -> Iterator[CheckResult]:
    """Check the ports of gateway and console, and the addresses to listen on."""
    gateway = context.config.gateway
    for name in ("port", "console_port", "admin_port", "health_port"):
        if port := getattr(gateway, name):
            host = "0.0.0.0" if gateway.host == "auto" else gateway.host
            yield from _port(context, f"gateway.{name}", host, port)
    host = context.config.transfer.data_host
    if host != "auto" and _bind(host, 0) == errno.EADDRNOTAVAIL:
        yield error(
            f"transfer.data_host: {host} is not an address of this machine",
            "ranks here cannot listen for KV",
            "set it to auto, the node's own address",
        )


def _port(context: CheckContext, field: str, host: str, port: int) -> Iterator[CheckResult]:
    problem = _bind(host, port)
    if problem == 0:
        yield ok(f"{field}: {host}:{port} is free", port=port)
    elif problem == errno.EADDRINUSE:
        users = [item for item in context.machine.listeners() if item.port == port]
        names = {f"{item.process} (process {item.process_id})" for item in users if item.process}
        user = ", ".join(sorted(names)) or "a process of another user"
        if context.is_running:
            yield ok(f"{field}: {host}:{port} is used by {user}, while the cluster runs", port=port)
            return
        yield error(
            f"{field}: {host}:{port} is taken by {user}",
            "nothing of ours can listen there; a gateway then does not start",
            f"end that process, or choose another {field} (0: a free one); if it is this very cluster, "
            "give its --admin-address",
            port=port,
        )
    else:
        reason = _ERRORS.get(problem, errno.errorcode.get(problem, str(problem)))
        yield error(
            f"{field}: cannot listen on {host}:{port}: {reason}",
            "a gateway does not start on this machine",
            "set gateway.host to an address of this machine, or to auto",
            port=port,
        )


def clock(context: CheckContext) -> Iterator[CheckResult]:
    """Check whether this machine's clock is synchronized. In a running cluster the hosts' clocks are
    compared."""
    kernel = context.machine.kernel_clock()
    if kernel is None:
        return
    if kernel.is_synchronized:
        yield ok(f"the clock is synchronized, within {1e3 * kernel.max_error_s:.0f} ms")
        return
    seen = "nothing keeps the clock of this machine right (adjtimex says: not synchronized)"
    why = "no token depends on it; but logs, traces and metrics of different hosts do not fit together"
    remedy = "run chrony or systemd-timesyncd; in a container that is the host's"
    say = note if context.config.transfer.data_host in LOOPBACK else warning
    yield say(seen, why, remedy)


def ray_token(context: CheckContext) -> Iterator[CheckResult]:
    """Check Ray's token authentication: whoever has the token runs code on every node."""
    mode = context.environment.get("RAY_AUTH_MODE", "token").lower()
    if mode != "token":
        yield warning(
            f"RAY_AUTH_MODE is {mode}",
            "whoever reaches a port of Ray runs code on every node and scales the pools",
            "unset it (tandem sets it to token), or let nothing but the cluster reach those ports",
        )
        return
    if "RAY_AUTH_TOKEN" in context.environment:
        yield from _token_text(context.environment["RAY_AUTH_TOKEN"], "RAY_AUTH_TOKEN", "the environment")
        return
    named = context.environment.get("RAY_AUTH_TOKEN_PATH", "")
    path = Path(named) if named else context.machine.home / ".ray" / "auth_token"
    if path.is_file():
        yield from _token_file(path)
    elif named or context.ray_address not in ("auto", "local"):
        yield error(
            f"there is no Ray token: {path} is missing",
            "a Ray cluster that is running already refuses a client without its token",
            "copy the token of the cluster there (mode 0600), or set RAY_AUTH_TOKEN",
        )
    else:
        yield note(f"there is no Ray token yet; Ray writes one to {path} when it starts here")


def _token_file(path: Path) -> Iterator[CheckResult]:
    try:
        text, mode = path.read_text(), stat.S_IMODE(path.stat().st_mode)
    except OSError as problem:
        remedy = "let this user read it, or set RAY_AUTH_TOKEN"
        yield error(
            f"the Ray token in {path} cannot be read: {problem.strerror}", "Ray does not start", remedy
        )
        return
    if mode & 0o077:
        is_shut = any(not folder.stat().st_mode & 0o011 for folder in path.absolute().parents)
        say = note if is_shut else warning
        yield say(
            f"{path} has the mode {mode:04o}"
            + (", in a folder that only its owner enters" if is_shut else ""),
            "other users who can read the token can run code on every node",
            f"`chmod 600 {path}`",
            mode=f"{mode:04o}",
        )
    yield from _token_text(text, str(path), "that file")


def _token_text(text: str, place: str, where: str) -> Iterator[CheckResult]:
    if not text.strip():
        remedy = f"put the cluster's token into {where}, or remove it"
        yield error(f"the Ray token in {place} is empty", "Ray refuses to start or to connect", remedy)
    elif len(text.strip()) < MIN_TOKEN_CHARS:
        yield warning(
            f"the Ray token in {place} has {len(text.strip())} characters",
            "a short one can be guessed",
            "`ray get-auth-token --generate` makes a good one",
        )
    else:
        yield ok(f"the Ray token is in {place}")


def ray_cluster(context: CheckContext) -> Iterator[CheckResult]:
    """Check whether something answers at the address to join; nothing is joined."""
    address = context.ray_address
    if address in ("auto", "local"):
        return
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal():
        remedy = "give auto, local or host:port"
        yield error(f"the Ray address {address!r} is none", "there is nothing to join", remedy)
        return
    try:
        started_at = context.clock.now()
        socket.create_connection((host, int(port)), timeout=_REACH_S).close()
    except (OSError, OverflowError) as problem:
        yield error(
            f"no Ray cluster answers at {address}: {problem}",
            "there is nothing to join",
            "`ray start --head` there, open the port, or correct --ray-address",
        )
        return
    reached_ms = 1e3 * (context.clock.now() - started_at)
    yield ok(
        f"something listens at {address} ({reached_ms:.1f} ms); whether it is Ray shows when it is joined"
    )


def secret(context: CheckContext) -> Iterator[CheckResult]:
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
    if num_bytes < MIN_TOKEN_CHARS:
        yield error(
            f"secret_file: {path} has {num_bytes} bytes",
            "the cluster does not start",
            f"`openssl rand -hex 32 > {path}`",
        )
    elif mode & 0o077:
        yield warning(
            f"secret_file: {path} has the mode {mode:04o}",
            "who can read it can read every prompt and write KV",
            f"`chmod 600 {path}`",
        )
    else:
        yield ok(f"secret_file: {path} has {num_bytes} bytes")


def _bind(host: str, port: int) -> int:
    """Return 0, or the number of the error; a port that is only closing counts as free, as for the
    gateway."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except OSError:
        return errno.EADDRNOTAVAIL
    with socket.socket(family, kind, protocol) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(address)
            probe.listen()
        except OSError as problem:
            return problem.errno or errno.EADDRNOTAVAIL
    return 0


# ----------------------------------------------------------------------------------------------
# The gateway's certificate: readable, with its key, valid, and for which names.

_SOON_DAYS = 14.0
_DAY_S = 86_400.0
_NOT_STARTED = "the gateways do not start"


def tls(context: CheckContext) -> Iterator[CheckResult]:
    gateway = context.config.gateway
    cert_file, key_file = gateway.tls_cert_file, gateway.tls_key_file
    if cert_file is None or key_file is None:
        if gateway.host not in LOOPBACK:
            yield note(
                f"the gateways speak no TLS, and listen on {gateway.host}",
                "prompts and answers can be read on the way, and whoever reaches the port is served",
                "gateway.tls_cert_file and tls_key_file, or a network that only clients reach",
            )
        return
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(cert_file, key_file)
        leaf = x509.load_pem_x509_certificates(cert_file.read_bytes())[0]
        mode = stat.S_IMODE(key_file.stat().st_mode)
    except (OSError, ValueError) as problem:  # ssl.SSLError is an OSError
        yield error(
            f"gateway.tls_cert_file {cert_file} with tls_key_file {key_file}: {problem}",
            _NOT_STARTED,
            "name a PEM chain, the gateway's own first, and the PEM key of that one, without a password",
        )
        return
    if mode & 0o007:
        yield warning(
            f"gateway.tls_key_file {key_file} has the mode {mode:04o}",
            "every user of this machine can read the key, and pass for the gateway",
            f"`chmod 600 {key_file}`",
        )
    yield from _validity(leaf, datetime.fromtimestamp(context.clock.wall(), UTC))


def _validity(leaf: x509.Certificate, now: datetime) -> Iterator[CheckResult]:
    begins, ends = leaf.not_valid_before_utc, leaf.not_valid_after_utc
    days = (ends - now).total_seconds() / _DAY_S
    seen = f"the gateway's certificate is for {_names(leaf)}, valid until {ends:%Y-%m-%d}"
    why, remedy = "clients refuse it", "renew the files: a running gateway reads them again"
    if days <= 0:
        yield error(f"{seen}: expired", why, remedy, days_left=round(days, 1))
    elif begins > now:
        yield error(f"{seen}: not valid before {begins:%Y-%m-%d %H:%M} UTC", why, "see to the clock, or wait")
    elif days < _SOON_DAYS:
        yield warning(f"{seen}, {days:.0f} days from now", f"then {why}", remedy, days_left=round(days, 1))
    else:
        yield ok(seen, days_left=round(days, 1))


def _names(leaf: x509.Certificate) -> str:
    try:
        names = leaf.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        return "no name (it has no subjectAltName, so that most clients refuse it)"
    return ", ".join(str(name.value) for name in names)


CHECKS = (
    Check(
        "ports",
        GROUP,
        "Ports of gateway, console and health free, or by whom they are taken; addresses",
        ports,
    ),
    Check("clock", GROUP, "Whether the clock is synchronized", clock),
    Check("ray-token", GROUP, "Ray's token: there, not empty, readable by its owner only", ray_token),
    Check("ray-cluster", GROUP, "Whether something answers at the Ray address to join", ray_cluster),
    Check("secret", GROUP, "The cluster's secret file", secret),
    Check("tls", GROUP, "The gateway's certificate and key: a pair, readable, not expired", tls),
)
