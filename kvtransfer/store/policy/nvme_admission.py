"""Which records are written to NVMe: a pure policy that learns from what became of those written before."""

from __future__ import annotations

from typing import NamedTuple

from kvtransfer.config import Admission as AdmissionPolicy
from kvtransfer.store.messages.records import RecordId, RecordInfo

# A record seen for the first time displaces others only if at least this part of those like it were read
# back: about seven bytes written for a byte read. Lower: more hits; higher: less wear.
FIRST_WORTH = 0.15
# The same for a record seen again; almost always kept: the next reading is seldom the last.
AGAIN_WORTH = 0.02
# One chain of this number is written although it is not worth it, to notice when that changes.
SAMPLED = 32
# A class is worth writing until this number of its trials have ended.
MIN_TRIALS = 64
# When this number of trials of a class have ended, the counts weigh half: workloads change.
MEMORY_TRIALS = 4000
# Records remembered, for each that fits in the tier.
SEEN_FACTOR = 4
# Bounds of the above; the upper one is about 80 MB.
MIN_SEEN, MAX_SEEN = 1024, 1 << 19

_MAX_TIMES_SEEN = 4
_MAX_TURN = 2
_MAX_DEPTH_CLASS = 6


class _History(NamedTuple):
    """What is remembered of a record. `num_turns`: how often its chain was prolonged after it had been seen
    again, `depth` its place in the chain; both as far as its predecessors are remembered."""

    num_times_seen: int
    num_turns: int
    depth: int
    is_sampled: bool

    @property
    def kind(self) -> int:
        """The class it is judged with: how often it was seen; of a first history, turn and depth (in steps of
        4 x) distinguish a new conversation's beginning from the end of an old one."""
        if self.num_times_seen > 1:
            return self.num_times_seen
        depth_class = min((self.depth + 1).bit_length() // 2, _MAX_DEPTH_CLASS)
        return 1 | self.num_turns << 4 | depth_class << 8

    def pack(self) -> int:
        return self.depth << 5 | self.is_sampled << 4 | self.num_turns << 2 | self.num_times_seen - 1


def _unpack(packed: int) -> _History:
    return _History((packed & 3) + 1, packed >> 2 & 3, packed >> 5, bool(packed >> 4 & 1))


class _Trials:
    """The records of a class that ended, and those of them that ended by being read from NVMe."""

    __slots__ = ("num_ended", "num_read")

    def __init__(self) -> None:
        self.num_ended = 0.0
        self.num_read = 0.0

    @property
    def worth(self) -> float:
        return 1.0 if self.num_ended < MIN_TRIALS else self.num_read / self.num_ended

    def end(self, was_read: bool) -> None:
        self.num_ended += 1
        self.num_read += was_read
        if self.num_ended >= MEMORY_TRIALS:
            self.num_ended /= 2
            self.num_read /= 2


class Admission:
    """Told of every record of one node; says which are worth writing to its NVMe tier.

    A yes is an offer: the caller calls `written` when the record is on NVMe, and `hit` again at the next hit
    when it is not. `is_full`: a write now displaces other records.

    *Adaptive*: while there is space everything is written, which wears the disk by once its size. After that
    a record has to be worth it. A record written in class c is a trial of c. It succeeds when the record is
    read from NVMe; it fails when the record is dropped unread, and also when it is found in the host tier, as
    it could have been written only then. Either way a record seen once more goes on in its next class. The
    part that succeeds is what a write of the class is worth. A rejected class is still written for one chain
    of 32: for whole chains, as a block is of no use without those before it.
    """

    def __init__(self, policy: AdmissionPolicy, capacity_bytes: int) -> None:
        self._policy = policy
        self._capacity_bytes = capacity_bytes
        # The packed histories by hash of the record's id: a collision costs one wrong guess.
        self._seen: dict[int, int] = {}
        # The class each written record is a trial of.
        self._on_nvme: dict[int, int] = {}
        self._trials: dict[int, _Trials] = {}
        self._num_chains = 0
        self._mean_bytes = 0.0

    def put(self, info: RecordInfo, is_full: bool) -> bool:
        """Return whether to write the record to NVMe now; it was committed to the host tier and is not on
        NVMe."""
        if self._policy == "all":
            return True
        self._mean_bytes += (info.num_bytes - self._mean_bytes) * (0.01 if self._mean_bytes else 1.0)
        number = hash(info.id)
        packed = self._seen.pop(number, None)
        history = self._first_time(info) if packed is None else _again(packed)
        self._remember(number, history)
        return self._is_worth(history, is_full)

    def hit(self, info: RecordInfo, is_full: bool) -> bool:
        """Return whether to write a record that was found in the host tier to NVMe now. Always False when it
        is there already."""
        number = hash(info.id)
        is_there = number in self._on_nvme
        if self._policy == "all":
            return not is_there
        history = self._see_again(number)
        if is_there:
            self._next_trial(number, history, was_read=False)
            return False
        return self._is_worth(history, is_full)

    def written(self, info: RecordInfo) -> None:
        """Note that the record is on NVMe now. Records found there at the start need no call."""
        number = hash(info.id)
        packed = self._seen.get(number)
        self._on_nvme[number] = 1 if packed is None else _unpack(packed).kind

    def nvme_hit(self, record_id: RecordId) -> None:
        """Note that the record was read from NVMe."""
        number = hash(record_id)
        self._next_trial(number, self._see_again(number), was_read=True)

    def dropped(self, record_id: RecordId) -> None:
        """Note that the record left NVMe to free space."""
        kind = self._on_nvme.pop(hash(record_id), None)
        if kind is not None:
            self._end(kind, was_read=False)

    def forgotten(self, record_id: RecordId) -> None:
        """Note that the record left NVMe for a reason that implies nothing about its worth: purged,
        damaged."""
        self._on_nvme.pop(hash(record_id), None)

    @property
    def num_remembered(self) -> int:
        return len(self._seen)

    def _is_worth(self, history: _History, is_full: bool) -> bool:
        if self._policy == "seen_twice":
            return history.num_times_seen > 1
        if not is_full or history.is_sampled:
            return True
        trials = self._trials.get(history.kind)
        return trials is None or trials.worth >= (FIRST_WORTH if history.num_times_seen == 1 else AGAIN_WORTH)

    def _first_time(self, info: RecordInfo) -> _History:
        record = info.id
        parent_number = hash(RecordId(record.space, info.parent, record.shard))
        packed = self._seen.get(parent_number) if info.parent else None
        if packed is None:
            return _History(1, 0, 0, self._draw())
        parent = _unpack(packed)
        if parent.num_times_seen == 1:
            return parent._replace(depth=parent.depth + 1)
        return _History(1, min(parent.num_turns + 1, _MAX_TURN), parent.depth + 1, self._draw())

    def _see_again(self, number: int) -> _History:
        packed = self._seen.pop(number, None)
        history = _History(2, 0, 0, False) if packed is None else _again(packed)
        self._remember(number, history)
        return history

    def _remember(self, number: int, history: _History) -> None:
        """Store the history of a record. The records seen last stay; the memory of the others is bounded."""
        self._seen[number] = history.pack()
        most = SEEN_FACTOR * self._capacity_bytes / max(self._mean_bytes, 1.0)
        most = min(max(most, MIN_SEEN), MAX_SEEN)
        while len(self._seen) > most:
            del self._seen[next(iter(self._seen))]

    def _draw(self) -> bool:
        self._num_chains += 1
        return self._num_chains % SAMPLED == 0

    def _next_trial(self, number: int, history: _History, *, was_read: bool) -> None:
        kind = self._on_nvme.get(number)
        if kind is not None:
            self._end(kind, was_read)
            self._on_nvme[number] = history.kind

    def _end(self, kind: int, was_read: bool) -> None:
        self._trials.setdefault(kind, _Trials()).end(was_read)


def _again(packed: int) -> _History:
    """Return the history of a record that is seen once more. It was sampled as a first history, if at all: a
    record seen again is judged by itself."""
    history = _unpack(packed)
    return history._replace(num_times_seen=min(history.num_times_seen + 1, _MAX_TIMES_SEEN), is_sampled=False)
