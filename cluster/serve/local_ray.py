"""A Ray cluster of one host that lives and dies with this process."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import ray

from cluster.errors import StartError
from cluster.serve import ray_watchdog
from cluster.serve.private_folder import RAY_FOLDER, PrivateFolder
from cluster.serve.ray_private import longest_socket, out_of_reach, with_own_ports
from cluster.serve.ray_token import using_token_file

_MAX_SOCKET_BYTES = 107
_VITAL = ("gcs_server", "raylet")
_OBJECT_STORE_BYTES = 128 << 20
_END_S = 5.0


@contextlib.contextmanager
def own_signals() -> Iterator[None]:
    """Restore the handlers of SIGINT and SIGTERM afterwards; outside the main thread, do nothing."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    kept = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in kept.items():
            signal.signal(number, handler)


class LocalRay:
    """Starts Ray's processes, with their session in a private folder, and connects to them.
    They run in sessions of their own, so that a signal to
    this process group (Ctrl-C, `timeout`, a shell's `kill %1`) does not reach them: they are ended here,
    after the streams.

    They do not outlive this process, however it ends: `ray_watchdog` kills them.
    """

    is_own = True

    def __init__(
        self, folder: PrivateFolder, *, loopback: bool, token_file: Path | None, **options: Any
    ) -> None:
        """`loopback`: nothing of it is reached from other hosts. `token_file` None: Ray finds its token by
        itself, or uses none. `options` are those of `ray.init`. `StartError` where the folder's path is too
        long for unix sockets."""
        temp_folder = folder.path / RAY_FOLDER
        check_length(temp_folder)
        self._started: list[subprocess.Popen[bytes]] = []
        self._closing = contextlib.ExitStack()
        self.token_file = token_file
        if token_file is not None:
            self._closing.enter_context(using_token_file(token_file))
        if loopback:
            options["_node_ip_address"] = "127.0.0.1"
        self._watchdog = subprocess.Popen(
            [sys.executable, "-I", "-S", str(Path(ray_watchdog.__file__))],
            stdin=subprocess.PIPE,
            start_new_session=True,
        )
        try:
            with own_signals(), out_of_reach(self._on_start), with_own_ports(loopback=loopback):
                context = ray.init(
                    address="local",
                    include_dashboard=True,
                    _temp_dir=str(temp_folder),
                    object_store_memory=_OBJECT_STORE_BYTES,
                    **options,
                )
        finally:
            if not ray.is_initialized():
                self._watchdog.communicate()  # which ends what was started
                self._closing.close()
        self.dashboard_url: str = context.dashboard_url or ""
        self._vital = [process for process in self._started if _program(process) in _VITAL]

    def why_ended(self) -> str:
        """Return why it has ended, "" while it lives: the GCS or the raylet is gone."""
        if all(process.poll() is None for process in self._vital):
            return ""
        return (
            "Ray's processes were ended from outside, and the streams with them;  "
            "send signals to `tandem serve` alone (systemd: KillMode=mixed)"
        )

    def shut_down(self) -> None:
        """Disconnect and end all its processes."""
        family = self._family()
        ray.shutdown()
        _, alive = psutil.wait_procs(family, timeout=_END_S)
        _kill(alive)
        self._end_watchdog()
        self._closing.close()

    def kill(self) -> None:
        """Kill all its processes at once."""
        _kill(self._family())
        self._end_watchdog()
        self._closing.close()

    def _on_start(self, process: subprocess.Popen[bytes]) -> None:
        self._started.append(process)
        self._send_to_watchdog(str(process.pid))

    def _send_to_watchdog(self, line: str) -> None:
        assert self._watchdog.stdin is not None
        with contextlib.suppress(BrokenPipeError, ValueError):  # it was killed, or has ended
            self._watchdog.stdin.write(f"{line}\n".encode())
            self._watchdog.stdin.flush()

    def _end_watchdog(self) -> None:
        assert self._watchdog.stdin is not None
        self._send_to_watchdog(ray_watchdog.ENDED)
        with contextlib.suppress(BrokenPipeError):
            self._watchdog.stdin.close()
        self._watchdog.wait()

    def _family(self) -> list[psutil.Process]:
        """Return the processes in its sessions, also those that have lost their parent."""
        found, sessions = [], {process.pid for process in self._started}
        for process in psutil.process_iter():
            with contextlib.suppress(ProcessLookupError, PermissionError):
                if os.getsid(process.pid) in sessions:
                    found.append(process)
        return found


def check_length(folder: Path) -> None:
    """Raise `StartError` where the unix sockets that Ray makes below the folder would have too long a path
    for the kernel."""
    over = len(os.fsencode(folder)) + longest_socket() - _MAX_SOCKET_BYTES
    if over > 0:
        raise StartError(
            f"{folder}: Ray's unix sockets below it would have paths of more than {_MAX_SOCKET_BYTES} bytes; "
            f"set TMPDIR to a folder whose path is at least {over} bytes shorter"
        )


def _program(process: subprocess.Popen[bytes]) -> str:
    command = process.args
    return Path(command[0]).name if isinstance(command, list) else ""


def _kill(processes: list[psutil.Process]) -> None:
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(processes, timeout=_END_S)
