"""The rooms of an engine core that hand-overs go through, with a model of the rank and without any wire."""

from __future__ import annotations

from collections.abc import Sequence

from hash_rank import BLOCK_TOKENS, END, FINGERPRINT, MAX_CONTEXT, VOCABULARY, HashRank, pack
from link_ends import LinkEnd

from kvtransfer.common.clock import ManualClock
from kvtransfer.common.faults import Faults
from kvtransfer.config import TransferConfig
from kvtransfer.messages import LandingGrant, LandingRequest, ReplicaIdentity, Shard, TransferOrder
from workers.config import EngineConfig
from workers.disagg.kv_receiver import KvReceiver
from workers.disagg.kv_sender import KvSender
from workers.disagg.migration import MigrationManager
from workers.messages import (
    LINK_UP_CODEC,
    HandOverReport,
    HandOverTarget,
    LoadReport,
    MoveEnded,
    PathMeasure,
    PeerLinkMessage,
    RequestFailed,
    SampleState,
    SamplingParams,
    StepFrame,
    Submission,
    TokenDelta,
)
from workers.replica.gateway_links import Gateways
from workers.replica.requests import Requests
from workers.scheduler.block_pool import BlockPool
from workers.scheduler.scheduler import Scheduler

HERE, PEER = ReplicaIdentity("here", 1), ReplicaIdentity("peer", 1)
GATEWAY = ("gateway", 1)
WHOLE = Shard(0, 1, 0, 2)


class PeersStub:
    """Links that are ready unless `failure` says why they cannot be; what is sent is kept."""

    def __init__(self) -> None:
        self.outbound: KvSender
        self.failure = ""
        self.is_ready = True
        self.to_reader: list[PeerLinkMessage] = []
        self.to_writer: list[PeerLinkMessage] = []

    def paths(self) -> tuple[PathMeasure, ...]:
        return ()

    def ensure(self, target: HandOverTarget) -> None:
        if self.failure:
            self.outbound.peer_failed(target.identity, self.failure)

    def connection(self, peer: ReplicaIdentity) -> bytes | None:
        return b"c" * 16 if self.is_ready else None

    def send_outbound(self, peer: ReplicaIdentity, message: PeerLinkMessage) -> None:
        self.to_reader.append(message)

    def send_inbound(self, writer: ReplicaIdentity, message: PeerLinkMessage) -> None:
        self.to_writer.append(message)


class Components:
    """Scheduler, requests and both sides of hand-overs of one replica, and a Link that keeps its frames."""

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
        self.decode_step_s = 1.0
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
        self.orders: list[TransferOrder] = []
        self.orders_to: list[tuple[int, TransferOrder]] = []
        num_ranks = len({rank for rank, _ in lanes})
        self.peers = PeersStub()
        self.gateways = Gateways(self.clock, self._no_load)
        self._gateway = LinkEnd("gateway")
        self.gateways.connected(GATEWAY, self._gateway.stream)
        self.outbound = KvSender(
            config=TransferConfig(),
            block_tokens=BLOCK_TOKENS,
            scheduler=self.scheduler,
            clock=self.clock,
            num_ranks=num_ranks,
            order=self.orders.append,
            on_failed=lambda failure: self.requests.failed(failure),
            on_ended=lambda key: self.requests.ended(key),
            kill_ranks=self._kill,
            faults=Faults(),
        )
        self.inbound = KvReceiver(
            config=TransferConfig(),
            block_tokens=BLOCK_TOKENS,
            pool=self.pool,
            scheduler=self.scheduler,
            clock=self.clock,
            num_ranks=num_ranks,
            order=self.orders.append,
            order_to=lambda *order: self.orders_to.append(order),
            on_joined=lambda *news: self.requests.joined(*news),
            faults=Faults(),
        )
        self.outbound.peers = self.inbound.peers = self.peers  # type: ignore[assignment]
        self.peers.outbound = self.outbound
        self.inbound.writer_joined(peer, lanes)
        self.requests = Requests(
            identity=identity,
            scheduler=self.scheduler,
            gateways=self.gateways,
            outbound=self.outbound,
            inbound=self.inbound,
            clock=self.clock,
            vocab_size=VOCABULARY,
            wake=lambda: None,
        )
        self.outbound.moving = self.moving = MigrationManager(
            identity=identity,
            scheduler=self.scheduler,
            outbound=self.outbound,
            gateways=self.gateways,
            clock=self.clock,
            most=max_moves,
            token_bytes=1,
            decode_step_s=lambda: self.decode_step_s,
            on_ended=self.requests.ended,
            on_failed=self.requests.failed,
            wake=lambda: None,
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
        self.inbound.grant()
        self.outbound.wanted(self.scheduler.landings_wanted(self.clock.now()))
        plan = self.scheduler.plan(self.clock.now())
        if plan is not None:
            self.requests.settle(self.scheduler.settle(self.rank.run(plan), self.clock.now()))
        self.moving.pump()
        for failure in self.scheduler.take_failures():
            self.requests.dropped(failure)
        self.gateways.flush()
        self._listen()

    def grant(self, num_held_tokens: int, block_ids: tuple[int, ...]) -> None:
        """The peer answers the last landing that was asked for."""
        asked = [message for message in self.peers.to_reader if isinstance(message, LandingRequest)][-1]
        self.outbound.message(PEER, LandingGrant(asked.landing_id, num_held_tokens, block_ids))

    def _listen(self) -> None:
        for frame in self._gateway.sent():
            message = LINK_UP_CODEC.decode(frame)
            if isinstance(message, StepFrame):
                self.failures.extend(message.failures)
                self.deltas.extend(message.deltas)
                self.moves.extend(message.moves)
                self.joined.extend(message.hand_overs)

    def _no_load(self) -> LoadReport:
        return LoadReport(identity=HERE, sequence=0)

    def _kill(self, reason: str) -> None:
        raise AssertionError(reason)
