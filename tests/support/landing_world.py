"""Both sides of the landing protocol with one rank each; messages are delivered one by one, in any order."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from kvtransfer.actions import (
    Granted,
    HandOverReady,
    KillRanks,
    Landed,
    LandingAction,
    PushAction,
    PushEnded,
    ToPeer,
    ToRanks,
    ToWriter,
)
from kvtransfer.config import TransferConfig
from kvtransfer.landing import LandingBook
from kvtransfer.messages import (
    CloseLanding,
    LandingAbort,
    LandingClosed,
    LandingGrant,
    LandingProgress,
    LandingRefusal,
    LandingRequest,
    LandingResult,
    Manifest,
    OpenLanding,
    PeerMessage,
    PieceSum,
    PushDone,
    PushOrder,
    PushStopped,
    ReplicaIdentity,
    Shard,
    StopPush,
    TransferOrder,
    Verified,
    VerifyOrder,
    WriterGone,
    WriterStopped,
)
from kvtransfer.pushing import PushBook
from workers.engine.blocks import BlockPool

BLOCK = 16
SHARD = Shard(0, 1, 0, 1)
PREFILL = ReplicaIdentity("p0", 1)
DECODE = ReplicaIdentity("d0", 1)
CONNECTION = b"c" * 16


def request(number: int, num_tokens: int, **fields: object) -> LandingRequest:
    values: dict[str, object] = {
        "landing_id": bytes([number]) * 16,
        "request_id": f"r{number}",
        "attempt": 0,
        "tenant": "",
        "priority": 0,
        "block_keys": (),
        "num_tokens": num_tokens,
        "num_samples": 1,
        "deadline_s": None,
    }
    return LandingRequest(**{**values, **fields})  # type: ignore[arg-type]


@dataclass
class World:
    """A prefill side, a decode side, one rank each, and the wires between them, delivered one by one."""

    pool: BlockPool
    one_sided: bool = True
    now: float = 0.0
    landing: LandingBook = field(init=False)
    push: PushBook = field(init=False)
    to_decode: deque[PeerMessage | HandOverReady] = field(default_factory=deque)
    to_prefill: deque[PeerMessage] = field(default_factory=deque)
    writer: deque[TransferOrder] = field(default_factory=deque)
    target: deque[TransferOrder] = field(default_factory=deque)
    owner: dict[int, bytes] = field(default_factory=dict)
    open_at_target: set[bytes] = field(default_factory=set)
    stopped: set[bytes] = field(default_factory=set)
    ended: dict[str, str] = field(default_factory=dict)
    joined: dict[bytes, Landed] = field(default_factory=dict)
    asked: dict[bytes, LandingRequest] = field(default_factory=dict)
    connected: bool = True

    def __post_init__(self) -> None:
        config = TransferConfig(landing_lease_s=10, landing_queue=8)
        self.landing = LandingBook(config, self.pool, BLOCK)
        self.push = PushBook(config, BLOCK)

    # each of these is one event that may happen at any time

    def ask(self, wanted: LandingRequest) -> None:
        self.asked[wanted.landing_id] = wanted
        self.do_push(self.push.ask(wanted, DECODE, CONNECTION))

    def compute(self, number: int, num_tokens: int) -> None:
        blocks = list(range(1000 * number, 1000 * number + 64))
        self.do_push(self.push.computed(f"r{number}", 0, num_tokens, blocks, self.now))

    def deliver_to_decode(self) -> None:
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
                self.do_landing(
                    self.landing.hand_over(PREFILL, landing_id, name, wanted.num_tokens, self.now)
                )
            case LandingProgress():
                self.landing.progress(PREFILL, message, self.now)
            case _:
                raise AssertionError(message)

    def deliver_to_prefill(self) -> None:
        message = self.to_prefill.popleft()
        match message:
            case LandingGrant():
                self.do_push(self.push.granted(DECODE, message, self.now))
            case LandingRefusal():
                self.do_push(self.push.refused(DECODE, message))
            case LandingAbort():
                self.do_push(self.push.aborted(DECODE, message, self.now))
            case LandingResult():
                self.do_push(self.push.joined(DECODE, message))
            case _:
                raise AssertionError(message)

    def run_writer(self) -> None:
        order = self.writer.popleft()
        if isinstance(order, StopPush):
            self.stopped.add(order.landing_id)
            self.do_push(self.push.push_stopped(PushStopped(order.landing_id)))
        elif isinstance(order, PushOrder) and order.landing_id not in self.stopped and self.connected:
            for move in order.moves:
                if self.one_sided or order.landing_id in self.open_at_target:
                    assert self.owner.get(move.dst_block) == order.landing_id, "write into a foreign block"
            pieces = tuple(PieceSum(move.block_index, SHARD, move.src_block) for move in order.moves)
            done = PushDone(order.push_id, order.landing_id, pieces, 64, 0.1, self.now, "shm")
            self.do_push(self.push.push_done(done, self.now))

    def run_target(self) -> None:
        order = self.target.popleft()
        match order:
            case OpenLanding():
                self.open_at_target.add(order.landing_id)
            case CloseLanding():
                self.open_at_target.discard(order.landing_id)
                connections = (CONNECTION,) if self.one_sided and self.connected else ()
                self.landing.closed(LandingClosed(order.landing_id, connections))
                self.sync_owners()
            case VerifyOrder():
                bad = tuple(check.block_index for check in order.pieces if check.checksum % 7 == 6)
                verified = Verified(order.landing_id, bad)
                self.do_landing(self.landing.verified(verified))

    def writer_dies(self) -> None:
        self.connected = False
        self.writer.clear()
        self.to_decode.clear()
        self.do_landing(self.landing.writer_lost(PREFILL))
        self.landing.writer_gone(WriterGone(PREFILL, CONNECTION))
        self.sync_owners()

    # plumbing

    def do_push(self, actions: list[PushAction]) -> None:
        for action in actions:
            match action:
                case ToPeer(_, message):
                    self.to_decode.append(message)
                case ToRanks(order):
                    self.writer.append(order)
                case HandOverReady():
                    self.to_decode.append(action)
                case PushEnded(request_id, _, error, _, _):
                    assert request_id not in self.ended, "a push ended twice"
                    self.ended[request_id] = error
                case Granted() | KillRanks():
                    pass

    def do_landing(self, actions: list[LandingAction]) -> None:
        for action in actions:
            match action:
                case ToWriter(_, message):
                    if self.connected:
                        self.to_prefill.append(message)
                    if isinstance(message, LandingGrant):
                        for block in message.block_ids:
                            self.owner[block] = message.landing_id
                case ToRanks(order):
                    self.target.append(order)
                case Landed():
                    self.joined[action.landing_id] = action
                    self.pool.release(action.block_ids)
        self.sync_owners()

    def sync_owners(self) -> None:
        """Blocks that the pool would hand out again belong to nobody."""
        self.landing.check()
        self.pool.check()
        free = self.pool.num_free
        taken = self.pool.allocate(free)
        for block in taken:
            self.owner.pop(block, None)
        self.pool.release(taken)

    def settle(self) -> None:
        """Deliver everything until nothing moves."""
        moved = True
        while moved:
            moved = False
            for queue, step in (
                (self.to_decode, self.deliver_to_decode),
                (self.to_prefill, self.deliver_to_prefill),
                (self.writer, self.run_writer),
                (self.target, self.run_target),
            ):
                while queue:
                    step()
                    moved = True
            actions = self.landing.grant(self.now, idle=True)
            self.do_landing(actions)
            moved = moved or bool(actions)
