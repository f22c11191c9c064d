"""Finished blocks on their way into the host tier: asynchronous, bounded, dropped rather than waited for.

    finished --queue--> PutRequest --PutGrant--> StorePut to the ranks --StorePutDone of each--> PutCommit

A block is referenced from its request until its ranks have copied it, so that nobody overwrites it before.
Where layers keep recurrent states, the state behind a block, if it has one, is a record of its own, which
follows that of the block.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from kvtransfer.blocks.keys import state_key
from kvtransfer.messages import Shard
from kvtransfer.store.messages.engine_session import HELD, NewRecord, PutCommit, PutGrant, PutRequest
from kvtransfer.store.messages.store_orders import StoreCopy, StorePut, StorePutDone
from kvtransfer.store.store_client import OwnerClient
from workers.interfaces import RankChannel
from workers.scheduler.block_pool import BlockPool
from workers.scheduler.group_pool import GroupPool
from workers.scheduler.step import FinishedBlock

_BATCH_BYTES = 16 << 20
_MAX_BATCH_BLOCKS = 32
_MAX_BATCHES = 2
# At most one in this many of the replica's blocks is held for copies.
_POOL_SHARE = 16


class _Item(NamedTuple):
    """What becomes a record of each shard: a block of KV, or with `is_state` the state behind one. `windows`
    are the blocks of the groups behind the first, of those with or without states."""

    key: bytes
    parent: bytes
    block_id: int
    windows: tuple[int, ...]
    is_state: bool


class StateRecords(NamedTuple):
    """The blocks of each group of layers with states, and the bytes of the record of one in each shard."""

    pools: Sequence[GroupPool] = ()
    shard_to_bytes: Mapping[Shard, int] = {}


_NO_STATES = StateRecords()


@dataclass(slots=True)
class _Batch:
    """Blocks and states of one chain; `places` are the (index of its item, rank) of each record of the
    request."""

    items: list[_Item]
    places: list[tuple[int, int]]
    group: str
    # The copies of each rank, from the grant on, and the items that they are of.
    copies: dict[int, list[StoreCopy]] = field(default_factory=dict)
    copied: dict[int, list[int]] = field(default_factory=dict)
    # Whether its records shall not come into being: the group was purged in between.
    is_void: bool = False
    sums: dict[int, StorePutDone] = field(default_factory=dict)

    def of_kind(self, *, is_state: bool) -> list[_Item]:
        """Return the items that are states, or those that are blocks."""
        return [item for item in self.items if item.is_state == is_state]


class BlockSaver:
    """See the module's text. `shards` are those of all ranks; copies of a KV head are written once."""

    def __init__(
        self,
        pool: BlockPool,
        shards: Mapping[int, tuple[Shard, int]],
        max_queued: int,
        client: OwnerClient,
        ranks: RankChannel,
        windows: Sequence[GroupPool] = (),
        states: StateRecords = _NO_STATES,
    ) -> None:
        """`shards` maps ranks to their shard and its bytes of a block."""
        self._pool = pool
        self._max_queued = max_queued
        self._client = client
        self._ranks = ranks
        self._windows = windows
        self._states, self._state_bytes = states
        self._writers: dict[Shard, tuple[int, int]] = {}
        for rank, (shard, num_bytes) in shards.items():
            self._writers.setdefault(shard, (rank, num_bytes))
        block_bytes = sum(num_bytes for _, num_bytes in self._writers.values())
        fitting = _BATCH_BYTES // max(1, block_bytes)
        most = max(1, min(fitting, pool.num_total // _POOL_SHARE // _MAX_BATCHES))
        self._batch_blocks = min(most, _MAX_BATCH_BLOCKS)
        self._queue: deque[FinishedBlock] = deque()
        self._batches: dict[int, _Batch] = {}
        self._number = 0
        self.num_stored = 0
        self.num_stored_states = 0
        # Blocks that were not stored, by cause.
        self.num_unstored: Counter[str] = Counter()

    @property
    def num_references(self) -> int:
        """Blocks that are held for copies."""
        return sum(len(batch.of_kind(is_state=False)) for batch in self._batches.values())

    @property
    def num_group_references(self) -> tuple[int, ...]:
        """Blocks of each group with a window, and of each with states, that are held for copies."""
        num_states = sum(len(batch.of_kind(is_state=True)) for batch in self._batches.values())
        return (*[self.num_references] * len(self._windows), *[num_states] * len(self._states))

    @property
    def has_orders(self) -> bool:
        """Whether a rank may be copying."""
        return any(batch.copies for batch in self._batches.values())

    @property
    def is_idle(self) -> bool:
        return not self._queue and not self._batches

    def finished(self, blocks: Iterable[FinishedBlock]) -> None:
        """Queue finished blocks; those beyond the queue's limit are not stored."""
        for block in blocks:
            if len(self._queue) < self._max_queued:
                self._queue.append(block)
            else:
                self.num_unstored["queue"] += 1

    def pump(self) -> None:
        """Ask for slots for the next blocks, while few are under way."""
        while self._queue and len(self._batches) < _MAX_BATCHES:
            self._request()

    def _request(self) -> None:
        first = self._queue[0]
        items: list[_Item] = []
        while self._queue and len(items) < self._batch_blocks:
            block = self._queue[0]
            if (block.chain, block.sharing_group) != (first.chain, first.sharing_group):
                break
            self._queue.popleft()
            its = self._items(block)
            items += its
            if not its:
                self.num_unstored["evicted"] += 1
        if not items:
            return
        places = [(index, rank) for index in range(len(items)) for rank, _ in self._writers.values()]
        records = tuple(
            NewRecord(item.key, item.parent, shard, self._state_bytes[shard] if item.is_state else num_bytes)
            for item in items
            for shard, (_, num_bytes) in self._writers.items()
        )
        batch = _Batch(items, places, first.sharing_group)
        self._number += 1
        if not self._client.send(PutRequest(self._number, first.sharing_group, first.chain, records)):
            self.num_unstored["failed"] += len(batch.of_kind(is_state=False))
            return
        self._pool.begin_copies([item.block_id for item in batch.of_kind(is_state=False)])
        for pool, block_ids in self._held(batch):
            pool.acquire(block_ids)
        self._batches[self._number] = batch

    def _items(self, block: FinishedBlock) -> list[_Item]:
        """Return what there is to store of a finished block, and of the state behind it; nothing when its KV
        is gone."""
        block_id = self._pool.find(block.key)
        windows = [window.find(block.key) for window in self._windows]
        held = tuple(it for it in windows if it is not None)
        if block_id is None or len(held) < len(windows):
            return []
        items = [_Item(block.key, block.parent, block_id, held, is_state=False)]
        found = [pool.find(block.key) for pool in self._states if block.has_state]
        states = tuple(it for it in found if it is not None)
        if states and len(states) == len(found):
            key = state_key(block.key)
            items.append(_Item(key, block.key, states[0], states[1:], is_state=True))
        return items

    def _held(self, batch: _Batch) -> Iterator[tuple[GroupPool, list[int]]]:
        """Yield the blocks of a batch in each group with a window, and in each with states."""
        for group, pool in enumerate(self._windows):
            yield pool, [item.windows[group] for item in batch.of_kind(is_state=False)]
        for group, pool in enumerate(self._states):
            its = batch.of_kind(is_state=True)
            yield pool, [(item.block_id, *item.windows)[group] for item in its]

    def granted(self, grant: PutGrant) -> None:
        """Have the ranks copy the blocks for which the owner has given slots."""
        batch = self._batches.get(grant.number)
        if batch is None:
            return
        if batch.is_void:
            self._client.send(PutCommit((), tuple(offset for offset in grant.offsets if offset >= 0)))
            self._end(grant.number)
            return
        refused: set[int] = set()
        for (index, rank), offset in zip(batch.places, grant.offsets, strict=True):
            item = batch.items[index]
            if offset >= 0:
                copy = StoreCopy(item.block_id, offset, item.windows, item.is_state)
                batch.copies.setdefault(rank, []).append(copy)
                batch.copied.setdefault(rank, []).append(index)
            elif offset != HELD:
                refused.add(index)
        if refused:
            self.num_unstored["refused"] += len(refused)
        if not batch.copies:
            self._end(grant.number)
        for rank, copies in batch.copies.items():
            self._ranks.send_to(rank, StorePut(grant.number, grant.arena, tuple(copies)))

    def copied(self, rank: int, done: StorePutDone) -> None:
        """Note that a rank has copied its part, or could not. The last rank's report ends the batch."""
        batch = self._batches.get(done.number)
        if batch is None or rank not in batch.copies:
            return
        batch.sums[rank] = done
        if len(batch.sums) < len(batch.copies):
            return
        written: list[tuple[int, int]] = []
        abandoned: list[int] = []
        bad: set[int] = set()
        for writer, copies in batch.copies.items():
            sums = batch.sums[writer].sums
            if len(sums) == len(copies) and not batch.is_void:
                written += [(copy.offset, total) for copy, total in zip(copies, sums, strict=True)]
            else:
                abandoned += [copy.offset for copy in copies]
                bad.update(batch.copied[writer])
        self._client.send(PutCommit(tuple(written), tuple(abandoned)))
        good = {index for indices in batch.copied.values() for index in indices} - bad
        num_states = sum(batch.items[index].is_state for index in good)
        self.num_stored_states += num_states
        self.num_stored += len(good) - num_states
        if bad:
            self.num_unstored["purged" if batch.is_void else "failed"] += len(bad)
        self._end(done.number)

    def drop(self, group: str | None) -> None:
        """Keep blocks of this sharing group (None: of any) that are not in the store yet from coming
        there."""
        kept = [block for block in self._queue if group is not None and block.sharing_group != group]
        self.num_unstored["purged"] += len(self._queue) - len(kept)
        self._queue = deque(kept)
        for batch in self._batches.values():
            batch.is_void = batch.is_void or group in (None, batch.group)

    def lost(self) -> None:
        """Make void what the owner was asked for: it is gone. Copies under way are waited for, not
        committed."""
        for number in [number for number, batch in self._batches.items() if not batch.copies]:
            self.num_unstored["failed"] += len(self._batches[number].of_kind(is_state=False))
            self._end(number)

    def _end(self, number: int) -> None:
        batch = self._batches.pop(number)
        self._pool.end_copies([item.block_id for item in batch.of_kind(is_state=False)])
        for pool, block_ids in self._held(batch):
            pool.release(block_ids, passed=True)  # the store has them
