"""The links between simulated replicas: messages take the time of the network, and arrive in their order."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple, Protocol

from cluster.simulation.virtual_time import EventQueue
from kvtransfer.messages import ReplicaIdentity, Shard
from workers.disagg.kv_receiver import KvReceiver
from workers.interfaces import PrefillSide
from workers.messages.link import HandOverTarget
from workers.messages.peer_link import PeerLinkMessage
from workers.stats_record import PathMeasure

# What crossing the network takes, and opening and measuring a path.
NETWORK_S = 0.0005
PATH_S = 0.05
_CONNECTION = b"c" * 16


class LinkedReplica(Protocol):
    """A replica, as the links of others see it."""

    identity: ReplicaIdentity
    kv_receiver: KvReceiver

    def catch_up(self) -> None:
        """Do the steps that are over by now, before anything else arrives."""

    def wake(self) -> None:
        """Call the replica's turn after what arrived."""

    @property
    def is_alive(self) -> bool:
        """Whether anybody answers there."""


class _Way(NamedTuple):
    side: PrefillSide
    reader: LinkedReplica


class SimulatedPeers:
    """The links of one replica, as a writer (`workers.interfaces.PeerLinks`) and as a reader."""

    def __init__(
        self,
        identity: ReplicaIdentity,
        events: EventQueue,
        find: Callable[[str], LinkedReplica | None],
        links: Mapping[ReplicaIdentity, SimulatedPeers],
        shard: Shard,
        catch_up: Callable[[], None],
        wake: Callable[[], None],
    ) -> None:
        """`find` returns a replica by its id, and `links` has the links of every replica that lives. A writer
        sends each block as one piece, the whole `shard`. The owner is called to `catch_up` before what
        arrives, and to `wake` behind it."""
        self._identity = identity
        self._events = events
        self._find = find
        self._links = links
        self._shard = shard
        self._catch_up = catch_up
        self._wake = wake
        self._ready: dict[ReplicaIdentity, _Way] = {}
        self._opening: set[ReplicaIdentity] = set()

    def ensure(self, target: HandOverTarget, side: PrefillSide) -> None:
        """Open a path to `target`, unless there is one."""
        reader = target.identity
        if reader in self._ready or reader in self._opening:
            return
        self._opening.add(reader)
        self._events.after(PATH_S, lambda: self._opened(reader, side))

    def _opened(self, reader: ReplicaIdentity, side: PrefillSide) -> None:
        self._opening.discard(reader)
        self._catch_up()
        replica = self._find(reader.replica_id)
        if replica is None or replica.identity != reader or not replica.is_alive:
            side.peer_failed(reader, "nobody answers there")
        else:
            self._ready[reader] = _Way(side, replica)
            replica.catch_up()
            replica.kv_receiver.writer_joined(self._identity, [[(0, self._shard)]])
            side.peer_ready(reader)
        self._wake()

    def connection(self, peer: ReplicaIdentity) -> bytes | None:
        return _CONNECTION if peer in self._ready else None

    def send_to_reader(self, peer: ReplicaIdentity, message: PeerLinkMessage) -> None:
        if (way := self._ready.get(peer)) is not None:
            self._events.after(NETWORK_S, lambda: self._arrive_at(way.reader, message))

    def _arrive_at(self, reader: LinkedReplica, message: PeerLinkMessage) -> None:
        if reader.is_alive and reader.identity in self._ready:
            reader.catch_up()
            reader.kv_receiver.message(self._identity, message)
            reader.wake()

    def send_to_writer(self, writer: ReplicaIdentity, message: PeerLinkMessage) -> None:
        if (links := self._links.get(writer)) is not None:
            self._events.after(NETWORK_S, lambda: links.answered(self._identity, message))

    def answered(self, reader: ReplicaIdentity, message: PeerLinkMessage) -> None:
        """Take a message of a replica to which this one writes."""
        if (way := self._ready.get(reader)) is not None:
            self._catch_up()
            way.side.message(reader, message)
            self._wake()

    def lost(self, peer: ReplicaIdentity) -> None:
        """Take in that a replica has died: it reads nothing from here any more."""
        if (way := self._ready.pop(peer, None)) is not None:
            self._catch_up()
            way.side.peer_failed(peer, "the peer link closed")
            self._wake()

    def paths(self) -> tuple[PathMeasure, ...]:
        return ()
