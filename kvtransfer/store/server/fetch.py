"""Serve one fetch of an engine core: load its blocks ahead of need and send them in the chain's order."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from kvtransfer.common.tasks import Spawn
from kvtransfer.messages import Shard
from kvtransfer.store.messages.engine_session import FetchedBlocks, FetchRequest, Source
from kvtransfer.store.messages.owner_codec import FromOwner
from kvtransfer.store.messages.records import RecordId, RecordInfo
from kvtransfer.store.server.catalog_view import CatalogView, FetchPlan
from kvtransfer.store.server.loader import NO_SPACE, LoadedRecord
from kvtransfer.store.server.node_tiers import NodeTiers

# RecordLoader that one fetch keeps waiting, for each that can run at once.
_LOADS_PER_THREAD = 2
# Blocks in one message.
_MAX_BLOCKS = 512
# How often a block whose record vanished is planned again.
_MAX_PLANS = 3
_MISSING = "not in any tier"
_NO_SPACE = "no space in the host tier"


@dataclass(eq=False)
class _Block:
    """A block of a fetch: its records that are in the host tier, leased, and the `loads` of the others."""

    index: int
    plan: FetchPlan
    here: dict[Shard, LoadedRecord]
    loads: dict[Shard, asyncio.Future[LoadedRecord]]
    num_plans: int = 1

    @property
    def is_here(self) -> bool:
        return all(load.done() for load in self.loads.values())


class Fetch:
    """One `FetchRequest`. Runs from `start` until its last block is sent, or `end`."""

    def __init__(
        self,
        request: FetchRequest,
        view: CatalogView,
        node: NodeTiers,
        send: Callable[[FromOwner], None],
    ) -> None:
        self._request = request
        self._keys = request.keys + _fetched_states(request, view)
        self._view = view
        self._node = node
        self._send = send
        self._max_loads = _LOADS_PER_THREAD * node.settings.io_threads
        self._position = 0
        self._window: deque[_Block] = deque()
        self._leases: list[int] = []
        self._has_learned = False
        self._task: asyncio.Task[None] | None = None

    def start(self, spawn: Spawn, on_done: Callable[[], None]) -> None:
        """Begin; `on_done` is called when nothing more will be sent."""
        self._task = spawn(self._run(), "store-fetch")
        self._task.add_done_callback(lambda task: on_done())

    def end(self, bad: Iterable[int] = ()) -> None:
        """Stop, drop the records at the `bad` offsets, and end all leases."""
        if self._task is not None:
            self._task.cancel()
        for block in self._window:
            self._drop(block)
        self._window.clear()
        leased = set(self._leases)
        for offset in bad:
            if offset in leased:  # an engine core can only judge records it has read
                self._node.bad(offset)
        for offset in self._leases:
            self._node.catalog.release(offset)
        self._leases.clear()

    # -------------------------------------------------------------------------------------------- inside

    async def _run(self) -> None:
        is_last, first, reason = False, 0, ""
        while not is_last:
            reason = reason or await self._fill_window()
            if self._window:
                await self._arrival(self._window[0])
            blocks, failed = self._take()
            if failed:
                reason = failed
                for block in self._window:
                    self._drop(block)
                self._window.clear()
            is_last = not self._window and (bool(reason) or self._position == len(self._keys))
            if self._request.to_device:
                self._send_blocks(first, blocks, is_last, reason)
            else:
                self._keep(blocks)
            first += len(blocks)

    async def _fill_window(self) -> str:
        """Begin to load the next blocks, up to the limits of the window. Return why the fetch ends here, or
        ""."""
        keys = self._keys
        while self._position < len(keys) and len(self._window) < _MAX_BLOCKS:
            if sum(len(block.loads) for block in self._window) >= self._max_loads:
                break
            block = await self._open(self._position)
            if block is None:
                return _MISSING
            self._window.append(block)
            self._position += 1
        return ""

    async def _open(self, index: int) -> _Block | None:
        """Plan the block, and lease or load its records. None: the block is not available."""
        key = self._keys[index]
        plan = self._view.plan(key)
        if plan is None and not self._has_learned:
            self._has_learned = True
            await self._view.learn(self._request.chain, self._keys[index:])
            plan = self._view.plan(key)
        return None if plan is None else self._begin(index, plan)

    def _begin(self, index: int, plan: FetchPlan) -> _Block:
        block = _Block(index, plan, {}, {})
        parent = self._keys[index - 1] if index else b""
        is_state = index >= len(self._request.keys)
        for shard in dict.fromkeys(read.shard for read in plan.reads):
            record = RecordId(self._view.space, self._keys[index], shard)
            held, offset = self._node.catalog.find(record), self._node.catalog.lease(record)
            if held is not None and offset is not None:
                block.here[shard] = LoadedRecord(offset, held.info)
            else:
                block.loads[shard] = self._load(record, parent, is_state=is_state)
        self._node.catalog.count_misses(len(block.loads))
        return block

    def _load(self, record: RecordId, parent: bytes, *, is_state: bool) -> asyncio.Future[LoadedRecord]:
        view = self._view
        info = RecordInfo(
            record,
            parent,
            self._request.chain,
            self._request.sharing_group,
            view.model,
            view.payload_bytes(record.shard, is_state=is_state),
            0,
        )
        holders = [each for each in view.holders(record.key) if each.shard == record.shard]
        return self._node.load(info, holders, is_urgent=self._request.to_device)

    async def _arrival(self, block: _Block) -> None:
        """Wait until the block is loaded or unavailable; plan it again when a record of it vanished."""
        while block.loads:
            await asyncio.wait(block.loads.values())
            offsets = [load.result().offset for load in block.loads.values()]
            if all(offset >= 0 for offset in offsets) or NO_SPACE in offsets or block.num_plans == _MAX_PLANS:
                return
            plan = self._view.plan(self._keys[block.index])
            if plan is None:
                return
            self._drop(block)
            again = self._begin(block.index, plan)
            block.plan, block.here, block.loads = again.plan, again.here, again.loads
            block.num_plans += 1

    def _take(self) -> tuple[list[_Block], str]:
        """Take the leading blocks that are loaded; also return why the next one is unavailable, or ""."""
        taken: list[_Block] = []
        while self._window and self._window[0].is_here:
            block = self._window[0]
            offsets = [load.result().offset for load in block.loads.values()]
            if any(offset < 0 for offset in offsets):
                if taken:
                    return taken, ""  # planned again when it is its turn
                return taken, _NO_SPACE if NO_SPACE in offsets else _MISSING
            block.here |= {shard: load.result() for shard, load in block.loads.items()}
            block.loads = {}
            self._leases += [arrived.offset for arrived in block.here.values()]
            taken.append(self._window.popleft())
        return taken, ""

    def _send_blocks(self, first: int, blocks: list[_Block], is_last: bool, reason: str) -> None:
        arena = self._node.catalog.arena
        fetched = FetchedBlocks(
            self._request.number,
            b"" if arena is None else arena.id,
            first,
            tuple(self._sources(block) for block in blocks),
            tuple(block.plan.tier for block in blocks),
            is_last,
            reason if is_last else "",
        )
        self._send(fetched)

    def _sources(self, block: _Block) -> tuple[Source, ...]:
        sources: list[Source] = []
        for rank, shard, piece in block.plan.reads:
            offset, info = block.here[shard]
            sources.append(Source(rank, offset, shard, piece, info.num_bytes, info.checksum))
        return tuple(sources)

    def _keep(self, blocks: list[_Block]) -> None:
        """Pin the blocks of a prefetch in the host tier for a while."""
        for block in blocks:
            for arrived in block.here.values():
                self._node.pin(arrived.info.id)
        for offset in self._leases:
            self._node.catalog.release(offset)
        self._leases.clear()

    def _drop(self, block: _Block) -> None:
        for load in block.loads.values():
            self._node.loader.forget(load)
        for arrived in block.here.values():
            self._node.catalog.release(arrived.offset)


def _fetched_states(request: FetchRequest, view: CatalogView) -> tuple[bytes, ...]:
    """Return the states that are fetched behind the blocks: only one of use is brought near."""
    if request.to_device:
        return request.states
    near = (key for key in reversed(request.states) if view.tier(key) is not None)
    return tuple(key for key in (next(near, None),) if key is not None)
