"""The folder of the NVMe tier: free space, direct I/O, and the kind of disk."""

from __future__ import annotations

import errno
import mmap
import os
import secrets
import tempfile
from collections.abc import Iterator
from pathlib import Path

from cluster.doctor.check_context import Check, CheckContext
from cluster.doctor.checks import CheckResult, Figures, error, note, ok, warning
from cluster.serve.machine import nearest_folder
from cluster.serve.resource_needs import gb

GROUP = "disk"
_PAGE_BYTES = 4096
_LOCAL = "name a folder on a local NVMe disk in store.nvme_path"


def free_space(context: CheckContext) -> Iterator[CheckResult]:
    """Compare the free space with the space that the store may still take."""
    folder = context.config.store.nvme_path
    if folder is None:
        return
    space = context.machine.space(folder)
    if space is None:
        yield error(f"{folder} cannot be looked at", "the NVMe tier stays empty", _LOCAL)
        return
    taken, wanted = _taken_bytes(folder), round(context.config.store.nvme_gb * 1e9)
    missing = wanted - taken - space.free_bytes
    seen = f"{gb(space.free_bytes)} free at {folder}; store.nvme_gb asks for {gb(wanted)}"
    seen += f", {gb(taken)} of it there already" if taken else ""
    figures: Figures = {"free_bytes": space.free_bytes, "wanted_bytes": wanted, "taken_bytes": taken}
    if missing > 0:
        remedy = f"free {gb(missing)}, or lower store.nvme_gb to {(wanted - missing) / 1e9:.1f}"
        yield error(
            seen, "the disk runs full, and the tier stops taking records while it is", remedy, **figures
        )
    else:
        yield ok(seen, **figures)


def direct_io(context: CheckContext) -> Iterator[CheckResult]:
    """Write and read one page with O_DIRECT, as the store does, and remove the file."""
    folder = context.config.store.nvme_path
    if folder is None:
        return
    try:
        with tempfile.TemporaryDirectory(prefix=".tandem-doctor-", dir=nearest_folder(folder)) as scratch:
            is_equal = _round_trip(Path(scratch) / "page")
    except OSError as problem:
        if problem.errno == errno.EINVAL:
            yield warning(
                f"the file system of {folder} refuses O_DIRECT",
                "the store then reads and writes through the page cache, which takes memory twice",
                f"{_LOCAL} (ext4 or xfs)",
            )
        else:
            yield error(
                f"nothing can be written to {folder}: {problem.strerror}",
                "the NVMe tier stays empty",
                "let this user write there, or name another folder in store.nvme_path",
            )
        return
    if is_equal:
        yield ok(f"a page went to {folder} and back with O_DIRECT")
    else:
        yield error(
            f"a page read from {folder} differs from what was written",
            "records would fail their checksum and be computed again",
            "replace that disk, or name another folder in store.nvme_path",
        )


def kind(context: CheckContext) -> Iterator[CheckResult]:
    folder = context.config.store.nvme_path
    mount = None if folder is None else context.machine.mount(folder)
    if folder is None or mount is None:
        return
    seen = f"{folder} is on {mount.kind} (mounted at {mount.point})"
    if mount.is_memory:
        yield warning(
            f"{seen}: memory, not a disk",
            "the tier takes host memory a second time, and is gone after a restart",
            f"{_LOCAL}, or raise store.dram_gb instead",
        )
    elif mount.is_network:
        yield warning(
            f"{seen}: a network file system",
            "loading a block then takes longer than computing it, and a hanging server holds up reads",
            f"{_LOCAL}; nodes share what they hold over the index, not over a file system",
        )
    elif context.machine.is_rotational(mount):
        yield warning(
            f"{seen}: a turning disk",
            "a block takes about 10 ms to find there; most would be computed faster",
            f"{_LOCAL}, or leave the tier out",
        )
    elif mount.kind == "overlay":
        yield note(
            f"{seen}: a container's own layer",
            "what it holds is gone with the container",
            "mount a volume there",
        )
    else:
        yield ok(seen)


CHECKS = (
    Check("nvme-room", GROUP, "Free space at `store.nvme_path` against `store.nvme_gb`", free_space),
    Check(
        "nvme-direct-io",
        GROUP,
        "Whether O_DIRECT works there: the doctor writes and reads one page",
        direct_io,
    ),
    Check(
        "nvme-kind",
        GROUP,
        "Whether the folder is on a network or memory file system, or on a turning disk",
        kind,
    ),
)


def _round_trip(path: Path) -> bool:
    written = mmap.mmap(-1, _PAGE_BYTES)
    written[:] = secrets.token_bytes(_PAGE_BYTES)
    found = mmap.mmap(-1, _PAGE_BYTES)
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_DIRECT, 0o600)
    try:
        num_written = os.pwrite(file, written, 0)
        num_read = os.preadv(file, [found], 0)
    finally:
        os.close(file)
    return num_written == num_read == _PAGE_BYTES and written[:] == found[:]


def _taken_bytes(folder: Path) -> int:
    """Return the size of the segments of earlier runs, which count as the store's own."""
    taken = 0
    for file in folder.glob("*/*"):
        try:
            taken += file.stat().st_blocks * 512
        except OSError:
            continue
    return taken
