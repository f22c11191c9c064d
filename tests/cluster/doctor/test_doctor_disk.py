"""The checks of the NVMe tier's folder, on real file systems and prepared descriptions of them."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from doctor_harness import FakeMachine, config_of, context_of, only, said

from cluster.config import ClusterConfig
from cluster.doctor import storage
from cluster.doctor.check_context import CheckContext
from cluster.doctor.checks import Severity
from cluster.serve.machine import Machine
from kvtransfer.rpc.handshake import draw_id

OK, NOTE, WARNING, ERROR = Severity
_SHM = Path("/dev/shm")


def store(folder: Path, nvme_gb: float = 1.0) -> ClusterConfig:
    return config_of(store={"nvme_path": str(folder), "nvme_gb": nvme_gb})


def real(folder: Path, nvme_gb: float = 1.0) -> CheckContext:
    return context_of(Machine(), store(folder, nvme_gb))


@pytest.fixture
def memory_folder() -> Iterator[Path]:
    """On a tmpfs, which a test's own folder need not be on."""
    if not _SHM.is_dir():
        pytest.skip("this machine has no /dev/shm")
    folder = _SHM / f"tandem-test-{draw_id().hex()[:8]}"
    folder.mkdir()
    yield folder
    shutil.rmtree(folder)


def test_without_the_tier_nothing_is_looked_at() -> None:
    for check in storage.CHECKS:
        assert not said(check.look, context_of(Machine()))


def test_free_space_counts_what_the_store_has_already(tmp_path: Path) -> None:
    free_gb = shutil.disk_usage(tmp_path).free / 1e9
    assert only(storage.free_space, real(tmp_path, 0.6)).severity is OK
    too_much = only(storage.free_space, real(tmp_path / "later", free_gb + 5))
    assert too_much.severity is ERROR
    assert "lower store.nvme_gb" in too_much.remedy
    taken = tmp_path / "host-app-0" / "segment"
    taken.parent.mkdir()
    taken.write_bytes(os.urandom(1 << 20))
    assert only(storage.free_space, real(tmp_path, 0.6)).figures["taken_bytes"] == pytest.approx(
        1 << 20, abs=8192
    )


def test_a_page_goes_to_a_disk_and_back(tmp_path: Path) -> None:
    result = only(storage.direct_io, real(tmp_path / "made" / "at the start"))
    assert result.severity is OK or "O_DIRECT" in result.seen
    assert list(tmp_path.iterdir()) == []


def test_memory_file_systems_are_no_disks(memory_folder: Path) -> None:
    assert only(storage.kind, real(memory_folder)).severity is WARNING
    result = only(storage.direct_io, real(memory_folder))
    # Kernels from 6.6 on take O_DIRECT there, and say nothing of what it is.
    assert result.severity in (OK, WARNING)
    assert list(memory_folder.iterdir()) == []


def test_a_file_system_without_direct_io_is_reported(tmp_path: Path) -> None:
    """/proc takes none; nothing can be made there either, which is told first."""
    result = only(storage.direct_io, real(Path("/proc/self")))
    assert result.severity is ERROR
    assert "nothing can be written" in result.seen


def test_a_refusal_of_o_direct_is_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = os.open

    def refuse(path: str | os.PathLike[str], flags: int, *rest: int, **named: int) -> int:
        if flags & os.O_DIRECT:
            raise OSError(22, os.strerror(22))
        return whole(path, flags, *rest, **named)

    monkeypatch.setattr(os, "open", refuse)
    result = only(storage.direct_io, real(tmp_path))
    assert result.severity is WARNING
    assert "refuses O_DIRECT" in result.seen


def test_a_disk_that_changes_bytes_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "pwrite", lambda file, data, at: len(data))
    monkeypatch.setattr(os, "preadv", lambda file, buffers, at: len(buffers[0]))
    assert only(storage.direct_io, real(tmp_path)).severity is ERROR


@pytest.mark.parametrize(
    ("folder", "severity", "word"),
    [
        ("/fast/kv", OK, "xfs"),
        ("/srv/kv", OK, "ext4"),
        ("/shared/kv", WARNING, "network"),
        ("/memory/kv", WARNING, "memory"),
        ("/layer/kv", NOTE, "container"),
    ],
)
def test_the_kind_of_file_system_is_reported(
    tmp_path: Path, folder: str, severity: Severity, word: str
) -> None:
    result = only(storage.kind, context_of(FakeMachine(tmp_path).view(), store(Path(folder))))
    assert result.severity is severity
    assert word in result.seen


def test_a_turning_disk_is_reported_also_below_a_partition(tmp_path: Path) -> None:
    turning = {"sys/dev/block/259:1/queue/rotational": "1\n"}
    machine = FakeMachine(tmp_path, turning)
    assert only(storage.kind, context_of(machine.view(), store(Path("/fast/kv")))).severity is WARNING
    disk_folder = tmp_path / "sys/devices/pci/block/sda"
    (disk_folder / "queue").mkdir(parents=True)
    (disk_folder / "queue/rotational").write_text("1\n")
    (disk_folder / "sda2").mkdir()
    shutil.rmtree(tmp_path / "sys/dev/block/8:2")
    (tmp_path / "sys/dev/block/8:2").symlink_to(disk_folder / "sda2")
    assert only(storage.kind, context_of(machine.view(), store(Path("/srv/kv")))).severity is WARNING
