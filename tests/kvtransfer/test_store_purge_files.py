"""A purge leaves no byte of a record in any file of the NVMe tier, and harms no other record."""

from __future__ import annotations

import errno
import os
import random
import threading
from pathlib import Path

import pytest
from nvme_harness import (
    SEGMENT_BYTES,
    NvmeHarness,
    crashed,
    image_of,
    info_of,
    nvme_harness,
    payload_of,
    settings_for,
)

from kvtransfer.common.faults import Faults
from kvtransfer.errors import StoreIoError
from kvtransfer.store.messages.records import PurgeOrder, RecordInfo
from kvtransfer.store.nvme import erasure
from kvtransfer.store.nvme.erasure import PurgeJournal, gaps_between

GROUP, OTHER = "acme-secret-group", "bystanders"
PURGE = PurgeOrder(GROUP, None)
RECORD = 9000
PAGE = 4096


def remains(folder: Path, infos: list[RecordInfo]) -> list[str]:
    """What the raw files of the folder still hold of these records: names, keys, pieces of payload."""
    found = []
    raw = {path.name: path.read_bytes() for path in folder.iterdir()}
    for name, data in raw.items():
        if GROUP.encode() in data:
            found.append(f"{name}: the group")
        for info in infos:
            key = int.from_bytes(info.id.key, "big")
            payload = payload_of(key, info.num_bytes)
            if info.id.key in data:
                found.append(f"{name}: key {key} at {data.index(info.id.key)}")
            for start in range(0, info.num_bytes - 16, 1000):
                if payload[start : start + 16] in data:
                    found.append(f"{name}: payload of {key} from {start}")
    return found


def key_of(number: int) -> int:
    """A key whose bytes occur nowhere by chance."""
    return random.Random(number).getrandbits(128) | 1 << 127


def put(harness: NvmeHarness, number: int, group: str) -> RecordInfo:
    info = harness.put(key_of(number), RECORD, group)
    assert harness.has(info)
    return info


def put_both(harness: NvmeHarness, num_records: int) -> tuple[list[RecordInfo], list[RecordInfo]]:
    """Records of the group and of the other one in turn."""
    infos = [put(harness, number, (GROUP, OTHER)[number % 2]) for number in range(num_records)]
    return infos[::2], infos[1::2]


def purge(harness: NvmeHarness) -> None:
    """Purge the group, as the owner of the tier does."""
    refs = [ref for info, ref in harness.held.values() if info.sharing_group == GROUP]
    harness.held = {key: held for key, held in harness.held.items() if held[0].sharing_group != GROUP}
    harness.tier.erase(refs, PURGE)
    harness.tier.end_purge(PURGE)


