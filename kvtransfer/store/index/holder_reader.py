"""Read the index: from the values of blocks to the nodes that live and have them."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import NamedTuple

from kvtransfer.common.clock import Clock
from kvtransfer.errors import StoreError
from kvtransfer.messages import Shard
from kvtransfer.store.index.redis_client import IndexAwayError, RedisLink
from kvtransfer.store.index.values import (
    Entry,
    NodeRecord,
    decode_entries,
    decode_node,
    key_prefix,
    node_key,
)
from kvtransfer.store.messages.records import Tier

_LOG = logging.getLogger(__name__)


# Keys of one MGET: what a busy server answers in far less than the budget.
CHUNK = 512
# The time for which a node is taken to live after its record was read.
NODES_S = 1.0


class Holder(NamedTuple):
    """A node that holds a record, in its cheapest tier; `address` is its owner's, host:port."""

    node_id: str
    epoch: int
    address: str
    tier: Tier
    shard: Shard


class Lookup:
    """One question: `found` grows, a chunk at a time, until `is_over` is set by the caller."""

    def __init__(self, space: bytes, chain: bytes, keys: Sequence[bytes]) -> None:
        self.space = space
        self.chain = chain
        self.keys = keys
        self.found: list[tuple[Holder, ...]] = []
        self.is_over = False
        self.error: IndexAwayError | None = None


class HolderReader:
    """Looks up blocks. Every `NODES_S` one look-up takes a second round trip for the records of the nodes."""

    def __init__(self, link: RedisLink, namespace: str, own_number: bytes, clock: Clock) -> None:
        self._link = link
        self._namespace = namespace
        self._own_number = own_number
        self._clock = clock
        self._nodes: dict[bytes, NodeRecord | None] = {}
        self._nodes_until = 0.0
        # Blocks with the same holders have equal values: each is decoded once, until the nodes are read
        # again.
        self._holders: dict[bytes | None, tuple[Holder, ...]] = {None: ()}

    async def read(self, lookup: Lookup) -> None:
        """Find the holders of the look-up's blocks. `IndexAwayError`."""
        prefix = key_prefix(self._namespace, lookup.chain, lookup.space)
        for first in range(0, len(lookup.keys), CHUNK):
            if lookup.is_over:
                return
            values = await self._link.mget_blocks(prefix, lookup.keys[first : first + CHUNK])
            if self._clock.now() >= self._nodes_until:
                self._holders = {None: ()}
                self._nodes = {}
                self._nodes_until = self._clock.now() + NODES_S
            try:
                holders = list(map(self._holders.__getitem__, values))
            except KeyError:
                holders = await self._decode(values)
            lookup.found += holders

    async def _decode(self, values: Sequence[bytes | None]) -> list[tuple[Holder, ...]]:
        entries = {
            value: tuple(entry for entry in decode_entries(value) if entry.node != self._own_number)
            for value in set(values)
            if value is not None
        }
        unknown = {entry.node for some in entries.values() for entry in some} - self._nodes.keys()
        if unknown:
            await self._read_nodes(list(unknown))
        for value, some in entries.items():
            self._holders[value] = tuple(filter(None, map(self._holder, some)))
        return [() if value is None else self._holders[value] for value in values]

    async def _read_nodes(self, numbers: list[bytes]) -> None:
        values = await self._link.mget([node_key(self._namespace, number) for number in numbers])
        for number, value in zip(numbers, values, strict=True):
            self._nodes[number] = None
            if value is not None:
                try:
                    self._nodes[number] = decode_node(value)
                except StoreError as error:
                    _LOG.warning("%s", error)

    def _holder(self, entry: Entry) -> Holder | None:
        node = self._nodes.get(entry.node)
        if node is None or node.epoch != entry.epoch:
            return None
        return Holder(node.node_id, node.epoch, node.address, entry.tier, entry.shard)
