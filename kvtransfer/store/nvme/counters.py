"""The counters of the NVMe tier, and the suspension of writes after failures."""

from __future__ import annotations

import logging
import threading
from collections import defaultdict

from kvtransfer.common.clock import Clock
from kvtransfer.common.health import CoolDown
from kvtransfer.common.moving_average import RateMeter
from kvtransfer.errors import StoreIoError
from kvtransfer.store.messages.admin_requests import TierStat

_log = logging.getLogger(__name__)


class NvmeCounters:
    """Counts, rates and the cool-down of one tier. Thread-safe."""

    def __init__(self, clock: Clock) -> None:
        # A permanent limitation.
        self.note = ""
        self._clock = clock
        self._lock = threading.Lock()
        self.reads = RateMeter()
        self.writes = RateMeter()
        self._cool_down = CoolDown()
        self._counts: dict[str, int] = defaultdict(int)

    def count(self, **counts: int) -> None:
        """Add to counters of `TierStat`."""
        with self._lock:
            for name, count in counts.items():
                self._counts[name] += count

    def failed(self, error: StoreIoError) -> None:
        """Count a failed write, and suspend writes for a while."""
        _log.warning("%s", error)
        with self._lock:
            self._counts["num_io_errors"] += 1
            self._cool_down.failed(str(error), self._clock.now())

    def pause(self) -> tuple[float, str]:
        """Return for how long writes are still suspended (0.0: they are not), and why."""
        if not self._cool_down.reason:
            return 0.0, ""
        with self._lock:
            return self._cool_down.remaining_s(self._clock.now()), self._cool_down.reason

    def begin(self, meter: RateMeter) -> float:
        """Begin a client's read (`reads`) or a write of records (`writes`); return the time, for its end."""
        with self._lock:
            now = self._clock.now()
            meter.begin(now)
            return now

    def end_read(self, began_at: float, num_bytes: int, *, is_hit: bool) -> None:
        """End a read of `num_bytes` bytes; 0: it failed."""
        with self._lock:
            self.reads.end(self._clock.now(), began_at, num_bytes)
            if num_bytes and is_hit:
                self._counts["num_hits"] += 1
                self._counts["num_hit_bytes"] += num_bytes

    def end_write(self, began_at: float, num_bytes: int, *, is_put: bool) -> None:
        """End a write of `num_bytes` bytes, for a client or by a compaction; 0: it failed."""
        with self._lock:
            now = self._clock.now()
            self.writes.end(now, began_at, num_bytes)
            if num_bytes:
                self._counts["num_written_bytes"] += num_bytes
                self._counts["num_put_bytes"] += num_bytes if is_put else 0
                self._cool_down.succeeded(now)

    def stat(self, num_bytes: int, capacity_bytes: int, num_records: int) -> TierStat:
        with self._lock:
            notes = [self.note]
            if self._cool_down.reason:
                pause_s = self._cool_down.remaining_s(self._clock.now())
                notes.append(f"writes are suspended for another {pause_s:.1f} s: {self._cool_down.reason}")
            return TierStat(
                "nvme",
                num_bytes,
                capacity_bytes,
                num_records,
                **self._counts,
                read_gb_s=self.reads.gb_s,
                write_gb_s=self.writes.gb_s,
                latency_s=self.reads.latency_s,
                note="; ".join(filter(None, notes)),
            )
