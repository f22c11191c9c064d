"""Two replicas between which streams move, without any wire: every message, order and report is one event.

Their ranks compute hashes of what the block tables point at, so a block that arrived wrong is a wrong token.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from hash_rank import BLOCK_TOKENS, alone, unpack
from replica_harness import GATEWAY, WHOLE, ReplicaHarness

from kvtransfer.messages import (
    CloseLanding,
    LandingClosed,
    OpenLanding,
    PieceSum,
    PushDone,
    PushFailed,
    PushOrder,
    PushStopped,
    ReplicaIdentity,
    StopPush,
    TransferOrder,
    Verified,
    VerifyOrder,
)
from workers.messages import HandOverTarget, Move, RequestFailed, StepPlan, Submission

A, B = ReplicaIdentity("a", 1), ReplicaIdentity("b", 1)
# Plans that are out at a time.
DEPTH = 2


@dataclass
class Stream:
    """What one request must get, and what the gateway heard of it."""

    submission: Submission
    at: Side
    wanted: list[int]
    tokens: dict[int, int] = field(default_factory=dict)
    finish: str = ""
    failure: RequestFailed | None = None
    is_cancelled: bool = False
    target: Side | None = None

    @property
    def key(self) -> tuple[str, int]:
        return self.submission.request_id, self.submission.attempt

    @property
    def is_over(self) -> bool:
        return bool(self.finish) or self.failure is not None or self.is_cancelled


class Side:
    """One replica: its components, its one rank, and what is on its way to the other."""

    def __init__(
        self, identity: ReplicaIdentity, peer: ReplicaIdentity, num_blocks: int, num_offload_blocks: int
    ) -> None:
        self.identity = identity
        self.replica = ReplicaHarness(
            num_blocks, identity=identity, peer=peer, num_offload_blocks=num_offload_blocks
        )
        self.other: Side
        self.plans: deque[StepPlan] = deque()
        # Blocks to come that arrive here with a wrong token.
        self.num_flips = 0
        self.num_broken_pushes = 0
        self._flipped: set[int] = set()

    def plan(self) -> bool:
        """Send a plan, if one is possible and not too many are out."""
        replica = self.replica
        replica.kv_receiver.grant()
        replica.kv_sender.ask_for_landings(replica.scheduler.landings_wanted(replica.clock.now()))
        plan = replica.scheduler.plan(replica.clock.now()) if len(self.plans) < DEPTH else None
        if plan is not None:
            self.plans.append(plan)
        replica.migration.pump()
        for failure in replica.scheduler.take_failures():
            replica.requests.dropped(failure)
        return plan is not None

    def settle(self) -> bool:
        """The rank runs the oldest plan and reports it."""
        if not self.plans:
            return False
        replica = self.replica
        report = replica.rank.run(self.plans.popleft())
        replica.requests.settle(replica.scheduler.settle(report, replica.clock.now()))
        replica.migration.pump()
        return True

    def send(self, as_writer: bool) -> bool:
        """The other side hears the oldest message from here."""
        peers = self.replica.peers
        waiting = peers.to_reader if as_writer else peers.to_writer
        if not waiting:
            return False
        message = waiting.pop(0)
        if as_writer:
            self.other.replica.kv_receiver.message(self.identity, message)
        else:
            self.other.replica.kv_sender.message(self.identity, message)
        self.other.replica.migration.pump()
        return True

    def transfer(self) -> bool:
        """The rank carries out the oldest order of the transfer, and reports it."""
        replica = self.replica
        if not replica.orders and not replica.orders_to:
            return False
        order = replica.orders.pop(0) if replica.orders else replica.orders_to.pop(0)[1]
        self._carry_out(order)
        replica.migration.pump()
        return True

    def _carry_out(self, order: TransferOrder) -> None:
        replica = self.replica
        match order:
            case PushOrder() if self.num_broken_pushes:
                self.num_broken_pushes -= 1
                replica.kv_sender.report(0, PushFailed(order.push_id, order.landing_id, "broken on purpose"))
            case PushOrder():
                for move in order.moves:
                    self._write(move.src_block, move.dst_block)
                pieces = tuple(PieceSum(move.block_index, 0, WHOLE, 5) for move in order.moves)
                replica.kv_sender.report(
                    0, PushDone(order.push_id, order.landing_id, pieces, 8 * len(pieces), 0.1, 1.0, "shm")
                )
            case StopPush(landing_id):
                replica.kv_sender.report(0, PushStopped(landing_id))
            case VerifyOrder():
                bad = tuple(it.block_index for it in order.pieces if it.block_id in self._flipped)
                self._flipped.difference_update(it.block_id for it in order.pieces)
                replica.kv_receiver.report(0, Verified(order.landing_id, bad))
            case CloseLanding(landing_id):
                replica.kv_receiver.report(0, LandingClosed(landing_id, ()))
            case OpenLanding():
                pass
            case _:
                raise AssertionError(order)

    def _write(self, src_block: int, dst_block: int) -> None:
        target = self.other
        for offset in range(BLOCK_TOKENS):
            token = self.replica.rank.kv.get((src_block, offset), 0)
            target.replica.rank.kv[dst_block, offset] = token + (1 if target.num_flips else 0)
        if target.num_flips:
            target.num_flips -= 1
            target._flipped.add(dst_block)

    def lose_link(self) -> None:
        """The link on which this side writes to the other ends; a new one opens at once."""
        self.replica.peers.to_reader.clear()
        self.other.replica.peers.to_writer.clear()
        self.other.replica.kv_receiver.writer_lost(self.identity)
        self.replica.kv_sender.peer_failed(self.other.identity, "reset")
        self.replica.peers.to_reader.clear()
        self.other.replica.peers.to_writer.clear()
        self.other.replica.kv_receiver.writer_joined(self.identity, ((0, WHOLE),))
        self.replica.migration.pump()

    def is_quiet(self) -> bool:
        replica = self.replica
        waiting = replica.peers.to_reader or replica.peers.to_writer or replica.orders or replica.orders_to
        return not (waiting or self.plans)

    def check(self) -> None:
        replica = self.replica
        replica.pool.check()
        replica.scheduler.check(replica.kv_receiver.landings.num_references)
        replica.kv_receiver.landings.check()


class MigrationPair:
    """Both sides, and the gateway's view of the streams."""

    def __init__(self, num_blocks: tuple[int, int] = (16, 16), num_offload_blocks: int = 0) -> None:
        """`num_offload_blocks` are in host memory, at each side."""
        self.a = Side(A, B, num_blocks[0], num_offload_blocks)
        self.b = Side(B, A, num_blocks[1], num_offload_blocks)
        self.a.other, self.b.other = self.b, self.a
        self.sides = (self.a, self.b)
        self.streams: dict[tuple[str, int], Stream] = {}

    def submit(self, prompt: list[int], max_tokens: int, at: Side, num_samples: int = 1) -> Stream:
        name = f"r{len(self.streams)}"
        submission = at.replica.submission(name, prompt, outputs=((),) * num_samples, max_tokens=max_tokens)
        wanted = alone(prompt, 0, max_tokens, submission.sampling)
        stream = self.streams[name, 1] = Stream(submission, at, wanted)
        at.replica.requests.submit(GATEWAY, submission)
        return stream

    def move(self, stream: Stream) -> None:
        """The gateway asks the replica that has the stream."""
        side, target = stream.at, stream.at.other
        stream.target = target
        order = Move(*stream.key, HandOverTarget(target.identity, "address"))
        side.replica.migration.start(order)
        side.replica.migration.pump()

    def cancel(self, stream: Stream) -> None:
        stream.is_cancelled = True
        for side in self.sides:
            side.replica.requests.cancel(stream.key)

    def listen(self) -> None:
        """The gateway reads its Links."""
        for side in self.sides:
            replica = side.replica
            replica.flush()
            replica._listen()
            for report in replica.joined:
                stream = self.streams[report.request_id, report.attempt]
                stream.at, stream.target = side, None
            for delta in replica.deltas:
                stream = self.streams[delta.request_id, delta.attempt]
                if delta.sample:
                    continue
                for offset, token in enumerate(unpack(delta.tokens)):
                    assert delta.first_index + offset not in stream.tokens, "a token was told twice"
                    stream.tokens[delta.first_index + offset] = token
                stream.finish = delta.finish or stream.finish
            for failure in replica.failures:
                stream = self.streams[failure.request_id, failure.attempt]
                assert not stream.finish
                stream.failure = failure
                if (
                    not stream.is_cancelled
                ):  # as a request at the gateway does: it stops the attempt wherever it may be
                    for member in self.sides:
                        member.replica.requests.cancel(stream.key)
            for ended in replica.moves:
                stream = self.streams[ended.request_id, ended.attempt]
                if ended.error and stream.at is side:
                    stream.target = None
            replica.joined.clear()
            replica.deltas.clear()
            replica.failures.clear()
            replica.moves.clear()

    def run(self, num_rounds: int = 400) -> None:
        """Let everything happen, in turn, until nothing is left to."""
        for _ in range(num_rounds):
            is_busy = False
            for side in self.sides:
                is_busy |= side.plan() | side.settle()
                while side.transfer() | side.send(True) | side.send(False):
                    is_busy = True
            self.listen()
            if not is_busy and all(side.is_quiet() for side in self.sides):
                return
        raise AssertionError("there is no end to it")

    def check_over(self) -> None:
        """Nothing is left anywhere, and every stream has its tokens, once, and its one end."""
        for side in self.sides:
            side.check()
            replica = side.replica
            assert replica.pool.num_references == replica.pool.num_quarantined == 0
            left = (len(replica.table), len(replica.migration), replica.kv_sender.sends.num_active)
            assert left == (0, 0, 0), f"{side.identity.replica_id}: {left}"
            assert replica.kv_receiver.landings.num_open == replica.kv_receiver.landings.num_waiting == 0
        for stream in self.streams.values():
            assert stream.is_over, f"{stream.key} hangs"
            got = [stream.tokens[index] for index in sorted(stream.tokens)]
            assert sorted(stream.tokens) == list(range(len(got))), f"{stream.key}: a gap in {stream.tokens}"
            assert got == stream.wanted[: len(got)]
            if stream.finish:
                assert got == stream.wanted
