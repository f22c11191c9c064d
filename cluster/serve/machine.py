"""The machine that checks look at: files below a root, commands, file systems, listening sockets.

Tests pass a prepared root and scripted commands.
"""

from __future__ import annotations

import ctypes
import re
import shutil
import struct
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import psutil

from kvtransfer.common.clock import SystemClock
from kvtransfer.common.host import cpu_flags

_COMMAND_S = 10.0
# The size of `struct timex`, rounded up; the offset of its `maxerror`, on 64 bits; the return value for an
# unsynchronized clock.
_TIMEX_BYTES, _MAX_ERROR_OFFSET, _TIME_ERROR = 256, 24, 5
# Without a limit, cgroups of version 1 report about 2^63.
_NO_LIMIT_BYTES = 1 << 60
_NETWORK_TYPES = ("nfs", "nfs4", "cifs", "smb3", "ceph", "glusterfs", "9p", "virtiofs", "lustre", "fuse.s3fs")
_MEMORY_TYPES = ("tmpfs", "ramfs")


def run_command(command: Sequence[str]) -> str | None:
    """Return the output of the command; None where it is not installed, fails or hangs."""
    if shutil.which(command[0]) is None:
        return None
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_COMMAND_S, check=False)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout if done.returncode == 0 else None


def measure_product_rates(dtypes: Sequence[str]) -> dict[str, float]:
    """Measure the operations a second of a linear layer on this machine, by dtype."""
    import torch  # here: no other check needs it

    from workers.rank.probe import linear_flop_s
    from workers.rank.runner_settings import read_dtype

    return {name: linear_flop_s(torch.device("cpu"), read_dtype(name), SystemClock()) for name in dtypes}


class Space(NamedTuple):
    """Represents the size of a file system."""

    total_bytes: int
    free_bytes: int


class Mount(NamedTuple):
    """Represents the file system that a path is on. `device` is its number in sysfs ("8:1")."""

    point: str
    kind: str
    device: str

    @property
    def is_network(self) -> bool:
        return self.kind in _NETWORK_TYPES or self.kind.startswith("fuse.")

    @property
    def is_memory(self) -> bool:
        return self.kind in _MEMORY_TYPES


class ListeningSocket(NamedTuple):
    """Represents a listening TCP socket; `process` is "" where this user may not know it."""

    host: str
    port: int
    process: str
    process_id: int


class KernelClock(NamedTuple):
    """Represents the kernel's view of the clock's synchronization."""

    is_synchronized: bool
    max_error_s: float


def read_kernel_clock() -> KernelClock | None:
    """Read the clock's state by adjtimex, which changes nothing here; None where there is no such call."""
    timex = ctypes.create_string_buffer(_TIMEX_BYTES)
    call = getattr(ctypes.CDLL(None), "adjtimex", None)
    state = -1 if call is None else int(call(timex))
    if state < 0:
        return None
    (max_error_us,) = struct.unpack_from("@l", timex, _MAX_ERROR_OFFSET)
    return KernelClock(state != _TIME_ERROR, max_error_us * 1e-6)


