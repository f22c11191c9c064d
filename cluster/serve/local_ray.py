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

from cluster.serve import ray_watchdog
from cluster.serve.ray_private import out_of_reach

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
    """Starts Ray's processes and connects to them. They run in sessions of their own, so that a signal to
    this process group (Ctrl-C, `timeout`, a shell's `kill %1`) does not reach them: they are ended here,
    after the streams.

    They do not outlive this process, however it ends: `ray_watchdog` kills them.
    """

    def __init__(self, **options: Any) -> None:
        """`options` are those of `ray.init`."""
        self._started: list[subprocess.Popen[bytes]] = []
        self._watchdog = subprocess.Popen(
            [sys.executable, "-I", "-S", str(Path(ray_watchdog.__file__))],
            stdin=subprocess.PIPE,
            start_new_session=True,
        )
        try:
            with own_signals(), out_of_reach(self._on_start):
                context = ray.init(
                    address="local",
                    include_dashboard=True,
                    object_store_memory=_OBJECT_STORE_BYTES,
                    **options,
                )
        finally:
            if not ray.is_initialized():
                self._watchdog.communicate()  # which ends what was started
        self.dashboard_url: str = context.dashboard_url or ""
        self._vital = [process for process in self._started if _program(process) in _VITAL]

    @property
    def has_ended(self) -> bool:
        """Whether it was ended from outside: the GCS or the raylet is gone."""
        return any(process.poll() is not None for process in self._vital)

    def shut_down(self) -> None:
        """Disconnect and end all its processes."""
        family = self._family()
        ray.shutdown()
        _, alive = psutil.wait_procs(family, timeout=_END_S)
        _kill(alive)
        self._end_watchdog()

    def kill(self) -> None:
        """Kill all its processes at once."""
        _kill(self._family())
        self._end_watchdog()

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


def _program(process: subprocess.Popen[bytes]) -> str:
    command = process.args
    return Path(command[0]).name if isinstance(command, list) else ""


def _kill(processes: list[psutil.Process]) -> None:
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(processes, timeout=_END_S)
