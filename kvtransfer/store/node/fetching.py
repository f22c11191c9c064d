"""One fetch of a brain: walks a chain, has its blocks brought in ahead of need, and tells them in order."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from kvtransfer.messages import Shard
from kvtransfer.store.messages import FetchedBlocks, FetchRequest, FromOwner, RecordId, RecordInfo, Source
from kvtransfer.store.node.loads import NO_ROOM, Arrived
from kvtransfer.store.node.node import Node
from kvtransfer.store.node.sight import Plan, Sight
from kvtransfer.store.tasks import Spawn

_AHEAD = 2
"""Loads that one fetch keeps waiting, for each that can run at once."""
_MAX_BLOCKS = 512
"""Told in one message."""
_MAX_PLANS = 3
"""So often a block whose record vanished is looked for again."""
_MISSING = "not in any tier"
_NO_ROOM = "no room in the host tier"


@dataclass(eq=False)
class _Block:
    """A block on its way: those of its records that are here, leased, and the `loads` of the others."""

    index: int
    plan: Plan
    here: dict[Shard, Arrived]
    loads: dict[Shard, asyncio.Future[Arrived]]
    num_plans: int = 1

    @property
    def is_here(self) -> bool:
        return all(load.done() for load in self.loads.values())


class Fetch:
    """One `FetchRequest`. Runs from `start` until its last block is told, or `end`."""

    def __init__(
        self,
        request: FetchRequest,
        sight: Sight,
        node: Node,
        send: Callable[[FromOwner], None],
    ) -> None:
        self._request = request
        self._sight = sight
        self._node = node
        self._send = send
        self._max_loads = _AHEAD * node.settings.io_threads
        self._position = 0
        self._window: deque[_Block] = deque()
        self._leases: list[int] = []
        self._has_learned = False
        self._task: asyncio.Task[None] | None = None

    def start(self, spawn: Spawn, on_done: Callable[[], None]) -> None:
        """Begin; `on_done` is called when nothing more of it will be told."""
        self._task = spawn(self._walk(), "store-fetch")
        self._task.add_done_callback(lambda task: on_done())

    def end(self, bad: Iterable[int] = ()) -> None:
        """Stop, drop what is `bad`, and end all leases."""
        if self._task is not None:
            self._task.cancel()
        for block in self._window:
            self._let_go(block)
        self._window.clear()
        leased = set(self._leases)
        for offset in bad:
            if offset in leased:  # a brain judges only what it has read
                self._node.bad(offset)
        for offset in self._leases:
            self._node.catalog.release(offset)
        self._leases.clear()

    # -------------------------------------------------------------------------------------------- inside

    async def _walk(self) -> None:
        is_last, first, reason = False, 0, ""
        while not is_last:
            reason = reason or await self._look_ahead()
            if self._window:
                await self._arrival(self._window[0])
            blocks, failed = self._take()
            if failed:
                reason = failed
                for block in self._window:
                    self._let_go(block)
                self._window.clear()
            is_last = not self._window and (bool(reason) or self._position == len(self._request.keys))
            if self._request.to_device:
                self._tell(first, blocks, is_last, reason)
            else:
                self._keep(blocks)
            first += len(blocks)

    async def _look_ahead(self) -> str:
        """Have the next blocks brought, as far ahead as is good; why it stopped for good, or ""."""
        keys = self._request.keys
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
        """Lease and order what the block needs."""
        key = self._request.keys[index]
        plan = self._sight.plan(key)
        if plan is None and not self._has_learned:
            self._has_learned = True
            await self._sight.learn(self._request.chain, self._request.keys[index:])
            plan = self._sight.plan(key)
        return None if plan is None else self._order(index, plan)

    def _order(self, index: int, plan: Plan) -> _Block:
        block = _Block(index, plan, {}, {})
        parent = self._request.keys[index - 1] if index else b""
        for shard in dict.fromkeys(take.shard for take in plan.takes):
            record = RecordId(self._sight.space, self._request.keys[index], shard)
            held, offset = self._node.catalog.find(record), self._node.catalog.lease(record)
            if held is not None and offset is not None:
                block.here[shard] = Arrived(offset, held.info)
            else:
                block.loads[shard] = self._bring(record, parent)
        self._node.catalog.count_misses(len(block.loads))
        return block

    def _bring(self, record: RecordId, parent: bytes) -> asyncio.Future[Arrived]:
        sight = self._sight
        info = RecordInfo(
            record, parent, self._request.chain, "", sight.model, sight.payload_bytes(record.shard), 0
        )
        holders = [each for each in sight.holders(record.key) if each.shard == record.shard]
        return self._node.bring(info, holders, is_urgent=self._request.to_device)

    async def _arrival(self, block: _Block) -> None:
        """Wait until the block is here, or cannot be had; look for it again when a record of it vanished."""
        while block.loads:
            await asyncio.wait(block.loads.values())
            offsets = [load.result().offset for load in block.loads.values()]
            if all(offset >= 0 for offset in offsets) or NO_ROOM in offsets or block.num_plans == _MAX_PLANS:
                return
            plan = self._sight.plan(self._request.keys[block.index])
            if plan is None:
                return
            self._let_go(block)
            again = self._order(block.index, plan)
            block.plan, block.here, block.loads = again.plan, again.here, again.loads
            block.num_plans += 1

    def _take(self) -> tuple[list[_Block], str]:
        """The leading blocks that are here, and why the one behind them cannot be had ("": it may still)."""
        taken: list[_Block] = []
        while self._window and self._window[0].is_here:
            block = self._window[0]
            offsets = [load.result().offset for load in block.loads.values()]
            if any(offset < 0 for offset in offsets):
                if taken:
                    return taken, ""  # looked for again when it is its turn
                return taken, _NO_ROOM if NO_ROOM in offsets else _MISSING
            block.here |= {shard: load.result() for shard, load in block.loads.items()}
            block.loads = {}
            self._leases += [arrived.offset for arrived in block.here.values()]
            taken.append(self._window.popleft())
        return taken, ""

    def _tell(self, first: int, blocks: list[_Block], is_last: bool, reason: str) -> None:
        arena = self._node.catalog.arena
        told = FetchedBlocks(
            self._request.number,
            b"" if arena is None else arena.id,
            first,
            tuple(self._sources(block) for block in blocks),
            tuple(block.plan.tier for block in blocks),
            is_last,
            reason if is_last else "",
        )
        self._send(told)

    def _sources(self, block: _Block) -> tuple[Source, ...]:
        sources: list[Source] = []
        for rank, shard, piece in block.plan.takes:
            offset, info = block.here[shard]
            sources.append(Source(rank, offset, shard, piece, info.num_bytes, info.checksum))
        return tuple(sources)

    def _keep(self, blocks: list[_Block]) -> None:
        """A prefetch: they stay in the host tier for a while."""
        for block in blocks:
            for arrived in block.here.values():
                self._node.pin(arrived.info.id)
        for offset in self._leases:
            self._node.catalog.release(offset)
        self._leases.clear()

    def _let_go(self, block: _Block) -> None:
        for load in block.loads.values():
            self._node.loads.forget(load)
        for arrived in block.here.values():
            self._node.catalog.release(arrived.offset)