@dataclass(frozen=True)
class Machine:
    """Represents the machine. `root` stands for `/`: below it lie `proc`, `sys` and `dev`."""

    root: Path = Path("/")
    run: Callable[[Sequence[str]], str | None] = run_command
    find_program: Callable[[str], str | None] = shutil.which
    home: Path = field(default_factory=Path.home)
    kernel_clock: Callable[[], KernelClock | None] = read_kernel_clock
    product_rates: Callable[[Sequence[str]], dict[str, float]] = measure_product_rates

    @property
    def proc(self) -> Path:
        return self.root / "proc"

    @property
    def sys(self) -> Path:
        return self.root / "sys"

    # ------------------------------------------------------------------------------------- limits

    def limit(self, name: str) -> tuple[float, float] | None:
        """Return the soft and hard limit of this process, such as "Max open files"; infinity where there is
        none."""
        found = re.search(rf"^{re.escape(name)}\s+(\S+)\s+(\S+)", read(self.proc / "self/limits"), re.M)
        return (_limit(found[1]), _limit(found[2])) if found else None

    # ------------------------------------------------------------------------------------- memory

    def memory(self, name: str) -> int | None:
        """Return an entry of /proc/meminfo in bytes (counts of huge pages in pages)."""
        found = re.search(rf"^{re.escape(name)}:\s+(\d+)( kB)?", read(self.proc / "meminfo"), re.M)
        return None if found is None else int(found[1]) * (1024 if found[2] else 1)

    def memory_limit(self) -> tuple[int, int] | None:
        """Return limit and use, in bytes, of the control group around this process that leaves least; None:
        no limit."""
        groups = self.sys / "fs/cgroup"
        known = [(groups / path, "memory.max", "memory.current") for path in self._group_paths("")]
        known += [
            (groups / "memory" / path, "memory.limit_in_bytes", "memory.usage_in_bytes")
            for path in self._group_paths("memory")
        ]
        found = []
        for folder, limit_name, used_name in known:
            limit = whole_number(folder / limit_name)
            if limit is not None and limit < _NO_LIMIT_BYTES:
                used = (whole_number(folder / used_name) or 0) - _reclaimable(folder / "memory.stat")
                found.append((limit, max(used, 0)))
        return min(found, key=lambda group: group[0] - group[1], default=None)

    def group_limit(self, controller: str, name: str) -> float:
        """Return the least of this setting over the control groups around this process; infinity: none."""
        groups = self.sys / "fs/cgroup"
        files = [groups / path / name for path in self._group_paths("")]
        files += [groups / controller / path / name for path in self._group_paths(controller)]
        found = [value for file in files if (value := whole_number(file)) is not None]
        return min(found, default=float("inf"))

    def _group_paths(self, controller: str) -> list[str]:
        """Return the groups of this process, innermost first, up to the root that it sees."""
        for line in read(self.proc / "self/cgroup").splitlines():
            _, controllers, path = [*line.split(":", 2), "", ""][:3]
            if controller in controllers.split(","):
                parts = [part for part in path.split("/") if part not in ("", "..")]
                return ["/".join(parts[:length]) for length in range(len(parts), -1, -1)]
        return [""]

    # ----------------------------------------------------------------------------------- processors

    def cpus(self) -> float:
        """Return the number of CPUs that this process may use, within its control group's quota; 0:
        unknown."""
        allowed = re.search(r"^Cpus_allowed_list:\s+(\S+)", read(self.proc / "self/status"), re.M)
        num = float(len(numbers(allowed[1]))) if allowed else 0.0
        for path in self._group_paths(""):
            quota, _, period = read(self.sys / "fs/cgroup" / path / "cpu.max").strip().partition(" ")
            if quota.isdecimal() and period.isdecimal() and int(period) > 0:
                num = min(num or float("inf"), int(quota) / int(period))
        return num

    def cpu_flags(self) -> frozenset[str]:
        """Return the flags as `kvtransfer.common.host.cpu_flags` reads them."""
        return cpu_flags(self.proc / "cpuinfo")

    # ---------------------------------------------------------------------------------------- GPUs

    def num_gpus(self, environment: Mapping[str, str]) -> int | None:
        """Return the number of GPUs that a Ray started here finds: those that nvidia-smi lists, within
        `CUDA_VISIBLE_DEVICES`; None where nvidia-smi does not report any."""
        listed = self.run(["nvidia-smi", "--query-gpu=index", "--format=csv,noheader"])
        if not listed or not listed.strip():
            return None
        num_listed = len(listed.split())
        visible = environment.get("CUDA_VISIBLE_DEVICES")
        if visible is None:
            return num_listed
        return min(num_listed, sum(bool(name.strip()) for name in visible.split(",")))

    # ---------------------------------------------------------------------------------- file systems

    def space(self, path: Path) -> Space | None:
        """Return the size of the file system that holds the path, or the nearest folder above that exists."""
        try:
            usage = shutil.disk_usage(nearest_folder(path))
        except OSError:
            return None
        return Space(usage.total, usage.free)

    def mount(self, path: Path) -> Mount | None:
        """Return where the (absolute) path is mounted; None when the kernel does not report it."""
        best: Mount | None = None
        for line in read(self.proc / "self/mountinfo").splitlines():
            before, _, after = line.partition(" - ")
            fields, kind = before.split(), after.split(" ", 1)[0]
            if len(fields) < 5 or not kind:
                continue
            point = fields[4].replace("\\040", " ")
            if Path(path).is_relative_to(point) and (best is None or len(point) >= len(best.point)):
                best = Mount(point, kind, fields[2])
        return best

    def is_rotational(self, mount: Mount) -> bool | None:
        """Return whether its disk rotates; None when sysfs does not report it."""
        device = self.sys / "dev/block" / mount.device
        for folder in (device, device.resolve().parent):  # a partition's disk is the folder above it
            found = whole_number(folder / "queue/rotational")
            if found is not None:
                return bool(found)
        return None

    # --------------------------------------------------------------------------------------- sockets

    def listeners(self) -> list[ListeningSocket]:
        """Return the listening TCP sockets; those of other users have no process name."""
        try:
            connections = psutil.net_connections(kind="tcp")
        except psutil.Error:
            return []
        return [
            ListeningSocket(item.laddr.ip, item.laddr.port, _process_name(item.pid), item.pid or 0)
            for item in connections
            if item.status == psutil.CONN_LISTEN and item.laddr
        ]


def read(path: Path) -> str:
    """Return the file's text; "" where it cannot be read."""
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""


def whole_number(path: Path) -> int | None:
    """Return the file's number; None where the file is missing or holds something else, such as "max"."""
    text = read(path).strip()
    return int(text) if re.fullmatch(r"-?\d+", text) else None


def nearest_folder(path: Path) -> Path:
    """Return the path, or the nearest folder above it that exists."""
    while not path.exists() and path != path.parent:
        path = path.parent
    return path


def numbers(ranges: str) -> list[int]:
    """Parse `0-2,5` as [0, 1, 2, 5]."""
    found: list[int] = []
    for part in ranges.strip().split(","):
        first, _, last = part.partition("-")
        if first.isdecimal():
            found.extend(range(int(first), int(last if last.isdecimal() else first) + 1))
    return found


def _limit(text: str) -> float:
    return float(text) if text.isdecimal() else float("inf")


def _reclaimable(stat: Path) -> int:
    """Return the bytes of file pages that the kernel reclaims first, although they count as used."""
    found = re.search(r"^(?:total_)?inactive_file (\d+)$", read(stat), re.M)
    return int(found[1]) if found else 0


def _process_name(process_id: int | None) -> str:
    if process_id is None:
        return ""
    try:
        return psutil.Process(process_id).name()
    except psutil.Error:
        return ""
