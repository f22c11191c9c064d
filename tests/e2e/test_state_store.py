"""Every family whose layers partly keep states, and a store: what was evicted, written to NVMe and outlived a
restart continues exactly, as `transformers` does."""

from __future__ import annotations

from pathlib import Path

import pytest
from e2e_harness import (
    BLOCK_TOKENS,
    ROOT_KEY,
    E2eHarness,
    Heard,
    Replica,
    add_with_store,
    prompt,
    raw,
    until,
)
from paged_model import continued
from state_families import STATE_FAMILIES, write_state_checkpoint
from store_harness import StoreHarness

from kvtransfer.blocks.keys import extend_keys
from kvtransfer.common.clock import SystemClock
from router.radix import PrefixTree
from workers.config import Parallel

pytestmark = pytest.mark.slow

NUM_TOKENS = 60
PROMPT = prompt(5)
# As long, and the same for 70 tokens: four blocks, behind which no chunk ends.
OTHER = [*PROMPT[:70], *prompt(6)[:30]]
# The first stage has no attention, the second no state.
THREE_STAGES = Parallel(pp=3, devices=("cpu", "cpu", "cpu"), layers=(2, 1, 1))


class StoredChats:
    """Replicas that come and go on one node."""

    def __init__(self, harness: E2eHarness, store: StoreHarness, model_dir: Path) -> None:
        self._harness = harness
        self._store = store
        self._model_dir = model_dir

    async def run(self, at: Replica, name: str, tokens: list[int]) -> Heard:
        """Run a prompt, and compare what comes with the reference."""
        heard = await self._harness.run(at, self._harness.submission(name, tokens, max_tokens=NUM_TOKENS))
        assert heard.failure is None, heard.failure
        assert heard.sequence() == continued(self._model_dir, tokens, NUM_TOKENS)
        assert heard.prefill is not None
        connector = at.core.connector
        assert connector is not None
        await until(lambda: connector.is_idle, "all is stored")
        return heard

    async def add(self, name: str, parallel: Parallel | None = None) -> Replica:
        return await add_with_store(self._harness, self._store, name, parallel=parallel)


def loaded(heard: Heard) -> dict[str, int]:
    assert heard.prefill is not None
    return heard.prefill.num_loaded_tokens


def cached_tokens(heard: Heard) -> int:
    assert heard.prefill is not None
    return heard.prefill.num_cached_tokens


def known_blocks(replica: Replica, tokens: list[int]) -> int:
    """Return how many blocks of a prompt a router that has just joined counts at the replica, in all."""
    reports, name = replica.core.reports, replica.core.identity
    reports.kv_events()
    tree = PrefixTree(SystemClock(), prediction_ttl_s=1.0)
    tree.add_replica(name)
    assert tree.apply_snapshot(reports.kv_snapshot())
    keys = extend_keys(ROOT_KEY, raw(tokens), BLOCK_TOKENS)
    num_device, in_store = tree.match(keys, (len(tokens) - 1) // BLOCK_TOKENS).of(name.replica_id)
    return num_device + sum(in_store)


@pytest.mark.parametrize("family", STATE_FAMILIES)
@pytest.mark.parametrize("readers", [Parallel(tp=2), THREE_STAGES], ids=["tp", "pp"])
async def test_a_chat_continues_where_another_replica_has_left_it(
    family: str, readers: Parallel, tmp_path: Path
) -> None:
    model_dir = tmp_path / "model"
    write_state_checkpoint(model_dir, family)
    harness = E2eHarness(model_dir)
    async with StoreHarness(tmp_path, harness.trust) as store, harness:
        await store.start()
        chats = StoredChats(harness, store, model_dir)
        first = await chats.add("first")
        assert not loaded(await chats.run(first, "first", PROMPT))
        # A router counts what a sequence then uses, up to a border with a state, left by chance or for that.
        assert known_blocks(first, PROMPT) == 6
        num_known = known_blocks(first, OTHER)
        assert cached_tokens(await chats.run(first, "other here", OTHER)) == num_known * BLOCK_TOKENS
        second = await chats.add("second", readers)
        # The last border before the end of the prompt.
        assert loaded(await chats.run(second, "second", PROMPT)) == {"dram": 96}
        # Where `OTHER` began at the first replica, others can begin elsewhere.
        third = await chats.add("third")
        assert loaded(await chats.run(third, "third", [*PROMPT[:75], 3, 5])) == {"dram": 64}
        # The next turn: what was generated is behind the newest border.
        turn = [*PROMPT, *continued(model_dir, PROMPT, NUM_TOKENS), *prompt(8)[:21]]
        heard = await chats.run(await chats.add("fourth", readers), "turn", turn)
        assert loaded(heard) == {"dram": (len(PROMPT) + NUM_TOKENS - 1) // 16 * 16}


@pytest.mark.parametrize("family", STATE_FAMILIES)
async def test_states_on_nvme_outlive_a_restart(family: str, tmp_path: Path) -> None:
    model_dir = tmp_path / "model"
    write_state_checkpoint(model_dir, family)
    harness = E2eHarness(model_dir)
    nvme = {"nvme_path": str(tmp_path / "nvme"), "nvme_bytes": 64 << 20, "segment_bytes": 4 << 20}
    async with StoreHarness(tmp_path, harness.trust, **nvme) as store, harness:
        await store.start()
        chats = StoredChats(harness, store, model_dir)
        first = await chats.add("first")
        await chats.run(first, "first", PROMPT)
        num_records = (await store.stat("dram")).num_records
        await store.until("nvme", lambda stat: stat.num_records == num_records, "all is on NVMe")
        await first.core.stop()
        await store.stop()
        await store.start()
        second = await chats.add("second")
        assert loaded(await chats.run(second, "second", PROMPT)) == {"nvme": 96}


@pytest.mark.parametrize("family", STATE_FAMILIES)
async def test_what_a_small_device_evicts_comes_back(family: str, tmp_path: Path) -> None:
    """Ten chats in turns, and KV and states for a few of them."""
    model_dir = tmp_path / "model"
    write_state_checkpoint(model_dir, family)
    harness = E2eHarness(model_dir)
    async with StoreHarness(tmp_path, harness.trust) as store, harness:
        await store.start()
        chats = StoredChats(harness, store, model_dir)
        small = {"kv_tokens": 512, "state_snapshots": 3, "max_sequences": 2}
        replica = await add_with_store(harness, store, "small", engine=small)
        prompts = [prompt(seed)[: 50 + 7 * seed] for seed in range(10, 17)]
        for number, tokens in enumerate(prompts):
            await chats.run(replica, f"first {number}", tokens)
        num_loaded = 0
        for number, tokens in enumerate(prompts):
            turn = [*tokens, *continued(model_dir, tokens, NUM_TOKENS)[:40], 7]
            num_loaded += sum(loaded(await chats.run(replica, f"second {number}", turn)).values())
        assert num_loaded
        await harness.quiet()
