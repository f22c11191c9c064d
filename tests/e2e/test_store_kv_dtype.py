"""KV that the store keeps in 8 bits (`store.kv_dtype`): what is found again is the KV that was computed,
rounded once, in any tier, at any shape, and after a restart."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from e2e_harness import (
    BLOCK_TOKENS,
    E2eHarness,
    Heard,
    Replica,
    add_with_store,
    prompt,
    stored_blocks,
    until,
)
from family_checkpoints import CASES, GEMMA4_SHAPE, write_family_checkpoint
from rounded_kv import continued_behind
from slow_cases import slow_but
from state_families import write_state_checkpoint
from store_harness import StoreHarness

from benchmarks.random_checkpoint import write_random_checkpoint
from kvtransfer.common.faults import FaultRule
from workers.config import Parallel
from workers.model.kv_form import ScaledParts
from workers.model.model_config import read_model_config

PROMPT = prompt(5, 200)
NUM_FULL_BLOCKS = (len(PROMPT) - 1) // BLOCK_TOKENS
NUM_LOADED = NUM_FULL_BLOCKS * BLOCK_TOKENS
NUM_TOKENS = 40
SHAPES = {
    "1x1": Parallel(),
    "2x1": Parallel(tp=2),
    "1x2": Parallel(pp=2, devices=("cpu", "cpu"), layers=(1, 1)),
}
# Of log-probabilities: where two ranks add up in another order, an element may be rounded to its neighbor.
MOST_ERROR = 2e-3


@pytest.fixture
async def stored(model_dir: Path, tmp_path: Path) -> AsyncIterator[tuple[E2eHarness, StoreHarness]]:
    """An empty harness of replicas, and a store that is not started."""
    harness = E2eHarness(model_dir)
    async with StoreHarness(tmp_path, harness.trust) as store, harness:
        yield harness, store


async def run(harness: E2eHarness, at: Replica, name: str, **how: Any) -> Heard:
    sampling = {"max_tokens": NUM_TOKENS, "num_logprobs": 1, **how}
    heard = await harness.run(at, harness.submission(name, PROMPT, **sampling))
    assert heard.failure is None, heard.failure
    return heard


def check(
    heard: Heard, model_dir: Path, kv_dtype: str | None, num_loaded: int = NUM_LOADED, *parts: int
) -> None:
    """Check tokens and log-probabilities against the model over KV that was rounded so."""
    tokens, logprobs = continued_behind(model_dir, PROMPT, num_loaded, kv_dtype, NUM_TOKENS, parts)
    assert heard.sequence() == tokens
    given = torch.tensor([heard.logprobs[index].logprob for index in range(NUM_TOKENS)])
    wanted = logprobs[range(NUM_TOKENS), tokens]
    torch.testing.assert_close(given, wanted, rtol=0, atol=MOST_ERROR)


def loaded(heard: Heard) -> dict[str, int]:
    assert heard.prefill is not None
    return dict(heard.prefill.num_loaded_tokens)


def test_the_reference_sees_the_rounding(model_dir: Path) -> None:
    """Else the tests below would show nothing."""
    exact, int8, fp8 = (
        continued_behind(model_dir, PROMPT, NUM_LOADED, kv_dtype, NUM_TOKENS)[1][0]
        for kv_dtype in (None, "int8", "fp8")
    )
    assert 5 * MOST_ERROR < float((int8 - exact).abs().max()) < float((fp8 - exact).abs().max()) < 1


@pytest.mark.parametrize("kv_dtype", slow_but(["int8", "fp8"], "int8"))
async def test_a_hit_is_kv_that_was_rounded_once(
    stored: tuple[E2eHarness, StoreHarness], model_dir: Path, kv_dtype: str
) -> None:
    """Computed, loaded from the store, handed over with what was loaded, and found on the device."""
    harness, store = stored
    await store.start()
    first = await add_with_store(harness, store, "a", store_kv_dtype=kv_dtype)
    check(await run(harness, first, "computed"), model_dir, None)
    await stored_blocks(first, NUM_FULL_BLOCKS)
    second = await add_with_store(harness, store, "b", "prefill", store_kv_dtype=kv_dtype)
    decode = await harness.add("d", "decode")
    for name, tiers in (("loaded", {"dram": NUM_LOADED}), ("on the device", {})):
        heard = await run(harness, second, name, decode=decode)
        assert loaded(heard) == tiers
        check(heard, model_dir, kv_dtype)
    check(await run(harness, first, "again"), model_dir, None)
    await harness.quiet()


@pytest.mark.parametrize("kv_dtype", slow_but(["int8", "fp8"], "int8"))
@pytest.mark.parametrize("shapes", slow_but(["2x1 1x2", "1x2 1x1", "1x1 2x1"], "2x1 1x2"))
async def test_any_shape_finds_it_on_nvme_after_a_restart(
    stored: tuple[E2eHarness, StoreHarness],
    model_dir: Path,
    tmp_path: Path,
    kv_dtype: str,
    shapes: str,
) -> None:
    harness, store = stored
    nvme: dict[str, Any] = {
        "nvme_path": str(tmp_path / "nvme"),
        "nvme_bytes": 64 << 20,
        "segment_bytes": 4 << 20,
    }
    await store.start(**nvme)
    writer, reader = (SHAPES[shape] for shape in shapes.split())
    first = await add_with_store(harness, store, "a", parallel=writer, store_kv_dtype=kv_dtype)
    await run(harness, first, "computed")
    await stored_blocks(first, NUM_FULL_BLOCKS)
    num_records = (await store.stat("dram")).num_records
    await first.close()
    await harness.replicas.pop("a").core.stop()
    await store.stop()
    await store.start(**nvme)
    second = await add_with_store(harness, store, "b", parallel=reader, store_kv_dtype=kv_dtype)
    await store.until("nvme", lambda stat: stat.num_records == num_records, "its segments are read")
    heard = await run(harness, second, "loaded")
    assert loaded(heard) == {"nvme": NUM_LOADED}
    check(heard, model_dir, kv_dtype)
    await harness.quiet()


async def test_a_flipped_bit_is_computed_not_used(
    stored: tuple[E2eHarness, StoreHarness], model_dir: Path, tmp_path: Path
) -> None:
    harness, store = stored
    await store.start()
    rule = FaultRule("store.corrupt.put", "corrupt", str(tmp_path / "flip"), after=4)
    first = await add_with_store(harness, store, "a", store_kv_dtype="int8", faults=[rule])
    await run(harness, first, "computed")
    await stored_blocks(first, NUM_FULL_BLOCKS)
    second = await add_with_store(harness, store, "b", store_kv_dtype="int8")
    heard = await run(harness, second, "loaded")
    assert loaded(heard) == {"dram": 3 * BLOCK_TOKENS}
    check(heard, model_dir, "int8", 3 * BLOCK_TOKENS)
    await until(
        lambda: second.load is not None and second.load.num_store_checksum_failures == 1, "it is counted"
    )
    await harness.quiet()


@pytest.mark.slow
async def test_other_forms_are_not_found(stored: tuple[E2eHarness, StoreHarness], model_dir: Path) -> None:
    """KV that was quantized for the store, for the device, or not at all is three kinds of KV."""
    harness, store = stored
    await store.start()
    forms: dict[str, dict[str, Any]] = {
        "store": {"store_kv_dtype": "int8"},
        "device": {"engine": {"kv_dtype": "int8"}, "store_kv_dtype": "int8"},
        "none": {},
    }
    for number, (name, how) in enumerate(forms.items(), 1):
        replica = await add_with_store(harness, store, name, **how)
        heard = await run(harness, replica, name)
        assert not loaded(heard)
        await stored_blocks(replica, NUM_FULL_BLOCKS)
        num_records = (await store.stat("dram")).num_records
        assert num_records >= number * NUM_FULL_BLOCKS
    check(heard, model_dir, None)


@pytest.mark.slow
async def test_tiers_hold_twice_as_much(tmp_path: Path) -> None:
    """Of KV in bf16 with heads of 128, whole records counted."""
    keys: dict[str, Any] = {"head_dim": 128, "num_hidden_layers": 16, "dtype": "bfloat16"}
    write_random_checkpoint(tmp_path / "model", "llama", seed=3, **keys)
    harness = E2eHarness(tmp_path / "model")
    sizes = []
    for kv_dtype in ("auto", "int8"):
        async with StoreHarness(tmp_path, harness.trust) as store:
            await store.start()
            how: dict[str, Any] = {"dtype": "bfloat16", "store_kv_dtype": kv_dtype}
            replica = await add_with_store(harness, store, kv_dtype, **how)
            await run(harness, replica, kv_dtype)
            await stored_blocks(replica, NUM_FULL_BLOCKS)
            stat = await store.stat("dram")
            sizes.append(stat.num_bytes / stat.num_records - 4096)
            await replica.close()
            await harness.replicas.pop(kv_dtype).core.stop()
    assert sizes[0] == BLOCK_TOKENS * 16 * 2 * 2 * 128 * 2
    assert sizes[1] / sizes[0] <= 0.53


class Model(NamedTuple):
    """A family whose KV is not that of one kind of heads, its sizes, the parts of a vector that have a scale
    each, how replicas are started, and the shape of the one that reads."""

    family: str
    keys: dict[str, Any]
    parts: tuple[int, ...]
    how: dict[str, Any] = {}
    reader: Parallel = SHAPES["1x1"]


_SHAPE: dict[str, Any] = {
    "hidden_size": 96,
    "intermediate_size": 101,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "head_dim": 16,
    "num_hidden_layers": 3,
    "vocab_size": 251,
    "pad_token_id": 0,
}
_LATENTS = _SHAPE | CASES["deepseek_v2-1"] | {"num_attention_heads": 6, "vocab_size": 251}
MODELS = {
    "latents": Model("deepseek_v2", _LATENTS, (_LATENTS["kv_lora_rank"], _LATENTS["qk_rope_head_dim"])),
    # Cells have two heads of 16 or one of 24.
    "heads of two sizes": Model("gemma4_text", _SHAPE | GEMMA4_SHAPE, (8,) * 12, {"frees_windows": True}),
    # The first stage has no attention, the second no state.
    "states": Model("qwen3_next", {}, (16,), {}, Parallel(pp=3, devices=("cpu",) * 3, layers=(2, 1, 1))),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
async def test_every_form_of_kv_is_kept_so(name: str, tmp_path: Path) -> None:
    model, folder = MODELS[name], tmp_path / "model"
    if name == "states":
        write_state_checkpoint(folder, model.family)
    else:
        write_family_checkpoint(folder, seed=7, **{"family": model.family, **model.keys})
    form = ScaledParts.in_store(read_model_config(folder), "int8", "auto")
    assert form == ScaledParts("int8", model.parts)
    harness = E2eHarness(folder)
    async with StoreHarness(tmp_path, harness.trust) as store, harness:
        await store.start()
        how = {"store_kv_dtype": "int8", **model.how}
        first = await add_with_store(harness, store, "a", parallel=Parallel(tp=2), **how)
        await run(harness, first, "computed")
        await stored_blocks(first, NUM_FULL_BLOCKS)
        second = await add_with_store(harness, store, "b", parallel=model.reader, **how)
        heard = await run(harness, second, "loaded")
        assert loaded(heard) == {"dram": NUM_LOADED}
        check(heard, folder, "int8", NUM_LOADED, *model.parts)
        await harness.quiet()
