"""What a replica reports of windows and states, against what its sequences find."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st
from slow_cases import examples

from kvtransfer.blocks.group_prefix import match_prefix
from kvtransfer.blocks.keys import state_key
from kvtransfer.common.clock import ManualClock
from kvtransfer.kv_events import BlocksStored, KvEvents, KvSnapshot
from kvtransfer.messages import ReplicaIdentity
from kvtransfer.store.messages.engine_session import TierEvents
from router.prefix_match import InStore
from router.radix import PrefixTree
from workers.replica.block_marks import BlockMarks
from workers.scheduler.block_pool import ROOT, BlockPool
from workers.scheduler.group_pool import GroupPool
from workers.store_connector.tier_view import TierView

BLOCK_TOKENS = 4
KEYS = tuple(bytes([index]) * 16 for index in range(8))
REPLICA = ReplicaIdentity("p0", 1)
indices = st.integers(0, len(KEYS) - 1)
actions = st.one_of(
    st.tuples(st.just("compute"), indices),
    st.tuples(st.just("window"), indices),
    st.tuples(st.just("purge"), indices),
)


class _Reporter:
    """A replica's pools, and a router's tree that hears of their changes."""

    def __init__(self, window: int, view: TierView | None = None) -> None:
        self.pool = BlockPool(16, BLOCK_TOKENS)
        self.windows = GroupPool(window, 16)
        self.marks = BlockMarks([self.windows], BLOCK_TOKENS, view)
        self.tree = PrefixTree(ManualClock(), 5.0)
        self.tree.add_replica(REPLICA)
        self.sequence = 0
        self.snapshot(self.tree)

    def snapshot(self, tree: PrefixTree) -> None:
        marked = self.marks.snapshot()
        stored = self.pool.snapshot()
        assert tree.apply_snapshot(KvSnapshot(REPLICA, self.sequence, stored, marked, self.marks.num_needed))

    def report(self) -> None:
        self.sequence += 1
        events = KvEvents(REPLICA, self.sequence, *self.pool.take_events(), *self.marks.take_events())
        assert self.tree.apply_events(events)

    def compute(self, end: int) -> None:
        """Compute the KV of all blocks up to this one."""
        block_ids = self.pool.allocate(end + 1)
        for index, block_id in enumerate(block_ids):
            self.pool.register(block_id, KEYS[index - 1] if index else ROOT, KEYS[index], "")
        self.pool.release(block_ids)

    def keep(self, index: int) -> None:
        """Have what the group with a window, or states, has of the block."""
        block_ids = self.windows.allocate(1)
        self.windows.register(block_ids[0], KEYS[index], "")
        self.windows.release(block_ids)

    def lose(self, num_blocks: int) -> None:
        """Evict so many of that group's."""
        self.windows.release(self.windows.allocate(16 - len(tuple(self.windows.keys)) + num_blocks))

    def found(self) -> int:
        return len(match_prefix(self.pool, [self.windows], KEYS, BLOCK_TOKENS).block_ids)


@settings(max_examples=examples(150), deadline=None)
@given(window=st.sampled_from([2, 5, 6, 12]), drawn=st.lists(actions, max_size=25))
def test_the_router_believes_in_exactly_what_a_sequence_finds(
    window: int, drawn: list[tuple[str, int]]
) -> None:
    """A state's window is two tokens; others need several blocks before a border."""
    reporter = _Reporter(window)
    for action, index in drawn:
        if action == "compute":
            reporter.compute(index)
        elif action == "window":
            reporter.keep(index)
        else:
            reporter.lose(min(index, len(tuple(reporter.windows.keys))))
        reporter.report()
        assert reporter.tree.match(KEYS).of("p0") == (reporter.found(), InStore(0, 0))
    again = PrefixTree(ManualClock(), 5.0)
    again.add_replica(REPLICA)
    reporter.snapshot(again)
    assert again.match(KEYS).of("p0") == (reporter.found(), InStore(0, 0))
    assert again.num_marked("p0") == reporter.tree.num_marked("p0")


def test_a_state_in_the_store_is_as_good_as_one_on_the_device() -> None:
    view = TierView(has_states=True)
    reporter = _Reporter(2, view)
    view.apply(
        TierEvents(
            (
                BlocksStored(b"", (*KEYS[:3], state_key(KEYS[2])), "dram"),
                BlocksStored(KEYS[2], KEYS[3:5], "nvme"),
                BlocksStored(KEYS[3], (state_key(KEYS[3]),), "nvme"),
            ),
            (),
        )
    )
    stored, _ = view.take_events()
    assert {key for chain in stored for key in chain.keys} == set(KEYS[:5]), "states are no blocks"
    assert len(view) == 5
    assert reporter.marks.take_events() == ((KEYS[2], KEYS[3]), ())
    view.apply(TierEvents((), (state_key(KEYS[3]),)))
    assert reporter.marks.take_events() == ((), (KEYS[3],))
    assert reporter.marks.snapshot() == (KEYS[2],)
    # A state comes to the device, and leaves the store.
    reporter.keep(2)
    view.apply(TierEvents((), (state_key(KEYS[2]),)))
    assert reporter.marks.take_events() == ((), ())
    # The owner is gone: all that it had.
    view.apply(TierEvents((BlocksStored(KEYS[4], (state_key(KEYS[4]),), "dram"),), ()))
    assert reporter.marks.take_events() == ((KEYS[4],), ())
    view.restart()
    view.apply(TierEvents((), ()))
    assert reporter.marks.take_events() == ((), (KEYS[4],))


def test_where_records_have_the_windows_the_store_marks_all_its_blocks() -> None:
    view = TierView()
    reporter = _Reporter(12, view)
    view.apply(TierEvents((BlocksStored(b"", KEYS[:2], "dram"),), ()))
    assert reporter.marks.take_events() == (KEYS[:2], ())
    view.apply(TierEvents((), (KEYS[0],)))
    assert reporter.marks.take_events() == ((), KEYS[:1])


def test_without_windows_and_states_nothing_is_marked() -> None:
    view = TierView()
    marks = BlockMarks([], BLOCK_TOKENS, view)
    view.apply(TierEvents((BlocksStored(b"", KEYS[:2], "dram"),), ()))
    assert marks.num_needed == 0
    assert marks.take_events() == ((), ())
    assert marks.snapshot() == ()
