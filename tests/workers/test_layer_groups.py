"""What a replica reports of its groups of layers, and of prompts that begin behind cached KV."""

from __future__ import annotations

import dataclasses

import pytest
from msgspec.structs import replace
from staged_engine import BLOCK_TOKENS, ask, engine, finish

from kvtransfer.messages import STATE_WINDOW, CompatibilityRecord, KvGroup
from workers.replica.layer_groups import LayerGroups
from workers.scheduler.block_pool import BlockPool
from workers.scheduler.group_pool import GroupPool
from workers.scheduler.snapshot_counts import SnapshotCounts

PLAIN = CompatibilityRecord(8, b"model", "bfloat16", "bfloat16", 16, 6, 4, 32)
LAYER_BYTES = 2 * 4 * 32 * 2
WINDOWED = replace(PLAIN, groups=(KvGroup((1, 4), 0), KvGroup((0, 2, 3, 5), 100)))
STATEFUL = replace(PLAIN, groups=(KvGroup((1, 4), 0), KvGroup((0, 2, 3, 5), STATE_WINDOW, 50)))
LATENT = replace(PLAIN, num_kinds=1)


@pytest.mark.parametrize(
    ("compatibility", "token_bytes", "sequence_bytes"),
    [
        (PLAIN, {"full": 6 * LAYER_BYTES}, {}),
        (LATENT, {"latent": 3 * LAYER_BYTES}, {}),
        (
            WINDOWED,
            {"full": 2 * LAYER_BYTES, "window 100": 4 * LAYER_BYTES},
            {"window 100": 400 * LAYER_BYTES},
        ),
        (STATEFUL, {"full": 2 * LAYER_BYTES}, {"state": 4 * 4 * 50 * 4}),
    ],
)
def test_groups_are_reported_by_name(
    compatibility: CompatibilityRecord, token_bytes: dict[str, int], sequence_bytes: dict[str, int]
) -> None:
    pool = BlockPool(20, 16)
    windows = [GroupPool(group.window, 8) for group in compatibility.groups[1:]]
    groups = LayerGroups(compatibility, pool, windows)
    pool.allocate(3)
    for window in windows:
        (block_id,) = window.allocate(1)
        window.register(block_id, b"k", "g")
        window.release([block_id])
        window.allocate(2)
    found = groups.statistics()
    assert (found["layers_token_bytes"], found["layers_sequence_bytes"]) == (token_bytes, sequence_bytes)
    first, *others = [*dict.fromkeys([*token_bytes, *sequence_bytes])]
    assert found["num_layers_blocks"] == {first: 20} | dict.fromkeys(others, 8)
    assert found["num_free_layers_blocks"] == {first: 17} | dict.fromkeys(others, 6)
    assert found["num_cached_layers_blocks"] == {first: 0} | dict.fromkeys(others, 1)


def test_prompts_that_compute_cached_tokens_again_are_misses() -> None:
    counts = SnapshotCounts()
    for num_cached, num_used in ((0, 0), (64, 64), (64, 16), (32, 0)):
        counts.add(num_cached, num_used)
    assert counts == SnapshotCounts(num_hits=1, num_misses=2, num_recomputed_tokens=80)
    for evicted in (0, 16, 48):
        counts.add(64, 16, evicted)
    assert (counts.num_recomputed_tokens, counts.num_evicted_tokens) == (80 + 3 * 48, 32)


def test_a_scheduler_counts_what_was_cached_and_of_no_use() -> None:
    side = engine(windows=((2 * BLOCK_TOKENS, 24),))
    prompt = [2 + index % 9 for index in range(6 * BLOCK_TOKENS)]
    side.scheduler.submit(ask("first", prompt, max_tokens=2), 0.0)
    finish(side)
    tables = side.scheduler.life.tables
    assert tables.snapshot_counts == SnapshotCounts()
    side.scheduler.submit(ask("again", [*prompt, 3, 4], max_tokens=2), 0.0)
    finish(side)
    assert tables.snapshot_counts == SnapshotCounts(num_hits=1)
    (window,) = tables.groups.pools
    window.purge(None)
    side.scheduler.submit(ask("third", [*prompt, 5, 6], max_tokens=2), 0.0)
    finish(side)
    lost = SnapshotCounts(num_hits=1, num_misses=1, num_recomputed_tokens=6 * BLOCK_TOKENS)
    assert tables.snapshot_counts == lost


def test_a_scheduler_counts_what_was_evicted_before_it_was_used() -> None:
    side = engine(states=[4], chunk_tokens=16)
    tables, prompts = side.scheduler.life.tables, [[first, *range(1, 12)] for first in (1, 2, 3)]

    def run(name: str, prompt: list[int]) -> SnapshotCounts:
        side.scheduler.submit(ask(name, prompt, max_tokens=2), 0.0)
        finish(side)
        return dataclasses.replace(tables.snapshot_counts)

    run("first", prompts[0])
    assert run("hit", [*prompts[0], 7]).num_hits == 1
    branch = run("branch", [*prompts[0][:4], 9, 9, 9])
    assert (branch.num_misses, branch.num_evicted_tokens) == (1, 0), "no state was ever kept there"
    for number, prompt in enumerate(prompts[1:]):
        run(f"other {number}", prompt)
    lost = run("lost", [*prompts[0], 7])
    assert lost.num_recomputed_tokens - branch.num_recomputed_tokens >= lost.num_evicted_tokens > 0
