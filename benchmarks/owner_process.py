"""A node's store process, for benchmarks."""

from __future__ import annotations

import secrets
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from kvtransfer.codec import framed
from kvtransfer.config import StoreSettings
from kvtransfer.rpc.trust import TrustFiles
from kvtransfer.store.server.store_process import SPEC_CODEC, StoreServerSpec


def owner_settings(**changes: Any) -> StoreSettings:
    """Return the settings of a node by itself: no index, and a socket name of its own."""
    fields: dict[str, Any] = {
        "node_id": "node",
        "epoch": 1,
        "name": f"tandem-bench-{secrets.token_hex(8)}",
        "host": "127.0.0.1",
        "dram_bytes": 1 << 30,
    }
    return StoreSettings(**{**fields, **changes})


@contextmanager
def running_owner(settings: StoreSettings, trust: TrustFiles) -> Iterator[str]:
    """Run an owner and yield its address; at the end the owner flushes and leaves."""
    process = subprocess.Popen(
        [sys.executable, "-m", "kvtransfer.store.server.store_process"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    frame = SPEC_CODEC.encode(StoreServerSpec(settings, trust))
    process.stdin.write(framed(frame))
    process.stdin.flush()
    try:
        yield process.stdout.readline().decode().strip()
    finally:
        process.stdin.close()
        process.wait()
        process.stdout.close()
