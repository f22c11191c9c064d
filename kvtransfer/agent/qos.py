"""Quality of service: hand-over before prefetch before write-back, and the rates that limit each.

A *flow* is one run of copies of a class: it asks before every batch (a few megabytes). A batch of a lower
class waits while a flow of a higher one waits or moves; a higher one never waits for a lower, so it meets at
most one batch of each such flow. Knows nothing of what is copied.
"""

from __future__ import annotations

import functools
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Generic, NamedTuple, TypeVar, get_args

from kvtransfer.common.clock import Clock
from kvtransfer.transfer_orders import TrafficClass, TransferSettings

# The most urgent first.
CLASSES: tuple[TrafficClass, ...] = get_args(TrafficClass)

# About how much a flow of a class without a limit moves between two questions.
BATCH_BYTES = 4 << 20
# The same from and to CUDA devices: a few of a large model's blocks, which take less than 10 ms over PCI
# Express, while to begin and to await a batch costs some 0.1 ms.
DEVICE_BATCH_BYTES = 256 << 20

# Over a path that is known to be faster, as much as it moves in this time, up to a gigabyte.
_DEVICE_BATCH_S = 0.005
_MOST_DEVICE_BATCH_BYTES = 1 << 30

# A limited class moves at most what its rate allows in this time at once: it looks slow, not bursty.
BATCH_S = 0.005

# A batch that takes longer than this holds no lower class back any more: its target stalls.
STALLED_S = 1.0

T = TypeVar("T")
# (num_bytes, give_up) -> whether the batch may move; see `TrafficGovernor.flow`.
TakeTurn = Callable[[int, Callable[[], bool]], bool]


class Counted(NamedTuple):
    """The bytes that a class has moved, and how long its batches have waited for their turn (a sum over
    flows)."""

    num_bytes: int
    num_batches: int
    waiting_s: float


@dataclass
class _FlowState:
    traffic: TrafficClass
    # The time at which its last batch was let go; None while the flow waits.
    moving_since: float | None = None


class TrafficRules:
    """Decides who may move now (sans-I/O). `limits` are bytes a second for each class; 0: none.

    A limited class moves a batch, then waits until the rate has made up for it: over any span of w seconds at
    most w times the rate and one batch.
    """

    def __init__(self, limits: Mapping[TrafficClass, float]) -> None:
        self._limits = dict(limits)
        self._ready_at: dict[TrafficClass, float] = {}
        self._flows: dict[int, _FlowState] = {}
        self._num_opened = 0

    def open(self, traffic: TrafficClass) -> int:
        """Add a flow that wants to move from now on; return its number."""
        self._num_opened += 1
        self._flows[self._num_opened] = _FlowState(traffic)
        return self._num_opened

    def close(self, flow: int) -> None:
        """Remove a flow that has ended, or has given up for now."""
        del self._flows[flow]

    def ask(self, flow: int, num_bytes: int, now: float) -> float:
        """Note that the flow's previous batch has ended and that the flow wants to move `num_bytes`. Return
        0.0 when it may from now; else the seconds after which to ask again, unless a flow closes before."""
        state = self._flows[flow]
        state.moving_since = None
        wait_s = self._held_back_s(state.traffic, now)
        if wait_s > 0:
            return wait_s
        limit = self._limits.get(state.traffic, 0.0)
        if limit > 0:
            ready_at = self._ready_at.get(state.traffic, now)
            if ready_at > now:
                return ready_at - now
            self._ready_at[state.traffic] = now + num_bytes / limit
        state.moving_since = now
        return 0.0

    def _held_back_s(self, traffic: TrafficClass, now: float) -> float:
        """Return how long flows of higher classes still hold this class back, as far as is known now."""
        higher = CLASSES[: CLASSES.index(traffic)]
        since = (each.moving_since for each in self._flows.values() if each.traffic in higher)
        return max((STALLED_S if at is None else at + STALLED_S - now for at in since), default=0)


