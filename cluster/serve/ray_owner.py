"""The owner of a Ray cluster, as the kernel of this host knows it. Names, command lines and files of
strangers count for nothing: any process may call itself a raylet, and each process that joins sends the Ray
token."""

from __future__ import annotations

import contextlib
import datetime
import ipaddress
import os
import pwd
import socket
import struct
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import psutil

_TABLES = (Path("/proc/net/tcp"), Path("/proc/net/tcp6"))
_LISTENING = "0A"
_GCS = "gcs_server"
_STORAGE = ("--redis_address=", "RAY_gcs_storage=")


class RayOwner(NamedTuple):
    """Represents the process that listens at the address of a Ray cluster on this host."""

    user_id: int
    # None: a process of another user, which this one cannot inspect.
    process: psutil.Process | None

    @property
    def is_trusted(self) -> bool:
        """Whether it is this user, or root."""
        return self.user_id in (os.geteuid(), 0)

    @property
    def text(self) -> str:
        """`process N, started by USER at TIME`, without the parts that cannot be known."""
        user = user_name(self.user_id)
        if self.process is None:
            return f"of {user}"
        at = datetime.datetime.fromtimestamp(self.process.create_time()).strftime("%Y-%m-%d %H:%M:%S")
        return f"process {self.process.pid}, started by {user} at {at}"


def user_name(user_id: int) -> str:
    """Return the name of a user, or the number where it has none."""
    try:
        return pwd.getpwuid(user_id).pw_name
    except KeyError:
        return f"user {user_id}"


def own_ray_clusters() -> dict[str, RayOwner]:
    """Return the Ray clusters whose GCS is a process of this user on this host, by host:port."""
    found = {}
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            if _is_own_gcs(process) and (address := _gcs_address(process)):
                host, port = split_address(address)
                owner = listener_at(
                    host, port
                )  # as this process would reach it: not in a container's network
                if owner is not None and owner.process == process:
                    found[address] = owner
    return found


def split_address(address: str) -> tuple[str, int]:
    """Return host and port of host:port; `ValueError` where it is none."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or "/" in host or int(port) > 65535:
        raise ValueError(f"{address!r} is not host:port")
    return host.removeprefix("[").removesuffix("]"), int(port)


def _is_own_gcs(process: psutil.Process) -> bool:
    """Return whether, by the kernel's account, this user has started it; only then its program and arguments
    count."""
    ids = process.uids()
    return {ids.real, ids.effective, ids.saved} == {os.geteuid()} and Path(process.exe()).name == _GCS


def _gcs_address(process: psutil.Process) -> str:
    arguments = dict(part.partition("=")[::2] for part in process.cmdline())
    ports = {
        connection.laddr.port
        for connection in process.net_connections("inet")
        if connection.status == psutil.CONN_LISTEN
    }
    if (named := arguments.get("--gcs_server_port", "")).isdecimal() and int(named):
        ports &= {int(named)}
    host = arguments.get("--node-ip-address", "")
    if len(ports) != 1 or not host:
        return ""
    return f"[{host}]:{ports.pop()}" if ":" in host else f"{host}:{ports.pop()}"


def listener_at(host: str, port: int) -> RayOwner | None:
    """Return the process that listens at host:port; None where that is another host, or nobody does."""
    for address in _addresses(host):
        found = _listener(address, port)
        if found is not None:
            user_id, inode = found
            return RayOwner(user_id, _holder(inode))
    return None


def _addresses(host: str) -> list[str]:
    """Return the addresses of a host, as far as they are of this one."""
    try:
        infos = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError:
        return []
    own = {address.address.partition("%")[0] for group in psutil.net_if_addrs().values() for address in group}
    named = list(dict.fromkeys(str(info[4][0]) for info in infos))
    return [address for address in named if address in own or ipaddress.ip_address(address).is_loopback]


def _listener(address: str, port: int) -> tuple[int, int] | None:
    """Return the user and the inode of the socket that the kernel would connect: the one of this address goes
    before those of all addresses."""
    wanted, everywhere = ipaddress.ip_address(address), None
    for bound, bound_port, user_id, inode in _listeners():
        if bound_port != port:
            continue
        if bound == wanted:
            return user_id, inode
        if bound.is_unspecified and (bound.version == 6 or wanted.version == 4):
            everywhere = everywhere or (user_id, inode)
    return everywhere


def _listeners() -> Iterator[tuple[ipaddress.IPv4Address | ipaddress.IPv6Address, int, int, int]]:
    """Yield address, port, user and inode of each listening socket of this host."""
    for table in _TABLES:
        with contextlib.suppress(OSError):
            for line in table.read_text().splitlines()[1:]:
                fields = line.split()
                if fields[3] == _LISTENING:
                    place, _, port = fields[1].partition(":")
                    yield _kernel_address(place), int(port, 16), int(fields[7]), int(fields[9])


def _kernel_address(text: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    """Read an address as /proc shows it: words of 32 bits in the order of this machine."""
    words = [int(text[at : at + 8], 16) for at in range(0, len(text), 8)]
    packed = struct.pack(f"{'<' if sys.byteorder == 'little' else '>'}{len(words)}I", *words)
    address = ipaddress.ip_address(packed)
    return getattr(address, "ipv4_mapped", None) or address


def _holder(inode: int) -> psutil.Process | None:
    """Return the process that holds the socket, where this user may look into it."""
    link = f"socket:[{inode}]"
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            folder = f"/proc/{process.pid}/fd"
            if any(os.readlink(f"{folder}/{name}") == link for name in os.listdir(folder)):
                return process
    return None


def is_persistent(gcs: psutil.Process) -> bool:
    """Whether this GCS of this user keeps its tables elsewhere, so that another one may take its place."""
    with contextlib.suppress(psutil.Error, OSError):
        settings = [*gcs.cmdline(), *(f"{name}={value}" for name, value in gcs.environ().items())]
        return any(text.startswith(_STORAGE) and not text.endswith(("=", "=memory")) for text in settings)
    return False
