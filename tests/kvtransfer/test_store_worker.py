"""The worker of a rank: copies between its blocks and the records of an arena that an owner shares."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from arena_harness import (
    LEFT,
    MODEL,
    NUM_BLOCKS,
    RIGHT,
    SLOT_BYTES,
    GroupedRank,
    SharedArena,
    StandInOwner,
    WorkerRank,
    get,
    layout,
    put,
    read,
)
from service_harness import Hooks

from kvtransfer.agent.qos import TrafficGovernor
from kvtransfer.blocks.checksum import checksum
from kvtransfer.blocks.device_pool import DevicePool
from kvtransfer.blocks.host_memory import KvMemory
from kvtransfer.blocks.layout import BlockLayout
from kvtransfer.blocks.pool import HostPool, KvPool
from kvtransfer.common.clock import SystemClock
from kvtransfer.common.faults import FaultRule, Faults
from kvtransfer.messages import STATE_WINDOW, KvGroup, Shard
from kvtransfer.store.messages.records import HEADER_BYTES
from kvtransfer.store.messages.store_orders import (
    StoreAttached,
    StoreCopy,
    StoreGet,
    StoreGetDone,
    StorePut,
    StorePutDone,
    StoreRead,
)
from kvtransfer.transfer_orders import TransferSettings

MakePool = Callable[[BlockLayout, KvMemory], KvPool]


@pytest.fixture
def arena() -> SharedArena:
    return SharedArena()


@pytest.fixture
def owner(arena: SharedArena) -> Iterator[StandInOwner]:
    with StandInOwner(arena) as owner:
        yield owner


def device_pool(layout: BlockLayout, memory: KvMemory) -> KvPool:
    tensor = torch.frombuffer(memory.buffer, dtype=torch.uint8)
    return DevicePool(layout, tensor.view(-1, layout.block_bytes))


@pytest.mark.parametrize("make_pool", [HostPool, device_pool])
def test_what_is_put_is_got_again(owner: StandInOwner, arena: SharedArena, make_pool: MakePool) -> None:
    with WorkerRank(seed=1, make_pool=make_pool) as writer, WorkerRank(seed=2, make_pool=make_pool) as reader:
        assert writer.attach(owner) == reader.attach(owner) == StoreAttached(arena.id)
        pairs = [(3, 5), (0, 1), (7, 9)]
        done = put(writer, arena, 1, pairs)
        for (block, slot), total in zip(pairs, done.sums, strict=True):
            lying = arena.payload(slot * SLOT_BYTES, writer.layout.block_bytes)
            assert lying.tobytes() == writer.blocks[block].tobytes()
            assert total == checksum(writer.blocks[block].tobytes())
        assert done.num_bytes == 3 * writer.layout.block_bytes
        before = reader.blocks.copy()
        reads = [
            read(target, slot, MODEL, MODEL, total)
            for target, (_, slot), total in zip((2, 4, 6), pairs, done.sums, strict=True)
        ]
        answer = get(reader, arena, 2, reads)
        assert answer.bad == ()
        assert answer.num_bytes == done.num_bytes
        for target, (block, _) in zip((2, 4, 6), pairs, strict=True):
            assert reader.blocks[target].tobytes() == writer.blocks[block].tobytes()
        untouched = [block for block in range(NUM_BLOCKS) if block not in (2, 4, 6)]
        assert (reader.blocks[untouched] == before[untouched]).all()


@pytest.mark.parametrize("make_pool", [HostPool, device_pool])
def test_states_and_kv_of_other_layers_have_records_of_their_own(
    owner: StandInOwner, arena: SharedArena, make_pool: MakePool
) -> None:
    """One order has both; of a record of the whole model a rank reads its part."""
    groups = KvGroup((1, 3), 0), KvGroup((0,), STATE_WINDOW, 24)
    kv_pairs, state_pairs = [(3, 1), (0, 2)], [(2, 3)]
    with (
        GroupedRank(MODEL, groups, 1, make_pool) as writer,
        GroupedRank(RIGHT, groups, 2, make_pool) as reader,
    ):
        assert writer.attach(owner).error == reader.attach(owner).error == ""
        copies = [StoreCopy(block, slot * SLOT_BYTES) for block, slot in kv_pairs]
        copies[1:1] = [StoreCopy(block, slot * SLOT_BYTES, (), True) for block, slot in state_pairs]
        writer.worker.handle(StorePut(1, arena.id, tuple(copies)))
        done = writer.reports.take(StorePutDone)
        assert not done.error
        reads = []
        for copy, total in zip(copies, done.sums, strict=True):
            blocks, layout = writer.kept[copy.is_state], writer.layouts[copy.is_state]
            lying = arena.payload(copy.offset, layout.block_bytes)
            assert lying.tobytes() == blocks[copy.block_id].tobytes()
            assert total == checksum(lying.tobytes())
            sizes = MODEL, RIGHT, layout.block_bytes, total
            reads.append(StoreRead(copy.block_id + 1, copy.offset, *sizes, (), copy.is_state))
        reader.worker.handle(StoreGet(2, arena.id, tuple(reads)))
        assert reader.reports.take(StoreGetDone).bad == ()
        for copy in copies:
            layout = writer.layouts[copy.is_state]
            rows = writer.kept[copy.is_state][copy.block_id].reshape(-1, 4, layout.head_bytes)
            here = reader.kept[copy.is_state][copy.block_id + 1]
            assert here.tobytes() == rows[:, RIGHT.head_start : RIGHT.head_end].tobytes()
        # A record of KV is none of a state, though both are whole.
        wrong = StoreRead(0, reads[0].offset, MODEL, RIGHT, reads[0].num_bytes, reads[0].checksum, (), True)
        reader.worker.handle(StoreGet(3, arena.id, (wrong,)))
        assert "cannot hold" in reader.reports.take(StoreGetDone).error


@pytest.mark.parametrize("make_pool", [HostPool, device_pool])
@pytest.mark.parametrize(
    ("held", "needed"),
    [
        ([MODEL], [LEFT, RIGHT]),  # 1 -> 2
        ([LEFT, RIGHT], [MODEL]),  # 2 -> 1
        ([Shard(0, 2, 0, 4), Shard(2, 4, 0, 4)], [LEFT, RIGHT]),  # pp 2 -> tp 2
        ([Shard(0, 4, 0, 3), Shard(0, 4, 3, 4)], [LEFT, RIGHT]),  # one record for both ranks
    ],
)
def test_records_of_other_shapes_fill_a_block(
    owner: StandInOwner, arena: SharedArena, held: list[Shard], needed: list[Shard], make_pool: MakePool
) -> None:
    with WorkerRank(MODEL, seed=3) as model:  # not attached: what the whole model's blocks hold
        slots = iter(range(1, 16))
        records: dict[tuple[int, Shard], tuple[int, int]] = {}
        for shard in held:
            with WorkerRank(shard, make_pool=make_pool) as writer:
                writer.blocks[:] = model.piece(shard)
                assert writer.attach(owner).error == ""
                pairs = [(block, next(slots)) for block in (0, 5)]
                sums = put(writer, arena, 1, pairs).sums
                for (block, slot), total in zip(pairs, sums, strict=True):
                    records[block, shard] = slot, total
        for shard in needed:
            with WorkerRank(shard, seed=4, make_pool=make_pool) as reader:
                assert reader.attach(owner).error == ""
                reads = [
                    read(block, *records[block, source][:1], source, piece, records[block, source][1])
                    for block in (0, 5)
                    for source in held
                    if (piece := both(source, shard)) is not None
                ]
                assert get(reader, arena, 2, reads).bad == ()
                for block in (0, 5):
                    assert reader.blocks[block].tobytes() == model.piece(shard)[block].tobytes()


def both(first: Shard, second: Shard) -> Shard | None:
    layers = max(first.layer_start, second.layer_start), min(first.layer_end, second.layer_end)
    heads = max(first.head_start, second.head_start), min(first.head_end, second.head_end)
    return Shard(*layers, *heads) if layers[0] < layers[1] and heads[0] < heads[1] else None


@pytest.mark.parametrize("piece", [MODEL, LEFT])
def test_every_flipped_bit_is_found(owner: StandInOwner, arena: SharedArena, piece: Shard) -> None:
    # Also where the piece that is copied does not lie: the record is what the sum is of.
    with WorkerRank(seed=1) as writer, WorkerRank(piece, seed=2) as reader:
        writer.attach(owner)
        reader.attach(owner)
        sums = put(writer, arena, 1, [(block, block + 1) for block in range(4)]).sums
        size = writer.layout.block_bytes
        for block, byte in ((1, 0), (2, size // 2 + 3), (3, size - 1)):
            arena.payload((block + 1) * SLOT_BYTES, size)[byte] ^= 1 << (byte % 8)
        reads = [read(block, block + 1, MODEL, piece, sums[block]) for block in range(4)]
        assert get(reader, arena, 2, reads).bad == (1, 2, 3)


def test_a_corrupted_put_is_found_by_its_reader(
    owner: StandInOwner, arena: SharedArena, tmp_path: Path
) -> None:
    rule = FaultRule("store.corrupt.put", "corrupt", str(tmp_path / "marker"), after=2)
    with WorkerRank(faults=Faults([rule])) as rank:
        rank.attach(owner)
        sums = put(rank, arena, 1, [(0, 1), (1, 2), (2, 3)]).sums
        assert [checksum(rank.blocks[block].tobytes()) for block in range(3)] == list(sums)
        reads = [read(block + 4, block + 1, MODEL, MODEL, sums[block]) for block in range(3)]
        assert get(rank, arena, 2, reads).bad == (1,)


def block_by_block() -> Hooks:
    """What is wrong is not in the same batch as what comes before it."""
    hooks = Hooks()
    hooks.hooks["nowhere"] = lambda passage: None
    return hooks


WRONG_COPIES = {
    "a block beyond the pool": StoreCopy(NUM_BLOCKS, SLOT_BYTES),
    "a negative block": StoreCopy(-1, SLOT_BYTES),
    "a record beyond the arena": StoreCopy(0, (2 << 20) - HEADER_BYTES),
    "a record with its end beyond": StoreCopy(0, (2 << 20) - (32 << 10)),
    "a negative offset": StoreCopy(0, -SLOT_BYTES),
    "an offset between two pages": StoreCopy(0, SLOT_BYTES + 8),
    "an offset of more than 63 bits": StoreCopy(0, 1 << 63),
}


@pytest.mark.parametrize("copy", WRONG_COPIES.values(), ids=WRONG_COPIES)
def test_a_wrong_put_is_an_error_and_writes_nothing(
    owner: StandInOwner, arena: SharedArena, copy: StoreCopy
) -> None:
    with WorkerRank(faults=block_by_block()) as rank:
        rank.attach(owner)
        rank.worker.handle(StorePut(1, arena.id, (StoreCopy(0, SLOT_BYTES), copy)))
        done = rank.reports.take(StorePutDone)
        assert done.error
        assert done.sums == ()
        assert not arena.bytes.any()
        assert put(rank, arena, 2, [(0, 1)]).error == ""


SIZE = layout(MODEL).block_bytes
WRONG_READS = {
    "a block beyond the pool": StoreRead(NUM_BLOCKS, SLOT_BYTES, MODEL, MODEL, SIZE, 0),
    "a record beyond the arena": StoreRead(0, (2 << 20) - HEADER_BYTES, MODEL, MODEL, SIZE, 0),
    "a length that is not the shard's": StoreRead(0, SLOT_BYTES, MODEL, MODEL, SIZE - 8, 0),
    "a piece outside the record": StoreRead(0, SLOT_BYTES, LEFT, MODEL, SIZE // 2, 0),
    "a piece outside the pool": StoreRead(0, SLOT_BYTES, Shard(0, 8, 0, 4), Shard(0, 8, 0, 4), 2 * SIZE, 0),
    "an empty piece": StoreRead(0, SLOT_BYTES, MODEL, Shard(1, 1, 0, 4), SIZE, 0),
    "a shard that is backwards": StoreRead(0, SLOT_BYTES, Shard(4, 0, 0, 4), Shard(4, 0, 0, 4), SIZE, 0),
    "layers below the first": StoreRead(0, SLOT_BYTES, Shard(-4, 4, 0, 4), MODEL, 2 * SIZE, 0),
}


@pytest.mark.parametrize("wrong", WRONG_READS.values(), ids=WRONG_READS)
def test_a_wrong_get_is_an_error_and_writes_nothing(
    owner: StandInOwner, arena: SharedArena, wrong: StoreRead
) -> None:
    with WorkerRank(faults=block_by_block()) as rank:
        rank.attach(owner)
        before = rank.blocks.copy()
        answer = get(rank, arena, 1, [read(0, 1, MODEL, MODEL, 0), wrong])
        assert answer.error
        assert answer.bad == (0, 1)
        assert (rank.blocks == before).all()
        assert put(rank, arena, 2, [(0, 1)]).error == ""


def test_orders_without_an_arena_or_for_another_are_errors(owner: StandInOwner, arena: SharedArena) -> None:
    with WorkerRank() as rank:
        assert put(rank, arena, 1, [(0, 1)]).error
        rank.attach(owner)
        assert put(rank, SharedArena(), 2, [(0, 1)]).error
        assert get(rank, SharedArena(), 3, [read(0, 1, MODEL, MODEL, 0)]).bad == (0,)
        assert not arena.bytes.any()


def test_empty_orders_are_answered(owner: StandInOwner, arena: SharedArena) -> None:
    with WorkerRank() as rank:
        rank.attach(owner)
        assert put(rank, arena, 1, []).error == ""
        assert get(rank, arena, 2, []).error == ""


# --------------------------------------------------------------------------------- order and traffic


def test_a_get_overtakes_the_rest_of_a_put(owner: StandInOwner, arena: SharedArena) -> None:
    hooks = Hooks()
    with WorkerRank(faults=hooks) as rank:
        rank.attach(owner)
        (total,) = put(rank, arena, 1, [(0, 9)]).sums

        def ask(passage: int) -> None:
            if passage == hooks.counts["store.copy.put"] == 3:  # the second block of the next put
                rank.worker.handle(StorePut(3, arena.id, (StoreCopy(1, 5 * SLOT_BYTES),)))
                rank.worker.handle(StoreGet(4, arena.id, (read(7, 9, MODEL, MODEL, total),)))

        hooks.hooks["store.copy.put"] = ask
        copies = tuple(StoreCopy(block, (block + 1) * SLOT_BYTES) for block in range(4))
        rank.worker.handle(StorePut(2, arena.id, copies))
        rank.reports.take(StorePutDone)
        rank.reports.take(StorePutDone)
        assert [getattr(report, "number", None) for report in rank.reports.all[2:]] == [4, 2, 3]
        for block in range(4):
            lying = arena.payload((block + 1) * SLOT_BYTES, SIZE)
            assert lying.tobytes() == rank.blocks[block].tobytes()


def test_copies_are_counted_and_wait_for_hand_overs(owner: StandInOwner, arena: SharedArena) -> None:
    clock = SystemClock()
    governor = TrafficGovernor(TransferSettings("127.0.0.1", ()), clock)
    with WorkerRank(governor=governor) as rank:
        rank.attach(owner)
        with governor.flow("hand_over"):
            rank.worker.handle(StorePut(1, arena.id, (StoreCopy(0, SLOT_BYTES),)))
            assert not rank.reports.all[1:]
        (total,) = rank.reports.take(StorePutDone).sums
        get(rank, arena, 2, [read(1, 1, MODEL, LEFT, total)])
        counted = governor.counted()
        assert counted["write_back"].num_bytes == SIZE
        assert counted["prefetch"].num_bytes == SIZE
        assert counted["hand_over"].num_bytes == 0


def test_a_put_that_waits_for_its_turn_ends_with_the_worker(owner: StandInOwner, arena: SharedArena) -> None:
    governor = TrafficGovernor(TransferSettings("127.0.0.1", ()), SystemClock())
    rank = WorkerRank(governor=governor)
    rank.attach(owner)
    with governor.flow("hand_over"):
        rank.worker.handle(StorePut(1, arena.id, (StoreCopy(0, SLOT_BYTES),)))
        rank.worker.close()
    assert len(rank.reports.all) == 1


def test_a_limited_class_goes_block_by_block(owner: StandInOwner, arena: SharedArena) -> None:
    limited = TransferSettings("127.0.0.1", (), prefetch_gb_s=0.01, write_back_gb_s=0.01)
    governor = TrafficGovernor(limited, SystemClock())
    with WorkerRank(governor=governor) as rank:
        rank.attach(owner)
        sums = put(rank, arena, 1, [(block, block + 1) for block in range(3)]).sums
        reads = [read(block, block + 1, MODEL, MODEL, sums[block]) for block in range(3)]
        assert get(rank, arena, 2, reads).bad == ()
        assert {name: count.num_batches for name, count in governor.counted().items()} == {
            "hand_over": 0,
            "prefetch": 3,
            "write_back": 3,
        }
