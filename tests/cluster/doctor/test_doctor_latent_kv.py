"""`engine.latent_kv`: refused where ranks cannot divide latents, recommended where they can, free to change,
and counted in memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from doctor_harness import FakeMachine, config_of, context_of, only

from benchmarks.random_checkpoint import write_random_checkpoint
from cluster.config import ClusterConfig
from cluster.doctor import model
from cluster.doctor.checks import CheckResult, Severity
from cluster.errors import ConfigError
from cluster.serve.resource_needs import needs_of
from cluster.serve.rollout import check_update
from cluster.stores import smallest_record_bytes
from kvtransfer.store.record import HEADER_BYTES
from workers.model.model_config import read_model_config

LATENTS: dict[str, Any] = {
    "q_lora_rank": None,
    "kv_lora_rank": 26,
    "qk_nope_head_dim": 10,
    "qk_rope_head_dim": 6,
    "v_head_dim": 9,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 37,
    "first_k_dense_replace": 1,
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_random_checkpoint(tmp_path / "model", "deepseek_v2", seed=1, **LATENTS)
    return tmp_path / "model"


def config_with(folder: Path, latent_kv: str, *, tp: int = 2, **more: Any) -> ClusterConfig:
    engine = {"latent_kv": latent_kv, "kv_tokens": 4096, "block_tokens": 32, **more}
    pools = [{"name": "one", "role": "both", "dtype": "bf16", "tp": tp, "engine": engine}]
    return config_of(folder, pools, store={"dram_gb": 0})


def results(tmp_path: Path, config: ClusterConfig) -> CheckResult:
    return only(model.split, context_of(FakeMachine(tmp_path / "machine").view(), config))


def test_it_is_refused_where_nothing_is_divided(tmp_path: Path) -> None:
    write_random_checkpoint(tmp_path / "llama", "llama", seed=1)
    config = config_with(tmp_path / "llama", "split")
    with pytest.raises(ConfigError, match=r"^pool one: engine\.latent_kv split: .*set replicated$"):
        config.pools[0].check_model(read_model_config(tmp_path / "llama"))
    found = results(tmp_path, config)
    assert (found.severity, "engine.latent_kv" in found.seen) == (Severity.ERROR, True)


def test_it_is_recommended_where_ranks_hold_copies(tmp_path: Path, folder: Path) -> None:
    long = {"kv_tokens": 163840}
    found = results(tmp_path, config_with(folder, "replicated", **long))
    assert (found.severity, found.remedy.split(",")[0]) == (Severity.NOTE, "engine.latent_kv: split")
    assert results(tmp_path, config_with(folder, "replicated", deterministic=True, **long)).remedy == ""
    assert results(tmp_path, config_with(folder, "split", **long)).severity is Severity.OK
    found = results(tmp_path, config_with(folder, "split", tp=4, **long))
    assert (found.severity, found.remedy) == (Severity.WARNING, "engine.block_tokens: 64, in all pools")


def test_an_update_may_change_it(folder: Path) -> None:
    check_update(config_with(folder, "replicated"), config_with(folder, "split"))


@pytest.mark.parametrize("tp", [2, 4])
def test_it_divides_kv_in_memory_and_in_the_store(folder: Path, tp: int) -> None:
    num_tokens = 1 << 23
    configs = [config_with(folder, it, tp=tp, kv_tokens=num_tokens) for it in ("split", "replicated")]
    divided, copied = (needs_of(config).pools[0].ranks for config in configs)
    whole_bytes = 32 * 3 * 32 * 2
    assert [it.block_bytes.block_bytes for it in copied] == [[whole_bytes]] * tp
    assert [it.block_bytes.block_bytes for it in divided] == [[whole_bytes // tp]] * tp
    # Memory is taken in huge pages.
    wanted = pytest.approx(num_tokens * 3 * 32 * 2 / tp, rel=0.05)
    assert all(it.kv_bytes == wanted for it in divided)
    records = [smallest_record_bytes(config.pools, folder) for config in configs]
    assert records == [HEADER_BYTES + whole_bytes // tp, HEADER_BYTES + whole_bytes]
