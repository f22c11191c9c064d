"""Both sides of the landing protocol with any ranks; messages are delivered one by one, in any order."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

from kvtransfer.blocks.layout import plan_pieces
from kvtransfer.config import TransferConfig
from kvtransfer.messages import ReplicaIdentity, Shard
from kvtransfer.peer_messages import (
    LandingAbort,
    LandingGrant,
    LandingProgress,
    LandingRefusal,
    LandingRequest,
    LandingResult,
    Manifest,
    PeerMessage,
    PieceSum,
    WriterStopped,
)
from kvtransfer.protocol.actions import (
    Granted,
    HandOverReady,
    KillRanks,
    Landed,
    LandingAction,
    Lost,
    PushAction,
    Pushed,
    PushEnded,
    ToPeer,
    ToRank,
    ToRanks,
    ToWriter,
)
from kvtransfer.protocol.receiver import LandingTable
from kvtransfer.protocol.sender import SendTable
from kvtransfer.transfer_orders import (
    CloseLanding,
    ClosePeer,
    ConnectPeer,
    OpenLanding,
    PushOrder,
    StopPush,
    TransferOrder,
    VerifyOrder,
)
from kvtransfer.transfer_reports import (
    LandingClosed,
    PushDone,
    PushFailed,
    PushStopped,
    TransferReport,
    Verified,
    WriterGone,
)
from workers.scheduler.block_pool import BlockPool

BLOCK = 16
SHARD = Shard(0, 1, 0, 1)
PREFILL = ReplicaIdentity("p0", 1)
DECODE = ReplicaIdentity("d0", 1)
# Request number n computes its prompt into the blocks from n times this on.
SOURCE_BLOCKS = 1000

Ranks = Sequence[tuple[int, Shard]]
ONE: Ranks = ((0, SHARD),)


def request(number: int, num_tokens: int, **fields: object) -> LandingRequest:
    values: dict[str, object] = {
        "landing_id": bytes([number]) * 16,
        "request_id": f"r{number}",
        "attempt": 0,
        "sharing_group": "",
        "priority": 0,
        "block_keys": (),
        "num_tokens": num_tokens,
        "num_samples": 1,
        "deadline_s": None,
    }
    return LandingRequest(**{**values, **fields})  # type: ignore[arg-type]


@dataclass
class World:
    """A prefill side, a decode side, their ranks, and the wires between them, delivered one by one."""

    pool: BlockPool
    one_sided: bool = True
    sources: Ranks = ONE
    readers: Ranks = ONE
    now: float = 0.0
    landing: LandingTable = field(init=False)
    push: SendTable = field(init=False)
    writers: list[WriterRank] = field(init=False)
    targets: list[TargetRank] = field(init=False)
    to_decode: deque[PeerMessage | HandOverReady] = field(default_factory=deque)
    to_prefill: deque[PeerMessage] = field(default_factory=deque)
    owner: dict[int, bytes] = field(default_factory=dict)
    ended: dict[str, str] = field(default_factory=dict)
    ready: dict[bytes, HandOverReady] = field(default_factory=dict)
    pushed: list[Pushed] = field(default_factory=list)
    joined: dict[bytes, Landed] = field(default_factory=dict)
    asked: dict[bytes, LandingRequest] = field(default_factory=dict)
    lost: list[str] = field(default_factory=list)
    # The tokens of requests that are handed over with less than was asked for, by request.
    num_handed_over: dict[str, int] = field(default_factory=dict)
    connection: bytes = b""
    num_connections: int = 0
    # The Peer link carries messages.
    is_linked: bool = False
    # The decode side has seen the end of the last link that ended.
    decode_knows: bool = True
    prefill_lives: bool = True

    def __post_init__(self) -> None:
        config = TransferConfig(landing_lease_s=10, landing_queue=8)
        self.landing = LandingTable(config, self.pool, BLOCK, len(self.readers))
        self.push = SendTable(config, BLOCK, len(self.sources))
        self.pieces = plan_pieces(self.sources, self.readers)
        self.targets = [TargetRank(rank) for rank, _ in self.readers]
        self.writers = [
            WriterRank(
                rank,
                PREFILL,
                self.one_sided,
                [(self.targets[target], piece) for source, target, piece in self.pieces if source == rank],
                self.check_owner,
            )
            for rank, _ in self.sources
        ]
        self.connect()

    # each of these is one event that may happen at any time

    def ask(self, wanted: LandingRequest) -> None:
        if self.is_linked:  # else there would be no connection to ask over
            self.asked[wanted.landing_id] = wanted
            self.do_push(self.push.ask(wanted, DECODE, self.connection))

    def compute(self, number: int, num_tokens: int) -> None:
        first = SOURCE_BLOCKS * number
        blocks = list(range(first, first + 64))
        self.do_push(self.push.computed(f"r{number}", 0, num_tokens, blocks, self.now))

    def deliver_to_decode(self) -> bool:
        if not self.to_decode:
            return False
        message = self.to_decode.popleft()
        match message:
            case LandingRequest():
                self.do_landing(self.landing.request(PREFILL, message, self.now, idle=False))
            case Manifest():
                self.do_landing(self.landing.manifest(PREFILL, message, self.now))
            case LandingAbort():
                self.do_landing(self.landing.aborted_by_writer(PREFILL, message))
            case WriterStopped():
                self.landing.writer_stopped(PREFILL, message)
            case HandOverReady():
                wanted = self.asked[message.landing_id]
                name = wanted.request_id, wanted.attempt
                landing_id = wanted.landing_id
                num_tokens = self.num_handed_over.get(wanted.request_id, wanted.num_tokens)
                self.do_landing(self.landing.hand_over(PREFILL, landing_id, name, num_tokens, self.now))
            case LandingProgress():
                self.landing.progress(PREFILL, message, self.now)
            case _:
                raise AssertionError(message)
        self.sync_owners()
        return True

    def deliver_to_prefill(self) -> bool:
        if not self.to_prefill:
            return False
        message = self.to_prefill.popleft()
        match message:
            case LandingGrant():
                self.do_push(self.push.granted(DECODE, message, self.now))
            case LandingRefusal():
                self.do_push(self.push.refused(DECODE, message))
            case LandingAbort():
                self.do_push(self.push.aborted(DECODE, message, self.now))
            case LandingResult():
                self.do_push(self.push.joined(DECODE, message, self.now))
            case _:
                raise AssertionError(message)
        return True

    def hear_writer(self, rank: int) -> bool:
        """Let the prefill engine core take a report of one of its ranks."""
        reports = self.writers[rank].reports
        if not reports:
            return False
        report = reports.popleft()
        match report if self.prefill_lives else None:
            case PushDone() as done:
                self.do_push(self.push.push_done(rank, done, self.now))
            case PushFailed() as failed:
                self.do_push(self.push.push_failed(rank, failed, self.now))
            case PushStopped() as stopped:
                self.do_push(self.push.push_stopped(rank, stopped))
        return True

    def hear_target(self, rank: int) -> bool:
        """Let the decode engine core take a report of one of its ranks."""
        reports = self.targets[rank].reports
        if not reports:
            return False
        match reports.popleft():
            case Verified() as verified:
                self.do_landing(self.landing.verified(rank, verified))
            case LandingClosed() as closed:
                self.landing.closed(rank, closed)
            case WriterGone() as gone:
                self.landing.writer_gone(rank, gone)
        self.sync_owners()
        return True

    def connect(self) -> None:
        """Open a Peer link from the prefill side, and the connections of its ranks."""
        if self.is_linked or not self.prefill_lives:
            return
        self.decode_notices()  # at the latest now
        self.num_connections += 1
        self.connection = b"connection %d" % self.num_connections
        for writer in self.writers:
            writer.orders.append(ConnectPeer(self.connection, PREFILL, DECODE, (), (), 0.0))
        self.is_linked = True
        aborts = self.landing.writer_joined(PREFILL, [[(target, piece) for _, target, piece in self.pieces]])
        if aborts:
            self.do_landing(aborts)

    def link_breaks(self) -> None:
        """Break the link: the prefill side notices now, the decode side some time later."""
        if self.is_linked and self.prefill_lives:
            self.cut_link()
            for writer in self.writers:
                writer.orders.append(ClosePeer(self.connection))
            self.do_push(self.push.peer_lost(DECODE, self.now))

    def decode_notices(self) -> None:
        """Let the decode side notice the end of the link."""
        if not self.decode_knows:
            self.decode_knows = True
            self.do_landing(self.landing.writer_lost(PREFILL))

    def prefill_dies(self) -> None:
        """End the engine core and all of its ranks."""
        self.prefill_lives = False
        for writer in self.writers:
            writer.die()
        if self.is_linked:
            self.cut_link()

    def tick(self) -> None:
        """Expire leases and overdue acknowledgements at both sides."""
        self.do_landing(self.landing.expire(self.now))
        if self.prefill_lives:
            self.do_push(self.push.tick(self.now))

    # plumbing

    def steps(self) -> list[Callable[[], bool]]:
        """Return every step that delivers one thing or does one piece of work; each returns whether there was
        any."""
        steps: list[Callable[[], bool]] = [self.deliver_to_decode, self.deliver_to_prefill]
        for writer in self.writers:
            steps += [writer.handle, writer.write, partial(self.hear_writer, writer.rank)]
        for target in self.targets:
            steps += [target.run, partial(self.hear_target, target.rank)]
        return steps

    def writers_work(self) -> None:
        """Let the prefill ranks do all they can, and report it to their engine core."""
        for writer in self.writers:
            while writer.handle() or writer.write() or self.hear_writer(writer.rank):
                pass

    def targets_work(self) -> None:
        """Let the decode ranks do all they can, and report it to their engine core."""
        for target in self.targets:
            while target.run() or self.hear_target(target.rank):
                pass

    def settle(self) -> None:
        """Deliver everything until nothing moves."""
        moved = True
        while moved:
            moved = False
            for step in self.steps():
                while step():
                    moved = True
            actions = self.landing.grant(self.now, idle=True)
            self.do_landing(actions)
            moved = moved or bool(actions)

    def cut_link(self) -> None:
        self.is_linked = self.decode_knows = False
        self.to_decode.clear()
        self.to_prefill.clear()

    def do_push(self, actions: list[PushAction]) -> None:
        for action in actions:
            match action:
                case ToPeer(_, message):
                    self._send_to_decode(message)
                case ToRanks(order):
                    for writer in self.writers:
                        writer.orders.append(order)
                case HandOverReady():
                    self.ready[action.landing_id] = action
                    self._send_to_decode(action)
                case Pushed():
                    self.pushed.append(action)
                case PushEnded(request_id, _, error, _, _):
                    assert request_id not in self.ended, "a push ended twice"
                    self.ended[request_id] = error
                case KillRanks():
                    self.prefill_dies()
                case Granted():
                    pass

    def do_landing(self, actions: list[LandingAction]) -> None:
        for action in actions:
            match action:
                case ToWriter(_, message):
                    if self.is_linked:
                        self.to_prefill.append(message)
                    if isinstance(message, LandingGrant):
                        for block in message.block_ids:
                            self.owner[block] = message.landing_id
                case ToRanks(order):
                    for target in self.targets:
                        target.orders.append(order)
                case ToRank(rank, order):
                    self.targets[rank].orders.append(order)
                case Landed():
                    self.check_joined(action)
                    self.joined[action.landing_id] = action
                    self.pool.release(action.block_ids)
                case Lost():
                    self.lost.append(action.reason)
        self.sync_owners()

    def _send_to_decode(self, message: PeerMessage | HandOverReady) -> None:
        if self.is_linked:
            self.to_decode.append(message)

    # what must hold

    def check_owner(self, landing_id: bytes, block: int) -> None:
        assert self.owner.get(block) == landing_id, "write into a foreign block"

    def check_joined(self, landed: Landed) -> None:
        """Check that every rank has every piece of the tokens that count as valid and were not held
        before."""
        first = landed.num_held_tokens // BLOCK
        number = landed.landing_id[0]
        for index in range(first, -(-landed.num_valid_tokens // BLOCK)):
            for _, target, piece in self.pieces:
                value = self.targets[target].memory.get((landed.block_ids[index], piece))
                assert value == SOURCE_BLOCKS * number + index, "a joined block was not written by all"

    def sync_owners(self) -> None:
        """Take the blocks that the pool would hand out again from their owners."""
        self.landing.check()
        self.pool.check()
        free = self.pool.num_free
        taken = self.pool.allocate(free)
        for block in taken:
            self.owner.pop(block, None)
            for target in self.targets:  # what was in them is overwritten by others
                for piece in {piece for _, rank, piece in self.pieces if rank == target.rank}:
                    target.memory.pop((block, piece), None)
        self.pool.release(taken)


# ----------------------------------------------------------------------------------------------
# Models of the ranks on both sides of a landing: what they may write, where, and what they report, in order.
#
# A writer rank writes one block at a time, so that everything can happen between two; nothing is ever copied,
# a target rank keeps which value was written as which piece of which of its blocks.

# A connection id and the writer's rank: what one writer rank has open to one target rank.
Channel = tuple[bytes, int]


@dataclass
class TargetRank:
    """One rank of the decode replica, with its gate."""

    rank: int
    orders: deque[TransferOrder] = field(default_factory=deque)
    reports: deque[TransferReport] = field(default_factory=deque)
    open: set[bytes] = field(default_factory=set)
    closed: set[bytes] = field(default_factory=set)
    admitted: dict[bytes, set[Channel]] = field(default_factory=dict)
    memory: dict[tuple[int, Shard], int] = field(default_factory=dict)

    def run(self) -> bool:
        """Do one order; False when there is none."""
        if not self.orders:
            return False
        order = self.orders.popleft()
        match order:
            case OpenLanding(landing_id):
                self.open.add(landing_id)
            case CloseLanding(landing_id):
                self.open.discard(landing_id)
                self.closed.add(landing_id)
                channels = sorted(self.admitted.pop(landing_id, set()))
                self.reports.append(LandingClosed(landing_id, tuple(name(channel) for channel in channels)))
            case VerifyOrder(landing_id, pieces):
                bad = {
                    check.block_index
                    for check in pieces
                    if self.memory.get((check.block_id, check.shard)) != check.checksum
                }
                self.reports.append(Verified(landing_id, tuple(sorted(bad))))
            case _:
                raise AssertionError(order)
        return True

    def leave(self, channel: Channel, writer: ReplicaIdentity) -> None:
        """Note that the channel's other end is closed."""
        for channels in self.admitted.values():
            channels.discard(channel)
        self.reports.append(WriterGone(writer, name(channel)))


