"""The NVMe tier when the disk, the files or the process fail: the right bytes or a miss, and it says why."""

from __future__ import annotations

import os
import resource
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import nvme_harness as support
import pytest
from nvme_harness import SEGMENT_BYTES, NvmeHarness, crashed, image_of, info_of, nvme_harness, settings_for

from kvtransfer.common.faults import FaultRule, Faults
from kvtransfer.errors import StoreError, StoreIoError
from kvtransfer.store.nvme import segment_files
from kvtransfer.store.record import HEADER_BYTES

pytestmark = pytest.mark.slow

RECORD = 20_000


def flip(path: Path, offset: int) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)
        file.seek(offset)
        file.write(bytes([byte[0] ^ 0x10]))


@contextmanager
def file_size_limit(num_bytes: int) -> Iterator[None]:
    """Nobody in this process can make a file larger: writing fails as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@contextmanager
def mounted(folder: Path, kind: str, options: str) -> Iterator[Path]:
    """A small file system of this test's own."""
    folder.mkdir()
    command = ["mount", "-t", kind, "-o", options, kind, str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"mounting is not allowed here: {done.stderr.strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


# ------------------------------------------------------------------------------------- damaged files


@pytest.mark.parametrize("is_sealed", [True, False])
def test_a_flipped_bit_anywhere_costs_one_record_at_most(tmp_path: Path, is_sealed: bool) -> None:
    with nvme_harness(tmp_path / "a") as harness:
        infos = [harness.put(key, RECORD) for key in range(3)]
        if not is_sealed:
            shutil.copytree(tmp_path / "a", tmp_path / "b")
    folder = tmp_path / ("a" if is_sealed else "b")
    (path,) = folder.glob("*.seg")
    directory = [SEGMENT_BYTES - 8192 + offset for offset in (0, 40, 90, 150, 300, 4096, 4102, 4120)]
    for offset in [*range(5, SEGMENT_BYTES - 8192, 5 * 1024 + 11), *directory]:
        copy = crashed(folder, tmp_path / "copy")
        flip(copy / path.name, offset)
        with nvme_harness(copy) as again:
            assert sum(again.has(info) for info in infos) >= 2, offset
            if offset % (6 * 4096) > 4096 + RECORD or offset in directory:
                assert all(again.has(info) for info in infos)
        shutil.rmtree(copy)


def test_bytes_that_change_while_it_runs_are_a_miss(tmp_path: Path) -> None:
    with nvme_harness(tmp_path) as harness:
        infos = [harness.put(key, RECORD) for key in range(3)]
        (path,) = harness.segments()
        flip(path, HEADER_BYTES + 7)
        flip(path, harness.held[infos[1].id][1].offset + 20)
        assert [harness.has(info) for info in infos] == [False, False, True]
        assert harness.tier.stat().num_checksum_failures == 1  # the header; payloads are for the reader


def test_another_record_at_the_place_is_named(tmp_path: Path) -> None:
    with nvme_harness(tmp_path) as harness:
        info, other = harness.put(1, RECORD), harness.put(2, RECORD)
        ref = harness.held[other.id][1]
        with pytest.raises(StoreIoError, match=rf"0+1\.seg: at {ref.offset} stands a record of 0+2$"):
            harness.tier.read(ref, info, image_of(info))
        with pytest.raises(StoreError, match="bytes for an image of"):
            harness.tier.read(ref, other, image_of(other)[:-4096])


def test_a_file_that_is_cut_loses_what_was_behind(tmp_path: Path) -> None:
    with nvme_harness(tmp_path / "a") as harness:
        infos = [harness.put(key, RECORD) for key in range(4)]
        (path,) = harness.segments()
        os.truncate(path, harness.held[infos[2].id][1].offset + 9000)
        assert [harness.has(info) for info in infos] == [True, True, False, False]
        assert harness.tier.stat().num_io_errors == 2
        with pytest.raises(StoreIoError, match=r"reading .*\.seg: EIO, \d+ bytes instead of \d+"):
            harness.tier.read(harness.held[infos[2].id][1], infos[2], image_of(infos[2]))
        folder = crashed(tmp_path / "a", tmp_path / "b")
    with nvme_harness(folder) as again:
        assert set(again.held) == {infos[0].id, infos[1].id}
        assert again.put(9, RECORD).id in again.held
        assert (folder / path.name).stat().st_size == SEGMENT_BYTES


def test_a_file_that_is_removed_is_missed_and_then_forgotten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(segment_files, "MAX_IDLE_FILES", 0)
    with nvme_harness(tmp_path, 3) as harness:
        infos = [harness.put(key, RECORD) for key in range(10)]
        victim = harness.segments()[0]
        victim.unlink()
        with pytest.raises(StoreIoError, match=rf"reading {victim}: ENOENT, No such file"):
            harness.tier.read(harness.held[infos[0].id][1], infos[0], image_of(infos[0]))
        assert [harness.has(info) for info in infos] == [False] * 5 + [True] * 5
        harness.tier.erase([harness.held[infos[0].id][1]])  # nothing brings it back
        assert harness.tier.needs_compaction
        compacted = harness.compact(*infos)
        assert compacted.moved == ()
        assert len(compacted.dropped) == 4
        assert harness.put(100, RECORD).id in harness.held
        assert all(harness.has(info) for info in infos[5:])


def test_the_whole_folder_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(segment_files, "MAX_IDLE_FILES", 0)
    with nvme_harness(tmp_path / "a") as harness:
        info = harness.put(1, RECORD)
        shutil.rmtree(tmp_path / "a")
        assert not harness.has(info)
        with pytest.raises(StoreIoError, match="ENOENT"):
            harness.tier.erase([harness.held[info.id][1]])  # perhaps it was only moved
        with pytest.raises(StoreIoError, match="ENOENT"):
            harness.put(2, RECORD)
        assert "ENOENT" in harness.tier.stat().note


# ------------------------------------------------------------------------------------ disks that fail


def test_a_full_disk_stops_writing_for_longer_each_time_but_not_reading(tmp_path: Path) -> None:
    with nvme_harness(tmp_path) as harness:
        infos = [harness.put(key, RECORD) for key in range(5)]
        with file_size_limit(SEGMENT_BYTES // 2):
            for pause_s in (1.0, 2.0, 4.0):
                with pytest.raises(StoreIoError, match=r"creating .*\.seg: EFBIG, File too large"):
                    harness.put(10, RECORD)
                assert not harness.tier.can_write
                harness.clock.advance(pause_s - 0.01)
                with pytest.raises(StoreIoError, match=r"writes are suspended for another 0\.0 s: creating"):
                    harness.put(11, RECORD)
                assert all(harness.has(info) for info in infos)
                assert not harness.tier.needs_compaction
                harness.clock.advance(0.02)
                assert harness.tier.can_write
        assert len(harness.segments()) == 1  # nothing half made stays
        stat = harness.tier.stat()
        assert "EFBIG" in stat.note
        assert (stat.num_io_errors, stat.num_refused) == (3, 3)
        infos.append(harness.put(12, RECORD))
        assert harness.tier.stat().note == ""
        assert all(harness.has(info) for info in infos)


def test_a_disk_that_is_really_full(tmp_path: Path) -> None:
    with mounted(tmp_path / "small", "tmpfs", f"size={2 * SEGMENT_BYTES + 65536}") as folder:
        harness = NvmeHarness(settings_for(folder / "node"))
        infos = [harness.put(key, RECORD) for key in range(10)]
        with pytest.raises(StoreIoError, match=r"creating .*\.seg: ENOSPC, No space left"):
            harness.put(10, RECORD)
        assert all(harness.has(info) for info in infos)
        harness.tier.close()
        with nvme_harness(folder / "node") as again:
            assert all(again.has(info) for info in infos)


def test_a_read_only_disk_is_read(tmp_path: Path) -> None:
    with mounted(tmp_path / "disk", "tmpfs", "size=2m") as disk:
        with nvme_harness(disk / "node") as harness:
            infos = [harness.put(key, RECORD) for key in range(7)]
            crashed(disk / "node", disk / "torn")
        subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
        for folder in (disk / "node", disk / "torn"):
            with nvme_harness(folder) as harness:
                assert all(harness.has(info) for info in infos)
                harness.clock.advance(100.0)
                with pytest.raises(StoreIoError, match=r"EROFS|EBADF"):
                    harness.put(10, RECORD)
                assert all(harness.has(info) for info in infos)
                with pytest.raises(StoreIoError, match=r"erasing in .*\.seg: (EROFS|EBADF)"):
                    harness.tier.erase([harness.held[infos[0].id][1]])
                with pytest.raises(StoreError, match="used by another owner"):
                    NvmeHarness(settings_for(folder))
        with pytest.raises(StoreIoError, match=r"locking .*new/lock: EROFS"):
            NvmeHarness(settings_for(disk / "new"))


def test_without_o_direct_the_page_cache_is_used_and_noted(tmp_path: Path) -> None:
    with mounted(tmp_path / "ram", "ramfs", "mode=700") as disk:
        for _ in range(2):
            with nvme_harness(disk / "node") as harness:
                info = harness.put(1, RECORD)
                assert harness.has(info)
                assert "refuses O_DIRECT" in harness.tier.stat().note


def test_a_write_that_fails_leaves_a_hole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(fd: int, buffers: list[memoryview], offset: int) -> int:
        return os.pwrite(fd, buffers[0], offset)  # only the header

    with nvme_harness(tmp_path / "a") as harness:
        before = harness.put(1, RECORD)
        with monkeypatch.context() as context:
            context.setattr(os, "pwritev", fail)
            with pytest.raises(StoreIoError, match="EIO, 4096 bytes instead of 24576 at 24576"):
                harness.put(2, RECORD)
        harness.clock.advance(10.0)
        after = harness.put(3, RECORD)
        folder = crashed(tmp_path / "a", tmp_path / "b")
    for path in (tmp_path / "a", folder):
        with nvme_harness(path) as again:
            assert set(again.held) == {before.id, after.id}
            assert again.has(before)
            assert again.has(after)


@pytest.mark.parametrize("call", ["pwritev", "fdatasync"])
def test_a_compaction_that_fails_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    def fail(*args: object) -> int:
        raise OSError(5, "Input/output error")

    with nvme_harness(tmp_path, 3) as harness:
        infos = [harness.put(key, RECORD) for key in range(10)]
        with monkeypatch.context() as context:
            context.setattr(os, call, fail)
            with pytest.raises(StoreIoError, match="EIO, Input/output error"):
                harness.compact(infos[0])
        assert all(harness.has(info) for info in infos)
        assert harness.tier.stat().num_records == 10
        assert harness.compact(infos[0]) == ((), ())  # it rests
        harness.clock.advance(10.0)
        assert [move.info for move in harness.compact(infos[0]).moved] == [infos[0]]
        assert harness.has(infos[0])


def test_a_segment_that_cannot_be_read_is_not_deleted_but_by_a_purge(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(fd: int, buffers: list[memoryview], offset: int) -> int:
        raise OSError(5, "Input/output error")

    with nvme_harness(tmp_path) as harness:
        info = harness.put(1, RECORD)
    with monkeypatch.context() as context:
        context.setattr(os, "preadv", fail)
        with nvme_harness(tmp_path) as harness:
            assert harness.held == {}
            assert harness.tier.stat().num_io_errors == 1
    with nvme_harness(tmp_path) as harness:
        assert harness.has(info)
    with monkeypatch.context() as context:
        context.setattr(os, "preadv", fail)
        with nvme_harness(tmp_path) as harness:
            harness.tier.erase([])  # who knows what it holds
    with nvme_harness(tmp_path) as harness:
        assert harness.held == {}


# -------------------------------------------------------------------------------------- fault points


def test_bytes_corrupted_on_their_way_are_a_miss(tmp_path: Path) -> None:
    rules = [
        FaultRule("store.nvme.write", "corrupt", str(tmp_path / "write"), after=2),
        FaultRule("store.nvme.read", "corrupt", str(tmp_path / "read"), after=3),
    ]
    with nvme_harness(tmp_path / "a", faults=Faults(rules)) as harness:
        infos = [harness.put(key, RECORD) for key in range(3)]
        assert [harness.has(info) for info in infos] == [True, False, False]
        assert [harness.has(info) for info in infos] == [True, False, True]


@pytest.mark.parametrize(
    ("point", "after"),
    [("store.nvme.write", 4), ("store.nvme.write", 10), ("store.nvme.read", 1)]
    + [("store.compact", number) for number in (1, 2, 3)]
    + [("store.recover", 1)],
)
def test_a_process_killed_at_any_point_loses_nothing_that_was_written(
    tmp_path: Path, point: str, after: int
) -> None:
    folder = tmp_path / "node"
    with nvme_harness(folder, 3) as harness:
        held = {harness.put(key, RECORD).id for key in range(100, 104)}
    script = f"""
import sys; sys.path.insert(0, {str(Path(support.__file__).parent)!r})
from pathlib import Path
from nvme_harness import *
from kvtransfer.common.faults import FaultRule
rules = [FaultRule({point!r}, "kill", {str(tmp_path / "marker")!r}, {after})]
harness = NvmeHarness(settings_for(Path({str(folder)!r}), 3), Faults(rules))
infos = []
for key in range(6):
    infos.append(harness.put(key, {RECORD}))
    print(key, flush=True)
print("compact", flush=True)
harness.compact(info_of(100, {RECORD}), info_of(103, {RECORD}))
print("compacted", flush=True)
for key in range(10, 13):
    harness.put(key, {RECORD})
    print(key, flush=True)
harness.has(infos[0])
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == -signal.SIGKILL, done.stderr
    told = done.stdout.split()
    written = {info_of(int(word), RECORD).id for word in told if word.isdigit()}
    if "compacted" in told:
        held = {info_of(key, RECORD).id for key in (100, 103)}
        written -= {info_of(0, RECORD).id}
    with nvme_harness(folder, 3) as harness:
        assert written | held <= set(harness.held)
        assert all(harness.has(info) for info, _ in list(harness.held.values()))
        while harness.tier.needs_compaction:
            harness.compact()
        assert harness.has(harness.put(50, RECORD))
