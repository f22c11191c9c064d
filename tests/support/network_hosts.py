"""Hosts of a network of their own: network namespaces that share no memory, no loopback and no sockets.

    host a -- veth -- router -- veth -- host b

The router forwards between the hosts until it is told to `cut`, and then drops every packet without a word,
as a network does that is broken. Needs root, and the program `ip`, with which tests are marked.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager

from optional_programs import find_program

_PREFIX = 24


class Host:
    """A network namespace with one address."""

    def __init__(self, name: str, address: str) -> None:
        self.name = name
        self.address = address

    def command(self, *arguments: str) -> list[str]:
        """What runs this command on the host."""
        return [find_program("ip"), "netns", "exec", self.name, *arguments]


class HostNetwork:
    """Two hosts and the router between them."""

    def __init__(self, first: Host, second: Host, router: str) -> None:
        self.first, self.second = first, second
        self._router = router

    def cut(self) -> None:
        """Drop whatever one host sends to the other."""
        for host in (self.first, self.second):
            _ip("-n", self._router, "route", "add", "blackhole", f"{host.address}/32")

    def mend(self) -> None:
        for host in (self.first, self.second):
            _ip("-n", self._router, "route", "delete", "blackhole", f"{host.address}/32")


@contextmanager
def host_network() -> Iterator[HostNetwork]:
    """Make the network, and delete it; what runs on its hosts must have ended by then."""
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
