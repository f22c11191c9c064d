"""How fast the NVMe tier writes and reads records, beside a plain O_DIRECT loop, as JSON lines.

Ways: "plain" is a loop of pwrite, then preadv, of `record_bytes` each in a file of its own; "store" is
`NvmeTier.write` and `read` of records with that payload (4 KiB more for each one's header, not counted in the
rate; sums, directories and the making of files are in its time); "write run" writes 16 records by one call of
`write_run`. All start on files whose blocks were taken but never written, go from and to the same kind of
memory, and have the same threads. "cold": again, after the page cache was dropped, which must change nothing.
Every repetition measures every way, and a ratio is the median of those within one repetition.

    python -m benchmarks.store_nvme [--mib 256] [--repeat 5] [--threads 1,8] [--folder .]
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import statistics
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from operator import truediv
from pathlib import Path
from typing import NamedTuple

import numpy as np

from kvtransfer.blocks.checksum import checksum
from kvtransfer.common.clock import SystemClock
from kvtransfer.common.faults import Faults
from kvtransfer.config import StoreSettings
from kvtransfer.messages import Shard
from kvtransfer.store.messages.records import RecordId, RecordInfo
from kvtransfer.store.nvme.log import NvmeRef, NvmeTier
from kvtransfer.store.record import HEADER_BYTES, image_bytes

RECORD_BYTES = (64 << 10, 1 << 20, 4 << 20)
SEGMENT_BYTES = 64 << 20
RUN = 16
CLOCK = SystemClock()


class Workload(NamedTuple):
    """Threads, bytes of a record's payload, and their number."""

    num_threads: int
    record_bytes: int
    num_records: int


class Memory:
    """Whole images, their pages taken; `payloads` are known bytes."""

    def __init__(self, workload: Workload) -> None:
        size = image_bytes(workload.record_bytes)
        view = memoryview(mmap.mmap(-1, size * workload.num_records))
        np.frombuffer(view, dtype=np.uint64)[:] = np.random.default_rng(7).integers(
            0, 1 << 63, len(view) // 8, dtype=np.uint64
        )
        self.images = [view[start : start + size] for start in range(0, len(view), size)]
        self.payloads = [image[HEADER_BYTES:] for image in self.images]


def spread(workload: Workload, work: Callable[[int], None], step: int = 1) -> float:
    """Return the seconds for `work` on every record (or every `step`-th), in order, by all threads."""
    numbers = iter(range(0, workload.num_records, step))

    def run() -> None:
        for number in numbers:  # shared: the next one goes to whoever is free
            work(number)

    with ThreadPoolExecutor(workload.num_threads) as pool:
        started = CLOCK.now()
        for future in [pool.submit(run) for _ in range(workload.num_threads)]:
            future.result()
        return CLOCK.now() - started


def drop_page_cache(folder: Path) -> None:
    """Drop the cached pages of these files, and all of the cache where that is allowed."""
    os.sync()
    for path in folder.iterdir():
        fd = os.open(path, os.O_RDONLY)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)
    if os.geteuid() == 0:
        Path("/proc/sys/vm/drop_caches").write_text("1")


def plain(workload: Workload, memory: Memory, folder: Path) -> dict[str, float]:
    size = workload.record_bytes
    path = folder / "plain"
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_DIRECT, 0o600)
    os.posix_fallocate(fd, 0, size * workload.num_records)

    def write(number: int) -> None:
        assert os.pwrite(fd, memory.payloads[number], number * size) == size

    def read(number: int) -> None:
        assert os.preadv(fd, [memory.payloads[number]], number * size) == size

    seconds = {"write": spread(workload, write), "read": spread(workload, read)}
    drop_page_cache(folder)
    seconds["cold read"] = spread(workload, read)
    os.close(fd)
    path.unlink()
    return seconds


def store(workload: Workload, memory: Memory, folder: Path) -> dict[str, float]:
    settings = StoreSettings(
        node_id="bench",
        epoch=1,
        name="",
        host="127.0.0.1",
        dram_bytes=0,
        nvme_path=str(folder / "tier"),
        nvme_bytes=3 * SEGMENT_BYTES + 3 * workload.num_records * image_bytes(workload.record_bytes),
        segment_bytes=SEGMENT_BYTES,
    )
    tier = NvmeTier(settings, CLOCK, Faults())
    tier.open()
    shard = Shard(0, 1, 0, 1)
    infos = []
    for number, payload in enumerate(memory.payloads):
        key = number.to_bytes(16, "big")
        identity = RecordId(b"benchmrk", key, shard)
        total = checksum(payload)
        infos.append(RecordInfo(identity, b"", key, "bench", b"m" * 32, workload.record_bytes, total))
    refs: dict[int, NvmeRef] = {}

    def write(number: int) -> None:
        refs[number] = tier.write(memory.images[number], infos[number])

    def write_run(number: int) -> None:
        end = min(number + RUN, workload.num_records)
        while number < end:
            run = tier.write_run([(memory.images[each], infos[each]) for each in range(number, end)])
            refs.update(enumerate(run, number))
            number += len(run)

    def read(number: int) -> None:
        tier.read(refs[number], infos[number], memory.images[number])

    seconds = {"write": spread(workload, write)}
    seconds["write run"] = spread(workload, write_run, RUN)
    for payload in memory.payloads:
        payload[:8] = bytes(8)
    seconds["read"] = spread(workload, read)
    assert all(
        checksum(payload) == info.checksum for payload, info in zip(memory.payloads, infos, strict=True)
    ), "what was read is not what was written"
    drop_page_cache(folder / "tier")
    seconds["cold read"] = spread(workload, read)
    tier.close()
    for path in (folder / "tier").iterdir():
        path.unlink()
    return seconds


def measure(workload: Workload, repeat: int, folder: Path) -> None:
    memory = Memory(workload)
    num_bytes = workload.record_bytes * workload.num_records
    rates: dict[tuple[str, str], list[float]] = {}
    for number in range(repeat + 1):
        for way in (plain, store) if number % 2 else (store, plain):
            for operation, seconds in way(workload, memory, folder).items():
                if number:  # the first pass wakes the disk
                    rates.setdefault((way.__name__, operation), []).append(num_bytes / seconds / 1e9)
    for (name, operation), values in sorted(rates.items()):
        line = {
            "benchmark": "store_nvme",
            "way": name,
            "operation": operation,
            "record_bytes": workload.record_bytes,
            "threads": workload.num_threads,
            "gb_s": round(statistics.median(values), 3),
            "best_gb_s": round(max(values), 3),
            "ratio": round(
                statistics.median(map(truediv, values, rates["plain", operation.removesuffix(" run")])), 3
            ),
            "num_bytes": num_bytes,
            "repeat": repeat,
        }
        print(json.dumps(line), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--mib", type=int, default=256)
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--threads", default="1,8")
    parser.add_argument("--folder", type=Path, default=Path())
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix=".store_nvme-", dir=args.folder) as folder:
        for num_threads in map(int, args.threads.split(",")):
            for record_bytes in RECORD_BYTES:
                workload = Workload(num_threads, record_bytes, (args.mib << 20) // record_bytes)
                measure(workload, args.repeat, Path(folder))


if __name__ == "__main__":
    main()
