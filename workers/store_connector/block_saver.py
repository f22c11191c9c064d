"""Finished blocks on their way into the host tier: asynchronous, bounded, dropped rather than waited for.

    finished --queue--> PutRequest --PutGrant--> StorePut to the ranks --StorePutDone of each--> PutCommit

A block is referenced from its request until its ranks have copied it, so that nobody overwrites it before.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from kvtransfer.messages import Shard
from kvtransfer.store.messages.engine_session import HELD, NewRecord, PutCommit, PutGrant, PutRequest
from kvtransfer.store.messages.store_orders import StoreCopy, StorePut, StorePutDone
from kvtransfer.store.store_client import StoreClient
from workers.interfaces import RankChannel
from workers.scheduler.block_pool import BlockPool
from workers.scheduler.step import FinishedBlock
from workers.scheduler.window_pool import WindowPool

_BATCH_BYTES = 16 << 20
_MAX_BATCH_BLOCKS = 32
_MAX_BATCHES = 2
# At most one in this many of the replica's blocks is held for copies.
_POOL_SHARE = 16


@dataclass(slots=True)
class _Batch:
    """Blocks of one chain, with those of each group with a window; `places` are the (block index, rank) of
    each record of the request."""

    block_ids: list[int]
    windows: list[list[int]]
    places: list[tuple[int, int]]
    group: str
    # The copies of each rank, from the grant on.
    copies: dict[int, list[StoreCopy]] = field(default_factory=dict)
    # Whether its records shall not come into being: the group was purged in between.
    is_void: bool = False
    sums: dict[int, StorePutDone] = field(default_factory=dict)


class BlockSaver:
    """See the module's text. `shards` are those of all ranks; copies of a KV head are written once."""

    def __init__(
        self,
        pool: BlockPool,
        shards: Mapping[int, tuple[Shard, int]],
        max_queued: int,
        client: StoreClient,
        ranks: RankChannel,
        windows: Sequence[WindowPool] = (),
    ) -> None:
        """`shards` maps ranks to their shard and its bytes of a block."""
        self._pool = pool
        self._max_queued = max_queued
        self._client = client
        self._ranks = ranks
        self._windows = windows
        self._writers: dict[Shard, tuple[int, int]] = {}
        for rank, (shard, num_bytes) in shards.items():
            self._writers.setdefault(shard, (rank, num_bytes))
        block_bytes = sum(num_bytes for _, num_bytes in self._writers.values())
        most = max(1, min(_BATCH_BYTES // block_bytes, pool.num_total // _POOL_SHARE // _MAX_BATCHES))
        self._batch_blocks = min(most, _MAX_BATCH_BLOCKS)
        self._queue: deque[FinishedBlock] = deque()
        self._batches: dict[int, _Batch] = {}
        self._number = 0
        self.num_stored = 0
        # Blocks that were not stored, by cause.
        self.num_unstored: Counter[str] = Counter()

    @property
    def num_references(self) -> int:
        """Blocks that are held for copies."""
        return sum(len(batch.block_ids) for batch in self._batches.values())

    @property
    def num_window_references(self) -> tuple[int, ...]:
        """Blocks of each group with a window that are held for copies."""
        batches = self._batches.values()
        return tuple(sum(len(it.windows[group]) for it in batches) for group in range(len(self._windows)))

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
        blocks: list[tuple[FinishedBlock, int]] = []
        while self._queue and len(blocks) < self._batch_blocks:
            block = self._queue[0]
            if (block.chain, block.sharing_group) != (first.chain, first.sharing_group):
                break
            self._queue.popleft()
            block_id = self._pool.find(block.key)
            if block_id is not None and all(window.find_all([block.key]) for window in self._windows):
                blocks.append((block, block_id))
            else:
                self.num_unstored["evicted"] += 1
        if not blocks:
            return
        places = [(index, rank) for index in range(len(blocks)) for rank, _ in self._writers.values()]
        records = tuple(
            NewRecord(block.key, block.parent, shard, num_bytes)
            for block, _ in blocks
            for shard, (_, num_bytes) in self._writers.items()
        )
        self._number += 1
        if not self._client.send(PutRequest(self._number, first.sharing_group, first.chain, records)):
            self.num_unstored["failed"] += len(blocks)
            return
        block_ids = [block_id for _, block_id in blocks]
        self._pool.begin_copies(block_ids)
        windows = [window.find_all(block.key for block, _ in blocks) or [] for window in self._windows]
        for window, its in zip(self._windows, windows, strict=True):
            window.acquire(its)
        self._batches[self._number] = _Batch(block_ids, windows, places, first.sharing_group)

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
            if offset >= 0:
                windows = tuple(its[index] for its in batch.windows)
                batch.copies.setdefault(rank, []).append(StoreCopy(batch.block_ids[index], offset, windows))
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
        bad_blocks: set[int] = set()
        for writer, copies in batch.copies.items():
            sums = batch.sums[writer].sums
            if len(sums) == len(copies) and not batch.is_void:
                written += [(copy.offset, total) for copy, total in zip(copies, sums, strict=True)]
            else:
                abandoned += [copy.offset for copy in copies]
                bad_blocks.update(copy.block_id for copy in copies)
        self._client.send(PutCommit(tuple(written), tuple(abandoned)))
        good = {copy.block_id for copies in batch.copies.values() for copy in copies} - bad_blocks
        self.num_stored += len(good)
        if bad_blocks:
            self.num_unstored["purged" if batch.is_void else "failed"] += len(bad_blocks)
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
            self.num_unstored["failed"] += len(self._batches[number].block_ids)
            self._end(number)

    def _end(self, number: int) -> None:
        batch = self._batches.pop(number)
        self._pool.end_copies(batch.block_ids)
        for window, its in zip(self._windows, batch.windows, strict=True):
            window.release(its, passed=True)  # the store has them
