"""The NVMe tier: what was written is read, also after a restart, with O_DIRECT; what was erased is gone."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
from pathlib import Path

import msgspec
import nvme_harness as nvme_support
import pytest
from nvme_harness import (
    SEGMENT_BYTES,
    NvmeHarness,
    crashed,
    empty_image,
    image_of,
    info_of,
    nvme_harness,
    payload_of,
    settings_for,
)

from kvtransfer.blocks.checksum import checksum
from kvtransfer.common.clock import ManualClock
from kvtransfer.common.faults import Faults
from kvtransfer.errors import StoreError, StoreIoError
from kvtransfer.store.messages.records import RecordInfo
from kvtransfer.store.nvme import segment_directory, segment_files
from kvtransfer.store.nvme.log import NvmeTier
from kvtransfer.store.nvme.segment import Directory, Segment
from kvtransfer.store.nvme.segment_headers import header_page
from kvtransfer.store.record import HEADER_BYTES, image_bytes


def open_flags(path: Path) -> list[int]:
    """The flags of this process's descriptors of the file."""
    found = []
    for link in Path("/proc/self/fd").iterdir():
        try:
            if link.readlink() == path:
                found.append(fcntl.fcntl(int(link.name), fcntl.F_GETFL))
        except FileNotFoundError:  # the descriptor of the listing itself
            continue
    return found


