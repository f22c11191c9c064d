"""Blocks on their way from the store into the replica, for sequences that wait for them.

    LoadNeed --FindRequest--> FindAnswer --worth it?--> FetchRequest --FetchedBlocks ...--> StoreGet to ranks
        --StoreGetDone of each--> registered, released: found by the sequence like any cached block

A load ends in every case, with what came good: the first `n` blocks of the need. Blocks that are bad, late,
lost or not worth loading are computed. No request waits for an owner that does not answer.

Where layers keep recurrent states, a prefix can be continued only where the state behind its last block is
there too: a load ends at such a border, and its state comes behind its blocks. Of a load of which less comes,
the blocks are kept, for the next one.

A load can begin before its request comes (`AnnouncedPrompts`). It is then *early*: it takes only blocks that
nobody here waits for, holds up nobody, and becomes that of the request's sequence when the request comes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from kvtransfer.blocks.keys import state_key
from kvtransfer.common.clock import Clock
from kvtransfer.store.messages.engine_session import (
    FetchedBlocks,
    FetchRelease,
    FetchRequest,
    FindAnswer,
    FindRequest,
    Source,
)
from kvtransfer.store.messages.store_orders import StoreGet, StoreGetDone, StoreRead
from kvtransfer.store.store_client import OwnerClient
from workers.scheduler.block_pool import ROOT
from workers.scheduler.sequence import HeldBack
from workers.scheduler.step import LoadNeed
from workers.store_connector.announced import POOL_SHARE, AnnouncedPrompts
from workers.store_connector.engine_parts import EngineParts
from workers.store_connector.state_load import StateLoad
from workers.store_connector.tier_costs import Borders, TierCosts
from workers.store_connector.window_load import WindowLoad

# An owner that has not answered a look-up after this time is taken for hung.
FIND_PATIENCE_S = 0.2
# A fetch of which nothing has come for this long is given up. The owner need not hang for that: it may wait
# for a disk or for another node, and an owner that hangs leaves the next look-up without answer.
FETCH_PATIENCE_S = 5.0
# A load that has waited for free blocks for this long has the loads behind it in line wait too: they would
# take all free blocks. A load that waits for its sharing group's share has the others of its group wait at
# once, and nobody else ever.
SPACE_PATIENCE_S = 1.0


@dataclass(slots=True)
class _Part:
    """Some blocks of a fetch that the ranks copy: blocks [first, first + num_blocks) of the load."""

    first: int
    num_blocks: int
    waiting: set[int]
    # The reads of each rank: (block index in the load, offset of the record).
    reads: dict[int, list[tuple[int, int]]]


@dataclass(slots=True)
class _Load:
    need: LoadNeed
    began_at: float
    heard_at: float
    # The first blocks of the need whose KV the device has; a sequence may lack the state behind them.
    num_here: int
    # Its request has not come.
    is_early: bool = False
    # What the owner has of it, once it has answered, and the blocks that are fetched of that.
    answer: FindAnswer | None = None
    tiers: tuple[str, ...] = ()
    # The time since which it waits for free blocks, if there are none.
    found_at: float = 0.0
    holds_back: HeldBack = HeldBack.NOBODY
    held_ids: list[int] = field(default_factory=list)
    block_ids: list[int] = field(default_factory=list)
    windows: list[WindowLoad] = field(default_factory=list)
    state: StateLoad | None = None
    came_from: list[str] = field(default_factory=list)
    is_fetching: bool = False
    # Blocks before the first bad or missing one, as known so far; the state counts as the block behind the
    # last.
    num_good: int = 0
    parts: dict[int, _Part] = field(default_factory=dict)
    bad_offsets: set[int] = field(default_factory=set)
    # Whether the owner has sent its last block.
    is_complete: bool = False
    # Whether the sequence waits no more; the blocks are held until the ranks are done with them.
    is_reported: bool = False

    @property
    def keys(self) -> tuple[bytes, ...]:
        """The keys of the blocks that the device lacks."""
        return self.need.keys[self.num_here :]

    @property
    def end(self) -> int:
        """The number of blocks of the prefix that it makes whole."""
        return self.num_here + len(self.tiers)

    @property
    def is_found(self) -> bool:
        """Whether its blocks wait to be fetched, or are."""
        return bool(self.tiers) or self.state is not None

    @property
    def num_good_blocks(self) -> int:
        """The good ones among its blocks, without the state."""
        return min(self.num_good, len(self.tiers))


class BlockLoader:
    """See the module's text. Each need has one load, with a number."""

    def __init__(
        self,
        engine: EngineParts,
        costs: TierCosts,
        client: OwnerClient,
        announced: AnnouncedPrompts,
        clock: Clock,
    ) -> None:
        self._pool = engine.pool
        self._windows = engine.windows
        self._states = engine.states
        self._costs = costs
        self._clock = clock
        self._client = client
        self._ranks = engine.ranks
        self._rates = engine.rates
        self._scheduler = engine.scheduler
        self._control = engine.control
        self._announced = announced
        self._loads: dict[int, _Load] = {}
        self._gets: dict[int, tuple[int, _Part]] = {}
        # The numbers of the early loads, by request.
        self._early: dict[str, int] = {}
        self._number = 0
        self.num_checksum_failures = 0
        # Loaded tokens by tier.
        self.num_loaded_tokens: Counter[str] = Counter()

    @property
    def num_references(self) -> int:
        """Blocks that loads hold."""
        return sum(len(load.held_ids) + len(load.block_ids) for load in self._loads.values())

    @property
    def num_group_references(self) -> tuple[int, ...]:
        """Blocks of each group with a window, and of each with states, that loads hold."""
        loads = [load for load in self._loads.values() if load.is_fetching]
        windows = [
            sum(load.windows[group].num_references for load in loads) for group in range(len(self._windows))
        ]
        num_states = sum(load.state is not None for load in loads)
        return (*windows, *[num_states] * len(self._states))

    @property
    def has_orders(self) -> bool:
        """Whether a rank may be copying."""
        return bool(self._gets)

    @property
    def is_idle(self) -> bool:
        return not self._loads

    @property
    def num_loads(self) -> int:
        """Loads under way, those included that wait for free blocks."""
        return len(self._loads)

    def is_loading(self, key: bytes) -> bool:
        """Whether a load of blocks from this one on is under way."""
        return any(load.keys[:1] == (key,) for load in self._loads.values())

    def wanted(self, need: LoadNeed) -> None:
        """Load blocks for a sequence that waits for them, or let it wait for the load that began early for
        it."""
        begun = next((it for it in self._loads.values() if _is_for(it, need)), None)
        if begun is not None:
            begun.found_at, begun.holds_back = self._clock.now(), HeldBack.NOBODY
        else:
            self._ask(need, is_early=False)

    def begin_early(self, need: LoadNeed) -> None:
        """Load blocks for a request that is announced; `need` names no sequence yet."""
        if need.request_id in self._early:  # announced again, while the earlier load still ends
            return
        self._early[need.request_id] = self._number + 1
        self._ask(need, is_early=True)

    def submitted(self, request_id: str, attempt: int, sample: int) -> None:
        """Give the early load of an announced request that has come to its sequence."""
        number = self._early.pop(request_id, None)
        if number is not None:
            load = self._loads[number]
            load.is_early, load.need = False, replace(load.need, attempt=attempt, sample=sample)

    def withdraw(self, request_id: str) -> None:
        """End the early load of an announced request that does not come, unless its blocks have begun to
        move."""
        number = self._early.get(request_id)
        if number is not None and not self._loads[number].is_fetching:
            self._end(number)

    def _ask(self, need: LoadNeed, *, is_early: bool) -> None:
        self._number += 1
        now = self._clock.now()
        # Blocks whose state alone is gone need not come again. Behind a window they do, with what is in it.
        only_states = bool(self._states) and not self._windows
        num_here = len(self._pool.match(need.keys)) if only_states else need.num_held
        load = self._loads[self._number] = _Load(need, now, now, num_here, is_early)
        states = self._state_keys(need.keys[need.num_held :])
        if not self._client.send(FindRequest(self._number, need.keys[0], load.keys, states)):
            self._end(self._number)

    def _state_keys(self, keys: Sequence[bytes]) -> tuple[bytes, ...]:
        """Return the keys of the states behind these blocks; none where no layer has a state."""
        return tuple(map(state_key, keys)) if self._states else ()

    def prefetch(self, group: str, keys: tuple[bytes, ...]) -> None:
        """Bring blocks near for a request that stands further back in line."""
        self._number += 1
        states = self._state_keys(keys)
        self._client.send(FetchRequest(self._number, group, keys[0], keys, to_device=False, states=states))

    def found(self, answer: FindAnswer) -> None:
        """Take the owner's answer to a look-up, and fetch the blocks worth loading once there are free ones
        (`pump`)."""
        load = self._loads.get(answer.number)
        if load is None or load.answer is not None or load.is_fetching:
            return
        load.answer = answer
        self._choose(load, answer, len(answer.tiers))
        load.found_at = self._clock.now()
        if not load.is_found:
            self._end(answer.number)
        self.pump()

    def _choose(self, load: _Load, answer: FindAnswer, num_most: int) -> None:
        """Choose the blocks that are worth loading, at most `num_most`, and the state behind the last."""
        tiers, prefill_tok_s = answer.tiers[:num_most], self._rates.prefill_tok_s
        if not self._states:
            load.tiers = tiers[: self._costs.num_worth_loading(tiers, prefill_tok_s)]
            return
        states: dict[int, str | None] = {}
        for end in range(load.need.num_held + 1, load.num_here + len(tiers) + 1):
            if StateLoad(self._states, load.need.keys[end - 1], end).is_here:
                states[end] = None
            elif (tier := answer.states.get(end - 1 - load.need.num_held)) is not None:
                states[end] = tier
        borders = Borders(load.need.num_held, load.num_here, tiers, states)
        end = self._costs.best_border(borders, prefill_tok_s)
        load.tiers = tiers[: max(0, end - load.num_here)]
        load.state = None
        if end:
            load.num_here = min(load.num_here, end)
            load.state = StateLoad(self._states, load.need.keys[end - 1], end)

    def pump(self) -> None:
        """Begin to fetch the blocks that fit now."""
        for number, load in self._found():
            self._begin(number, load)

    def cannot_copy(self) -> None:
        """End the loads that still wait for free blocks: the ranks do not reach the store now, so those are
        computed."""
        for number, _ in self._found():
            self._end(number)

    def _found(self) -> list[tuple[int, _Load]]:
        """Return the loads whose blocks were found and are not being fetched yet, by number."""
        return [it for it in self._loads.items() if it[1].is_found and not it[1].is_fetching]

    def _begin(self, number: int, load: _Load) -> None:
        held_ids = self._pool.match(load.need.keys[: load.num_here])
        if len(held_ids) < load.num_here:  # evicted since: what was found does not follow on them
            self._end(number)
            return
        # A context that reaches into host memory is longer than the pool; and space for the sequence's last,
        # computed block must be left, or the load could not be used.
        group = load.need.sharing_group
        num_most = self._pool.num_total - self._pool.num_quarantined
        num_most = min(num_most, self._pool.limit(group)) - 1 - len(held_ids)
        if load.is_early:
            num_most = min(num_most, self._num_early_blocks(group))
        self._limit(load, max(0, num_most))
        if not load.is_found:
            self._end(number)
            return
        if self._lacks_share(load, held_ids):
            self._hold_back(load, HeldBack.GROUP)
            return
        windows = [
            WindowLoad(window, load.need.keys, load.num_here, load.end, self._pool.block_tokens)
            for window in self._windows
        ]
        if not all(window.follows_on for window in windows):
            self._end(number)
            return
        num_idle = sum(not self._pool.is_referenced(block_id) for block_id in held_ids)
        num_free = self._pool.num_free - num_idle - self._scheduler.counts.num_running
        if load.is_early:
            num_free -= self._scheduler.counts.num_blocks_awaited(None)
        num_running = self._scheduler.counts.num_running
        has_windows = all(window.fits(num_running) for window in windows)
        if load.state is not None:
            load.state = StateLoad(self._states, load.need.keys[load.end - 1], load.end)
            has_windows = load.state.fits(num_running)
        if len(load.tiers) > max(num_free, 0) or not has_windows:
            is_patient = self._clock.now() - load.found_at <= SPACE_PATIENCE_S
            self._hold_back(load, HeldBack.NOBODY if is_patient else HeldBack.EVERYBODY)
            return
        keys, chain = load.keys[: len(load.tiers)], load.need.keys[0]
        states: tuple[bytes, ...] = ()
        if load.state is not None and not load.state.is_here:
            states = self._state_keys(load.need.keys[load.end - 1 : load.end])
        if not self._client.send(FetchRequest(number, group, chain, keys, to_device=True, states=states)):
            self._end(number)
            return
        self._hold_back(load, HeldBack.NOBODY)
        load.is_fetching = True
        load.began_at = load.heard_at = self._clock.now()
        load.num_good = len(keys) + len(states)
        load.held_ids = held_ids
        self._pool.acquire(held_ids)
        load.block_ids = self._pool.allocate(len(keys), group)
        for window in windows:
            window.take()
        load.windows = windows
        if load.state is not None:
            load.state.take()
        if load.is_early:
            self._announced.begin(load.need.request_id, len(held_ids), len(keys))

    def _limit(self, load: _Load, num_most: int) -> None:
        """Load at most so many blocks."""
        if len(load.tiers) <= num_most:
            return
        if self._states:
            assert load.answer is not None
            self._choose(load, load.answer, num_most)
        load.tiers = load.tiers[:num_most]

    def _lacks_share(self, load: _Load, held_ids: Sequence[int]) -> bool:
        """Whether the load's sharing group has too little left of its share."""
        group = load.need.sharing_group
        if not self._pool.has_limit(group):
            return False
        num_blocks = (
            len(load.tiers) + self._pool.num_to_use(held_ids) + self._scheduler.counts.num_running_of(group)
        )
        if load.is_early:
            num_blocks += self._scheduler.counts.num_blocks_awaited(group)
        return num_blocks > self._pool.num_left(group)

    def _num_early_blocks(self, group: str) -> int:
        """Return how many blocks more may be loaded for requests of a sharing group that have not come."""
        num_left = self._pool.num_total // POOL_SHARE - self._announced.num_blocks()
        if not self._pool.has_limit(group):
            return num_left
        return min(num_left, self._pool.limit(group) // POOL_SHARE - self._announced.num_blocks(group))

    def _hold_back(self, load: _Load, whom: HeldBack) -> None:
        if load.holds_back is not whom and not load.is_early:
            load.holds_back = whom
            self._scheduler.hold_back(load.need, whom)

    def fetched(self, fetched: FetchedBlocks) -> None:
        """Have the ranks copy the next blocks, which lie in the host tier."""
        load = self._loads.get(fetched.number)
        if load is None or load.is_complete:
            return
        load.heard_at = self._clock.now()
        end = fetched.first + len(fetched.blocks)
        load.came_from += fetched.tiers
        load.is_complete = fetched.is_last
        if fetched.is_last:
            load.num_good = min(load.num_good, end)
        reads: dict[int, list[StoreRead]] = {}
        part = _Part(fetched.first, len(fetched.blocks), set(), {})
        for index, sources in enumerate(fetched.blocks, fetched.first):
            for source in sources:
                read = _read(load, index, source)
                reads.setdefault(source.rank, []).append(read)
                part.reads.setdefault(source.rank, []).append((index, source.offset))
        if reads:
            self._number += 1
            part.waiting = set(reads)
            load.parts[self._number] = part
            self._gets[self._number] = fetched.number, part
            for rank, rank_reads in reads.items():
                self._ranks.send_to(rank, StoreGet(self._number, fetched.arena, tuple(rank_reads)))
        self._settle(fetched.number)

    def copied(self, rank: int, done: StoreGetDone) -> None:
        """Note that a rank has copied its part of some blocks, and found those of `done` bad."""
        if done.number not in self._gets:
            return
        number, part = self._gets[done.number]
        load = self._loads[number]
        for index in done.bad:
            block_index, offset = part.reads[rank][index]
            load.num_good = min(load.num_good, block_index)
            if not done.error:
                load.bad_offsets.add(offset)
                self.num_checksum_failures += 1
        load.heard_at = self._clock.now()
        part.waiting.discard(rank)
        if not part.waiting:
            del self._gets[done.number], load.parts[done.number]
            self._settle(number)

    def drop(self, group: str | None) -> None:
        """Make void the loads under way for this sharing group (None: for all): their blocks are computed
        instead."""
        for number, load in list(self._loads.items()):
            if group in (None, load.need.sharing_group):
                load.num_good = 0
                if not load.is_fetching:
                    self._end(number)

    def tick(self) -> bool:
        """Give up loads that take too long; return False when the owner has left a look-up without answer."""
        now = self._clock.now()
        answers = True
        for number, load in list(self._loads.items()):
            waited_s = now - load.heard_at
            if load.answer is None and waited_s > FIND_PATIENCE_S:
                answers = False
                self._end(number)
            elif load.is_fetching and waited_s > FETCH_PATIENCE_S:
                self._give_up(number)
                self._report(load, {})  # if it is still here, ranks hold it up
        return answers

    def lost(self) -> None:
        """End the loads: the owner is gone, and answers nothing more. Copies under way are waited for."""
        for number, load in list(self._loads.items()):
            if load.is_fetching:
                self._give_up(number)
            else:
                self._end(number)

    def _give_up(self, number: int) -> None:
        """Settle for the blocks that came, or are being copied."""
        load = self._loads[number]
        if not load.is_complete:
            load.is_complete = True
            load.num_good = min(load.num_good, len(load.came_from))
        self._settle(number)

    def _settle(self, number: int) -> None:
        """End the load when its last block has come and is copied."""
        load = self._loads[number]
        if not load.is_complete or load.parts:
            return
        parent = load.need.keys[load.num_here - 1] if load.num_here else ROOT
        for key, block_id in zip(load.keys[: load.num_good_blocks], load.block_ids, strict=False):
            self._pool.register(block_id, parent, key, load.need.sharing_group)
            parent = key
        for window in load.windows:
            window.register(load.num_here + load.num_good, load.need.sharing_group)
        if load.state is not None and load.num_good > len(load.tiers):
            load.state.register(load.need.sharing_group)
        self._client.send(FetchRelease(number, tuple(sorted(load.bad_offsets))))
        self._end(number)

    def _end(self, number: int) -> None:
        load = self._loads.pop(number)
        came = Counter(load.came_from[: load.num_good_blocks] if load.is_complete else ())
        if came:
            self._costs.measured(came, self._clock.now() - load.began_at)
        self._pool.release(load.held_ids + load.block_ids)
        for window in load.windows:
            window.release()
        if load.state is not None and load.is_fetching:
            load.state.release()
        self._report(load, dict(came))

    def _report(self, load: _Load, num_blocks: dict[str, int]) -> None:
        """Let the sequence wait no more: `num_blocks` blocks have come, by tier."""
        if not load.is_reported:
            load.is_reported = True
            num_tokens = {tier: count * self._pool.block_tokens for tier, count in num_blocks.items()}
            self.num_loaded_tokens.update(num_tokens)
            if load.is_early:
                del self._early[load.need.request_id]
                self._announced.loaded(load.need.request_id, load.came_from[: sum(num_blocks.values())])
            else:
                self._scheduler.end_load(load.need, num_tokens)
            self._control.wake()


def _read(load: _Load, index: int, source: Source) -> StoreRead:
    """Return what a rank copies of a load's block, or, behind the last one, of its state."""
    is_state = index == len(load.tiers)
    if is_state:
        assert load.state is not None
        block_id, *windows = load.state.block_ids
    else:
        block_id = load.block_ids[index]
        windows = [it.block(load.num_here + index) for it in load.windows]
    record = source.offset, source.shard, source.piece, source.num_bytes, source.checksum
    return StoreRead(block_id, *record, tuple(windows), is_state)


def _is_for(load: _Load, need: LoadNeed) -> bool:
    """Whether what the load brings is what the sequence of this need would wait for."""
    wanted = load.need
    return (
        not (load.is_early or load.is_reported)
        and (wanted.request_id, wanted.attempt, wanted.sample) == (need.request_id, need.attempt, need.sample)
        and wanted.sharing_group == need.sharing_group
        and wanted.keys == need.keys[: len(wanted.keys)]
    )
