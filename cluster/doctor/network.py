"""Ports, addresses and clock of this machine, and the Ray cluster to join."""

from __future__ import annotations

import errno
import socket
import stat
from collections.abc import Iterator
from pathlib import Path

from cluster.config import LOOPBACK
from cluster.doctor.check_context import Check, CheckContext
from cluster.doctor.checks import CheckResult, error, note, ok, warning
from cluster.serve.serve_runs import ServeRun, living_runs

GROUP = "network and Ray"
_REACH_S = 5.0
MIN_TOKEN_CHARS = 16
_ERRORS = {errno.EADDRNOTAVAIL: "no such address here", errno.EACCES: "not allowed to this user"}


def ports(context: CheckContext) -> Iterator[CheckResult]:
    """Check the ports of gateway and console, and the addresses to listen on."""
    gateway = context.config.gateway
    for name, port in gateway.listed_ports.items():
        if port:
            host = "0.0.0.0" if gateway.host == "auto" else gateway.host
            yield from _port(context, name, host, port)
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
        own = [run for run in living_runs() if any(it.endswith(f":{port}") for it in _addresses(run))]
        if own:
            yield error(
                f"{field}: {host}:{port} is taken by your `tandem serve` of {own[0].text}",
                "nothing else can listen there",
                f"`tandem status --admin-address {own[0].admins[0]}` shows it, Ctrl-C or SIGINT to process "
                f"{own[0].process_id} stops it; for another one beside it choose another {field} (0: a free "
                "one)",
                port=port,
            )
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


def _addresses(run: ServeRun) -> tuple[str, ...]:
    return (*run.gateways, *run.admins)


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
    """Check Ray's token authentication: anyone who has the token runs code on every node."""
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
    if not named and context.ray_address == "local":
        yield ok("`tandem serve` draws the token of its Ray, in a file that this user alone can read")
        return
    path = Path(named) if named else context.machine.home / ".ray" / "auth_token"
    if path.is_file():
        yield from _token_file(path)
    elif named or context.ray_address != "auto":
        yield error(
            f"there is no Ray token: {path} is missing",
            "a Ray cluster that is running already refuses a client without its token",
            "copy the token of the cluster there (mode 0600), or set RAY_AUTH_TOKEN",
        )
    else:
        yield note(
            f"there is no Ray token in {path}: a Ray cluster that `ray start` runs here has another one"
        )


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


CHECKS = (
    Check(
        "ports",
        GROUP,
        "Whether the ports of gateway, console and health are free, and their addresses exist",
        ports,
    ),
    Check("clock", GROUP, "Whether the clock is synchronized", clock),
    Check("ray-token", GROUP, "Whether Ray's token is there, and only its owner can read it", ray_token),
    Check("ray-cluster", GROUP, "Whether something answers at the Ray address to join", ray_cluster),
)