@pytest.fixture(params=["punched", "zeros"])
def filesystem(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """What the file system can do."""
    if request.param == "zeros":

        def refuse(fd: int, start: int, stop: int) -> None:
            raise OSError(errno.EOPNOTSUPP, "Operation not supported")

        monkeypatch.setattr(erasure, "punch", refuse)
        monkeypatch.setattr(erasure, "_ZEROS_BYTES", 3 * PAGE)
    return str(request.param)


@pytest.mark.usefixtures("filesystem")
def test_a_purge_leaves_no_byte_in_sealed_and_open_segments(tmp_path: Path) -> None:
    with nvme_harness(tmp_path) as harness:
        gone, kept = put_both(harness, 20)
        assert len(harness.segments()) > 2
        assert remains(tmp_path, gone)
        purge(harness)
        assert remains(tmp_path, gone) == []
        assert all(harness.has(info) for info in kept)
        later = [put(harness, number, OTHER) for number in range(100, 104)]
        folder = crashed(tmp_path, tmp_path.parent / f"{tmp_path.name}-crashed")
    for each in (tmp_path, folder):
        with nvme_harness(each) as again:
            assert set(again.held) == {info.id for info in kept + later}
            assert all(again.has(info) for info in kept + later)
            assert remains(each, gone) == []


def test_what_left_the_tier_before_the_purge_leaves_no_byte_either(tmp_path: Path) -> None:
    """Records that were dropped, written twice, given up by a compaction, and what a file held before it was
    used again."""
    with nvme_harness(tmp_path, 3) as harness:
        gone = [put(harness, number, GROUP) for number in range(12)]
        harness.tier.drop(harness.held.pop(gone[5].id)[1])
        again = put(harness, 6, GROUP)
        while harness.tier.needs_compaction:
            harness.compact(gone[7])
        number = 100
        while not harness.tier.needs_compaction:
            put(harness, number, OTHER)
            number += 1
        harness.compact()
        kept = [put(harness, 200, OTHER)]
        assert remains(tmp_path, gone)
        purge(harness)
        assert remains(tmp_path, [*gone, again]) == []
        assert harness.has(kept[0])
        assert harness.tier.stat().num_records == len(harness.held)
    with nvme_harness(tmp_path, 3) as harness:
        assert all(info.sharing_group == OTHER for info, _ in harness.held.values())
        assert harness.has(kept[0])


def test_a_purge_after_a_restart_finds_the_remains_of_the_life_before(tmp_path: Path) -> None:
    with nvme_harness(tmp_path) as harness:
        gone = [put(harness, number, GROUP) for number in range(9)]
        put(harness, 50, OTHER)
        harness.tier.drop(harness.held.pop(gone[0].id)[1])
    with nvme_harness(tmp_path) as harness:
        purge(harness)
        assert remains(tmp_path, gone) == []
        assert harness.has(info_of(key_of(50), RECORD, OTHER))


def test_the_space_of_a_purge_is_given_back_or_used_again(tmp_path: Path) -> None:
    with nvme_harness(tmp_path, 4) as harness:
        for number in range(18):
            put(harness, number, GROUP)
        purge(harness)
        sealed, newest = harness.segments()[0], harness.segments()[-1]
        assert sealed.stat().st_blocks * 512 < SEGMENT_BYTES / 2
        assert newest.stat().st_blocks * 512 >= SEGMENT_BYTES / 2  # it gets more records
        for number in range(100, 140):
            while harness.tier.needs_compaction:
                harness.compact()
            put(harness, number, OTHER)


def test_a_purge_that_is_interrupted_anywhere_is_completed_before_records_are_served(tmp_path: Path) -> None:
    """The process dies at each step: what the next one finds is a copy of the files at that moment."""
    copies: list[Path] = []

    class Interrupting(Faults):
        def at(self, point: str) -> bool:
            if point == "store.erase":
                copies.append(crashed(tmp_path / "node", tmp_path / f"copy-{len(copies)}"))
            return False

    with nvme_harness(tmp_path / "node", faults=Interrupting()) as harness:
        gone, kept = put_both(harness, 16)
        refs = [harness.held.pop(info.id)[1] for info in gone]
        harness.tier.erase(refs, PURGE)
        copies.append(crashed(tmp_path / "node", tmp_path / "before-the-end"))
    assert len(copies) > 10
    for folder in copies:
        with nvme_harness(folder) as again:
            assert set(again.held) == {info.id for info in kept}
            assert all(again.has(info) for info in kept)
            assert remains(folder, gone) == []
            assert PurgeJournal(folder).read() == ()
            put(again, 91, GROUP)
        with nvme_harness(folder) as again:  # the purge is over: it takes nothing that came later
            assert len(again.held) == len(kept) + 1


def test_a_purge_that_fails_is_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(fd: int, start: int, stop: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    with nvme_harness(tmp_path) as harness:
        gone = [put(harness, number, GROUP) for number in range(3)]
        kept = put(harness, 9, OTHER)
        with monkeypatch.context() as context:
            context.setattr(erasure, "punch", fail)
            for _ in range(2):
                with pytest.raises(StoreIoError, match=r"erasing in .*\.seg: EIO"):
                    harness.tier.erase([], PURGE)
            with pytest.raises(StoreIoError, match="EIO"):
                harness.tier.end_purge(PURGE)
        harness.clock.advance(100.0)
        folder = crashed(tmp_path, tmp_path.parent / f"{tmp_path.name}-crashed")
        harness.tier.end_purge(PURGE)
        assert remains(tmp_path, gone) == []
        assert harness.has(kept)
    with nvme_harness(folder) as again:
        assert remains(folder, gone) == []
        assert set(again.held) == {kept.id}


def test_a_journal_that_cannot_be_read_stands_for_everything(tmp_path: Path) -> None:
    with nvme_harness(tmp_path) as harness:
        infos = [put(harness, 1, GROUP), put(harness, 2, OTHER)]
    (tmp_path / erasure.JOURNAL_NAME).write_bytes(b"garbage")
    with nvme_harness(tmp_path) as harness:
        assert harness.held == {}
        assert remains(tmp_path, infos) == []
        assert put(harness, 3, OTHER).id in harness.held
    with nvme_harness(tmp_path) as harness:
        assert len(harness.held) == 1


def test_writers_and_readers_of_others_go_on_beside_purges(tmp_path: Path) -> None:
    with nvme_harness(tmp_path, 32) as harness:
        gone: list[RecordInfo] = []
        for number in range(10):
            gone.append(put(harness, number, GROUP))
            put(harness, 1000 + number, OTHER)
        refs = {harness.held[info.id][1] for info in gone}
        bystanders = [held for held in harness.held.values() if held[1] not in refs]
        written: list[RecordInfo] = []
        problems: list[object] = []
        stop = threading.Event()

        def write() -> None:
            for number in range(2000, 2060):
                info = info_of(key_of(number), RECORD, OTHER)
                harness.held[info.id] = (info, harness.tier.write(image_of(info), info))
                written.append(info)
            stop.set()

        def read() -> None:
            while not stop.is_set():
                problems.extend(info for info, _ in bystanders if not harness.has(info))

        threads = [threading.Thread(target=work) for work in (write, read)]
        for thread in threads:
            thread.start()
        while not stop.is_set():
            harness.tier.erase([], PURGE)
        for thread in threads:
            thread.join()
        assert problems == []
        assert len(written) == 60
        assert all(harness.has(info) for info in written)
        harness.tier.end_purge(PURGE)
        assert remains(tmp_path, gone) == []


def test_a_file_that_was_cut_is_cleared_to_its_end(tmp_path: Path) -> None:
    with nvme_harness(tmp_path) as harness:
        gone = [put(harness, number, GROUP) for number in range(3)]
        (path,) = harness.segments()
        os.truncate(path, harness.held[gone[2].id][1].offset + 5000)
        folder = crashed(tmp_path, tmp_path.parent / f"{tmp_path.name}-crashed")
    with nvme_harness(folder) as again:
        assert len(again.held) == 2
        purge(again)
        assert remains(folder, gone) == []


@pytest.mark.parametrize(
    ("live", "expected"),
    [
        ([], [(0, 100)]),
        ([(0, 100)], []),
        ([(40, 20), (10, 10)], [(0, 10), (20, 40), (60, 100)]),
        ([(0, 50), (50, 50)], []),
    ],
)
def test_gaps(live: list[tuple[int, int]], expected: list[tuple[int, int]]) -> None:
    assert list(gaps_between(live, 100)) == expected


def test_a_tier_without_a_purge_has_no_journal(tmp_path: Path) -> None:
    harness = NvmeHarness(settings_for(tmp_path))
    put(harness, 1, OTHER)
    harness.tier.erase([harness.held[info_of(key_of(1), RECORD).id][1]])
    harness.tier.close()
    assert [path.suffix for path in sorted(tmp_path.iterdir())] == [".seg", ""]  # and the lock
