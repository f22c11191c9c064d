"""Ports and addresses of this machine, its clock, and the Ray cluster that is to be joined."""

from __future__ import annotations

import errno
import socket
import stat
from collections.abc import Iterator
from pathlib import Path

from cluster.doctor.checks import Check, CheckContext, Verdict, error, note, ok, warning

GROUP = "network and Ray"
LOOPBACK = ("127.0.0.1", "localhost", "::1")
_REACH_S = 5.0
MIN_TOKEN_CHARS = 16


def ports(case: CheckContext) -> Iterator[Verdict]:
    """The gateway's and the console's, and the addresses to listen on."""
    gateway = case.config.gateway
    for name in ("port", "console_port", "health_port"):
        if port := getattr(gateway, name):
            host = "0.0.0.0" if gateway.host == "auto" else gateway.host
            yield from _port(case, f"gateway.{name}", host, port)
    host = case.config.transfer.data_host
    if host != "auto" and _bind(host, 0) == errno.EADDRNOTAVAIL:
        yield error(
            f"transfer.data_host: {host} is not an address of this machine",
            "ranks here cannot listen for KV",
            "set it to auto, the node's own address",
        )


def _port(case: CheckContext, field: str, host: str, port: int) -> Iterator[Verdict]:
    problem = _bind(host, port)
    if problem == 0:
        yield ok(f"{field}: {host}:{port} is free", port=port)
    elif problem == errno.EADDRINUSE:
        users = [item for item in case.machine.listeners() if item.port == port]
        names = {f"{item.process} (process {item.process_id})" for item in users if item.process}
        user = ", ".join(sorted(names)) or "a process of another user"
        if case.is_running:
            yield ok(f"{field}: {host}:{port} is used by {user}, while the cluster runs", port=port)
            return
        yield error(
            f"{field}: {host}:{port} is taken by {user}",
            "nothing of ours can listen there; a gateway then does not start",
            f"end that process, or choose another {field} (0: a free one); if it is this very cluster, "
            "give its --address",
            port=port,
        )
    else:
        yield error(
            f"{field}: cannot listen on {host}:{port}: {_error_text(problem)}",
            "a gateway does not start on this machine",
            "set gateway.host to an address of this machine, or to auto",
            port=port,
        )


def clock(case: CheckContext) -> Iterator[Verdict]:
    """Whether something keeps this machine's clock right. Live, the clocks of the hosts are compared."""
    kernel = case.machine.kernel_clock()
    if kernel is None:
        return
    if kernel.is_synchronized:
        yield ok(f"the clock is synchronized, within {1e3 * kernel.max_error_s:.0f} ms")
        return
    seen = "nothing keeps the clock of this machine right (adjtimex says: not synchronized)"
    why = "no token depends on it; but logs, traces and metrics of different hosts do not fit together"
    remedy = "run chrony or systemd-timesyncd; in a container that is the host's"
    say = note if case.config.transfer.data_host in LOOPBACK else warning
    yield say(seen, why, remedy)


def ray_token(case: CheckContext) -> Iterator[Verdict]:
    """Ray's token authentication: whoever has the token runs code on every node."""
    mode = case.environment.get("RAY_AUTH_MODE", "token").lower()
    if mode != "token":
        yield warning(
            f"RAY_AUTH_MODE is {mode}",
            "whoever reaches a port of Ray runs code on every node and scales the pools",
            "unset it (tandem sets it to token), or let nothing but the cluster reach those ports",
        )
        return
    if "RAY_AUTH_TOKEN" in case.environment:
        yield from _token_text(case.environment["RAY_AUTH_TOKEN"], "RAY_AUTH_TOKEN", "the environment")
        return
    named = case.environment.get("RAY_AUTH_TOKEN_PATH", "")
    path = Path(named) if named else case.machine.home / ".ray" / "auth_token"
    if path.is_file():
        yield from _token_file(path)
    elif named or case.ray_address not in ("auto", "local"):
        yield error(
            f"there is no Ray token: {path} is missing",
            "a Ray cluster that is running already refuses a client without its token",
            "copy the token of the cluster there (mode 0600), or set RAY_AUTH_TOKEN",
        )
    else:
        yield note(f"there is no Ray token yet; Ray writes one to {path} when it starts here")


def _token_file(path: Path) -> Iterator[Verdict]:
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


def _token_text(text: str, place: str, where: str) -> Iterator[Verdict]:
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


def ray_cluster(case: CheckContext) -> Iterator[Verdict]:
    """Whether something answers at the address to join; nothing is joined."""
    address = case.ray_address
    if address in ("auto", "local"):
        return
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal():
        remedy = "give auto, local or host:port"
        yield error(f"the Ray address {address!r} is none", "there is nothing to join", remedy)
        return
    try:
        started_at = case.clock.now()
        socket.create_connection((host, int(port)), timeout=_REACH_S).close()
    except (OSError, OverflowError) as problem:
        yield error(
            f"no Ray cluster answers at {address}: {problem}",
            "there is nothing to join",
            "`ray start --head` there, open the port, or correct --ray-address",
        )
        return
    reached_ms = 1e3 * (case.clock.now() - started_at)
    yield ok(
        f"something listens at {address} ({reached_ms:.1f} ms); whether it is Ray shows when it is joined"
    )


def secret(case: CheckContext) -> Iterator[Verdict]:
    path = case.config.secret_file
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
)


def _bind(host: str, port: int) -> int:
    """0, or the number of the error; a port that is only closing counts as free, as for the gateway."""
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


def _error_text(number: int) -> str:
    return {errno.EADDRNOTAVAIL: "no such address here", errno.EACCES: "not allowed to this user"}.get(
        number, errno.errorcode.get(number, str(number))
    )
