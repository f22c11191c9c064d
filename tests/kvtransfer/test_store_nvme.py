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
    NvmeHouse,
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
from kvtransfer.store.messages import RecordInfo
from kvtransfer.store.nvme import segments
from kvtransfer.store.nvme.log import NvmeTier
from kvtransfer.store.record import HEADER_BYTES


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
    with nvme_harness(tmp_path) as house:
        info = house.put(1, num_bytes)
        assert house.get(info.id) == payload_of(1, num_bytes)
        assert house.held[info.id][1].num_bytes == HEADER_BYTES + -(-num_bytes // 4096) * 4096


def test_reading_leaves_the_header_page_of_the_arena_alone(tmp_path: Path) -> None:
    with nvme_harness(tmp_path) as house:
        info = house.put(1, 5000)
        image = empty_image(5000)
        image[:HEADER_BYTES] = b"\x5a" * HEADER_BYTES
        house.tier.read(house.held[info.id][1], info, image)
        assert image[:HEADER_BYTES] == b"\x5a" * HEADER_BYTES
        assert image[HEADER_BYTES : HEADER_BYTES + 5000] == payload_of(1, 5000)


def test_files_are_open_with_o_direct_and_their_blocks_are_taken(tmp_path: Path) -> None:
    with nvme_harness(tmp_path) as house:
        house.put(1)
        (path,) = house.segments()
        flags = open_flags(path)
        assert flags
        assert all(flag & os.O_DIRECT for flag in flags)
        assert path.stat().st_size == SEGMENT_BYTES
        assert path.stat().st_blocks * 512 >= SEGMENT_BYTES
        assert house.tier.stat().note == ""


def test_a_run_is_one_write_of_neighbours_and_ends_with_the_segment(tmp_path: Path) -> None:
    with nvme_harness(tmp_path) as house:
        infos = [info_of(key, 28_000) for key in range(6)]
        images = [(image_of(info), info) for info in infos]
        first = house.tier.write_run(images)
        assert 1 < len(first) < 6
        assert [ref.offset for ref in first] == [number * 32768 for number in range(len(first))]
        rest = house.tier.write_run(images[len(first) :])
        assert {ref.segment for ref in rest} != {ref.segment for ref in first}
        house.held = {info.id: (info, ref) for info, ref in zip(infos, first + rest, strict=True)}
        assert all(house.has(info) for info in infos)


def test_more_files_than_stay_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(segments, "MAX_IDLE_FILES", 2)
    with nvme_harness(tmp_path) as house:
        infos = [house.put(key, 100_000) for key in range(7)]
        for info in infos + infos[::-1]:
            assert house.has(info)
        assert sum(len(open_flags(path)) for path in house.segments()) == 2


@pytest.mark.parametrize("is_orderly", [True, False])
def test_a_restart_finds_every_record(tmp_path: Path, is_orderly: bool) -> None:
    with nvme_harness(tmp_path / "a") as house:
        infos = [house.put(key, 30_000 + key, space=b"space--%d" % (key % 2)) for key in range(12)]
        folder = crashed(tmp_path / "a", tmp_path / "b")
    with nvme_harness(tmp_path / "a" if is_orderly else folder) as again:
        assert [again.held[info.id][0] for info in infos] == infos
        assert len(again.held) == 12
        assert all(again.has(info) for info in infos)
        assert again.put(99).id in again.held
        assert again.tier.stat().num_checksum_failures == 0


def test_after_a_restart_the_newest_segment_is_written_on(tmp_path: Path) -> None:
    for key in range(5):
        with nvme_harness(tmp_path) as house:
            house.put(key, 8000)
            assert len(house.segments()) == 1
            assert all(house.has(info) for info, _ in list(house.held.values()))
            assert len(house.held) == key + 1


def test_opening_a_sealed_segment_reads_its_end_only(tmp_path: Path) -> None:
    with nvme_harness(tmp_path) as house:
        info = house.put(1, 20_000)
        path = house.segments()[0]
    damage(path, HEADER_BYTES, b"\xff" * 20_000)
    with nvme_harness(tmp_path) as house:
        assert info.id in house.held  # believed ...
        assert not house.has(info)  # ... until somebody sums it
        assert house.tier.stat().num_checksum_failures == 0


def test_a_large_directory_is_read(tmp_path: Path) -> None:
    house = NvmeHouse(settings_for(tmp_path, 2, 24 << 20))
    infos = [info_of(key, 100, tenant="t" * 900) for key in range(400)]
    image = empty_image(100)
    for start in range(0, 400, 50):
        assert len(house.tier.write_run([(image, info) for info in infos[start : start + 50]])) == 50
    house.tier.close()
    assert segments._TAIL_BYTES < 400 * 900
    again = NvmeHouse(settings_for(tmp_path, 2, 24 << 20))
    assert {info for info, _ in again.held.values()} == set(infos)
    assert again.tier.stat().num_records == 400
    again.tier.close()


def test_a_full_segment_has_room_for_its_directory(tmp_path: Path) -> None:
    with nvme_harness(tmp_path) as house:
        for key in range(40):
            house.put(key, 100, tenant="t" * 900)
        full = house.segments()[:-1]
        assert len(full) > 1
        for path in full:
            assert path.stat().st_size == SEGMENT_BYTES
            assert path.read_bytes()[-4096:].startswith(segments._MAGIC)
    with nvme_harness(tmp_path) as again:
        assert len(again.held) == 40
        assert all(again.has(info) for info, _ in list(again.held.values()))


# -------------------------------------------------------------------------------------------- erasure


@pytest.mark.parametrize("is_orderly", [True, False])
def test_what_was_erased_does_not_come_back(tmp_path: Path, is_orderly: bool) -> None:
    with nvme_harness(tmp_path / "a") as house:
        kept = [house.put(key, 30_000, "kept") for key in range(0, 12, 2)]
        purged = [house.put(key, 30_000, "purged") for key in range(1, 12, 2)]
        house.tier.erase([house.held[info.id][1] for info in purged])
        assert not any(house.has(info) for info in purged)
        assert all(house.has(info) for info in kept)
        folder = crashed(tmp_path / "a", tmp_path / "b")
    with nvme_harness(tmp_path / "a" if is_orderly else folder) as again:
        assert set(again.held) == {info.id for info in kept}
        assert all(again.has(info) for info in kept)
        assert again.tier.stat().num_checksum_failures == 0


def test_what_was_dropped_before_is_erased_too(tmp_path: Path) -> None:
    with nvme_harness(tmp_path / "a") as house:
        info, twice = house.put(1), house.put(2)
        house.tier.drop(house.held[info.id][1])
        house.put(2)  # the copy before is not held any more
        assert not house.has(info)
        found = crashed(tmp_path / "a", tmp_path / "b")
        house.tier.erase([house.held[twice.id][1]])
        empty = crashed(tmp_path / "a", tmp_path / "c")
    with nvme_harness(found) as again:
        assert set(again.held) == {info.id, twice.id}  # dropped in memory only
    with nvme_harness(empty) as again:
        assert again.held == {}
        assert again.segments() == []


def test_what_was_dropped_in_an_earlier_life_is_erased_too(tmp_path: Path) -> None:
    with nvme_harness(tmp_path / "a") as house:
        info, other = house.put(1), house.put(2)
        house.put(1)
        house.tier.drop(house.held[other.id][1])
    with nvme_harness(tmp_path / "a") as house:  # by its directory, which is not there any more from now on
        assert set(house.held) == {info.id}
        house.tier.erase([house.held[info.id][1]])
        folder = crashed(tmp_path / "a", tmp_path / "b")
    with nvme_harness(folder) as again:
        assert again.held == {}


def test_an_erasure_that_failed_says_so_and_is_done_by_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with nvme_harness(tmp_path / "a") as house:
        info = house.put(1)

        def fail(fd: int) -> None:
            raise OSError(5, "Input/output error")

        with monkeypatch.context() as context:
            context.setattr(os, "fdatasync", fail)
            with pytest.raises(StoreIoError, match=r"erasing in .*\.seg: EIO"):
                house.tier.erase([house.held[info.id][1]])
        house.tier.erase([])
        assert house.tier.stat().num_io_errors == 1
        copy = crashed(tmp_path / "a", tmp_path / "b")
    with nvme_harness(copy) as again:
        assert again.held == {}


# ------------------------------------------------------------------------------- what else lies there


def test_two_owners_never_share_a_folder(tmp_path: Path) -> None:
    with nvme_harness(tmp_path) as house:
        house.put(1)
        second = NvmeTier(settings_for(tmp_path), ManualClock(), Faults())
        with pytest.raises(StoreError, match=f"used by another owner, process {os.getpid()}"):
            second.open()
        script = (
            f"import sys; sys.path.insert(0, {str(Path(nvme_support.__file__).parent)!r})\n"
            "from pathlib import Path; from nvme_harness import *\n"
            f"NvmeHouse(settings_for(Path({str(tmp_path)!r})))"
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
    with nvme_harness(tmp_path) as house:
        house.put(1)
    assert [(tmp_path / name).read_text() for name in names] == ["mine"] * 4
    assert (tmp_path / "0000000007.seg").is_dir()
    for name in [*names, "0000000007.seg"]:
        assert any(f"{name} is none of the store's files" in message for message in caplog.messages)


@pytest.mark.parametrize("what", ["trailer", "header"])
def test_a_segment_of_another_version_is_reclaimed(
    tmp_path: Path, what: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    module = "kvtransfer.store.nvme.segments" if what == "trailer" else "kvtransfer.store.record"
    with monkeypatch.context() as context:
        context.setattr(f"{module}.VERSION", 7)
        with nvme_harness(tmp_path / "a") as house:
            house.put(1)
            folder = crashed(tmp_path / "a", tmp_path / "b")
    with nvme_harness(folder if what == "header" else tmp_path / "a") as again:
        assert again.held == {}
        assert again.segments() == []
    assert "another version" in caplog.text or "format version 7" in caplog.text


def test_a_file_under_another_number_holds_nothing(tmp_path: Path) -> None:
    with nvme_harness(tmp_path) as house:
        house.put(1)
        path = house.segments()[0]
    path.rename(tmp_path / "0000000042.seg")
    with nvme_harness(tmp_path) as house:
        assert house.held == {}
        house.put(2)
        assert [path.name for path in house.segments()] == ["0000000043.seg"]


def test_a_payload_that_looks_like_a_record_is_none(tmp_path: Path) -> None:
    with nvme_harness(tmp_path / "other") as house:
        house.put(3, 5000)
        whole = house.segments()[0].read_bytes()[: 3 * HEADER_BYTES]
    with nvme_harness(tmp_path / "a") as house:
        house.put(1, 5000)
        outer = info_of(2, len(whole))
        outer = msgspec.structs.replace(outer, checksum=checksum(whole))
        image = empty_image(len(whole))
        image[HEADER_BYTES:] = whole
        ref = house.tier.write(image, outer)
        house.tier.erase([ref])  # now a scan looks inside
        folder = crashed(tmp_path / "a", tmp_path / "b")
    with nvme_harness(folder) as again:
        assert {info.id.key[-1] for info, _ in again.held.values()} == {1}


@pytest.mark.parametrize(
    ("num_bytes", "error"), [(SEGMENT_BYTES, "does not fit in a segment"), (5000, "an image of 4096 bytes")]
)
def test_impossible_records_are_refused(tmp_path: Path, num_bytes: int, error: str) -> None:
    with nvme_harness(tmp_path) as house:
        info: RecordInfo = info_of(1, num_bytes)
        image = image_of(info) if num_bytes == SEGMENT_BYTES else empty_image(0)
        with pytest.raises(StoreError, match=error):
            house.tier.write(image, info)
        assert house.tier.stat().num_io_errors == 0
        assert house.put(2).id in house.held


def test_too_small_a_capacity_is_refused(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="less than two segments"):
        NvmeHouse(settings_for(tmp_path, 1))


def damage(path: Path, offset: int, data: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        file.write(data)
