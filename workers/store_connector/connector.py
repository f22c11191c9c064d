"""The engine core's side of the tiered store: finished blocks go out, missing ones come in, nobody waits.

    OwnerClient <---- StoreConnector ----> ranks (AttachStore, StorePut, StoreGet)
                      |   |
          WriteThrough     BlockLoader          TierView (what the node holds, for KV events)
                               |
                        AnnouncedPrompts

The store is open when its owner is connected and every rank has mapped the same arena. While it is not, loads
end at once and finished blocks are not stored; the replica serves on.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence

from kvtransfer.blocks.layout import BlockLayout
from kvtransfer.common.clock import Clock
from kvtransfer.common.host import host_id
from kvtransfer.messages import CompatibilityRecord, ReplicaIdentity, Shard
from kvtransfer.rpc.handshake import draw_id
from kvtransfer.store.messages.engine_session import (
    EngineHello,
    FetchedBlocks,
    FindAnswer,
    FindRequest,
    PutGrant,
    StoreWelcome,
    TierEvents,
    TierPart,
    TierPartRequest,
)
from kvtransfer.store.messages.owner_codec import STORE_PROTOCOL
from kvtransfer.store.messages.store_orders import (
    AttachStore,
    StoreAttached,
    StoreGetDone,
    StorePutDone,
    StoreReport,
)
from kvtransfer.store.record import stored_form
from kvtransfer.store.store_client import OwnerClient, StoreEvents
from workers.messages.link import Announce, GatewayKey, Submission
from workers.messages.rank_channel import RankReady
from workers.model.kv_form import KvForm
from workers.scheduler.step import LoadNeed
from workers.store_connector.announced import AnnouncedPrompts
from workers.store_connector.block_loader import BlockLoader
from workers.store_connector.block_saver import BlockSaver, StateRecords
from workers.store_connector.engine_parts import EngineParts
from workers.store_connector.tier_costs import TierCosts
from workers.store_connector.tier_view import TierView

_ATTACH_PERIOD_S = 2.0
_ASK_PERIOD_S = 0.5
# The number of a look-up that is for no load: the numbers of loads begin at 1.
_NO_LOAD = 0

_log = logging.getLogger("tandem.tiers")


class StoreConnector:
    """See the module's text. Implements `kvtransfer.store.store_client.StoreEvents`; all on the engine core's
    loop."""

    def __init__(
        self,
        *,
        name: str,
        connect: Callable[[EngineHello, StoreEvents], OwnerClient],
        identity: ReplicaIdentity,
        ready: Sequence[RankReady],
        engine: EngineParts,
        clock: Clock,
        records: KvForm | None = None,
    ) -> None:
        """`name` is the owner's abstract unix socket, and `connect` makes the connection to it; `ready` are
        the reports of all ranks. `records` is the form of KV in the store; None: that of the device."""
        kv_dtype, scale_bytes = ("", 0) if records is None else (records.name, records.scale_bytes)
        compatibility = stored_form(ready[0].compatibility, kv_dtype, scale_bytes)
        shards = [rank.endpoints.shard for rank in ready]
        self._name = name
        self._session = draw_id()
        self._pool = engine.pool
        self._scheduler = engine.scheduler
        self._max_loading = engine.scheduler.config.max_loading
        self._num_ranks = len(shards)
        self._ranks = engine.ranks
        self._control = engine.control
        self._is_answering = True
        # Whether the owner has sent its welcome on this connection.
        self._is_welcome = False
        # The arena that each rank has mapped; a rank without one is missing.
        self._arenas: dict[int, bytes] = {}
        # The time at which ranks without an arena are ordered again to map it.
        self._attach_at = 0.0
        # The time at which an owner that does not answer is asked again whether it does.
        self._ask_at = 0.0
        self._clock = clock
        self._quiet = asyncio.Event()
        self._quiet.set()
        hello = EngineHello(
            STORE_PROTOCOL, self._session, identity, compatibility, tuple(shards), takes_parts=True
        )
        self._client = connect(hello, self)
        block_bytes = {shard: BlockLayout.of(compatibility, shard).block_bytes for shard in shards}
        state_bytes = {shard: _state_bytes(compatibility, shard) for shard in shards}
        num_bytes = (sum(its[shard] for shard in shards) for its in (block_bytes, state_bytes))
        self.costs = TierCosts(compatibility.block_tokens, *num_bytes)
        self.view = TierView(has_states=bool(engine.states))
        self.saver = BlockSaver(
            engine.pool,
            {rank: (shard, block_bytes[shard]) for rank, shard in enumerate(shards)},
            engine.scheduler.config.write_queue,
            self._client,
            engine.ranks,
            engine.windows,
            StateRecords(engine.states, state_bytes),
        )
        self.announced = AnnouncedPrompts()
        self.loader = BlockLoader(engine, self.costs, self._client, self.announced, clock)

    async def start(self) -> None:
        """Begin to connect; the store opens when it can."""
        await self._client.start()

    async def close(self) -> None:
        """Disconnect from the owner."""
        await self._client.close()

    @property
    def is_open(self) -> bool:
        """Whether the owner answers and every rank has mapped its arena."""
        has_arena = len(self._arenas) == self._num_ranks and len(set(self._arenas.values())) == 1
        return self._client.is_up and self._is_answering and has_arena

    @property
    def num_references(self) -> int:
        """Blocks that are held for copies."""
        return self.saver.num_references + self.loader.num_references

    @property
    def num_group_references(self) -> tuple[int, ...]:
        """Blocks of each group with a window, and of each with states, that are held for copies."""
        held = zip(self.saver.num_group_references, self.loader.num_group_references, strict=True)
        return tuple(saved + loaded for saved, loaded in held)

    @property
    def is_idle(self) -> bool:
        """Whether nothing is on its way in or out."""
        return self.saver.is_idle and self.loader.is_idle

    # ------------------------------------------------------------------------------------ from the engine
    # core

    def announce(self, gateway: GatewayKey, announce: Announce) -> None:
        """Load the blocks that a request waiting in a gateway will want, or at least bring them near."""
        block_tokens = self._pool.block_tokens
        num_blocks = min((announce.num_tokens - 1) // block_tokens, self._pool.num_total)
        keys = announce.block_keys[: max(0, num_blocks)]
        if not (self.is_open and keys):
            return
        now = self._clock.now()
        is_new = self.announced.add(gateway, announce.request_id, announce.sharing_group, keys, now)
        if is_new and self.loader.num_loads >= self._max_loading:
            self.loader.prefetch(announce.sharing_group, keys)

    def withdraw(self, request_id: str) -> None:
        """Forget an announced request that does not come."""
        if self.announced.forget(request_id) is not None:
            self.loader.withdraw(request_id)

    def lost(self, gateway: GatewayKey) -> None:
        """Forget what a gateway has announced: its link has ended. A gateway that still runs announces its
        queue again."""
        for prompt in self.announced.drop_gateway(gateway):
            self.loader.withdraw(prompt.request_id)

    def arrived(self, submission: Submission) -> None:
        """Give a request what was loaded for it since it was announced, unless the request was refused. One
        that will wait for a while has its blocks brought near."""
        request_id, attempt = submission.request_id, submission.attempt
        if not self._scheduler.is_here(request_id, attempt):
            self.withdraw(request_id)
            return
        if (prompt := self.announced.forget(request_id)) is not None:
            self.loader.submitted(request_id, attempt, submission.samples[0].index)
            num_blocks = prompt.num_loaded_blocks(len(self._pool.match(prompt.keys)))
            num_tokens = {tier: count * self._pool.block_tokens for tier, count in num_blocks.items()}
            self._scheduler.note_loaded((request_id, attempt), num_tokens)
        if self.is_open and submission.block_keys and self._scheduler.counts.num_waiting > self._max_loading:
            self.loader.prefetch(submission.facts.sharing_group, submission.block_keys)

    def pump(self) -> None:
        """Write finished blocks, and load the wanted ones."""
        if self.view.forget_some():
            self._control.wake()
        is_open = self.is_open
        finished = self._scheduler.life.tables.take_finished()
        if is_open:
            self.saver.finished(finished)
            self.saver.pump()
            self.loader.pump()
        else:
            self.loader.cannot_copy()
            if finished:
                self.saver.num_unstored["away"] += len(finished)
        while needs := self._scheduler.loads_wanted():
            for need in needs:
                if is_open:
                    self.loader.wanted(need)
                else:
                    self._scheduler.end_load(need, {})
            if is_open:
                break
        if is_open:
            self._load_announced()

    def _load_announced(self) -> None:
        """Begin early loads that fit in addition to those of requests that are here. Of prompts that begin
        alike the second one waits for the load of the first."""
        while self.loader.num_loads < self._max_loading and (prompt := self.announced.next) is not None:
            num_held = len(self._pool.match(prompt.keys))
            if num_held < len(prompt.keys) and self.loader.is_loading(prompt.keys[num_held]):
                return
            self.announced.take()
            if num_held < len(prompt.keys):
                need = LoadNeed(prompt.request_id, 0, 0, prompt.sharing_group, prompt.keys, num_held)
                self.loader.begin_early(need)

    def purge(self, group: str | None) -> None:
        """Keep blocks of this group (None: of any) that were finished before from going to the store, or
        coming from it, after this."""
        self.pump()  # queues the blocks finished last
        self.saver.drop(group)
        self.announced.drop(group)
        self.loader.drop(group)

    def tick(self) -> None:
        """Give up on an owner that does not answer; have ranks try again that could not map its arena."""
        if self._client.is_up and self._clock.now() >= self._attach_at:
            self._attach()
        now = self._clock.now()
        for prompt in self.announced.expire(now):
            self.loader.withdraw(prompt.request_id)
        if not self._is_answering and now >= self._ask_at:
            self._ask_at = now + _ASK_PERIOD_S
            self._client.send(FindRequest(_NO_LOAD, b"", ()))  # any answer shows that the owner is back
        if not self.loader.tick() and self._is_answering:
            self._is_answering = False
            _log.warning("the store does not answer; serving continues without it")

    def report(self, rank: int, report: StoreReport) -> None:
        """Take a report of a rank."""
        match report:
            case StoreAttached(arena, error):
                self._attached(rank, arena, error)
            case StorePutDone():
                if report.error:
                    _log.warning("rank %d could not write to the store: %s", rank, report.error)
                self.saver.copied(rank, report)
            case StoreGetDone():
                if report.error:
                    _log.warning("rank %d could not read from the store: %s", rank, report.error)
                self.loader.copied(rank, report)
        self._note_quiet()

    def _attached(self, rank: int, arena: bytes, error: str) -> None:
        if error:
            self._arenas.pop(rank, None)
            _log.info("rank %d has no arena: %s", rank, error)
        else:
            was_open = self.is_open
            self._arenas[rank] = arena
            if self.is_open and not was_open:
                _log.info("the store is open")

    def _attach(self) -> None:
        self._attach_at = self._clock.now() + _ATTACH_PERIOD_S
        for rank in range(self._num_ranks):
            if rank not in self._arenas:
                self._ranks.send_to(rank, AttachStore(self._name, self._session))

    # ------------------------------------------------------------------------------------ from the owner

    async def ready_to_connect(self) -> None:
        """Return once no rank copies for an earlier connection any more."""
        self._note_quiet()
        await self._quiet.wait()

    def on_welcome(self, welcome: StoreWelcome) -> None:
        self._heard()
        if not self._is_welcome:
            self._is_welcome = True
            self._client.send(TierPartRequest(0))
        self.costs.set_store_rates(welcome.gb_s)
        if not self._arenas:
            self._attach()

    def on_lost(self, reason: str) -> None:
        self._is_welcome = False
        self._arenas.clear()
        self.view.restart()
        self.saver.lost()
        self.loader.lost()
        self._note_quiet()
        self._control.wake()

    def on_grant(self, grant: PutGrant) -> None:
        self._heard()
        self.saver.granted(grant)
        self._note_quiet()
        self._control.wake()

    def on_find(self, answer: FindAnswer) -> None:
        self._heard()
        self.loader.found(answer)
        self._control.wake()

    def on_fetched(self, fetched: FetchedBlocks) -> None:
        self._heard()
        self.loader.fetched(fetched)
        self._note_quiet()
        self._control.wake()

    def on_tiers(self, events: TierEvents) -> None:
        self._heard()
        self.view.apply(events)
        self._control.wake()

    def on_tier_part(self, part: TierPart) -> None:
        self._heard()
        self.view.apply_part(part)
        if part.next_part:
            self._client.send(TierPartRequest(part.next_part))
        self._control.wake()

    def _heard(self) -> None:
        self._is_answering = True

    def _note_quiet(self) -> None:
        if self.saver.has_orders or self.loader.has_orders:
            self._quiet.clear()
        else:
            self._quiet.set()


def _state_bytes(compatibility: CompatibilityRecord, shard: Shard) -> int:
    """Return the size of the states behind a block in a shard; 0 where no layer has one."""
    groups = range(1, len(compatibility.groups))
    return sum(BlockLayout.of(compatibility, shard, group).block_bytes for group in groups)


def reaches_store(name: str | None, ranks: Sequence[RankReady]) -> bool:
    """Return whether there is a store, and every rank reaches it: ranks copy between their memory and its
    arena."""
    if name is None:
        return False
    remote_ranks = [rank.rank for rank in ranks if rank.host_id != host_id()]
    if remote_ranks:
        _log.warning("ranks %s are on other hosts: this replica does not use the store", remote_ranks)
    return not remote_ranks
