"""Migration of running streams to another replica: finished blocks first, then the state.

    Move --> QUEUED --in turn--> ASKED --granted--> COPYING --held, all written--> HANDED --joined--> migrated
               ^                   |                   |                              |
               +--- once more -----+-- too late, preempted, part of it in host memory +-- target lost:
                                   |                   |                              |   fails, "leaving"
                                   +-- no capacity, aborted, push failed, peer lost --+-- aborted there
                                                       v
                                     (it continues here, the gateway is sent the reason)

The sequence decodes until what is finished has been written; then it is held with its next token, so that it
pauses only while its last blocks and its state are on their way. Which token that is follows from the speed
of the transfer: the landing has capacity for more tokens than that takes. Called by the engine core, on its
loop.
"""

from __future__ import annotations

import logging
import math
from enum import Enum, auto

from kvtransfer.common.clock import Clock
from kvtransfer.messages import ReplicaIdentity
from kvtransfer.protocol.actions import Pushed, PushEnded
from workers.disagg.kv_sender import KvSender
from workers.disagg.request_table import ActiveRequest, RequestTable
from workers.interfaces import EngineControl
from workers.messages.link import HandOverTarget, Move, MoveEnded, RequestFailed
from workers.scheduler.scheduler import Scheduler
from workers.scheduler.sequence_migration import Position
from workers.scheduler.step import ChunkDone, StepRates

# The time that a landing may wait for blocks at the target; then the gateway chooses again.
LANDING_WAIT_S = 2.0
# A landing has capacity for the tokens decoded in this time, in addition to the time that the copy takes.
AHEAD_S = 0.25
MAX_TRIES = 4
# A sequence that has fewer tokens to go ends here sooner than it migrates.
_LEAST_LEFT = 4
_ASSUMED_STEP_S = 0.03
_ASSUMED_GB_S = 1.0

_log = logging.getLogger("tandem.migration")


class _State(Enum):
    QUEUED = auto()
    ASKED = auto()
    COPYING = auto()
    HANDED = auto()
    # The migration is given up; the writes for it are being stopped.
    ENDING = auto()


class MigrationManager:
    """Starts the migrations away from one replica in turn, `max_active` at a time."""

    def __init__(
        self,
        *,
        identity: ReplicaIdentity,
        scheduler: Scheduler,
        requests: RequestTable,
        sender: KvSender,
        rates: StepRates,
        control: EngineControl,
        clock: Clock,
        max_active: int,
        token_bytes: int,
        state_bytes: int = 0,
    ) -> None:
        """`token_bytes` is the KV of one token, and `state_bytes` what a sequence has beside; `rates` are the
        measured ones."""
        self._identity = identity
        self._migrations: list[Migration] = []
        self._max_active = max_active
        self._token_bytes = token_bytes
        self._state_bytes = state_bytes
        self._rates = rates
        self.scheduler = scheduler
        self.requests = requests
        self.sender = sender
        self.control = control
        self.clock = clock
        self.num_migrated = 0
        self.num_failed = 0

    def __len__(self) -> int:
        if self._migrations:
            self._migrations = [migration for migration in self._migrations if migration.is_current]
        return len(self._migrations)

    def start(self, move: Move) -> None:
        """Migrate this request when its turn comes. A request that is not here (any more) has been answered
        already, and one that is being handed over will leave anyway."""
        record = self.requests.get((move.request_id, move.attempt))
        if record is None or record.push is not None:
            return
        migration = Migration(record, move.target, self)
        record.push = migration
        self._migrations.append(migration)
        if move.target.identity == self._identity:
            migration.fail("it runs there already")
        self.control.wake()

    def pump(self) -> None:
        """Start the migrations that may start, and take back those that the scheduler has changed; called
        after every turn."""
        if not len(self):
            return
        num_free = self._max_active - sum(it.state is not _State.QUEUED for it in self._migrations)
        for migration in list(self._migrations):
            if not migration.is_current:
                continue
            if migration.state is not _State.QUEUED:
                migration.review()
            elif num_free > 0:
                num_free -= migration.begin()

    def progress(self, chunk: ChunkDone) -> None:
        """Push KV of one more token of a sequence that migrates."""
        record = self.requests.get((chunk.request_id, chunk.attempt))
        if record is not None and isinstance(record.push, Migration):
            record.push.progress(chunk)

    def capacity(self, position: Position, num_tries: int) -> int:
        """Return how many tokens a landing must hold: those of now, and those decoded until they are
        written."""
        gb_s = self.sender.sends.counters.gb_s or _ASSUMED_GB_S
        num_bytes = position.num_tokens * self._token_bytes + self._state_bytes
        copy_s = num_bytes * self._max_active / gb_s / 1e9
        wanted_s = (AHEAD_S + copy_s) * (1 << (num_tries - 1))
        num_ahead = math.ceil(wanted_s / (self._rates.decode_step_s or _ASSUMED_STEP_S))
        return min(position.num_tokens + max(num_ahead, _LEAST_LEFT), position.most_tokens)


