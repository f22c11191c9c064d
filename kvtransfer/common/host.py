"""This host: which processes can share memory with this one, and what its processors can do."""

from __future__ import annotations

import hashlib
import os
import re
import socket
import stat
import tempfile
from pathlib import Path

CPU_INFO = Path("/proc/cpuinfo")
CPU_CACHES = Path("/sys/devices/system/cpu/cpu0/cache")
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_NETWORK_NAMESPACE = Path("/proc/self/ns/net")


def host_id() -> str:
    """Return an id that is equal exactly where unix sockets and memory can be shared: for one boot, network
    namespace and user."""
    if not _BOOT_ID.exists():
        return hashlib.sha256(socket.gethostname().encode()).hexdigest()[:32]
    fields = (_BOOT_ID.read_text().strip(), os.stat(_NETWORK_NAMESPACE).st_ino, os.getuid())
    return hashlib.sha256(repr(fields).encode()).hexdigest()[:32]


def cpu_flags(cpu_info: Path | None = None) -> frozenset[str]:
    """Return the features that every processor has, as the kernel names them: "avx2", "amx_bf16"; on ARM
    "bf16".

    The set is empty where the kernel names none. `cpu_info` None: `CPU_INFO`.
    """
    try:
        text = (cpu_info or CPU_INFO).read_text(errors="replace")
    except OSError:
        return frozenset()
    found = re.findall(r"^(?:flags|Features)\s*:(.*)$", text, re.M)
    return frozenset.intersection(*(frozenset(line.split()) for line in found)) if found else frozenset()


def cpu_name(cpu_info: Path | None = None) -> str:
    """Return the processors' model name, "unknown" where the kernel gives none. `cpu_info` None:
    `CPU_INFO`."""
    try:
        text = (cpu_info or CPU_INFO).read_text(errors="replace")
    except OSError:
        return "unknown"
    found = re.search(r"^model name\s*:\s*(.+)$", text, re.M)
    return found[1].strip() if found else "unknown"


def cache_bytes(folder: Path | None = None) -> int:
    """Return the bytes of the largest cache of the first processor, which it may share with others; 0 where
    the kernel gives none. `folder` None: `CPU_CACHES`."""
    units = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
    sizes = [path.read_text().strip() for path in (folder or CPU_CACHES).glob("index*/size")]
    found = [re.fullmatch(r"(\d+)([KMG]?)", size) for size in sizes]
    return max((int(size[1]) * units.get(size[2], 1) for size in found if size), default=0)


def private_folder(name: str) -> Path:
    """Return the folder `<name>-<user id>` below the temporary folder, which no other user can have written
    to; create it if it is missing.

    Raises `OSError` when it cannot be made, or is not a folder of this user's that others cannot write to.
    """
    folder = Path(tempfile.gettempdir()) / f"{name}-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise OSError(f"{folder} is not a folder that only this user can write to; remove it")
    return folder
