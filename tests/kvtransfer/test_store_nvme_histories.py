"""Any history of an NVMe tier, with restarts and crashes, against a dictionary: the right bytes or a miss."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from nvme_harness import NvmeHarness, info_of, payload_of, settings_for

from kvtransfer.errors import StoreError, StoreIoError
from kvtransfer.store.messages.records import RecordId

pytestmark = pytest.mark.slow

SEGMENT_BYTES = 64 << 10
NUM_SEGMENTS = 4
KEYS = st.integers(0, 11)
SIZES = [1, 4096, 9000, 22_000]


def identity(key: int) -> RecordId:
    return info_of(key, size(key)).id


def size(key: int) -> int:
    return SIZES[key % len(SIZES)]


class Histories(RuleBasedStateMachine):
    """`present` must be found, `doubtful` may be, everything else must not."""

    def __init__(self) -> None:
        super().__init__()
        self.root = Path(tempfile.mkdtemp(prefix="nvme-histories-"))
        self.num_lives = 0
        self.harness = self.start(self.root / "0")
        self.present: set[int] = set()
        self.doubtful: set[int] = set()

    def start(self, folder: Path) -> NvmeHarness:
        return NvmeHarness(settings_for(folder, NUM_SEGMENTS, SEGMENT_BYTES))

    @rule(key=KEYS)
    def put(self, key: int) -> None:
        try:
            self.harness.put(key, size(key))
        except StoreIoError:
            raise
        except StoreError:
            assert self.harness.tier.needs_compaction
            return
        self.present.add(key)

    @rule(key=KEYS)
    def drop(self, key: int) -> None:
        if key in self.present:
            self.harness.tier.drop(self.harness.held.pop(identity(key))[1])
            self.present.discard(key)
            self.doubtful.add(key)

    @rule(key=KEYS, also=KEYS)
    def erase(self, key: int, also: int) -> None:
        keys = {key, also} & self.present
        self.harness.tier.erase([self.harness.held.pop(identity(each))[1] for each in keys])
        self.present -= keys
        self.doubtful.clear()  # what was dropped is erased with them
        raw = b"".join(path.read_bytes() for path in self.harness.segments())
        for each in set(range(12)) - self.present:
            assert payload_of(each, size(each))[:64] not in raw or size(each) < 64
            assert identity(each).key not in raw or each == 0  # whose key is all zeros

    @precondition(lambda self: self.harness.tier.needs_compaction)
    @rule(wanted=st.sets(KEYS))
    def compact(self, wanted: set[int]) -> None:
        before = self.harness.tier.stat().num_records
        compacted = self.harness.compact(*[info_of(key, size(key)) for key in wanted])
        assert self.harness.tier.stat().num_records == before - len(compacted.dropped)
        gone = {int.from_bytes(info.id.key, "big") for info, _ in compacted.dropped}
        assert gone <= self.present
        self.present -= gone

    @rule()
    def restart(self) -> None:
        self.harness.tier.close()
        self.come_back(self.harness.folder)

    @rule(data=st.data())
    def crash(self, data: st.DataObject) -> None:
        """The process dies; perhaps the end of the newest file is lost, or a page of it is garbage."""
        self.num_lives += 1
        folder = self.root / str(self.num_lives)
        shutil.copytree(self.harness.folder, folder)
        self.harness.tier.close()
        files = sorted(folder.glob("*.seg"))
        damage = data.draw(st.sampled_from(["none", "cut", "garbage"])) if files else "none"
        if damage != "none":
            newest = int(files[-1].stem)
            hit = {record for record, (_, ref) in self.harness.held.items() if ref.segment == newest}
            lost = {key for key in self.present if identity(key) in hit}
            self.present -= lost
            self.doubtful |= lost
            offset = data.draw(st.integers(0, files[-1].stat().st_size))
            with files[-1].open("r+b") as file:
                if damage == "cut":
                    file.truncate(offset)
                else:
                    file.seek(offset // 4096 * 4096)
                    file.write(payload_of(offset, 4096))
        self.come_back(folder)

    def come_back(self, folder: Path) -> None:
        self.harness = self.start(folder)
        found = {key for key in range(12) if identity(key) in self.harness.held}
        assert self.present <= found <= self.present | self.doubtful
        returned = {key for key in found - self.present if self.harness.has(info_of(key, size(key)))}
        for key in found - self.present - returned:  # the reader finds it bad
            self.harness.tier.drop(self.harness.held.pop(identity(key))[1])
        self.present |= returned
        self.doubtful -= returned

    @invariant()
    def right_bytes_or_a_miss(self) -> None:
        for key in range(12):
            assert self.harness.has(info_of(key, size(key))) == (key in self.present)

    @invariant()
    def the_figures_and_the_disk_agree(self) -> None:
        stat = self.harness.tier.stat()
        assert stat.num_records == len(self.harness.held) == len(self.present)
        assert stat.num_bytes == sum(ref.num_bytes for _, ref in self.harness.held.values())
        used_bytes = sum(path.stat().st_size for path in self.harness.segments())
        assert used_bytes <= NUM_SEGMENTS * SEGMENT_BYTES

    def teardown(self) -> None:
        self.harness.tier.close()
        shutil.rmtree(self.root)


Histories.TestCase.settings = settings(
    max_examples=30, stateful_step_count=30, deadline=None, suppress_health_check=list(HealthCheck)
)
TestHistories = Histories.TestCase
