"""The parts of an engine core that hand-overs go through, with a model of the rank and without any wire."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

from engine_fakes import FakeControl, FakeRanks, LinkEnd
from hash_rank import BLOCK_TOKENS, END, FINGERPRINT, MAX_CONTEXT, VOCABULARY, HashRank, pack

from kvtransfer.common.clock import ManualClock
from kvtransfer.common.faults import Faults
from kvtransfer.config import TransferConfig
from kvtransfer.messages import LandingGrant, LandingRequest, ReplicaIdentity, Shard
from workers.config import EngineConfig
from workers.disagg.kv_receiver import KvReceiver
from workers.disagg.kv_sender import KvSender
from workers.disagg.migration import MigrationManager
from workers.disagg.peers import Peers
from workers.disagg.request_table import RequestTable
from workers.messages import (
    LINK_UP_CODEC,
    HandOverReport,
    HandOverTarget,
    LoadReport,
    MoveEnded,
    PeerLinkMessage,
    RequestFailed,
    SampleState,
    SamplingParams,
    StepFrame,
    Submission,
    TokenDelta,
)
from workers.replica.gateway_links import GatewayLinks
from workers.replica.requests import Requests
from workers.scheduler.block_pool import BlockPool
from workers.scheduler.scheduler import Scheduler
from workers.scheduler.step import StepRates
from workers.stats_record import PathMeasure

HERE, PEER = ReplicaIdentity("here", 1), ReplicaIdentity("peer", 1)
GATEWAY = ("gateway", 1)
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
        max_moves: int = 2,
        num_offload_blocks: int = 0,
    ) -> None:
        """`lanes` are the (rank, piece) of each lane of `peer`, to and from here; as many ranks are here."""
        self.clock = ManualClock(100.0)
        self.rates = StepRates(decode_step_s=1.0)
        self.pool = BlockPool(num_blocks, BLOCK_TOKENS)
        self.scheduler = Scheduler(
            EngineConfig(max_sequences=4),
            self.pool,
            eos_token_ids=(END,),
            max_context_tokens=MAX_CONTEXT,
            fingerprint=FINGERPRINT,
            num_offload_blocks=num_offload_blocks,
        )
        self.rank = HashRank()
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
        self.kv_sender = KvSender(
            config=TransferConfig(),
            block_tokens=BLOCK_TOKENS,
            num_ranks=num_ranks,
            scheduler=self.scheduler,
            requests=self.table,
            peers=peers,
            ranks=self.ranks,
            control=control,
            clock=self.clock,
            faults=Faults(),
        )
        self.kv_receiver = KvReceiver(
            config=TransferConfig(),
            num_ranks=num_ranks,
            pool=self.pool,
            scheduler=self.scheduler,
            requests=self.table,
            peers=peers,
            ranks=self.ranks,
            clock=self.clock,
            faults=Faults(),
        )
        self.kv_receiver.writer_joined(peer, lanes)
        self.migration = MigrationManager(
            identity=identity,
            scheduler=self.scheduler,
            requests=self.table,
            sender=self.kv_sender,
            rates=self.rates,
            control=control,
            clock=self.clock,
            max_active=max_moves,
            token_bytes=1,
        )
        self.requests = Requests(
            identity=identity,
            table=self.table,
            gateways=self.gateways,
            scheduler=self.scheduler,
            kv_sender=self.kv_sender,
            kv_receiver=self.kv_receiver,
            migration=self.migration,
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
    ) -> Submission:
        return Submission(
            request_id=request_id,
            attempt=1,
            tenant="",
            priority=0,
            prompt=pack(list(prompt)),
            block_keys=(),
            samples=tuple(SampleState(i, i, pack(list(output))) for i, output in enumerate(outputs)),
            sampling=SamplingParams(
                max_tokens=max_tokens, ignore_eos=True, repetition_penalty=1.0 + len(prompt) % 2
            ),
            decode=None if decode is None else HandOverTarget(decode, "address"),
            deadline_s=deadline_s,
        )

    def pump(self) -> None:
        """What the engine core does after every event, and what the rank answers."""
        self.kv_receiver.grant()
        self.kv_sender.ask_for_landings(self.scheduler.landings_wanted(self.clock.now()))
        plan = self.scheduler.plan(self.clock.now())
        if plan is not None:
            self.requests.settle(self.scheduler.settle(self.rank.run(plan), self.clock.now()))
        self.migration.pump()
        for failure in self.scheduler.take_failures():
            self.requests.dropped(failure)
        self.flush()
        self._listen()

    def grant(self, num_held_tokens: int, block_ids: tuple[int, ...]) -> None:
        """The peer answers the last landing that was asked for."""
        asked = [message for message in self.peers.to_reader if isinstance(message, LandingRequest)][-1]
        self.kv_sender.message(PEER, LandingGrant(asked.landing_id, num_held_tokens, block_ids))

    def _listen(self) -> None:
        for frame in self._gateway.sent():
            message = LINK_UP_CODEC.decode(frame)
            if isinstance(message, StepFrame):
                self.failures.extend(message.failures)
                self.deltas.extend(message.deltas)
                self.moves.extend(message.moves)
                self.joined.extend(message.hand_overs)

    def flush(self) -> None:
        self.gateways.flush(lambda: LoadReport(identity=HERE, sequence=0))
