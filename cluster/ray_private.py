"""Every use of Ray beyond its public API, each behind a function of ours."""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import ray._private.utils
from ray._private import services

_GIVE_UP_S = 5
"""How long processes of a Ray cluster of ours live without its GCS, which nobody would start again."""


@contextlib.contextmanager
def out_of_reach(on_start: Callable[[subprocess.Popen[bytes]], None]) -> Iterator[None]:
    """Start what `ray.init` starts in sessions of their own, and leave our handlers of signals alone.

    A signal to our process group then reaches us alone. Ray's processes still die with us, by
    PR_SET_PDEATHSIG; not all that those have started does. `on_start` is called with each process.
    """
    popen, set_handler = services.ConsolePopen, ray._private.utils.set_sigterm_handler

    def start(*args: Any, env: Mapping[str, str], **kwargs: Any) -> subprocess.Popen[bytes]:
        env = {**env, "RAY_gcs_rpc_server_reconnect_timeout_s": str(_GIVE_UP_S)}
        process: subprocess.Popen[bytes] = popen(*args, env=env, start_new_session=True, **kwargs)
        on_start(process)
        return process

    def set_no_handler(handler: Callable[..., object]) -> None:
        """Instead of Ray's, which ends the process in the midst of what it does."""

    services.ConsolePopen, ray._private.utils.set_sigterm_handler = start, set_no_handler
    try:
        yield
    finally:
        services.ConsolePopen, ray._private.utils.set_sigterm_handler = popen, set_handler
