"""Ray nodes started by hand, as `ray start` does it: on this host, or on hosts of a network of their own.

Such hosts are network namespaces that share no memory, no loopback and no sockets:

    host a -- veth -- router -- veth -- host b

The router forwards between the hosts until a test calls `cut`, and then drops every packet silently, as a
broken network does. This needs root, and the program `ip`, with which tests are marked.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from child_processes import kill_family
from optional_programs import find_program
from serving import environment, free_port


class RayNodes:
    """Ray processes with a folder of their own, apart from whatever else runs here."""

    def __init__(self, folder: Path, head: Host | None = None) -> None:
        """`folder` must have a short name: sockets lie below it. `head` None: this host's loopback."""
        self._folder = folder
        self._processes: list[subprocess.Popen[bytes]] = []
        token = folder / "token"
        token.write_text("token-of-nodes-started-by-hand-0123456789")
        token.chmod(0o600)
        # The environment variables of each process that joins them.
        self.variables = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(token)}
        self.address = f"{head.address if head else '127.0.0.1'}:{free_port()}"

    def start(
        self, *, is_head: bool, host: Host | None = None, resources: Mapping[str, float] | None = None
    ) -> None:
        """Start a node with resources for one replica; the head has those for the gateway, too."""
        place = (
            ("--head", "--port", self.address.rpartition(":")[2]) if is_head else ("--address", self.address)
        )
        command = [sys.executable, "-m", "ray.scripts.scripts", "start", *place, "--block"]
        command += ["--node-ip-address", host.address if host else "127.0.0.1", "--num-cpus", "2"]
        command += ["--object-store-memory", "100000000", "--resources", json.dumps(dict(resources or {}))]
        command += ["--include-dashboard", "false"] if is_head else []
        with (self._folder / f"ray-{len(self._processes)}.log").open("wb") as log:
            self._processes.append(
                subprocess.Popen(
                    host.command(*command) if host else command,
                    env={**environment(), **self.variables, "RAY_TMPDIR": str(self._folder)},
                    stdout=log,
                    stderr=subprocess.STDOUT,
                )
            )

    def close(self) -> None:
        """Kill them: an orderly end is drained for half a minute."""
        for process in reversed(self._processes):
            kill_family(process)


_PREFIX = 24


class Host:
    """A network namespace with one address."""

    def __init__(self, name: str, address: str) -> None:
        self.name = name
        self.address = address

    def command(self, *arguments: str) -> list[str]:
        """Return the command line that runs this command on the host."""
        return [find_program("ip"), "netns", "exec", self.name, *arguments]


class HostNetwork:
    """Two hosts and the router between them."""

    def __init__(self, first: Host, second: Host, router: str) -> None:
        self.first, self.second = first, second
        self._router = router

    def cut(self) -> None:
        """Drop all packets that one host sends to the other."""
        for host in (self.first, self.second):
            _ip("-n", self._router, "route", "add", "blackhole", f"{host.address}/32")

    def mend(self) -> None:
        for host in (self.first, self.second):
            _ip("-n", self._router, "route", "delete", "blackhole", f"{host.address}/32")


@contextmanager
def host_network() -> Iterator[HostNetwork]:
    """Make the network, and delete it; all processes on its hosts must have ended by then."""
    names = [f"tandem-{part}-{os.getpid()}" for part in ("a", "b", "router")]
    made = []
    try:
        for name in names:
            _ip("netns", "add", name)
            made.append(name)
            _ip("-n", name, "link", "set", "lo", "up")
        *hosts, router = names
        _ip("netns", "exec", router, "sh", "-c", "echo 1 > /proc/sys/net/ipv4/ip_forward")
        for number, name in enumerate(hosts, 1):
            inner = f"eth{number}"
            _ip("-n", name, "link", "add", "eth0", "type", "veth", "peer", "name", inner, "netns", router)
            _ip("-n", name, "address", "add", f"10.213.{number}.2/{_PREFIX}", "dev", "eth0")
            _ip("-n", router, "address", "add", f"10.213.{number}.1/{_PREFIX}", "dev", inner)
            _ip("-n", name, "link", "set", "eth0", "up")
            _ip("-n", router, "link", "set", inner, "up")
            _ip("-n", name, "route", "add", "default", "via", f"10.213.{number}.1")
        first, second = (Host(name, f"10.213.{number}.2") for number, name in enumerate(hosts, 1))
        yield HostNetwork(first, second, router)
    finally:
        for name in made:
            _ip("netns", "delete", name)


def _ip(*arguments: str) -> None:
    subprocess.run([find_program("ip"), *arguments], check=True, capture_output=True, text=True)