class Migration:
    """One stream on its way to `target`; see the module's drawing. It is the `Push` of its request."""

    def __init__(self, record: ActiveRequest, target: HandOverTarget, manager: MigrationManager) -> None:
        self.target = target
        self.state = _State.QUEUED
        self._record = record
        self._manager = manager
        self._sender = manager.sender
        self._scheduler = manager.scheduler
        self._num_tries = 0
        # The number of tokens for which the landing has capacity.
        self._capacity = 0
        # Whether it is settled with how many tokens the sequence stops here.
        self._is_stopping = False
        self._again = False

    @property
    def is_current(self) -> bool:
        """Whether the request is still here, and still to migrate."""
        return self._record.push is self

    # --------------------------------------------------------------------------------- from the manager

    def begin(self) -> bool:
        """Ask for a landing, if there is a path and the sequence can migrate now."""
        key, sequences = self._record.key, self._scheduler.migration
        if not self._sender.has_path(self.target):
            return False
        position = sequences.position(key)
        if position is None or position.most_tokens - position.num_tokens < _LEAST_LEFT:
            return False
        self.state = _State.ASKED
        self._num_tries += 1
        self._capacity = self._manager.capacity(position, self._num_tries)
        submission, block_keys = sequences.submission(key), sequences.block_keys(key)
        deadline = self._manager.clock.now() + LANDING_WAIT_S
        self._sender.ask(self.target, submission, self._capacity, block_keys, deadline, is_growing=True)
        return True

    def review(self) -> None:
        """Give the landing back when the sequence has outgrown it, or no longer lies on the device."""
        if self.state is _State.ASKED:
            position = self._scheduler.migration.position(self._record.key)
            if position is None or position.num_tokens > self._capacity:
                self._try_again("no capacity in time")
        elif self.state is _State.COPYING and not self._scheduler.migration.is_on_its_way(self._record.key):
            self._try_again("its blocks were needed")

    def progress(self, chunk: ChunkDone) -> None:
        """Push KV of one more token."""
        if self.state is _State.COPYING:
            self._sender.computed(self._record.key, chunk.num_computed_tokens, chunk.block_ids, chunk.windows)

    def fail(self, reason: str) -> None:
        """Continue here, and report to the gateway why."""
        self._record.push = None
        self._manager.num_failed += 1
        self._scheduler.migration.resume(self._record.key)
        about = {"request_id": self._record.key[0]}
        _log.info("%s attempt %d stays here: %s", *self._record.key, reason, extra=about)
        self._manager.requests.post(
            self._record.key, MoveEnded(*self._record.key, self.target.identity, reason)
        )

    # -------------------------------------------------------------------------------- from the transfer

    def peer_ready(self) -> None:
        """Do nothing: the next `pump` begins."""

    def peer_failed(self, reason: str) -> None:
        """Continue here, unless a state was sent that may have arrived: then the sequence must not continue
        here as well, and its gateway decides."""
        if self.state is _State.QUEUED:
            self.fail(reason)
        elif self.state is _State.HANDED:
            self._record.push = None
            self._manager.num_failed += 1
            self._scheduler.cancel(*self._record.key)
            lost = f"the way to {self.target.identity.replica_id} was lost with its state on it: {reason}"
            self._manager.requests.fail(RequestFailed(*self._record.key, "leaving", lost))

    def granted(self) -> None:
        """Write the finished blocks."""
        key, sequences = self._record.key, self._scheduler.migration
        if self.state is not _State.ASKED:
            return
        if not sequences.hold_at(key, self._capacity):
            self._try_again("no capacity in time")
            return
        self.state = _State.COPYING
        position = sequences.position(key)
        assert position is not None
        self._sender.computed(key, position.num_settled, position.block_ids, position.windows)
        self._hold_when_caught_up()

    def pushed(self, _: Pushed) -> None:
        """Stop the sequence with its next token when nothing more can be written."""
        self._hold_when_caught_up()

    def handed_over(self) -> None:
        """Note that the state is sent: from here the target may run the stream."""
        self.state = _State.HANDED

    def ended(self, ended: PushEnded) -> None:
        """Report where the stream runs now; or continue here; or ask once more."""
        key, manager = self._record.key, self._manager
        if not ended.error:
            manager.num_migrated += 1
            self._scheduler.finish_hand_over(*key)
            manager.requests.post(key, MoveEnded(*key, self.target.identity))
            self._record.push = None
            manager.requests.remove(key)
        elif self._again:
            self._scheduler.migration.resume(key)
            self.state, self._again, self._is_stopping = _State.QUEUED, False, False
        else:
            self.fail(ended.reason)
        manager.control.wake()

    # ------------------------------------------------------------------------------------------ private

    def _hold_when_caught_up(self) -> None:
        key = self._record.key
        if (
            self.state is not _State.COPYING
            or self._is_stopping
            or not self._sender.sends.has_caught_up(*key)
        ):
            return
        position = self._scheduler.migration.position(key)
        if position is not None and position.num_tokens < self._capacity:
            self._is_stopping = self._scheduler.migration.hold_at(key, position.num_tokens)
            self._sender.sends.end_at(*key, position.num_tokens)

    def _try_again(self, reason: str) -> None:
        """Give the landing back and ask for another one, a few times."""
        self.state, self._again = _State.ENDING, self._num_tries < MAX_TRIES
        self._scheduler.migration.resume(self._record.key)
        self._sender.stop(self._record.key, reason)
