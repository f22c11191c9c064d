"""The router at scale, as JSON lines: a figure, its limit and their ratio.

Memory: what the prefix tree takes with 1,000 replicas and 10 million blocks, of which each tenth is at three
replicas. Decisions: with 64 replicas, a prompt of 8,192 tokens and a million blocks in the tree, and without
a limit with 1,000 replicas and 10 million blocks. Keys: the longest that a gateway's event loop stands still
for the keys of a prompt of 100,000 tokens. Events: blocks that are stored and removed, decoded from their
frames, one after the other. Snapshots: the longest that a replica and a gateway stand still for a part of a
snapshot of a million blocks, on the device and in the store, for forgetting as many, and for removing a
replica that has as many; and the longest that the owner of a store and an engine core stand still for a part
of what the store holds. With `--operations` a tree checks its invariants after so many random operations.

All times are the thread's processor time, which other processes disturb least. As in a gateway, the garbage
collector leaves out what was there before decisions are timed.

    python -m benchmarks.router_scale [--only memory,decision,keys,events,snapshot,operations]
        [--operations 200000]
"""

from __future__ import annotations

import argparse
import hashlib
import json
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from random import Random

from benchmarks.router import load_of, quantiles_us
from benchmarks.tree_operations import TreeOperations
from cluster.serve.collector import leave_out_started
from kvtransfer.blocks.keys import TOKEN_BYTES, key_slices
from kvtransfer.common.clock import SystemClock
from kvtransfer.common.faults import Faults
from kvtransfer.kv_events import BlocksRemoved, BlocksStored, KvEvents, KvSnapshot
from kvtransfer.messages import ReplicaIdentity, Shard
from kvtransfer.request_facts import RequestFacts
from kvtransfer.store.dram.catalog import Catalog
from kvtransfer.store.messages.engine_session import TierPart
from kvtransfer.store.messages.owner_codec import FROM_OWNER_CODEC
from kvtransfer.store.messages.records import RecordId, RecordInfo
from kvtransfer.store.nvme.segment import NvmeRef
from kvtransfer.store.server.tier_changes import TierChanges
from router.block_history import BlockHistory
from router.config import RouterConfig
from router.messages import RouteRequest
from router.native import load_kernel
from router.radix import PrefixTree
from router.service import RouterService
from workers.messages.link import LINK_UP_CODEC
from workers.replica.block_marks import BlockMarks
from workers.replica.snapshot_parts import SnapshotParts
from workers.scheduler.block_pool import BlockPool
from workers.store_connector.tier_view import TierView

BLOCK_TOKENS = 64
PROMPT_TOKENS = 8192
LONG_PROMPT_TOKENS = 100_000
EVENT_BLOCKS = 8
NUM_SNAPSHOT_BLOCKS = 1_000_000
CHAIN_BLOCKS = 128
PAGE_BYTES = 4096

MEMORY_LIMIT_GIB = 4.0
DECISION_LIMITS_US = {"p50": 200.0, "p99": 500.0}
KEYS_LIMIT_MS = 1.0
EVENTS_LIMIT_PER_S = 200_000
SNAPSHOT_LIMIT_MS = 5.0

Line = dict[str, object]


def line(what: str, figure: float, limit: float | None, unit: str, **more: object) -> Line:
    """Return one line; a ratio above 1 misses the limit."""
    made: Line = {"what": what, "figure": round(figure, 3), "unit": unit, "limit": limit}
    if limit is not None:
        made["ratio"] = round(limit / figure if unit == "1/s" else figure / limit, 3)
    return made | more


def key_of(number: int) -> bytes:
    """Return a hash, as keys are: those of consecutive numbers must not fill the parts of a table in turn."""
    return hashlib.blake2b(number.to_bytes(16, "big", signed=True), digest_size=16).digest()


def keys_from(first: int, count: int) -> tuple[bytes, ...]:
    """Return keys of consecutive numbers."""
    return tuple(map(key_of, range(first, first + count)))


