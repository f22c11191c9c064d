"""Compaction: it frees space, what is wanted survives, the capacity always holds, readers notice nothing."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from nvme_harness import SEGMENT_BYTES, NvmeHarness, crashed, image_of, info_of, nvme_harness, payload_of

from kvtransfer.errors import StoreError, StoreIoError
from kvtransfer.store.messages.records import RecordInfo
from kvtransfer.store.nvme.log import Compacted, Moved, NvmeRef
from kvtransfer.store.nvme.segment import Segment
from kvtransfer.store.record import HEADER_BYTES, image_bytes

# Five of them fill a segment.
RECORD = 20_000


def fill(harness: NvmeHarness, first: int = 0) -> list[RecordInfo]:
    """Write records until there is no free space."""
    infos: list[RecordInfo] = []
    while True:
        try:
            infos.append(harness.put(first + len(infos), RECORD))
        except StoreIoError:
            raise
        except StoreError:
            return infos


def used_bytes(folder: Path) -> int:
    return sum(path.stat().st_blocks * 512 for path in folder.glob("*.seg"))


def test_when_it_is_full_it_says_so_and_nothing_is_lost(tmp_path: Path) -> None:
    with nvme_harness(tmp_path, 4) as harness:
        assert not harness.tier.needs_compaction
        infos = fill(harness)
        assert len(infos) == 3 * 5  # the last segment is a compaction's
        assert harness.tier.needs_compaction
        assert harness.tier.can_write
        assert all(harness.has(info) for info in infos)
        stat = harness.tier.stat()
        assert stat.num_records == 15
        assert stat.num_bytes == 15 * image_bytes(RECORD)
        assert stat.num_refused == 1
        assert stat.num_io_errors == 0


@pytest.mark.parametrize("num_segments", [2, 3, 6])
def test_the_oldest_go_but_for_those_that_are_wanted(tmp_path: Path, num_segments: int) -> None:
    with nvme_harness(tmp_path, num_segments) as harness:
        infos = fill(harness)
        compacted = harness.compact(infos[0], infos[3], infos[-1])
        assert {move.info for move in compacted.moved} <= {infos[0], infos[3], infos[-1]}
        assert infos[3] in {move.info for move in compacted.moved}
        assert {info for info, _ in compacted.dropped} == set(infos[:5]) - {
            move.info for move in compacted.moved
        }
        assert [harness.has(info) for info in infos] == [info.id in harness.held for info in infos]
        assert harness.has(infos[3])
        assert all(harness.has(info) for info in infos[5:])
        assert not harness.tier.needs_compaction
        assert harness.put(100, RECORD).id in harness.held
        assert harness.tier.stat().num_evictions == len(compacted.dropped)
        assert harness.tier.stat().num_records == len(harness.held)


def test_survivors_take_half_a_segment_at_most_the_newest_first(tmp_path: Path) -> None:
    with nvme_harness(tmp_path, 4) as harness:
        infos = fill(harness)
        compacted = harness.compact(*infos)
        assert [move.info for move in compacted.moved] == infos[3:5][-len(compacted.moved) :]
        assert sum(move.new.num_bytes for move in compacted.moved) <= SEGMENT_BYTES // 2
        assert compacted.moved


def test_nothing_is_done_while_there_is_space(tmp_path: Path) -> None:
    with nvme_harness(tmp_path, 4) as harness:
        info = harness.put(1)
        assert harness.compact() == ((), ())
        assert harness.has(info)


def test_old_places_serve_until_the_table_knows_the_new_ones(tmp_path: Path) -> None:
    with nvme_harness(tmp_path, 3) as harness:
        infos = fill(harness)
        compacted = harness.tier.compact(lambda info: info.id == infos[0].id)
        assert harness.has(infos[0])  # by its old place
        ((info, old, _),) = compacted.moved
        harness.take_over(compacted)
        assert harness.has(infos[0])
        fill(harness, 100)
        harness.compact(infos[0])
        with pytest.raises(
            StoreIoError, match=f"at {old.offset} of segment {old.segment} is not held any more"
        ):
            harness.tier.read(old, info, image_of(info))


def test_erasing_by_an_old_place_erases_the_copy(tmp_path: Path) -> None:
    with nvme_harness(tmp_path / "a", 3) as harness:
        infos = fill(harness)
        old = harness.held[infos[0].id][1]
        compacted = harness.tier.compact(lambda info: info.id == infos[0].id)
        assert len(compacted.moved) == 1
        harness.tier.erase([old])
        folder = crashed(tmp_path / "a", tmp_path / "b")
    with nvme_harness(folder, 3) as again:
        assert infos[0].id not in again.held
        assert set(again.held) == {info.id for info in infos[5:]}


def test_what_is_dropped_while_it_is_copied_stays_dropped(tmp_path: Path) -> None:
    with nvme_harness(tmp_path, 3) as harness:
        infos = fill(harness)

        def drop_it(info: RecordInfo) -> bool:
            if info.id == infos[2].id:
                harness.tier.drop(harness.held[info.id][1])
            return info.id == infos[2].id

        compacted = harness.tier.compact(drop_it)
        assert compacted.moved == ()
        assert len(compacted.dropped) == 4
        assert not harness.has(infos[2])


def test_a_crash_before_the_victim_is_gone_leaves_one_of_each(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copies: list[Path] = []
    with nvme_harness(tmp_path / "a", 3) as harness:
        infos = fill(harness)
        commit = harness.tier._table.commit

        def crash_and_commit(victim: Segment, moved: Sequence[Moved]) -> Compacted:
            copies.append(crashed(tmp_path / "a", tmp_path / "b"))
            return commit(victim, moved)

        monkeypatch.setattr(harness.tier._table, "commit", crash_and_commit)
        harness.compact(infos[4])
    with nvme_harness(copies[0], 3) as again:
        assert set(again.held) == {info.id for info in infos}
        assert all(again.has(info) for info in infos)
        again.tier.erase([again.held[infos[4].id][1]])
        folder = crashed(copies[0], tmp_path / "c")
    with nvme_harness(folder, 3) as again:  # neither the copy nor the first one
        assert infos[4].id not in again.held


def test_a_victim_is_used_again_unless_somebody_reads_it(tmp_path: Path) -> None:
    with nvme_harness(tmp_path, 3) as harness:
        fill(harness)
        inode = harness.segments()[0].stat().st_ino
        harness.compact()
        assert inode in {path.stat().st_ino for path in harness.segments()}
        infos = fill(harness, 100)
        assert all(harness.has(info) for info in infos)
        victim = harness.tier._table.segments({min(harness.tier._table._segments)})[0]
        harness.tier._files.pin(victim)
        inode = victim.path.stat().st_ino
        harness.compact()
        assert inode not in {path.stat().st_ino for path in harness.segments()}
        harness.tier._files.unpin(victim)


def test_the_capacity_holds_at_every_moment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    largest = 0

    def watched(call: Callable[..., int]) -> Callable[..., int]:
        def watch(*args: object) -> int:
            nonlocal largest
            result = call(*args)
            largest = max(largest, used_bytes(tmp_path))
            return result

        return watch

    monkeypatch.setattr(os, "pwritev", watched(os.pwritev))
    with nvme_harness(tmp_path, 4) as harness:
        for number in range(12):
            infos = fill(harness, number * 100)
            harness.compact(*infos[::2])
    assert largest == 4 * SEGMENT_BYTES


def test_a_smaller_capacity_gives_up_the_oldest(tmp_path: Path) -> None:
    with nvme_harness(tmp_path, 8) as harness:
        infos = fill(harness)
    with nvme_harness(tmp_path, 3) as harness:
        assert used_bytes(tmp_path) <= 3 * SEGMENT_BYTES
        assert set(harness.held) == {info.id for info in infos[-len(harness.held) :]}
        assert harness.held
        assert all(harness.has(info) for info, _ in list(harness.held.values()))
        while harness.tier.needs_compaction:
            harness.compact()
        assert harness.put(1000).id in harness.held


def test_readers_and_writers_and_compaction_at_once(tmp_path: Path) -> None:
    """Eight threads; every record that the books have comes back right or, once, as given up meanwhile."""
    lock = threading.Lock()
    with nvme_harness(tmp_path, 5) as harness:
        num_read = 0
        now_at: dict[NvmeRef | None, NvmeRef | None] = {}
        is_over = threading.Event()

        def compact() -> None:
            with lock:
                compacted = harness.tier.compact(lambda each: each.num_bytes % 2000 == 0)
                harness.take_over(compacted)
                now_at.update({old: new for _, old, new in compacted.moved})
                now_at.update({ref: None for _, ref in compacted.dropped})

        def write(thread: int) -> None:
            for number in range(60):
                info = info_of(thread * 1000 + number, 5000 + 1000 * (number % 9))
                ref: NvmeRef | None = None
                while ref is None:
                    try:
                        ref = harness.tier.write(image_of(info), info)
                    except StoreIoError:
                        raise
                    except StoreError:
                        compact()
                with lock:
                    while ref in now_at:  # by a compaction since the write returned
                        ref = now_at[ref]
                    if ref is not None:
                        harness.held[info.id] = (info, ref)

        def read(thread: int) -> None:
            nonlocal num_read
            number = thread
            while not is_over.is_set():
                number += 7
                with lock:
                    infos = [info for info, _ in harness.held.values()]
                payload = harness.get(infos[number % len(infos)].id) if infos else None
                if payload is None:  # given up, or moved twice, since the books were asked
                    continue
                info = infos[number % len(infos)]
                assert payload == payload_of(int.from_bytes(info.id.key, "big"), info.num_bytes)
                num_read += 1

        with ThreadPoolExecutor(8) as pool:
            readers = [pool.submit(read, thread) for thread in range(4)]
            writers = [pool.submit(write, thread) for thread in range(4)]
            try:
                for future in writers:
                    future.result()
            finally:
                is_over.set()
            for future in readers:
                future.result()
        stat = harness.tier.stat()
        assert num_read > 100
        assert stat.num_evictions > 50
        assert stat.num_checksum_failures == stat.num_io_errors == 0
        assert stat.num_records == len(harness.held)
        assert all(harness.has(info) for info, _ in list(harness.held.values()))
        assert used_bytes(tmp_path) <= 5 * SEGMENT_BYTES
        assert stat.num_written_bytes > stat.num_put_bytes


def test_the_figures_count_whole_records(tmp_path: Path) -> None:
    with nvme_harness(tmp_path) as harness:
        info = harness.put(1, 5000)
        harness.get(info.id)
        stat = harness.tier.stat()
        assert stat.num_put_bytes == stat.num_written_bytes == stat.num_hit_bytes == 3 * HEADER_BYTES
        assert stat.num_bytes == 3 * HEADER_BYTES
        assert (stat.num_records, stat.num_hits) == (1, 1)
        assert stat.capacity_bytes == 8 * SEGMENT_BYTES
