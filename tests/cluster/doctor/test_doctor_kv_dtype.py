"""`engine.kv_dtype`: refused where KV cannot be kept so, equal in all pools, and counted in memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from doctor_harness import FakeMachine, config_of, context_of, only

from benchmarks.random_checkpoint import write_random_checkpoint
from cluster.config import ClusterConfig
from cluster.doctor import model
from cluster.doctor.checks import Severity
from cluster.errors import ConfigError
from cluster.serve.resource_needs import needs_of
from cluster.serve.rollout import check_update
from cluster.stores import smallest_record_bytes
from kvtransfer.store.record import HEADER_BYTES
from workers.model.model_config import read_model_config

LATENTS: dict[str, Any] = {
    "q_lora_rank": None,
    "kv_lora_rank": 22,
    "qk_nope_head_dim": 10,
    "qk_rope_head_dim": 6,
    "v_head_dim": 9,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 37,
    "first_k_dense_replace": 1,
}

HEADS_OF_TWO_SIZES: dict[str, Any] = {
    "sliding_window": 40,
    "global_head_dim": 48,
    "attention_k_eq_v": True,
    "num_global_key_value_heads": 1,
    "hidden_size_per_layer_input": 7,
    "vocab_size_per_layer_input": 256,
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    sizes: dict[str, Any] = {
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 128,
    }
    write_random_checkpoint(tmp_path / "model", "llama", seed=1, **sizes)
    return tmp_path / "model"


def config_with(folder: Path, kv_dtype: str, **more: Any) -> ClusterConfig:
    engine = {"kv_dtype": kv_dtype, "kv_tokens": 4096, "block_tokens": 32, **more}
    pools = [{"name": "one", "role": "both", "dtype": "bf16", "engine": engine}]
    return config_of(folder, pools, store={"dram_gb": 0})


def test_a_model_whose_kv_is_of_another_form_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "other"
    write_random_checkpoint(folder, "gemma4_text", seed=1, **HEADS_OF_TWO_SIZES)
    config, problem = config_with(folder, "int8"), "the model's layers have heads of several sizes"
    with pytest.raises(ConfigError, match=rf"^pool one: engine\.kv_dtype int8: {problem}.*set auto$"):
        config.pools[0].check_model(read_model_config(folder))
    result = only(model.split, context_of(FakeMachine(tmp_path / "machine").view(), config))
    assert (result.severity, "engine.kv_dtype" in result.seen) == (Severity.ERROR, True)
    config_with(folder, "auto").pools[0].check_model(read_model_config(folder))


def test_a_latent_has_two_scales(tmp_path: Path) -> None:
    folder = tmp_path / "latents"
    write_random_checkpoint(folder, "deepseek_v2", seed=1, num_hidden_layers=3, **LATENTS)
    config = config_with(folder, "int8")
    config.pools[0].check_model(read_model_config(folder))
    (block_bytes,) = needs_of(config).pools[0].ranks[0].block_bytes.block_bytes
    assert block_bytes == 32 * 3 * (22 + 6 + 2 * 4)
    assert smallest_record_bytes(config.pools, folder) == HEADER_BYTES + block_bytes


def test_unknown_and_unequal_dtypes_are_refused(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"pools\[0\]\.engine\.kv_dtype: .*'auto', 'int8' or 'fp8'"):
        config_with(folder, "int4")
    pools = [
        {"name": role, "role": role, "engine": {"kv_dtype": kv_dtype}}
        for role, kv_dtype in (("prefill", "int8"), ("decode", "auto"))
    ]
    with pytest.raises(ConfigError, match=r"engine\.kv_dtype must be equal in all pools.*'auto', 'int8'"):
        config_of(folder, pools)


def test_an_update_cannot_change_it(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"^pools: kv_dtype is auto now, the file says fp8: .* exchange KV"):
        check_update(config_with(folder, "auto"), config_with(folder, "fp8"))


@pytest.mark.parametrize("kv_dtype", ["int8", "fp8"])
def test_it_halves_kv_in_memory_and_in_the_store(folder: Path, kv_dtype: str) -> None:
    configs = [config_with(folder, it, offload_tokens=640) for it in (kv_dtype, "auto")]
    small, whole = (needs_of(config).pools[0].ranks[0] for config in configs)
    (small_bytes,), (whole_bytes,) = small.block_bytes.block_bytes, whole.block_bytes.block_bytes
    assert small_bytes == 32 * 2 * 3 * 2 * (128 + 4)
    assert small_bytes / whole_bytes == pytest.approx(0.516, abs=1e-3)
    assert small.offload_bytes == 640 // 32 * small_bytes
    assert small.weight_bytes == whole.weight_bytes
    record_bytes = smallest_record_bytes(configs[0].pools, folder)
    assert record_bytes == HEADER_BYTES + small_bytes
