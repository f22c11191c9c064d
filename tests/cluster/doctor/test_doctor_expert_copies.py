"""`engine.expert_copies`: refused by name where ranks cannot have copies, and counted in their memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from doctor_harness import TINY, FakeMachine, config_of, context_of, only

from benchmarks.random_checkpoint import write_random_checkpoint
from cluster.config import ClusterConfig, PoolConfig
from cluster.doctor import model
from cluster.doctor.checks import Severity
from cluster.errors import ConfigError
from cluster.serve.resource_needs import needs_of
from workers.model.model_config import read_model_config

NUM_EXPERTS, NUM_LAYERS = 8, 2


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    write_random_checkpoint(
        path,
        "qwen3_moe",
        seed=1,
        tokenizer_from=TINY,
        num_hidden_layers=NUM_LAYERS,
        num_experts=NUM_EXPERTS,
        num_experts_per_tok=2,
        moe_intermediate_size=512,
    )
    return path


def config_with(folder: Path, copies: Any, **fields: Any) -> ClusterConfig:
    engine = {"expert_copies": copies, "kv_tokens": 4096, **fields.pop("engine", {})}
    pool = {"name": "moe", "role": "both", "dtype": "fp32", "tp": 2, "ep": 2, "engine": engine, **fields}
    return config_of(folder, [pool], store={"dram_gb": 0})


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        (
            {"ep": 1},
            "expert_copies 2: with ep 1 every rank has a part of every expert; set 0, or an ep above 1",
        ),
        ({"tp": 1, "ep": 1}, "expert_copies 2: with ep 1 .*; set 0, or an ep above 1"),
        ({"engine": {"deterministic": True}}, "expert_copies 2: .*; set 0, or deterministic: false"),
        (
            {"engine": {"expert_copies": 5}},
            "expert_copies 5: at most 4 of a layer's 8 experts are at other ranks; set at most 4",
        ),
    ],
)
def test_copies_that_cannot_be_are_refused_with_pool_and_setting(
    folder: Path, fields: dict[str, Any], problem: str
) -> None:
    config = config_with(folder, 2, **fields)
    with pytest.raises(ConfigError, match=rf"^pool moe: engine\.{problem}"):
        config.pools[0].check_model(read_model_config(folder))
    result = only(model.split, context_of(FakeMachine(folder / "machine").view(), config))
    assert result.severity is Severity.ERROR
    assert "engine.expert_copies" in result.seen
    config_with(folder, 4).pools[0].check_model(read_model_config(folder))
    config_with(folder, 0, **fields | {"engine": {"expert_copies": 0}}).pools[0].check_model(
        read_model_config(folder)
    )


def test_a_model_without_experts_and_numbers_that_are_none_are_refused(folder: Path) -> None:
    (pool,) = config_with(folder, 2, ep=1).pools
    with pytest.raises(ConfigError, match=r"engine\.expert_copies 2: the model has no experts; set 0"):
        pool.check_model(read_model_config(TINY))
    for wrong, problem in ((-1, "must be at least 0, not -1"), (0.5, "must be a whole number")):
        with pytest.raises(ConfigError, match=rf"pools\[0\]\.engine\.expert_copies: {problem}"):
            config_with(folder, wrong)
    assert PoolConfig(name="moe", role="both").engine.expert_copies == 0


@pytest.mark.parametrize(("tp", "ep", "num_sharing"), [(2, 2, 1), (4, 2, 2)])
def test_slots_are_counted_as_weights_of_each_rank(folder: Path, tp: int, ep: int, num_sharing: int) -> None:
    """A rank that shares experts has a part of each copy."""
    mixture = read_model_config(folder).mixture
    assert mixture is not None
    expert_bytes = 4 * NUM_LAYERS * mixture.weights_of_expert(read_model_config(folder).hidden_size)
    without, copies = (needs_of(config_with(folder, count, tp=tp, ep=ep)).pools[0].ranks for count in (0, 3))
    for before, after in zip(without, copies, strict=True):
        assert after.weight_bytes - before.weight_bytes == 3 * expert_bytes // num_sharing
        assert after.activation_bytes >= before.activation_bytes
