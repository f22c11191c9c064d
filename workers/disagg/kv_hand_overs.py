"""The ways by which sequences and their KV leave and reach one replica."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from kvtransfer.common.clock import Clock
from kvtransfer.common.faults import Faults
from kvtransfer.messages import ReplicaIdentity
from kvtransfer.protocol.receiver import LandingTable
from kvtransfer.protocol.sender import SendTable
from workers.disagg.kv_receiver import KvReceiver
from workers.disagg.kv_sender import KvSender
from workers.disagg.migration import MigrationManager
from workers.disagg.request_table import RequestTable
from workers.interfaces import BlockSharing, EngineControl, PeerLinks, RankChannel
from workers.scheduler.scheduler import Scheduler
from workers.scheduler.step import StepRates


class KvSizes(NamedTuple):
    """The tokens of a block, the bytes of KV of a token and of the state of a sequence, and the token ids
    that the model has."""

    block_tokens: int
    token_bytes: int
    state_bytes: int
    vocab_size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class HandOverSurroundings:
    """What hand-overs are made for and with. `sharing` gives on what landed, where ranks receive parts of
    what all hold; `rates` are the measured ones."""

    identity: ReplicaIdentity
    sizes: KvSizes
    sends: SendTable
    landings: LandingTable
    scheduler: Scheduler
    requests: RequestTable
    rates: StepRates
    max_migrations: int
    peers: PeerLinks
    ranks: RankChannel
    control: EngineControl
    clock: Clock
    faults: Faults
    sharing: BlockSharing | None = None


class KvHandOvers(NamedTuple):
    """The sender of prompts, the receiver of both, and the migrations away from here."""

    sender: KvSender
    receiver: KvReceiver
    migration: MigrationManager

    @classmethod
    def of(cls, around: HandOverSurroundings) -> KvHandOvers:
        """Return the three, joined."""
        sizes = around.sizes
        sender = KvSender(
            sends=around.sends,
            scheduler=around.scheduler,
            requests=around.requests,
            peers=around.peers,
            ranks=around.ranks,
            control=around.control,
            clock=around.clock,
            faults=around.faults,
        )
        receiver = KvReceiver(
            landings=around.landings,
            block_tokens=sizes.block_tokens,
            vocab_size=sizes.vocab_size,
            scheduler=around.scheduler,
            requests=around.requests,
            peers=around.peers,
            ranks=around.ranks,
            clock=around.clock,
            faults=around.faults,
            sharing=around.sharing,
        )
        migration = MigrationManager(
            identity=around.identity,
            scheduler=around.scheduler,
            requests=around.requests,
            sender=sender,
            rates=around.rates,
            control=around.control,
            clock=around.clock,
            max_active=around.max_migrations,
            token_bytes=sizes.token_bytes,
            state_bytes=sizes.state_bytes,
        )
        return cls(sender, receiver, migration)