@pytest.mark.parametrize("num_bytes", [1, 4095, 4096, 4097, 100_000])
def test_a_record_comes_back_as_it_was_written(tmp_path: Path, num_bytes: int) -> None:
    with nvme_harness(tmp_path) as harness:
        info = harness.put(1, num_bytes)
        assert harness.get(info.id) == payload_of(1, num_bytes)
        assert harness.held[info.id][1].num_bytes == HEADER_BYTES + -(-num_bytes // 4096) * 4096


def test_reading_leaves_the_header_page_of_the_arena_alone(tmp_path: Path) -> None:
    with nvme_harness(tmp_path) as harness:
        info = harness.put(1, 5000)
        image = empty_image(5000)
        image[:HEADER_BYTES] = b"\x5a" * HEADER_BYTES
        harness.tier.read(harness.held[info.id][1], info, image)
        assert image[:HEADER_BYTES] == b"\x5a" * HEADER_BYTES
        assert image[HEADER_BYTES : HEADER_BYTES + 5000] == payload_of(1, 5000)


def test_files_are_open_with_o_direct_and_their_blocks_are_taken(tmp_path: Path) -> None:
    with nvme_harness(tmp_path) as harness:
        harness.put(1)
        (path,) = harness.segments()
        flags = open_flags(path)
        assert flags
        assert all(flag & os.O_DIRECT for flag in flags)
        assert path.stat().st_size == SEGMENT_BYTES
        assert path.stat().st_blocks * 512 >= SEGMENT_BYTES
        assert harness.tier.stat().note == ""


def test_a_run_is_one_write_of_neighbours_and_ends_with_the_segment(tmp_path: Path) -> None:
    with nvme_harness(tmp_path) as harness:
        infos = [info_of(key, 28_000) for key in range(6)]
        images = [(image_of(info), info) for info in infos]
        first = harness.tier.write_run(images)
        assert 1 < len(first) < 6
        assert [ref.offset for ref in first] == [number * 32768 for number in range(len(first))]
        rest = harness.tier.write_run(images[len(first) :])
        assert {ref.segment for ref in rest} != {ref.segment for ref in first}
        harness.held = {info.id: (info, ref) for info, ref in zip(infos, first + rest, strict=True)}
        assert all(harness.has(info) for info in infos)


def test_more_files_than_stay_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(segment_files, "MAX_IDLE_FILES", 2)
    with nvme_harness(tmp_path) as harness:
        infos = [harness.put(key, 100_000) for key in range(7)]
        for info in infos + infos[::-1]:
            assert harness.has(info)
        assert sum(len(open_flags(path)) for path in harness.segments()) == 2


@pytest.mark.parametrize("is_orderly", [True, False])
def test_a_restart_finds_every_record(tmp_path: Path, is_orderly: bool) -> None:
    with nvme_harness(tmp_path / "a") as harness:
        infos = [harness.put(key, 30_000 + key, space=b"space--%d" % (key % 2)) for key in range(12)]
        folder = crashed(tmp_path / "a", tmp_path / "b")
    with nvme_harness(tmp_path / "a" if is_orderly else folder) as again:
        assert [again.held[info.id][0] for info in infos] == infos
        assert len(again.held) == 12
        assert all(again.has(info) for info in infos)
        assert again.put(99).id in again.held
        assert again.tier.stat().num_checksum_failures == 0


def test_after_a_restart_the_newest_segment_is_written_on(tmp_path: Path) -> None:
    for key in range(5):
        with nvme_harness(tmp_path) as harness:
            harness.put(key, 8000)
            assert len(harness.segments()) == 1
            assert all(harness.has(info) for info, _ in list(harness.held.values()))
            assert len(harness.held) == key + 1


def test_opening_a_sealed_segment_reads_its_end_only(tmp_path: Path) -> None:
    with nvme_harness(tmp_path) as harness:
        info = harness.put(1, 20_000)
        path = harness.segments()[0]
    damage(path, HEADER_BYTES, b"\xff" * 20_000)
    with nvme_harness(tmp_path) as harness:
        assert info.id in harness.held  # believed ...
        assert not harness.has(info)  # ... until somebody sums it
        assert harness.tier.stat().num_checksum_failures == 0


def test_a_large_directory_is_read(tmp_path: Path) -> None:
    harness = NvmeHarness(settings_for(tmp_path, 2, 24 << 20))
    infos = [info_of(key, 100, group="t" * 900) for key in range(400)]
    image = empty_image(100)
    for start in range(0, 400, 50):
        assert len(harness.tier.write_run([(image, info) for info in infos[start : start + 50]])) == 50
    harness.tier.close()
    assert segment_directory._TAIL_BYTES < 400 * 900
    again = NvmeHarness(settings_for(tmp_path, 2, 24 << 20))
    assert {info for info, _ in again.held.values()} == set(infos)
    assert again.tier.stat().num_records == 400
    again.tier.close()


def test_a_full_segment_has_space_for_its_directory(tmp_path: Path) -> None:
    with nvme_harness(tmp_path) as harness:
        for key in range(40):
            harness.put(key, 100, group="t" * 900)
        full = harness.segments()[:-1]
        assert len(full) > 1
        for path in full:
            assert path.stat().st_size == SEGMENT_BYTES
            assert path.read_bytes()[-4096:].startswith(segment_directory._MAGIC)
    with nvme_harness(tmp_path) as again:
        assert len(again.held) == 40
        assert all(again.has(info) for info, _ in list(again.held.values()))


# -------------------------------------------------------------------------------------------- erasure


@pytest.mark.parametrize("is_orderly", [True, False])
def test_what_was_erased_does_not_come_back(tmp_path: Path, is_orderly: bool) -> None:
    with nvme_harness(tmp_path / "a") as harness:
        kept = [harness.put(key, 30_000, "kept") for key in range(0, 12, 2)]
        purged = [harness.put(key, 30_000, "purged") for key in range(1, 12, 2)]
        harness.tier.erase([harness.held[info.id][1] for info in purged])
        assert not any(harness.has(info) for info in purged)
        assert all(harness.has(info) for info in kept)
        folder = crashed(tmp_path / "a", tmp_path / "b")
    with nvme_harness(tmp_path / "a" if is_orderly else folder) as again:
        assert set(again.held) == {info.id for info in kept}
        assert all(again.has(info) for info in kept)
        assert again.tier.stat().num_checksum_failures == 0


def test_what_was_dropped_before_is_erased_too(tmp_path: Path) -> None:
    with nvme_harness(tmp_path / "a") as harness:
        info, twice = harness.put(1), harness.put(2)
        harness.tier.drop(harness.held[info.id][1])
        harness.put(2)  # the copy before is not held any more
        assert not harness.has(info)
        found = crashed(tmp_path / "a", tmp_path / "b")
        harness.tier.erase([harness.held[twice.id][1]])
        empty = crashed(tmp_path / "a", tmp_path / "c")
    with nvme_harness(found) as again:
        assert set(again.held) == {info.id, twice.id}  # dropped in memory only
    with nvme_harness(empty) as again:
        assert again.held == {}
        assert again.segments() == []


def test_what_was_dropped_in_an_earlier_life_is_erased_too(tmp_path: Path) -> None:
    with nvme_harness(tmp_path / "a") as harness:
        info, other = harness.put(1), harness.put(2)
        harness.put(1)
        harness.tier.drop(harness.held[other.id][1])
    with nvme_harness(tmp_path / "a") as harness:  # by its directory, which is not there any more from now on
        assert set(harness.held) == {info.id}
        harness.tier.erase([harness.held[info.id][1]])
        folder = crashed(tmp_path / "a", tmp_path / "b")
    with nvme_harness(folder) as again:
        assert again.held == {}


def test_an_erasure_that_failed_says_so_and_is_done_by_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with nvme_harness(tmp_path / "a") as harness:
        info = harness.put(1)

        def fail(fd: int) -> None:
            raise OSError(5, "Input/output error")

        with monkeypatch.context() as context:
            context.setattr(os, "fsync", fail)
            with pytest.raises(StoreIoError, match=r"erasing in .*\.seg: EIO"):
                harness.tier.erase([harness.held[info.id][1]])
        harness.tier.erase([])
        assert harness.tier.stat().num_io_errors == 2  # the file and the folder
        copy = crashed(tmp_path / "a", tmp_path / "b")
    with nvme_harness(copy) as again:
        assert again.held == {}


# ------------------------------------------------------------------------------- what else lies there


def test_two_owners_never_share_a_folder(tmp_path: Path) -> None:
    with nvme_harness(tmp_path) as harness:
        harness.put(1)
        second = NvmeTier(settings_for(tmp_path), ManualClock(), Faults())
        with pytest.raises(StoreError, match=f"used by another owner, process {os.getpid()}"):
            second.open()
        script = (
            f"import sys; sys.path.insert(0, {str(Path(nvme_support.__file__).parent)!r})\n"
            "from pathlib import Path; from nvme_harness import *\n"
            f"NvmeHarness(settings_for(Path({str(tmp_path)!r})))"
        )
        other = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
        assert other.returncode == 1
        assert "used by another owner" in other.stderr
    assert len(second.open()) == 1  # given back
    second.close()


def test_foreign_files_are_left_alone(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    names = ["notes.txt", "1.seg", "backup.seg", "00000001.seg.bak"]
    for name in names:
        (tmp_path / name).write_text("mine")
    (tmp_path / "0000000007.seg").mkdir()
    with nvme_harness(tmp_path) as harness:
        harness.put(1)
    assert [(tmp_path / name).read_text() for name in names] == ["mine"] * 4
    assert (tmp_path / "0000000007.seg").is_dir()
    for name in [*names, "0000000007.seg"]:
        assert any(f"{name} is none of the store's files" in message for message in caplog.messages)


@pytest.mark.parametrize("what", ["trailer", "header"])
def test_a_segment_of_another_version_is_reclaimed(
    tmp_path: Path, what: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    module = "kvtransfer.store.nvme.segment_directory" if what == "trailer" else "kvtransfer.store.record"
    with monkeypatch.context() as context:
        context.setattr(f"{module}.VERSION", 7)
        with nvme_harness(tmp_path / "a") as harness:
            harness.put(1)
            folder = crashed(tmp_path / "a", tmp_path / "b")
    with nvme_harness(folder if what == "header" else tmp_path / "a") as again:
        assert again.held == {}
        assert again.segments() == []
    assert "another version" in caplog.text or "format version 7" in caplog.text


@pytest.mark.parametrize("offset", [-4096, 100, 8192, SEGMENT_BYTES, 1 << 62])
def test_a_directory_of_impossible_places_is_not_believed(tmp_path: Path, offset: int) -> None:
    with nvme_harness(tmp_path) as harness:
        info = harness.put(1)
        path = harness.segments()[0]
    sealed = Segment(1, path, SEGMENT_BYTES, end=image_bytes(info.num_bytes))
    with path.open("r+b") as file:
        segment_directory.write_directory(file.fileno(), sealed, Directory([(offset, info)], []))
    with nvme_harness(tmp_path) as harness:
        assert harness.has(info)  # its header is found in its place


@pytest.mark.parametrize("num_bytes", [-1, -8192, -(1 << 60)])
def test_a_header_of_a_record_that_ends_before_it_begins_is_passed_over(
    tmp_path: Path, num_bytes: int
) -> None:
    with nvme_harness(tmp_path / "a") as harness:
        infos = [harness.put(key) for key in (1, 2)]
        folder = crashed(tmp_path / "a", tmp_path / "b")
    offset = image_bytes(infos[0].num_bytes)
    odd = msgspec.structs.replace(infos[1], num_bytes=num_bytes, checksum=checksum(b""))
    damage(next(folder.glob("*.seg")), offset, header_page(odd, 1, offset))
    with nvme_harness(folder) as again:
        assert [info for info, _ in again.held.values()] == infos[:1]


def test_a_file_under_another_number_holds_nothing(tmp_path: Path) -> None:
    with nvme_harness(tmp_path) as harness:
        harness.put(1)
        path = harness.segments()[0]
    path.rename(tmp_path / "0000000042.seg")
    with nvme_harness(tmp_path) as harness:
        assert harness.held == {}
        harness.put(2)
        assert [path.name for path in harness.segments()] == ["0000000043.seg"]


def test_a_payload_that_looks_like_a_record_is_none(tmp_path: Path) -> None:
    with nvme_harness(tmp_path / "other") as harness:
        harness.put(3, 5000)
        whole = harness.segments()[0].read_bytes()[: 3 * HEADER_BYTES]
    with nvme_harness(tmp_path / "a") as harness:
        harness.put(1, 5000)
        outer = info_of(2, len(whole))
        outer = msgspec.structs.replace(outer, checksum=checksum(whole))
        image = empty_image(len(whole))
        image[HEADER_BYTES:] = whole
        ref = harness.tier.write(image, outer)
        harness.tier.erase([ref])  # now a scan looks inside
        folder = crashed(tmp_path / "a", tmp_path / "b")
    with nvme_harness(folder) as again:
        assert {info.id.key[-1] for info, _ in again.held.values()} == {1}


@pytest.mark.parametrize(
    ("num_bytes", "error"), [(SEGMENT_BYTES, "does not fit in a segment"), (5000, "an image of 4096 bytes")]
)
def test_impossible_records_are_refused(tmp_path: Path, num_bytes: int, error: str) -> None:
    with nvme_harness(tmp_path) as harness:
        info: RecordInfo = info_of(1, num_bytes)
        image = image_of(info) if num_bytes == SEGMENT_BYTES else empty_image(0)
        with pytest.raises(StoreError, match=error):
            harness.tier.write(image, info)
        assert harness.tier.stat().num_io_errors == 0
        assert harness.put(2).id in harness.held


def test_too_small_a_capacity_is_refused(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="less than two segments"):
        NvmeHarness(settings_for(tmp_path, 1))


def damage(path: Path, offset: int, data: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        file.write(data)
