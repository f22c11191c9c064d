"""What the NVMe tier counts and measures, and whether its disk may be written to."""

from __future__ import annotations

import logging
import threading
from collections import defaultdict

from kvtransfer.common.backoff import CoolDown
from kvtransfer.common.clock import Clock
from kvtransfer.common.moving_average import RateMeter
from kvtransfer.errors import StoreIoError
from kvtransfer.store.messages import TierStat

_log = logging.getLogger(__name__)


class NvmeCounters:
    """Of one tier. Thread-safe."""

    def __init__(self, clock: Clock) -> None:
        # What will not get better by itself.
        self.note = ""
        self._clock = clock
        self._lock = threading.Lock()
        self._reads = RateMeter()
        self._writes = RateMeter()
        self._cool_down = CoolDown()
        self._counts: dict[str, int] = defaultdict(int)

    def count(self, **counts: int) -> None:
        """Add to counters of `TierStat`."""
        with self._lock:
            for name, count in counts.items():
                self._counts[name] += count

    def failed(self, error: StoreIoError) -> None:
        """A write failed: nothing is written for a while."""
        _log.warning("%s", error)
        with self._lock:
            self._counts["num_io_errors"] += 1
            self._cool_down.failed(str(error), self._clock.now())

    def pause(self) -> tuple[float, str]:
        """For how long nothing must be written yet (0.0: it may), and why."""
        if not self._cool_down.reason:
            return 0.0, ""
        with self._lock:
            return self._cool_down.remaining_s(self._clock.now()), self._cool_down.reason

    def begin_read(self) -> float:
        """A client's read begins; returns when, for `end_read`."""
        with self._lock:
            now = self._clock.now()
            self._reads.begin(now)
            return now

    def end_read(self, began_at: float, num_bytes: int, *, is_hit: bool) -> None:
        """So many bytes came; 0: it failed."""
        with self._lock:
            self._reads.end(self._clock.now(), began_at, num_bytes)
            if num_bytes and is_hit:
                self._counts["num_hits"] += 1
                self._counts["num_hit_bytes"] += num_bytes

    def begin_write(self) -> float:
        """A write of records begins; returns when, for `end_write`."""
        with self._lock:
            now = self._clock.now()
            self._writes.begin(now)
            return now

    def end_write(self, began_at: float, num_bytes: int, *, is_put: bool) -> None:
        """So many bytes were written, for a client or by a compaction; 0: it failed."""
        with self._lock:
            now = self._clock.now()
            self._writes.end(now, began_at, num_bytes)
            if num_bytes:
                self._counts["num_written_bytes"] += num_bytes
                self._counts["num_put_bytes"] += num_bytes if is_put else 0
                self._cool_down.succeeded(now)

    def stat(self, num_bytes: int, capacity_bytes: int, num_records: int) -> TierStat:
        with self._lock:
            notes = [self.note]
            if self._cool_down.reason:
                pause_s = self._cool_down.remaining_s(self._clock.now())
                notes.append(f"not written to for another {pause_s:.1f} s: {self._cool_down.reason}")
            return TierStat(
                "nvme",
                num_bytes,
                capacity_bytes,
                num_records,
                **self._counts,
                read_gb_s=self._reads.gb_s,
                write_gb_s=self._writes.gb_s,
                latency_s=self._reads.latency_s,
                note="; ".join(filter(None, notes)),
            )
