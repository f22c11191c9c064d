"""An engine whose ranks divide latents by tokens: the tokens of one rank, with prefixes that are cached and
sequences that are preempted; and a request that fails at one rank fails alone. The ranks are threads."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from local_engine import BLOCK, SEEDED, LocalEngine, draw, packed, submitted
from msgspec.structs import replace

from benchmarks.random_checkpoint import write_random_checkpoint
from kvtransfer.common.faults import FaultRule, Faults
from workers.config import EngineConfig
from workers.messages.link import Submission

WHOLE = EngineConfig(block_tokens=BLOCK, max_batch_tokens=256, chunk_tokens=60, max_sequences=8)
SPLIT = WHOLE.model_copy(update={"latent_kv": "split"})
LATENTS: dict[str, Any] = {
    "q_lora_rank": None,
    "kv_lora_rank": 26,
    "qk_nope_head_dim": 10,
    "qk_rope_head_dim": 6,
    "v_head_dim": 9,
    "num_attention_heads": 3,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 37,
    "first_k_dense_replace": 1,
    "num_hidden_layers": 2,
}
# Space for all at once, and less, so that some are preempted.
MANY, FEW = 80, 26
POISON = "poison"
POISON_SLOT = 1


def ask(name: str, num_prompt: int, *, n: int = 1, shared: int = 0) -> Submission:
    """Ask with a prompt whose first `shared` tokens are those of all others."""
    prompt = [*draw(shared, seed=1), *draw(num_prompt - shared, seed=num_prompt)]
    sampling = replace(SEEDED, max_tokens=20, ignore_eos=True)
    return submitted(name, packed(prompt), sampling, n=n)


REQUESTS = (
    ask("first", 20),
    ask(POISON, 130),
    ask("two", 50, n=2),
    ask("long", 150, shared=64),
    ask("behind", 130, shared=64),
    ask("short", 3),
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    write_random_checkpoint(path, "deepseek_v2", seed=3, **LATENTS)
    return path


@pytest.fixture(scope="module")
def expected(folder: Path) -> Iterator[dict[tuple[str, int], bytes]]:
    """The tokens of one rank."""
    engine = LocalEngine(folder, WHOLE, MANY)
    yield engine.run(REQUESTS)
    engine.close()


def run(engine: LocalEngine) -> dict[tuple[str, int], bytes]:
    outputs = engine.run(REQUESTS)
    assert engine.pool.num_referenced == 0
    engine.close()
    return outputs


@pytest.mark.parametrize("host_id", ["here", pytest.param("", marks=pytest.mark.slow)])
@pytest.mark.parametrize("num_blocks", [pytest.param(MANY, marks=pytest.mark.slow), FEW])
def test_divided_latents_give_the_tokens_of_one_rank(
    folder: Path, expected: dict[tuple[str, int], bytes], host_id: str, num_blocks: int
) -> None:
    engine = LocalEngine(folder, SPLIT, num_blocks, tp=2, host_id=host_id)
    block_bytes = [runner.layouts[0].block_bytes for runner in engine.runners]
    assert block_bytes == [BLOCK // 2 * 2 * 32 * 4] * 2
    assert run(engine) == expected
    assert not engine.failures


@pytest.mark.parametrize(("rank", "kind", "after"), [(1, "prefill", 9), (0, "decode", 40)])
def test_a_request_that_fails_at_one_rank_fails_alone(
    folder: Path, expected: dict[tuple[str, int], bytes], rank: int, kind: str, after: int, tmp_path: Path
) -> None:
    """From the middle of a layer on, between the exchanges of its attention."""
    point = f"rank.layers.{kind}.{rank}.{POISON_SLOT}"
    failing = Faults([FaultRule(point, "raise", str(tmp_path / "marker"), after, 1 << 30)])
    faults = [failing if rank == it else Faults() for it in range(2)]
    engine = LocalEngine(folder, SPLIT, MANY, tp=2, host_id="here", faults=faults)
    outputs = run(engine)
    assert (tmp_path / "marker").exists()
    assert set(engine.failures) == {POISON}
    for name, tokens in expected.items():
        assert name[0] == POISON or outputs[name] == tokens
