"""This host: which processes can share memory with this one, and what its processors can do."""

from __future__ import annotations

import hashlib
import os
import re
import socket
from pathlib import Path

CPU_INFO = Path("/proc/cpuinfo")
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_NETWORK_NAMESPACE = Path("/proc/self/ns/net")


def host_id() -> str:
    """Equal exactly where unix sockets and memory can be shared: one boot, network namespace and user."""
    if not _BOOT_ID.exists():
        return hashlib.sha256(socket.gethostname().encode()).hexdigest()[:32]
    fields = (_BOOT_ID.read_text().strip(), os.stat(_NETWORK_NAMESPACE).st_ino, os.getuid())
    return hashlib.sha256(repr(fields).encode()).hexdigest()[:32]


def cpu_flags(cpu_info: Path | None = None) -> frozenset[str]:
    """The features that every processor has, as the kernel names them: "avx2", "amx_bf16"; on ARM "bf16".

    Empty where the kernel does not say. `cpu_info` None: `CPU_INFO`.
    """
    try:
        text = (cpu_info or CPU_INFO).read_text(errors="replace")
    except OSError:
        return frozenset()
    found = re.findall(r"^(?:flags|Features)\s*:(.*)$", text, re.M)
    return frozenset.intersection(*(frozenset(line.split()) for line in found)) if found else frozenset()
