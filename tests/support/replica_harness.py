"""The parts of an engine core that hand-overs go through, with a model of the rank and without any wire:
one replica, or two between which streams migrate, every message, order and report being one event.

The ranks compute hashes of what the block tables point at, so a block that arrived wrong is a wrong token.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import cast

from engine_fakes import FakeControl, FakeRanks, LinkEnd
from group_kv import NO_GROUPS, GroupSizes
from staged_engine import (
    BLOCK_TOKENS,
    END,
    MAX_CONTEXT,
    ROOT_KEY,
    VOCABULARY,
    HashRank,
    alone,
    pack,
    unpack,
)

from kvtransfer.common.clock import ManualClock
from kvtransfer.common.faults import Faults
from kvtransfer.common.group_shares import GroupShares
from kvtransfer.config import TransferConfig
from kvtransfer.messages import ReplicaIdentity, Shard
from kvtransfer.peer_messages import LandingGrant, LandingRequest, PieceSum
from kvtransfer.protocol.receiver import LandingTable
from kvtransfer.protocol.sender import SendTable
from kvtransfer.transfer_orders import (
    CloseLanding,
    OpenLanding,
    PushOrder,
    StopPush,
    TransferOrder,
    VerifyOrder,
)
from kvtransfer.transfer_reports import LandingClosed, PushDone, PushFailed, PushStopped, Verified
from workers.config import EngineConfig
from workers.disagg.kv_hand_overs import HandOverSurroundings, KvHandOvers, KvSizes
from workers.disagg.kv_sender import KvSender
from workers.disagg.peers import Peers
from workers.disagg.request_table import RequestTable
from workers.interfaces import BlockSharing
from workers.messages.link import (
    LINK_UP_CODEC,
    HandOverReport,
    HandOverTarget,
    LoadReport,
    Move,
    MoveEnded,
    QueueReport,
    RequestFailed,
    SampleState,
    StepFrame,
    Submission,
    TokenDelta,
)
from workers.messages.peer_link import PeerLinkMessage
from workers.messages.rank_channel import StepPlan
from workers.messages.sampling import SamplingParams
from workers.replica.gateway_links import GatewayLinks
from workers.replica.requests import Requests
from workers.scheduler.block_pool import BlockPool
from workers.scheduler.expected_time import ExpectedTime
from workers.scheduler.scheduler import Scheduler
from workers.scheduler.step import StepRates
from workers.stats_record import PathMeasure

HERE, PEER = ReplicaIdentity("here", 1), ReplicaIdentity("peer", 1)
GATEWAY = ("gateway", 1)
NO_LIMITS = GroupShares()
WHOLE = Shard(0, 1, 0, 2)


class PeersStub:
    """Links that are ready unless `failure` says why they cannot be; what is sent is kept."""

    def __init__(self) -> None:
        self.failure = ""
        self.is_ready = True
        self.to_reader: list[PeerLinkMessage] = []
        self.to_writer: list[PeerLinkMessage] = []

    def paths(self) -> tuple[PathMeasure, ...]:
        return ()

    def ensure(self, target: HandOverTarget, side: KvSender) -> None:
        if self.failure:
            side.peer_failed(target.identity, self.failure)

    def connection(self, peer: ReplicaIdentity) -> bytes | None:
        return b"c" * 16 if self.is_ready else None

    def send_to_reader(self, peer: ReplicaIdentity, message: PeerLinkMessage) -> None:
        self.to_reader.append(message)

    def send_to_writer(self, writer: ReplicaIdentity, message: PeerLinkMessage) -> None:
        self.to_writer.append(message)


class ReplicaHarness:
    """Scheduler, requests and both sides of hand-overs of one replica, and a link that keeps its frames."""

    def __init__(
        self,
        num_blocks: int = 16,
        lanes: Sequence[tuple[int, Shard]] = ((0, WHOLE),),
        *,
        identity: ReplicaIdentity = HERE,
        peer: ReplicaIdentity = PEER,
        max_migrations: int = 2,
        num_offload_blocks: int = 0,
        shares: GroupShares = NO_LIMITS,
        sharing: BlockSharing | None = None,
        groups: GroupSizes = NO_GROUPS,
    ) -> None:
        """`lanes` are the (rank, piece) of each lane of `peer`, to and from here; as many ranks are here."""
        self.clock = ManualClock(100.0)
        self.rates = StepRates(decode_step_s=1.0)
        self.pool = BlockPool(num_blocks, BLOCK_TOKENS, shares)
        self.group_pools = groups.pools(self.pool)
        self.scheduler = Scheduler(
            EngineConfig(max_sequences=4),
            self.pool,
            eos_token_ids=(END,),
            max_context_tokens=MAX_CONTEXT,
            num_offload_blocks=num_offload_blocks,
            group_pools=self.group_pools,
        )
        self.rank = HashRank(groups.memory(BLOCK_TOKENS))
        self.ranks = FakeRanks()
        self.orders, self.orders_to = self.ranks.orders, self.ranks.orders_to
        num_ranks = len({rank for rank, _ in lanes})
        self.peers = PeersStub()
        peers = cast(Peers, self.peers)
        self.gateways = GatewayLinks(self.clock)
        self._gateway = LinkEnd("gateway")
        self.gateways.connected(GATEWAY, self._gateway.stream)
        control = FakeControl()
        self.table = RequestTable(self.gateways, control)
        has_states = [pool.has_states for pool in self.group_pools]
        hand_overs = KvHandOvers.of(
            HandOverSurroundings(
                identity=identity,
                sizes=KvSizes(BLOCK_TOKENS, 1, 0, VOCABULARY),
                sends=SendTable(TransferConfig(), BLOCK_TOKENS, num_ranks, has_states),
                landings=LandingTable(TransferConfig(), self.pool, BLOCK_TOKENS, num_ranks, self.group_pools),
                scheduler=self.scheduler,
                requests=self.table,
                rates=self.rates,
                max_migrations=max_migrations,
                peers=peers,
                ranks=self.ranks,
                control=control,
                clock=self.clock,
                faults=Faults(),
                sharing=sharing,
            )
        )
        self.kv_sender, self.kv_receiver, self.migration = hand_overs
        self.kv_receiver.writer_joined(peer, [lanes] * (1 + groups.num_groups))
        self.requests = Requests(
            identity=identity,
            table=self.table,
            gateways=self.gateways,
            scheduler=self.scheduler,
            hand_overs=hand_overs,
            work=ExpectedTime(),
            clock=self.clock,
            vocab_size=VOCABULARY,
        )
        self.moves: list[MoveEnded] = []
        self.joined: list[HandOverReport] = []
        self.failures: list[RequestFailed] = []
        self.deltas: list[TokenDelta] = []

    def submission(
        self,
        request_id: str,
        prompt: Sequence[int],
        *,
        decode: ReplicaIdentity | None = None,
        outputs: Sequence[Sequence[int]] = ((),),
        deadline_s: float | None = None,
        max_tokens: int = 8,
        group: str = "",
    ) -> Submission:
        return Submission(
            request_id=request_id,
            attempt=1,
            tenant="",
            sharing_group=group,
            priority=0,
            prompt=pack(list(prompt)),
            root_key=ROOT_KEY + group.encode(),
            block_keys=(),
            samples=tuple(SampleState(i, i, pack(list(output))) for i, output in enumerate(outputs)),
            sampling=SamplingParams(
                max_tokens=max_tokens, ignore_eos=True, repetition_penalty=1.0 + len(prompt) % 2
            ),
            decode=None if decode is None else HandOverTarget(decode, "address"),
            deadline_s=deadline_s,
        )

    def pump(self) -> None:
        """Do what the engine core does after every event, and what the rank answers."""
        self.kv_receiver.grant()
        self.kv_sender.ask_for_landings(self.scheduler.landings_wanted(self.clock.now()))
        plan = self.scheduler.plan(self.clock.now())
        if plan is not None:
            self.requests.settle(self.scheduler.settle(self.rank.run(plan), self.clock.now()))
        self.migration.pump()
        for failure in self.scheduler.take_failures():
            self.requests.dropped(failure)
        self.flush()
        self.listen()

    def grant(self, num_held_tokens: int, block_ids: tuple[int, ...]) -> None:
        """Grant the last landing that was asked for, as the peer."""
        asked = [message for message in self.peers.to_reader if isinstance(message, LandingRequest)][-1]
        self.kv_sender.message(PEER, LandingGrant(asked.landing_id, num_held_tokens, block_ids))

    def listen(self) -> None:
        """Take in what the gateway has got."""
        for frame in self._gateway.sent():
            message = LINK_UP_CODEC.decode(frame)
            if isinstance(message, StepFrame):
                self.failures.extend(message.failures)
                self.deltas.extend(message.deltas)
                self.moves.extend(message.moves)
                self.joined.extend(message.hand_overs)

    def flush(self) -> None:
        self.gateways.flush(
            lambda: LoadReport(identity=HERE, sequence=0), lambda: QueueReport(0, 0, 0, 0, 0, 0)
        )


A, B = ReplicaIdentity("a", 1), ReplicaIdentity("b", 1)
# Plans that are out at a time.
DEPTH = 2


@dataclass
class Stream:
    """The output that one request must get, and the reports of it to the gateway."""

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
        self,
        identity: ReplicaIdentity,
        peer: ReplicaIdentity,
        num_blocks: int,
        num_offload_blocks: int,
        shares: GroupShares,
        groups: GroupSizes,
    ) -> None:
        self.identity = identity
        self.replica = ReplicaHarness(
            num_blocks,
            identity=identity,
            peer=peer,
            num_offload_blocks=num_offload_blocks,
            shares=shares,
            groups=groups,
        )
        self._num_groups = 1 + groups.num_groups
        self.other: Side
        self.plans: deque[StepPlan] = deque()
        # Blocks to come that arrive here with a wrong token.
        self.num_flips = 0
        self.num_broken_pushes = 0
        self._flipped: set[tuple[int, int]] = set()
        # Landings that the rank has closed: its gate refuses what is written for them afterwards.
        self._closed: set[bytes] = set()

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
        """Run the oldest plan at the rank and report it."""
        if not self.plans:
            return False
        replica = self.replica
        report = replica.rank.run(self.plans.popleft())
        replica.requests.settle(replica.scheduler.settle(report, replica.clock.now()))
        replica.migration.pump()
        return True

    def send(self, as_writer: bool) -> bool:
        """Send the oldest message from here to the other side."""
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
        """Carry out the oldest order of the transfer at the rank, and report it."""
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
            case PushOrder() if order.landing_id in self.other._closed:
                replica.kv_sender.report(
                    0, PushFailed(order.push_id, order.landing_id, "the landing is closed")
                )
            case PushOrder():
                for move in order.moves:
                    self._write(order.group, move.src_block, move.dst_block)
                pieces = tuple(PieceSum(move.block_index, 0, WHOLE, 5) for move in order.moves)
                replica.kv_sender.report(
                    0, PushDone(order.push_id, order.landing_id, pieces, 8 * len(pieces), 0.1, 1.0, "shm")
                )
            case StopPush(landing_id):
                replica.kv_sender.report(0, PushStopped(landing_id))
            case VerifyOrder():
                blocks = {(order.group, it.block_id): it.block_index for it in order.pieces}
                bad = tuple(index for block, index in blocks.items() if block in self._flipped)
                self._flipped.difference_update(blocks)
                replica.kv_receiver.report(0, Verified(order.landing_id, bad))
            case CloseLanding(landing_id):
                self._closed.add(landing_id)
                replica.kv_receiver.report(0, LandingClosed(landing_id, ()))
            case OpenLanding():
                pass
            case _:
                raise AssertionError(order)

    def _write(self, group: int, src_block: int, dst_block: int) -> None:
        target = self.other
        sources, targets = (side.replica.rank.kv_of(group) for side in (self, target))
        for offset in range(BLOCK_TOKENS):
            token = sources.get((src_block, offset), 0)
            targets[dst_block, offset] = token + (1 if target.num_flips else 0)
        if target.num_flips:
            target.num_flips -= 1
            target._flipped.add((group, dst_block))

    def lose_link(self) -> None:
        """End the link on which this side writes to the other; a new one opens at once."""
        self.replica.peers.to_reader.clear()
        self.other.replica.peers.to_writer.clear()
        self.other.replica.kv_receiver.writer_lost(self.identity)
        self.replica.kv_sender.peer_failed(self.other.identity, "reset")
        self.replica.peers.to_reader.clear()
        self.other.replica.peers.to_writer.clear()
        self.other.replica.kv_receiver.writer_joined(self.identity, [[(0, WHOLE)]] * self._num_groups)
        self.replica.migration.pump()

    def is_quiet(self) -> bool:
        replica = self.replica
        waiting = replica.peers.to_reader or replica.peers.to_writer or replica.orders or replica.orders_to
        return not (waiting or self.plans)

    def check(self) -> None:
        replica = self.replica
        replica.pool.check()
        for window in replica.group_pools:
            window.check()
        landings = replica.kv_receiver.landings
        replica.scheduler.check(landings.num_references, landings.num_group_references)
        replica.kv_receiver.landings.check()


class MigrationPair:
    """Both sides, and the gateway's view of the streams."""

    def __init__(
        self,
        num_blocks: tuple[int, int] = (16, 16),
        num_offload_blocks: int = 0,
        shares: GroupShares = NO_LIMITS,
        groups: GroupSizes = NO_GROUPS,
    ) -> None:
        """`num_offload_blocks` are in host memory, at each side."""
        self.a = Side(A, B, num_blocks[0], num_offload_blocks, shares, groups)
        self.b = Side(B, A, num_blocks[1], num_offload_blocks, shares, groups)
        self.a.other, self.b.other = self.b, self.a
        self.sides = (self.a, self.b)
        self.streams: dict[tuple[str, int], Stream] = {}

    def submit(
        self,
        prompt: list[int],
        max_tokens: int,
        at: Side,
        num_samples: int = 1,
        group: str = "",
        *,
        name: str = "",
        hands_over: bool = False,
    ) -> Stream:
        """Submit a request at a side; with `hands_over` the other side decodes."""
        name, outputs = name or f"r{len(self.streams)}", ((),) * num_samples
        decode = at.other.identity if hands_over else None
        submission = at.replica.submission(
            name, prompt, outputs=outputs, max_tokens=max_tokens, group=group, decode=decode
        )
        wanted = alone(prompt, 0, max_tokens, submission.sampling)
        stream = self.streams[name, 1] = Stream(submission, at, wanted)
        at.replica.requests.submit(GATEWAY, submission)
        return stream

    def move(self, stream: Stream) -> None:
        """Ask the replica that has the stream to move it, as the gateway does."""
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
        """Read the gateway's Links."""
        for side in self.sides:
            replica = side.replica
            replica.flush()
            replica.listen()
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
        """Check that nothing is left anywhere, and that every stream has its tokens, once, and its one
        end."""
        for side in self.sides:
            side.check()
            replica = side.replica
            assert replica.pool.num_references == replica.pool.num_quarantined == 0
            assert not any(it.num_references or it.num_quarantined for it in replica.group_pools)
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
