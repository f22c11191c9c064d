"""A long run of a model with states amid drawn faults: every request ends once, with the tokens of the
reference, and nothing stays in use."""

from __future__ import annotations

from pathlib import Path

import pytest
from e2e_harness import E2eHarness, prompt, until
from paged_model import greedy_tokens, reference_of
from state_chaos import SAMPLED, Chaos, Question, nothing_is_left, under_way
from state_families import write_state_checkpoint
from store_harness import StoreHarness

pytestmark = pytest.mark.slow

NUM_TOKENS = 50
NUM_PROMPTS = 10
NUM_CLIENTS = 8
NUM_REQUESTS = 10
NUM_FAULTS = 6
# So little that most of what is stored is evicted.
DRAM_BYTES = 1 << 20


async def questions_of(harness: E2eHarness, model_dir: Path, seed: int) -> list[Question]:
    """Draw prompts that share prefixes. The greedy answers are those of `transformers`, the others those of a
    replica that computes one request at a time."""
    reference = reference_of(model_dir)
    reference.generation_config.eos_token_id = None
    calm = await harness.add("calm")
    bases = [prompt(1000 * seed + number, 130) for number in range(3)]
    found: list[Question] = []
    for number in range(NUM_PROMPTS):
        shared = bases[number % 3][: 20 + 11 * number]
        tokens = [*shared, *prompt(1000 * seed + 500 + number, 3 + 5 * (number % 4))]
        sampled = []
        for sample in range(3):
            asked = harness.submission(
                f"calm {number} {sample}", tokens, seed=7 + sample, max_tokens=NUM_TOKENS, **SAMPLED
            )
            sampled.append((await harness.run(calm, asked)).sequence())
        found.append(Question(tokens, greedy_tokens(reference, tokens, NUM_TOKENS), sampled))
    await calm.core.stop()
    await calm.close()
    del harness.replicas["calm"]
    return found


@pytest.mark.parametrize("seed", [1, 2, 3])
@pytest.mark.parametrize("family", ["qwen3_next"])
async def test_every_request_ends_right_whatever_breaks(family: str, seed: int, tmp_path: Path) -> None:
    print(f"seed {seed}")
    model_dir = tmp_path / "model"
    write_state_checkpoint(model_dir, family)
    harness = E2eHarness(model_dir)
    async with StoreHarness(tmp_path, harness.trust, dram_bytes=DRAM_BYTES) as store, harness:
        await store.start()
        questions = await questions_of(harness, model_dir, seed)
        chaos = Chaos(harness, store.settings.name, seed, tmp_path, NUM_FAULTS)
        await chaos.start()
        await chaos.run(questions, NUM_CLIENTS, NUM_REQUESTS)
        print(chaos.counts, f"{chaos.num_replaced} replaced, {chaos.num_preemptions()} preemptions")
        chaos.check_ends()
        await chaos.heal()
        try:
            await harness.quiet()
        except AssertionError:
            print({name: under_way(replica) for name, replica in harness.replicas.items()})
            raise
        for name, replica in harness.replicas.items():
            await until(nothing_is_left(replica), f"no state of {name} is in use")
        await store.check_nothing_leaked()
