"""The cluster-wide index: which nodes have which record, in Redis, for which no request ever waits.

A look-up is cut off after its budget, and after five of those in a row Redis is not queried at all until a
probe in the background was answered in time. Whatever becomes of Redis, `find` and `announce` never fail.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Sequence

from kvtransfer.common.clock import Clock
from kvtransfer.common.moving_average import moving_average
from kvtransfer.common.tasks import SupervisedTasks, wait_first
from kvtransfer.config import StoreSettings
from kvtransfer.messages import ReplicaIdentity
from kvtransfer.store.index.announcer import AnnounceLimits, Announcer
from kvtransfer.store.index.breaker import Breaker
from kvtransfer.store.index.holder_reader import Holder, HolderReader, Lookup
from kvtransfer.store.index.node_lease import NodeLease, Renewal
from kvtransfer.store.index.redis_client import IndexAwayError, RedisLink, redacted
from kvtransfer.store.index.values import node_key, node_number
from kvtransfer.store.messages.admin_requests import IndexStat
from kvtransfer.store.messages.records import RecordInfo, Tier

__all__ = ["Holder", "Index"]

_LOG = logging.getLogger(__name__)
# Look-ups on the wire at once; those that were cut off count until their answer comes.
_MAX_LOOKUPS = 8
_LEAVE_S = 1.0
_CANCEL_AGAIN_S = 0.1
_SMOOTHING = 0.1
# Turns of the loop after the budget, in which an answer that is already here is still read: when our loop
# was busy with other things, its timer and the answer are noticed together.
_NUM_LAST_TURNS = 3


class Index:
    """One owner's view of Redis. Built plain, run by `start` and `close` on one event loop."""

    def __init__(
        self,
        settings: StoreSettings,
        identity: ReplicaIdentity,
        address: str,
        clock: Clock,
        held_records: Callable[[], Iterable[tuple[RecordInfo, Tier]]] = tuple,
        limits: AnnounceLimits | None = None,
    ) -> None:
        """`identity` is the node's id and the owner's epoch, which grows with every owner of the node. Other
        owners connect to `address` (host:port). `held_records` returns all records that this node holds, each
        in its cheapest tier, whenever they must be announced again."""
        self._url = settings.redis_url
        self._budget_s = settings.lookup_budget_s
        self._identity = identity
        self._clock = clock
        namespace = settings.redis_namespace
        number = node_number(identity.replica_id)
        self._own_key = node_key(namespace, number)
        self._link = RedisLink(self._url, settings.node_lease_s / 2, settings.redis_ca_file)
        self._reader = HolderReader(self._link, namespace, number, clock)
        self._lease = NodeLease(self._link, namespace, identity, address, settings.node_lease_s)
        self._announcer = Announcer(
            self._link,
            namespace,
            identity,
            clock,
            limits or AnnounceLimits(),
            held_records,
            self._wrote,
        )
        self._breaker = Breaker()
        self._lookups = asyncio.Semaphore(_MAX_LOOKUPS)
        self._has_opened = asyncio.Event()
        self._has_opened.set()
        self._has_closed = asyncio.Event()
        self._tasks = SupervisedTasks(_log_failure)
        self._is_announcing = False
        self._is_superseded = False
        # Whether silence, not an error, opened the breaker.
        self._is_late = False
        self._note = ""
        self._write_note = ""
        self._num_lookups = self._num_late = self._num_errors = 0
        self._latency_s = 0.0

    # ------------------------------------------------------------------------------ for the owner

    async def start(self) -> None:
        """Begin to connect, in the background: returns at once."""
        if self._url:
            self._note = f"{redacted(self._url)} was not reached yet"
            self._tasks.spawn(self._guard(), "index-guard")
            self._tasks.spawn(self._renew(), "index-renew")

    async def close(self) -> None:
        """Tell the others that this node has nothing any more, and disconnect; waits a second at most."""
        # Until 3.12 a wait with a time limit, as the client does, can swallow a cancellation.
        await self._tasks.close(again_s=_CANCEL_AGAIN_S)
        if self._link.is_connected and not self._breaker.is_open:
            try:
                async with asyncio.timeout(_LEAVE_S):
                    await self._lease.leave()
            except (IndexAwayError, TimeoutError) as error:
                _LOG.info("this node's lease is left to end by itself: %s", error)
        await self._link.close()

    def announce(self, info: RecordInfo, tier: Tier | None) -> None:
        """Tell where this node has the record now; None: nowhere. Returns at once, never fails."""
        if self._url and not self._is_superseded:
            self._announcer.announce(info, tier)

    async def find(self, space: bytes, chain: bytes, keys: Sequence[bytes]) -> list[tuple[Holder, ...]]:
        """Return the holders of each block on other nodes, in order of the keys. () where none is known: also
        for keys that were not answered within the budget, and for all when Redis is not queried. Never
        fails."""
        lookup = Lookup(space, chain, keys)
        if keys and not self._breaker.is_open:
            self._num_lookups += 1
            task = self._tasks.spawn(self._look_up(lookup), "index-look-up")
            await asyncio.wait((task,), timeout=self._budget_s)
            for _ in range(_NUM_LAST_TURNS):
                if not task.done():
                    await asyncio.wait((task,), timeout=0)
            lookup.is_over = True
            self._judge(lookup, is_late=not task.done())
        return lookup.found + [()] * (len(keys) - len(lookup.found))

    def stat(self) -> IndexStat:
        """Return the statistics of this index so far."""
        state = "off"
        if self._url:
            state = "up" if not self._breaker.is_open else "slow" if self._is_late else "down"
        return IndexStat(
            state,
            self._num_lookups,
            self._num_late,
            self._num_errors,
            self._announcer.num_announced,
            self._announcer.num_dropped,
            self._announcer.num_rebuilds,
            self._latency_s,
            self._note or self._write_note,
        )

    # -------------------------------------------------------------------------------- look-ups

    async def _look_up(self, lookup: Lookup) -> None:
        async with self._lookups:
            started_at = self._clock.now()
            try:
                await self._reader.read(lookup)
            except IndexAwayError as error:
                lookup.error = error
                self._count(error)
                return
            if len(lookup.found) == len(lookup.keys):
                took_s = self._clock.now() - started_at
                self._latency_s = moving_average(self._latency_s, took_s, _SMOOTHING)

    def _judge(self, lookup: Lookup, is_late: bool) -> None:
        self._num_late += is_late
        if lookup.error is None and (
            lookup.found or not is_late
        ):  # of many keys some are well answered in time
            self._breaker.succeeded()
            return
        self._breaker.failed(self._clock.now())
        if self._breaker.is_open:
            self._opened(is_late or (lookup.error is not None and lookup.error.is_late))

    # ------------------------------------------------------------------- between Redis and the breaker

    def _count(self, error: IndexAwayError) -> None:
        self._num_errors += 1
        self._note = str(error)

    def _opened(self, is_late: bool) -> None:
        """Look-ups stop, from now until a probe goes well."""
        self._is_late = is_late
        if not self._has_opened.is_set():
            self._has_opened.set()
            if is_late:
                self._note = f"{redacted(self._url)} does not answer within {self._budget_s * 1e3:g} ms"
            _LOG.warning("the index is not queried any more: %s", self._note)

    def _broke(self, error: IndexAwayError) -> None:
        """Note that something in the background failed: when that was the connection, look-ups would fail,
        too."""
        self._num_errors += 1
        if error.is_refusal:
            self._write_note = str(error)
        else:
            self._note = str(error)
            self._breaker.trip(self._clock.now())
            self._opened(error.is_late)

    async def _guard(self) -> None:
        """Probe whenever the breaker is open."""
        while True:
            await self._has_opened.wait()
            if pause_s := self._breaker.probe_in_s(self._clock.now()):
                await self._clock.sleep(pause_s)
            is_well = await self._probe()
            self._breaker.probed(is_well, self._clock.now())
            if is_well:
                self._note = ""
                self._has_opened.clear()
                self._has_closed.set()
                _LOG.info("the index is queried again: %s answers", redacted(self._url))

    async def _probe(self) -> bool:
        """Whether Redis answers within the budget; connects first where that is needed."""
        try:
            if not self._link.is_connected:
                await self._link.connect()
            await self._link.mget([self._own_key])  # also waits for the end of a stall
            started_at = self._clock.now()
            await self._link.mget([self._own_key])
        except IndexAwayError as error:
            self._count(error)
            self._is_late = error.is_late
            if not error.is_late:
                await self._link.close()  # what is there next may be another kind of server
            return False
        took_s = self._clock.now() - started_at
        if took_s > self._budget_s:
            self._is_late = True
            budget_ms = self._budget_s * 1e3
            self._note = (
                f"{redacted(self._url)} answers in {took_s * 1e3:.1f} ms, the budget is {budget_ms:g} ms"
            )
        return took_s <= self._budget_s

    # ------------------------------------------------------------------------------ announcements

    async def _renew(self) -> None:
        """Keep this node's lease, and notice when Redis lost our announcements."""
        while not self._is_superseded:
            if self._link.is_connected:
                try:
                    self._renewed(await self._lease.renew())
                except IndexAwayError as error:
                    self._broke(error)
            # The next time after the delay, or as soon as a probe went well.
            await wait_first(self._has_closed.wait(), self._clock.sleep(self._lease.period_s))
            self._has_closed.clear()

    def _renewed(self, renewal: Renewal) -> None:
        if renewal is Renewal.SUPERSEDED:
            self._is_superseded = True
            self._write_note = (
                f"a later owner of node {self._identity.replica_id} announces, this one does not"
            )
            _LOG.warning("%s", self._write_note)
            self._announcer.stop()
        elif not self._is_announcing:
            self._is_announcing = True
            self._tasks.spawn(self._announcer.drain(), "index-announce")
            self._tasks.spawn(self._announcer.reannounce(), "index-rebuild")
        elif renewal is Renewal.LOST:
            _LOG.info("the index lost this node: everything is announced again")
            self._announcer.rebuild()

    def _wrote(self, error: IndexAwayError | None) -> None:
        if error is None:
            self._write_note = ""
        else:
            self._broke(error)


def _log_failure(error: BaseException) -> None:
    _LOG.error("a part of the index ended by an error of ours", exc_info=error)