def resident_gib() -> float:
    """Return the memory of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * PAGE_BYTES / (1 << 30)


# ------------------------------------------------------------------------------- memory and decisions


def filled_router(num_replicas: int, num_blocks: int) -> RouterService:
    """Return a router whose replicas hold so many different blocks, nine in ten at one replica and one in ten
    at three; half of the replicas compute prompts."""
    clock = SystemClock()
    service = RouterService(RouterConfig(), BLOCK_TOKENS, clock, 0, salt="gateway")
    service.set_shared(True)
    num_own = num_blocks // num_replicas
    chains: list[list[BlocksStored]] = [[] for _ in range(num_replicas)]
    random = Random(1)
    for index in range(num_replicas):
        start = (index + 1) << 32
        chains[index].append(BlocksStored(b"", keys_from(start, num_own)))
        # Of these the last tenth is at two replicas more, prompt by prompt.
        for first in range(num_own * 9 // 10, num_own, CHAIN_BLOCKS):
            for other in random.sample(range(num_replicas), 2):
                shared = keys_from(start + first, min(CHAIN_BLOCKS, num_own - first))
                chains[other].append(BlocksStored(b"", shared))
        if index % 64 == 63 or index == num_replicas - 1:
            _report(service, chains, index // 64 * 64, index + 1)
    for index in range(num_replicas):  # what was shared with those that came before
        _report(service, chains, index, index + 1)
        service.loads.on_load(load_of(f"r{index:04}", clock.now(), index % 7 * 100, index % 5))
    return service


def _report(service: RouterService, chains: list[list[BlocksStored]], start: int, end: int) -> None:
    """Tell the router what is known of these replicas, and forget it here."""
    for index in range(start, end):
        identity = ReplicaIdentity(f"r{index:04}", 1)
        service.add_replica(identity, "prefill" if index % 2 else "decode")
        if service.tree.needs_snapshot(identity.replica_id):
            service.tree.apply_snapshot(KvSnapshot(identity, 0, tuple(chains[index])))
        elif chains[index]:
            service.tree.apply_events(KvEvents(identity, 1, tuple(chains[index]), ()))
        chains[index].clear()


def measure_decisions(
    service: RouterService, num_replicas: int, limits: dict[str, float], num_calls: int = 5000
) -> Iterator[Line]:
    """Time decisions for prompts of which each replica has the beginning of one, at another depth."""
    num_blocks = PROMPT_TOKENS // BLOCK_TOKENS
    random = Random(2)
    prompts = []
    for index in range(64):
        keys = keys_from((index % num_replicas + 1) << 32, num_blocks)
        depth = random.randrange(num_blocks)
        prompts.append((*keys[:depth], *keys_from((index + 1) << 64, num_blocks - depth)))
    numbers = iter(range(num_calls))

    def decide() -> None:
        number = next(numbers)
        keys = prompts[number % len(prompts)]
        request = RouteRequest(str(number), RequestFacts("t"), keys, PROMPT_TOKENS, 100)
        service.route(request)
        service.on_finished(str(number))

    for quantile, figure_us in zip(("p50", "p99"), quantiles_us(decide, num_calls), strict=True):
        yield line(
            f"decision {quantile}",
            figure_us,
            limits.get(quantile),
            "us",
            replicas=num_replicas,
            blocks=service.tree.num_keys,
        )


def measure_memory() -> Iterator[Line]:
    """Measure the memory of 1,000 replicas with 10 million blocks, and decisions there."""
    before = resident_gib()
    service = filled_router(1000, 10_000_000)
    yield line(
        "memory",
        resident_gib() - before,
        MEMORY_LIMIT_GIB,
        "GiB",
        replicas=1000,
        blocks=service.tree.num_keys,
    )
    leave_out_started()
    yield from measure_decisions(service, 1000, {}, 500)


def measure_decision() -> Iterator[Line]:
    """Time decisions with 64 replicas and a million blocks."""
    service = filled_router(64, 1_000_000)
    leave_out_started()
    yield from measure_decisions(service, 64, DECISION_LIMITS_US)


# --------------------------------------------------------------------------------- keys and events


def slices_ms(calls: Iterator[Callable[[], object]]) -> list[float]:
    """Return the time of each call, in order of the times."""
    times = []
    for call in calls:
        start = time.thread_time()
        call()
        times.append(1e3 * (time.thread_time() - start))
    return sorted(times)


def longest(what: str, times_ms: list[float], limit_ms: float, **more: object) -> Line:
    """Return the 99th percentile of slices, with the longest and their number."""
    p99_ms = times_ms[len(times_ms) * 99 // 100]
    return line(what, p99_ms, limit_ms, "ms", longest=round(times_ms[-1], 3), slices=len(times_ms), **more)


def measure_keys() -> Iterator[Line]:
    """Time the slices in which the keys of long prompts are hashed."""
    tokens = Random(3).randbytes(LONG_PROMPT_TOKENS * TOKEN_BYTES)
    for block_tokens in (16, 64, 512):
        times_ms: list[float] = []
        for _ in range(20):
            slices = key_slices(bytes(16), tokens, block_tokens)
            times_ms += slices_ms(_nexts(slices))
        yield longest("slice of keys p99", sorted(times_ms), KEYS_LIMIT_MS, block_tokens=block_tokens)


def _nexts(slices: Iterator[object]) -> Iterator[Callable[[], object]]:
    """Return calls that take one slice each, until there are none."""
    ended: list[bool] = []

    def take() -> None:
        if next(slices, None) is None:
            ended.append(True)

    while not ended:
        yield take


def measure_events(num_frames: int = 20_000) -> Iterator[Line]:
    """Measure how many blocks a second are stored and removed, from frames of 8 and 8 blocks."""
    tree = PrefixTree(SystemClock(), 5.0, load_kernel(), BlockHistory())
    identities = [ReplicaIdentity(f"r{index:04}", 1) for index in range(64)]
    for identity in identities:
        tree.add_replica(identity)
        tree.apply_snapshot(KvSnapshot(identity, 0, ()))
    frames = []
    for number in range(num_frames):
        stored = BlocksStored(b"", keys_from(number * EVENT_BLOCKS, EVENT_BLOCKS))
        removed = BlocksRemoved(keys_from((number - 64 * 100) * EVENT_BLOCKS, EVENT_BLOCKS))
        events = KvEvents(identities[number % 64], number // 64 + 1, (stored,), (removed,))
        frames.append(LINK_UP_CODEC.encode(events))
    start = time.thread_time()
    for frame in frames:
        message = LINK_UP_CODEC.decode_known(frame)
        assert isinstance(message, KvEvents)
        assert tree.apply_events(message)
    rate = 2 * EVENT_BLOCKS * num_frames / (time.thread_time() - start)
    yield line("block events", rate, EVENTS_LIMIT_PER_S, "1/s", blocks_per_frame=2 * EVENT_BLOCKS)


# ---------------------------------------------------------------------------------------- snapshots


def measure_snapshot() -> Iterator[Line]:
    """Time the parts of a snapshot of a million blocks of the device, and of as many in the store."""
    pool = BlockPool(NUM_SNAPSHOT_BLOCKS, BLOCK_TOKENS)
    for first in range(0, NUM_SNAPSHOT_BLOCKS, CHAIN_BLOCKS):
        keys = keys_from(first, min(CHAIN_BLOCKS, NUM_SNAPSHOT_BLOCKS - first))
        parent = b""
        for block, key in zip(pool.allocate(len(keys)), keys, strict=True):
            pool.register(block, parent, key, "")
            parent = key
    yield from _measure_parts("device", SnapshotParts(pool, BlockMarks((), BLOCK_TOKENS), None))
    del pool
    view = TierView()
    yield from _measure_owner(view)
    yield from _measure_parts("store", SnapshotParts(BlockPool(1, 1), BlockMarks((), 1), view))


class _Unheard:
    """Hears the changes of a catalog (`CatalogEvents`) that has no session."""

    def committed(self, info: RecordInfo) -> None: ...

    def touched(self, info: RecordInfo) -> None: ...

    def evicted(self, info: RecordInfo) -> None: ...

    def gone(self, record_id: RecordId, reason: str) -> None: ...


def _measure_owner(view: TierView) -> Iterator[Line]:
    """Time the parts of what the store of a node holds, from its owner to an engine core, and what the engine
    core does when an owner comes back with a million other blocks."""
    space, shard = bytes(16), Shard(0, 32, 0, 8)
    for first in (NUM_SNAPSHOT_BLOCKS, 0):
        catalog = Catalog(None, SystemClock(), Faults(), _Unheard())
        parent = chain = b""
        for number, key in enumerate(keys_from(first, NUM_SNAPSHOT_BLOCKS)):
            if number % CHAIN_BLOCKS == 0:
                parent, chain = b"", key
            info = RecordInfo(RecordId(space, key, shard), parent, chain, "", space, 1 << 20, 0)
            catalog.added_nvme(info, NvmeRef(number, 0, 1 << 20))
            parent = key
        yield from _measure_owner_parts(catalog, space, shard, view)


def _measure_owner_parts(catalog: Catalog, space: bytes, shard: Shard, view: TierView) -> Iterator[Line]:
    def slice_of(index: int) -> Iterator[bytes]:
        return (each.key for each in catalog.slice(index))

    changes = TierChanges([shard], lambda key: catalog.lookup(space, key), slice_of)
    frames: list[bytes] = []
    numbers = [0]

    def serve() -> None:
        part = changes.part(numbers[-1])
        frames.append(FROM_OWNER_CODEC.encode(part))
        numbers.append(part.next_part)

    served_ms = []
    while numbers[-1] or not frames:
        served_ms += slices_ms(iter([serve]))

    def publish() -> None:
        """Take the changes, as for KV events."""
        view.take_changed()
        view.take_events()

    def take(frame: bytes) -> None:
        message = FROM_OWNER_CODEC.decode_known(frame)
        assert isinstance(message, TierPart)
        view.apply_part(message)
        publish()

    taken_ms = slices_ms(partial(take, frame) for frame in frames)
    yield longest("owner's part served p99", sorted(served_ms), SNAPSHOT_LIMIT_MS, where="store")
    yield longest("owner's part taken p99", taken_ms, SNAPSHOT_LIMIT_MS, where="store", blocks=len(view))
    lost_ms = []
    is_left = True

    def compare() -> None:
        nonlocal is_left
        is_left = view.forget_some()
        publish()

    while is_left:
        lost_ms += slices_ms(iter([compare]))
    assert len(view) == NUM_SNAPSHOT_BLOCKS
    yield longest("lost blocks removed p99", sorted(lost_ms), SNAPSHOT_LIMIT_MS, where="store")


def _measure_parts(where: str, parts: SnapshotParts) -> Iterator[Line]:
    identity = ReplicaIdentity("r0", 1)
    tree = PrefixTree(SystemClock(), 5.0, load_kernel(), BlockHistory())
    tree.add_replica(identity)
    frames: list[bytes] = []
    numbers = [0]

    def serve() -> None:
        """Make the next part and its frame."""
        number = numbers[-1]
        stored, marked, next_part = parts.part(number)
        snapshot = KvSnapshot(identity, 0, stored, marked, 0, number, next_part)
        frames.append(LINK_UP_CODEC.encode(snapshot))
        numbers.append(next_part)

    times_ms = []
    while numbers[-1] or not frames:
        times_ms += slices_ms(iter([serve]))

    def apply(frame: bytes) -> None:
        message = LINK_UP_CODEC.decode_known(frame)
        assert isinstance(message, KvSnapshot)
        assert tree.apply_snapshot(message)

    yield longest("part served p99", sorted(times_ms), SNAPSHOT_LIMIT_MS, where=where)
    applied_ms = slices_ms(partial(apply, frame) for frame in frames)
    yield longest("part applied p99", applied_ms, SNAPSHOT_LIMIT_MS, where=where, blocks=tree.num_keys)
    # Nothing is left: what was there is forgotten while the tree is used.
    assert tree.apply_snapshot(KvSnapshot(identity, 0, ()))
    yield longest("forgetting p99", _forgetting_ms(tree), SNAPSHOT_LIMIT_MS, where=where)
    for frame in frames:
        apply(frame)
    yield longest(
        "removing a replica p99",
        sorted(slices_ms(iter([partial(tree.remove_replica, "r0")])) + _forgetting_ms(tree)),
        SNAPSHOT_LIMIT_MS,
        where=where,
    )


def _forgetting_ms(tree: PrefixTree) -> list[float]:
    """Match prompts until nothing is left in the tree; return the time of each, in order of the times."""
    times_ms = []
    while tree.num_keys:
        times_ms += slices_ms(iter([partial(tree.match, ())]))
    return sorted(times_ms)


def measure_operations(num_operations: int) -> Iterator[Line]:
    """Check a tree after random operations."""
    operations = TreeOperations(1, num_replicas=50, num_prompts=200, prompt_blocks=60)
    start = time.thread_time()
    operations.run(num_operations)
    took_s = time.thread_time() - start
    operations.check()
    yield line(
        "operations checked", num_operations / took_s, None, "1/s", operations=num_operations, is_valid=True
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--operations", type=int, default=200_000)
    measures: dict[str, Callable[[], Iterator[Line]]] = {
        "memory": measure_memory,
        "decision": measure_decision,
        "keys": measure_keys,
        "events": measure_events,
        "snapshot": measure_snapshot,
        "operations": lambda: measure_operations(arguments.operations),
    }
    parser.add_argument("--only", default=",".join(measures))
    arguments = parser.parse_args()
    for name, measure in measures.items():
        if name in arguments.only.split(","):
            for made in measure():
                print(json.dumps(made), flush=True)


if __name__ == "__main__":
    main()