class TrafficGovernor:
    """Applies the rules to the flows of one rank, for any number of threads."""

    def __init__(self, settings: TransferSettings, clock: Clock, device: str = "cpu") -> None:
        """`device` is the one that holds the rank's blocks."""
        self._clock = clock
        self._is_on_cpu = device == "cpu"
        self._limits: dict[TrafficClass, float] = {
            "hand_over": settings.hand_over_gb_s * 1e9,
            "prefetch": settings.prefetch_gb_s * 1e9,
            "write_back": settings.write_back_gb_s * 1e9,
        }
        self._rules = TrafficRules(self._limits)
        self._changed = threading.Condition()
        self._counted = dict.fromkeys(CLASSES, Counted(0, 0, 0.0))

    @contextmanager
    def flow(self, traffic: TrafficClass) -> Iterator[TakeTurn]:
        """Hold lower classes back until the end of the block, which calls the function that it receives
        before every batch. `take_turn(num_bytes, give_up)` ends the batch before and waits until `num_bytes`
        more may move: True. False when `give_up` returns True: it is asked before waiting and after every
        `wake`, and must not call the governor."""
        with self._changed:
            number = self._rules.open(traffic)
        try:
            yield functools.partial(self._await_turn, number, traffic)
        finally:
            with self._changed:
                self._rules.close(number)
                self._changed.notify_all()

    def batch_bytes(self, traffic: TrafficClass, path_gb_s: float = 0.0) -> int:
        """Return how many bytes to ask for at a time, for copies over a path of this rate (0: unknown)."""
        limit = self._limits[traffic]
        most = BATCH_BYTES
        if not self._is_on_cpu:
            of_path = min(int(path_gb_s * 1e9 * _DEVICE_BATCH_S), _MOST_DEVICE_BATCH_BYTES)
            most = max(DEVICE_BATCH_BYTES, of_path)
        return min(most, max(1, int(limit * BATCH_S))) if limit else most

    def wake(self) -> None:
        """Make every waiting flow ask its `give_up` again, and the clock."""
        with self._changed:
            self._changed.notify_all()

    def counted(self) -> dict[TrafficClass, Counted]:
        """Return the counts of each class since the start."""
        with self._changed:
            return dict(self._counted)

    def _await_turn(
        self, number: int, traffic: TrafficClass, num_bytes: int, give_up: Callable[[], bool]
    ) -> bool:
        with self._changed:
            asked_at = self._clock.now()
            while not (given_up := give_up()):
                wait_s = self._rules.ask(number, num_bytes, self._clock.now())
                if wait_s <= 0:
                    break
                self._changed.wait(wait_s)
            before = self._counted[traffic]
            self._counted[traffic] = Counted(
                before.num_bytes + (0 if given_up else num_bytes),
                before.num_batches + (0 if given_up else 1),
                before.waiting_s + self._clock.now() - asked_at,
            )
            return not given_up


class ClassQueue(Generic[T]):
    """Items that wait for a thread, the most urgent class first and in order within it."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._items: dict[TrafficClass, deque[T]] = {traffic: deque() for traffic in CLASSES}
        self._is_woken = False

    def put(self, traffic: TrafficClass, item: T) -> None:
        """Add an item at the end of its class."""
        with self._changed:
            self._items[traffic].append(item)
            self._changed.notify_all()

    def put_first(self, traffic: TrafficClass, item: T) -> None:
        """Add an item before all others of its class: it had its turn already and continues."""
        with self._changed:
            self._items[traffic].appendleft(item)
            self._changed.notify_all()

    def wake(self) -> None:
        """Make the next `get` return at once."""
        with self._changed:
            self._is_woken = True
            self._changed.notify_all()

    def get(self) -> T | None:
        """Return the most urgent item when there is one; None after `wake`, which comes first."""
        with self._changed:
            self._changed.wait_for(lambda: self._is_woken or any(self._items.values()))
            if self._is_woken:
                self._is_woken = False
                return None
            return next(items for items in self._items.values() if items).popleft()

    def has_above(self, traffic: TrafficClass) -> bool:
        """Whether an item of a higher class waits."""
        with self._changed:
            return any(self._items[each] for each in CLASSES[: CLASSES.index(traffic)])