@dataclass
class _Running:
    order: PushOrder
    begun: bool = False
    pieces: list[PieceSum] = field(default_factory=list)
    num_written: int = 0


@dataclass
class WriterRank:
    """One rank of the prefill replica, with its fence. `wrote(landing_id, block)` is called before a block is
    written. A one-sided writer asks the target once per landing, a two-sided one for every block."""

    rank: int
    identity: ReplicaIdentity
    one_sided: bool
    lanes: Sequence[tuple[TargetRank, Shard]]
    wrote: Callable[[bytes, int], None]
    orders: deque[TransferOrder] = field(default_factory=deque)
    reports: deque[TransferReport] = field(default_factory=deque)
    queue: deque[_Running] = field(default_factory=deque)
    stopped: set[bytes] = field(default_factory=set)
    connection: bytes = b""
    is_alive: bool = True
    # Stopped by a signal: it does nothing, and its connections stay open.
    is_frozen: bool = False
    # Blocks to come that arrive with a wrong value in every lane.
    num_flips: int = 0

    def handle(self) -> bool:
        """Take one order from the engine core; False when there is none."""
        if not self.orders or self.is_frozen:
            return False
        order = self.orders.popleft()
        match order:
            case ConnectPeer():
                self.connection = order.connection_id
            case ClosePeer(connection_id):
                if connection_id == self.connection:
                    self.disconnect()
            case PushOrder():
                if order.landing_id in self.stopped or order.connection_id != self.connection:
                    self._failed(order, "stopped or disconnected")
                else:
                    self.queue.append(_Running(order))
            case StopPush(landing_id):
                self.stopped.add(landing_id)
                self._drop(landing_id)
                self.reports.append(PushStopped(landing_id))
            case _:
                raise AssertionError(order)
        return True

    def write(self) -> bool:
        """Write the next block of the oldest push, to every lane; False when there is none, or it waits."""
        if not self.queue or self.is_frozen:
            return False
        running = self.queue[0]
        landing_id = running.order.landing_id
        if not running.begun or not self.one_sided:
            targets = [target for target, _ in self.lanes if not self._is_admitted(target, landing_id)]
            if any(landing_id in target.closed for target in targets):
                self.fail()
                return True
            if any(landing_id not in target.open for target in targets):
                return False  # the order that opens it is on its way to the target
            for target in targets if self.one_sided else ():
                target.admitted.setdefault(landing_id, set()).add((self.connection, self.rank))
            running.begun = True
        self._write_block(running)
        if running.num_written == len(running.order.moves):
            self.queue.popleft()
            order, num_bytes = running.order, 8 * len(running.pieces)
            transport = "shm" if self.lanes else ""
            pieces = tuple(running.pieces)
            self.reports.append(
                PushDone(order.push_id, landing_id, pieces, num_bytes, 0.1, 1.0 + self.rank, transport)
            )
        return True

    def fail(self) -> None:
        """Fail the oldest push."""
        if self.queue and not self.is_frozen:
            self._failed(self.queue.popleft().order, "it broke")

    def disconnect(self) -> None:
        """Close the connection: nothing is written over it any more, and each target sees it end."""
        for running in self.queue:
            self._failed(running.order, "its connection was closed")
        self.queue.clear()
        for target, _ in self.lanes if self.one_sided and self.connection else ():
            target.leave((self.connection, self.rank), self.identity)
        self.connection = b""

    def die(self) -> None:
        """End the rank: its earlier reports may still arrive; the kernel closes its connections."""
        if self.is_alive:
            self.orders.clear()
            self.queue.clear()
            self.disconnect()
            self.is_alive, self.is_frozen = False, True

    def _write_block(self, running: _Running) -> None:
        move = running.order.moves[running.num_written]
        running.num_written += 1
        flip, self.num_flips = bool(self.num_flips), max(0, self.num_flips - 1)
        for target, piece in self.lanes:
            self.wrote(running.order.landing_id, move.dst_block)
            target.memory[move.dst_block, piece] = -1 if flip else move.src_block
            running.pieces.append(PieceSum(move.block_index, target.rank, piece, move.src_block))

    def _is_admitted(self, target: TargetRank, landing_id: bytes) -> bool:
        return self.one_sided and (self.connection, self.rank) in target.admitted.get(landing_id, set())

    def _drop(self, landing_id: bytes) -> None:
        for running in [item for item in self.queue if item.order.landing_id == landing_id]:
            self.queue.remove(running)
            self._failed(running.order, "its landing was stopped")

    def _failed(self, order: PushOrder, reason: str) -> None:
        self.reports.append(PushFailed(order.push_id, order.landing_id, reason))


def name(channel: Channel) -> bytes:
    """As targets name it in their reports."""
    return channel[0] + b"/%d" % channel[1]
