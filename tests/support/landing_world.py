"""Both sides of the landing protocol with any ranks; messages are delivered one by one, in any order."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

from landing_ranks import LaneModel, TargetRank, WriterRank

from kvtransfer.blocks.group_prefix import first_needed_block
from kvtransfer.blocks.layout import BlockLayout, plan_pieces
from kvtransfer.config import TransferConfig
from kvtransfer.messages import BlockSpan, ReplicaIdentity, Shard
from kvtransfer.peer_messages import (
    LandingAbort,
    LandingGrant,
    LandingProgress,
    LandingRefusal,
    LandingRequest,
    LandingResult,
    Manifest,
    PeerMessage,
    WriterStopped,
)
from kvtransfer.protocol.actions import (
    Granted,
    HandOverReady,
    KillRanks,
    Landed,
    LandingAction,
    Lost,
    PushAction,
    Pushed,
    PushEnded,
    ToPeer,
    ToRank,
    ToRanks,
    ToWriter,
)
from kvtransfer.protocol.receiver import LandingTable
from kvtransfer.protocol.sender import SendTable
from kvtransfer.transfer_orders import (
    ClosePeer,
    ConnectPeer,
)
from kvtransfer.transfer_reports import (
    LandingClosed,
    PushDone,
    PushFailed,
    PushStopped,
    Verified,
    WriterGone,
)
from workers.scheduler.block_pool import BlockPool
from workers.scheduler.group_pool import GroupPool

BLOCK = 16
SHARD = Shard(0, 1, 0, 1)
PREFILL = ReplicaIdentity("p0", 1)
DECODE = ReplicaIdentity("d0", 1)
# Request number n computes its prompt into the blocks from n times this on, each group of layers into as many
# as a prompt has at most.
SOURCE_BLOCKS = 1000
MOST_BLOCKS = 64

Ranks = Sequence[tuple[int, Shard]]
ONE: Ranks = ((0, SHARD),)


def request(number: int, num_tokens: int, **fields: object) -> LandingRequest:
    values: dict[str, object] = {
        "landing_id": bytes([number]) * 16,
        "request_id": f"r{number}",
        "attempt": 0,
        "sharing_group": "",
        "priority": 0,
        "block_keys": (),
        "num_tokens": num_tokens,
        "num_samples": 1,
        "deadline_s": None,
    }
    return LandingRequest(**{**values, **fields})  # type: ignore[arg-type]


def source_block(number: int, group: int, index: int) -> int:
    """Return the block into which the prefill side computes a block of request `number`."""
    return SOURCE_BLOCKS * number + MOST_BLOCKS * group + index


def state_value(number: int, num_tokens: int) -> int:
    """Return what the block of a state has behind so many tokens of request `number`."""
    return 10**9 + 10**6 * number + num_tokens


@dataclass
class World:
    """A prefill side, a decode side, their ranks, and the wires between them, delivered one by one."""

    pool: BlockPool
    one_sided: bool = True
    sources: Ranks = ONE
    readers: Ranks = ONE
    # The blocks of the groups of layers behind the first, and the layers of all groups.
    group_pools: Sequence[GroupPool] = ()
    layers: Sequence[tuple[int, ...] | None] = (None,)
    now: float = 0.0
    landing: LandingTable = field(init=False)
    push: SendTable = field(init=False)
    writers: list[WriterRank] = field(init=False)
    targets: list[TargetRank] = field(init=False)
    to_decode: deque[PeerMessage | HandOverReady] = field(default_factory=deque)
    to_prefill: deque[PeerMessage] = field(default_factory=deque)
    owner: dict[tuple[int, int], bytes] = field(default_factory=dict)
    ended: dict[str, str] = field(default_factory=dict)
    ready: dict[bytes, HandOverReady] = field(default_factory=dict)
    pushed: list[Pushed] = field(default_factory=list)
    joined: dict[bytes, Landed] = field(default_factory=dict)
    asked: dict[bytes, LandingRequest] = field(default_factory=dict)
    lost: list[str] = field(default_factory=list)
    granted: dict[bytes, LandingGrant] = field(default_factory=dict)
    # Blocks of the prefill side that are behind the window of their sequence, by group: others may have them.
    reused: set[tuple[int, int]] = field(default_factory=set)
    # What is in the blocks of states of the prefill side now, by group and block.
    states: dict[tuple[int, int], int] = field(default_factory=dict)
    # The tokens of requests that are handed over with less than was asked for, by request.
    num_handed_over: dict[str, int] = field(default_factory=dict)
    connection: bytes = b""
    num_connections: int = 0
    # The Peer link carries messages.
    is_linked: bool = False
    # The decode side has seen the end of the last link that ended.
    decode_knows: bool = True
    prefill_lives: bool = True

    def __post_init__(self) -> None:
        config = TransferConfig(landing_lease_s=10, landing_queue=8)
        self.landing = LandingTable(config, self.pool, BLOCK, len(self.readers), self.group_pools)
        self.push = SendTable(config, BLOCK, len(self.sources), [it.has_states for it in self.group_pools])
        pieces = plan_pieces(self.sources, self.readers)
        layouts = [BlockLayout(SHARD, 1, BLOCK, 1, group=layers) for layers in self.layers]
        self.pieces_by_group = [
            [piece for piece in pieces if layout.num_layers(piece.piece)] for layout in layouts
        ]
        self.pieces = self.pieces_by_group[0]
        self.targets = [TargetRank(rank) for rank, _ in self.readers]
        self.writers = [
            WriterRank(
                rank,
                PREFILL,
                self.one_sided,
                [
                    LaneModel(self.targets[target], piece, group)
                    for group, pieces in enumerate(self.pieces_by_group)
                    for source, target, piece in pieces
                    if source == rank
                ],
                self.check_owner,
                self.read,
            )
            for rank, _ in self.sources
        ]
        self.connect()

    # each of these is one event that may happen at any time

    def ask(self, wanted: LandingRequest) -> None:
        if self.is_linked:  # else there would be no connection to ask over
            self.asked[wanted.landing_id] = wanted
            self.do_push(self.push.ask(wanted, DECODE, self.connection))

    def compute(self, number: int, num_tokens: int) -> None:
        """Compute the first `num_tokens` tokens, and free what comes behind a window."""
        windows = []
        for group, window in enumerate(self.group_pools, start=1):
            if window.has_states:
                (block,) = state_blocks = (source_block(number, group, 0),)
                self.states[group, block] = state_value(number, num_tokens)
                windows.append(BlockSpan((num_tokens - 1) // BLOCK, state_blocks))
                continue
            first = first_needed_block(num_tokens, window.window, BLOCK)
            blocks = tuple(source_block(number, group, index) for index in range(MOST_BLOCKS))
            windows.append(BlockSpan(first, blocks[first:]))
            self.reused |= {(group, block) for block in blocks[:first]}
        blocks = tuple(source_block(number, 0, index) for index in range(MOST_BLOCKS))
        self.do_push(self.push.computed(f"r{number}", 0, num_tokens, blocks, self.now, windows))

    def deliver_to_decode(self) -> bool:
        if not self.to_decode:
            return False
        message = self.to_decode.popleft()
        match message:
            case LandingRequest():
                self.do_landing(self.landing.request(PREFILL, message, self.now, idle=False))
            case Manifest():
                self.do_landing(self.landing.manifest(PREFILL, message, self.now))
            case LandingAbort():
                self.do_landing(self.landing.aborted_by_writer(PREFILL, message))
            case WriterStopped():
                self.landing.writer_stopped(PREFILL, message)
            case HandOverReady():
                wanted = self.asked[message.landing_id]
                name = wanted.request_id, wanted.attempt
                landing_id = wanted.landing_id
                num_tokens = self.num_handed_over.get(wanted.request_id, wanted.num_tokens)
                self.do_landing(self.landing.hand_over(PREFILL, landing_id, name, num_tokens, self.now))
            case LandingProgress():
                self.landing.progress(PREFILL, message, self.now)
            case _:
                raise AssertionError(message)
        self.sync_owners()
        return True

    def deliver_to_prefill(self) -> bool:
        if not self.to_prefill:
            return False
        message = self.to_prefill.popleft()
        match message:
            case LandingGrant():
                self.do_push(self.push.granted(DECODE, message, self.now))
            case LandingRefusal():
                self.do_push(self.push.refused(DECODE, message))
            case LandingAbort():
                self.do_push(self.push.aborted(DECODE, message, self.now))
            case LandingResult():
                self.do_push(self.push.joined(DECODE, message, self.now))
            case _:
                raise AssertionError(message)
        return True

    def hear_writer(self, rank: int) -> bool:
        """Let the prefill engine core take a report of one of its ranks."""
        reports = self.writers[rank].reports
        if not reports:
            return False
        report = reports.popleft()
        match report if self.prefill_lives else None:
            case PushDone() as done:
                self.do_push(self.push.push_done(rank, done, self.now))
            case PushFailed() as failed:
                self.do_push(self.push.push_failed(rank, failed, self.now))
            case PushStopped() as stopped:
                self.do_push(self.push.push_stopped(rank, stopped))
        return True

    def hear_target(self, rank: int) -> bool:
        """Let the decode engine core take a report of one of its ranks."""
        reports = self.targets[rank].reports
        if not reports:
            return False
        match reports.popleft():
            case Verified() as verified:
                self.do_landing(self.landing.verified(rank, verified))
            case LandingClosed() as closed:
                self.landing.closed(rank, closed)
            case WriterGone() as gone:
                self.landing.writer_gone(rank, gone)
        self.sync_owners()
        return True

    def connect(self) -> None:
        """Open a Peer link from the prefill side, and the connections of its ranks."""
        if self.is_linked or not self.prefill_lives:
            return
        self.decode_notices()  # at the latest now
        self.num_connections += 1
        self.connection = b"connection %d" % self.num_connections
        for writer in self.writers:
            writer.orders.append(ConnectPeer(self.connection, PREFILL, DECODE, (), (), 0.0))
        self.is_linked = True
        lanes = [[(target, piece) for _, target, piece in it] for it in self.pieces_by_group]
        aborts = self.landing.writer_joined(PREFILL, lanes)
        if aborts:
            self.do_landing(aborts)

    def link_breaks(self) -> None:
        """Break the link: the prefill side notices now, the decode side some time later."""
        if self.is_linked and self.prefill_lives:
            self.cut_link()
            for writer in self.writers:
                writer.orders.append(ClosePeer(self.connection))
            self.do_push(self.push.peer_lost(DECODE, self.now))

    def decode_notices(self) -> None:
        """Let the decode side notice the end of the link."""
        if not self.decode_knows:
            self.decode_knows = True
            self.do_landing(self.landing.writer_lost(PREFILL))

    def prefill_dies(self) -> None:
        """End the engine core and all of its ranks."""
        self.prefill_lives = False
        for writer in self.writers:
            writer.die()
        if self.is_linked:
            self.cut_link()

    def tick(self) -> None:
        """Expire leases and overdue acknowledgements at both sides."""
        self.do_landing(self.landing.expire(self.now))
        if self.prefill_lives:
            self.do_push(self.push.tick(self.now))

    # plumbing

    def steps(self) -> list[Callable[[], bool]]:
        """Return every step that delivers one thing or does one piece of work; each returns whether there was
        any."""
        steps: list[Callable[[], bool]] = [self.deliver_to_decode, self.deliver_to_prefill]
        for writer in self.writers:
            steps += [writer.handle, writer.write, partial(self.hear_writer, writer.rank)]
        for target in self.targets:
            steps += [target.run, partial(self.hear_target, target.rank)]
        return steps

    def writers_work(self) -> None:
        """Let the prefill ranks do all they can, and report it to their engine core."""
        for writer in self.writers:
            while writer.handle() or writer.write() or self.hear_writer(writer.rank):
                pass

    def targets_work(self) -> None:
        """Let the decode ranks do all they can, and report it to their engine core."""
        for target in self.targets:
            while target.run() or self.hear_target(target.rank):
                pass

    def settle(self) -> None:
        """Deliver everything until nothing moves."""
        moved = True
        while moved:
            moved = False
            for step in self.steps():
                while step():
                    moved = True
            actions = self.landing.grant(self.now, idle=True)
            self.do_landing(actions)
            moved = moved or bool(actions)

    def cut_link(self) -> None:
        self.is_linked = self.decode_knows = False
        self.to_decode.clear()
        self.to_prefill.clear()

    def do_push(self, actions: list[PushAction]) -> None:
        for action in actions:
            match action:
                case ToPeer(_, message):
                    self._send_to_decode(message)
                case ToRanks(order):
                    for writer in self.writers:
                        writer.orders.append(order)
                case HandOverReady():
                    self.ready[action.landing_id] = action
                    self._send_to_decode(action)
                case Pushed():
                    self.pushed.append(action)
                case PushEnded(request_id, _, error, _, _):
                    assert request_id not in self.ended, "a push ended twice"
                    self.ended[request_id] = error
                case KillRanks():
                    self.prefill_dies()
                case Granted():
                    pass

    def do_landing(self, actions: list[LandingAction]) -> None:
        for action in actions:
            match action:
                case ToWriter(_, message):
                    if self.is_linked:
                        self.to_prefill.append(message)
                    if isinstance(message, LandingGrant):
                        self._note_grant(message)
                case ToRanks(order):
                    for target in self.targets:
                        target.orders.append(order)
                case ToRank(rank, order):
                    self.targets[rank].orders.append(order)
                case Landed():
                    self.check_joined(action)
                    self.joined[action.landing_id] = action
                    self.pool.release(action.block_ids)
                    for window, blocks in zip(self.group_pools, action.windows, strict=True):
                        window.release(blocks.block_ids)
                case Lost():
                    self.lost.append(action.reason)
        self.sync_owners()

    def _send_to_decode(self, message: PeerMessage | HandOverReady) -> None:
        if self.is_linked:
            self.to_decode.append(message)

    def _note_grant(self, grant: LandingGrant) -> None:
        self.granted[grant.landing_id] = grant
        for group, block_ids in enumerate((grant.block_ids, *(it.block_ids for it in grant.windows))):
            for block in block_ids:
                self.owner[group, block] = grant.landing_id

    def read(self, group: int, block: int) -> int:
        """Return what a block of the prefill side has: its id, unless it is another sequence's by now."""
        if (state := self.states.get((group, block))) is not None:
            return state
        return -2 if (group, block) in self.reused else block

    # what must hold

    def check_owner(self, landing_id: bytes, group: int, block: int) -> None:
        assert self.owner.get((group, block)) == landing_id, "write into a foreign block"

    def check_joined(self, landed: Landed) -> None:
        """Check that every rank has every piece of the tokens that count as valid and were not held before,
        as far as the windows of groups reach back."""
        end, number = -(-landed.num_valid_tokens // BLOCK), landed.landing_id[0]
        parts = BlockSpan(0, landed.block_ids), *landed.windows
        firsts = [landed.num_held_tokens // BLOCK]
        for window in self.group_pools:
            firsts.append(first_needed_block(landed.num_valid_tokens, window.window, BLOCK))
        for group, (blocks, first) in enumerate(zip(parts, firsts, strict=True)):
            for index in range(first, end):
                block = blocks.block_ids[index - blocks.first]
                expected = source_block(number, group, index)
                if group and self.group_pools[group - 1].has_states:
                    expected = state_value(number, landed.num_valid_tokens)
                assert self.has(group, block, expected), "a joined block was not written by all"

    def has(self, group: int, block: int, value: int) -> bool:
        """Whether every rank has this value in every piece of its block."""
        return all(
            self.targets[target].memory.get((group, block, piece)) == value
            for _, target, piece in self.pieces_by_group[group]
        )

    def sync_owners(self) -> None:
        """Take the blocks that a pool would hand out again from their owners."""
        self.landing.check()
        pools: list[BlockPool | GroupPool] = [self.pool, *self.group_pools]
        for group, pool in enumerate(pools):
            pool.check()
            taken = pool.allocate(pool.num_free)
            for block in taken:
                self._overwrite(group, block)
            pool.release(taken)

    def _overwrite(self, group: int, block: int) -> None:
        """Let others write a block."""
        self.owner.pop((group, block), None)
        for _, target, piece in self.pieces_by_group[group]:
            self.targets[target].memory.pop((group, block, piece), None)
