"""`engine.expert_offload`: refused by name where it cannot be, and counted in the memory of both sides."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from doctor_harness import TINY, FakeMachine, config_of, context_of, only

from benchmarks.random_checkpoint import write_random_checkpoint
from cluster.config import ClusterConfig, PoolConfig
from cluster.doctor import limits, model
from cluster.doctor.checks import Severity
from cluster.errors import ConfigError
from cluster.serve.container_memory import check_container_memory, host_parts
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


def config_with(folder: Path, offload: Any, **fields: Any) -> ClusterConfig:
    engine = {"expert_offload": offload, "kv_tokens": 4096, **fields.pop("engine", {})}
    pool = {"name": "moe", "role": "both", "device": "cuda", "dtype": "fp32", "engine": engine, **fields}
    return config_of(folder, [pool], store={"dram_gb": 0})


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"device": "cpu"}, "expert_offload 4: on device cpu all experts are in host memory already; set 0"),
        ({"tp": 2}, "expert_offload 4: ranks that share layers .* tp is 2; set 0, or tp: 1"),
        ({"engine": {"deterministic": True}}, "expert_offload 4: .*; set 0, or deterministic: false"),
        ({"engine": {"expert_offload": 9}}, "expert_offload 9: a layer has 8 experts; set at most 8"),
    ],
)
def test_an_offload_that_cannot_be_is_refused_with_pool_and_setting(
    folder: Path, fields: dict[str, Any], problem: str
) -> None:
    config = config_with(folder, 4, **fields)
    with pytest.raises(ConfigError, match=rf"^pool moe: engine\.{problem}"):
        config.pools[0].check_model(read_model_config(folder))
    result = only(model.split, context_of(FakeMachine(folder / "machine").view(), config))
    assert result.severity is Severity.ERROR
    assert "engine.expert_offload" in result.seen


def test_a_model_without_experts_and_numbers_that_are_none_are_refused(folder: Path) -> None:
    (pool,) = config_with(folder, 4).pools
    with pytest.raises(ConfigError, match=r"engine\.expert_offload 4: the model has no experts; set 0"):
        pool.check_model(read_model_config(TINY))
    for wrong, problem in ((-1, "must be at least 0, not -1"), (0.5, "must be a whole number")):
        with pytest.raises(ConfigError, match=rf"pools\[0\]\.engine\.expert_offload: {problem}"):
            config_with(folder, wrong)
    assert PoolConfig(name="moe", role="both").engine.expert_offload == 0


def test_experts_are_counted_on_the_device_and_in_host_memory(folder: Path, tmp_path: Path) -> None:
    mixture = read_model_config(folder).mixture
    assert mixture is not None
    expert_bytes = 4 * NUM_LAYERS * mixture.weights_of_expert(read_model_config(folder).hidden_size)
    whole, split = (needs_of(config_with(folder, offload)).pools[0].ranks[0] for offload in (0, 5))
    assert whole.weight_bytes - split.weight_bytes == 5 * expert_bytes
    assert (whole.expert_bytes, split.expert_bytes) == (0, NUM_EXPERTS * expert_bytes)
    assert split.host_bytes - whole.host_bytes == NUM_EXPERTS * expert_bytes
    assert split.device_bytes < whole.device_bytes
    config = config_with(folder, 5)
    (need,) = needs_of(config).pools
    assert host_parts(need.ranks, 0)["engine.expert_offload"] == NUM_EXPERTS * expert_bytes
    limit = {"sys/fs/cgroup/memory.max": f"{need.replica_bytes - 1}\n"}
    with pytest.raises(ConfigError, match=r"engine\.expert_offload [0-9.]+ MB"):
        check_container_memory(config, "moe", FakeMachine(tmp_path / "container", limit).view())
    machine = FakeMachine(tmp_path / "machine").view()
    assert "experts in host memory" in only(limits.memory, context_of(machine, config)).seen
    plain = only(limits.memory, context_of(machine, config_with(folder, 0)))
    assert "experts in host memory" not in plain.seen


def test_a_model_with_experts_that_is_too_large_for_a_gpu_has_this_remedy(
    folder: Path, tmp_path: Path
) -> None:
    question = "nvidia-smi --query-gpu=memory.total "
    machine = FakeMachine(tmp_path, commands={question: "256\n"}).view()
    result = only(limits.device_memory, context_of(machine, config_with(folder, 0)))
    assert result.severity is Severity.ERROR
    assert "engine.expert_offload" in result.remedy
    dense = config_of(pools=[{"name": "d", "role": "both", "device": "cuda", "engine": {"kv_tokens": 4096}}])
    assert "expert_offload" not in only(limits.device_memory, context_of(machine, dense)).remedy
