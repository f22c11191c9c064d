"""What a plan says that devices hold, against ranks that are started."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pytest
from doctor_harness import FakeMachine

from benchmarks.random_checkpoint import write_random_checkpoint
from benchmarks.rank_memory import Resident
from benchmarks.rank_process import RankProcess
from cluster.config import parse_config
from cluster.planning.device_profile import DeviceProfile, device_profile
from cluster.planning.device_split import DeviceSplit, HeldMemory, held_memory, pool_keys, with_engine
from cluster.planning.planned_model import planned_model
from cluster.serve.auto_kv import planned_needs
from workers.model.rank_memory import GROUP_BYTES

_SIZES: dict[str, Any] = {
    "hidden_size": 512,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "vocab_size": 8192,
    "max_position_embeddings": 131072,
}
NAME_TO_FAMILY: dict[str, tuple[str, dict[str, Any]]] = {
    "dense": ("qwen3", {"intermediate_size": 8192, "tie_word_embeddings": True}),
    "experts": (
        "qwen3_moe",
        {
            "intermediate_size": 1024,
            "num_experts": 16,
            "num_experts_per_tok": 4,
            "moe_intermediate_size": 512,
        },
    ),
    "latent": (
        "deepseek_v3",
        {
            "intermediate_size": 2048,
            "moe_intermediate_size": 512,
            "n_routed_experts": 16,
            "n_shared_experts": 1,
            "num_experts_per_tok": 2,
            "n_group": 2,
            "topk_group": 1,
            "first_k_dense_replace": 1,
            "q_lora_rank": 256,
            "kv_lora_rank": 256,
            "qk_nope_head_dim": 64,
            "qk_rope_head_dim": 32,
            "v_head_dim": 64,
        },
    ),
    "states": (
        "qwen3_5_text",
        {
            "intermediate_size": 6144,
            "linear_num_key_heads": 8,
            "linear_num_value_heads": 8,
            "linear_key_head_dim": 64,
            "linear_value_head_dim": 64,
        },
    ),
}
NUM_SEQUENCES = 8
# Enough for the weights, and for some hundred MB of KV.
SERVER = DeviceProfile("server", 2.0, read_gb_s=20, bf16_tflop_s=1, kind="cpu", devices_per_node=8, step_us=0)


class Started(NamedTuple):
    """A rank that was started with the KV of the plan: what the plan says, the rank's own memory, the
    mappings of its pools, and the blocks that it reports."""

    held: HeldMemory
    own_bytes: int
    pool_bytes: int
    num_blocks: int


def pool_bytes(process_id: int) -> int:
    """Return the sizes of the mappings of KV of a process."""
    total = 0
    for line in Path(f"/proc/{process_id}/maps").read_text().splitlines():
        if "memfd:tandem-kv" in line:
            first, _, end = line.partition(" ")[0].partition("-")
            total += int(end, 16) - int(first, 16)
    return total


def started(folder: Path, family: str, keys: dict[str, Any], num_layers: int) -> Started:
    folder.mkdir()
    sizes = {**_SIZES, **keys, "num_hidden_layers": num_layers}
    write_random_checkpoint(folder, family, seed=1, dtype="bfloat16", **sizes)
    held = held_memory(planned_model(str(folder), "auto", "auto"), SERVER, DeviceSplit(1), NUM_SEQUENCES)
    assert held is not None
    settings: dict[str, Any] = {
        "num_kv_tokens": held.kv_tokens,
        "max_sequences": NUM_SEQUENCES,
        "frees_windows": True,
        "num_threads": 1,
    }
    with RankProcess(folder, "bfloat16", **settings) as rank:
        process_id = rank.process.pid
        return Started(held, Resident.of(process_id).own, pool_bytes(process_id), rank.ready.num_blocks)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("name", NAME_TO_FAMILY)
def test_a_started_rank_holds_what_was_planned(tmp_path: Path, name: str) -> None:
    """Weights by what more layers take, since torch and kernels are in every rank."""
    family, keys = NAME_TO_FAMILY[name]
    few, many = (started(tmp_path / str(num), family, keys, num) for num in (4, 16))
    for rank in (few, many):
        assert rank.num_blocks * 64 == rank.held.kv_tokens
        of_plan = rank.held.kv_tokens * rank.held.token_bytes
        assert of_plan == pytest.approx(rank.held.kv_bytes, rel=0.02)
        assert rank.pool_bytes - of_plan == pytest.approx(rank.held.staging, abs=4 << 20)
        assert rank.pool_bytes == pytest.approx(of_plan + rank.held.staging, rel=0.05)
    weights = many.held.weights - few.held.weights
    assert weights > 200 << 20, "what allocators keep besides, some MB, would matter"
    assert many.own_bytes - few.own_bytes == pytest.approx(weights, rel=0.05)


@pytest.mark.parametrize("num_sockets", [1, 2, 4])
def test_the_start_on_cpus_decides_as_planned(tmp_path: Path, num_sockets: int) -> None:
    """With a replica on each socket of a machine of this memory."""
    sizes: dict[str, Any] = {**_SIZES, "intermediate_size": 1024, "num_hidden_layers": 4}
    write_random_checkpoint(tmp_path / "model", "qwen3", seed=1, dtype="bfloat16", **sizes)
    model, profile = (
        planned_model(str(tmp_path / "model"), "auto", "auto"),
        msgspec.structs.replace(SERVER, memory_gb=16.0, devices_per_node=num_sockets),
    )
    held = held_memory(model, profile, DeviceSplit(1), 64)
    assert held is not None
    keys = with_engine(pool_keys(model, profile, DeviceSplit(1), "both"), max_sequences=64)
    config = parse_config(
        {"model": model.source, "pools": [{**keys, "replicas": num_sockets, "surge": False}]}, "cluster.yaml"
    )
    memory = f"MemTotal: {num_sockets * 15_625_000} kB\nMemAvailable: {num_sockets * 15_625_000} kB\n"
    machine = FakeMachine(tmp_path, {"proc/meminfo": memory}).view()
    decided = planned_needs(config, machine, is_running=True).pools[0]
    assert held.kv_tokens == pytest.approx(decided.kv_tokens, rel=0.02)


def test_each_part_is_counted_on_a_gpu() -> None:
    model = planned_model("llama-3.1-8b", "auto", "auto")
    one, two = (held_memory(model, device_profile("H100"), DeviceSplit(tp), 64) for tp in (1, 2))
    assert one is not None
    assert two is not None
    # Batches of transfers, paths that are measured, and 11 graphs of 32 layers; several ranks have buffers
    # for their sums.
    graphs = 11 * 32 * (128 << 10)
    assert one.staging == (256 << 20) + (64 << 20) + graphs
    assert two.staging == (256 << 20) + (64 << 20) + graphs + GROUP_BYTES
    for held in (one, two):
        parts = held.weights + held.activations + held.staging + held.context + held.kv_bytes
        assert parts == pytest.approx(0.9 * 80e9)
    assert two.kv_tokens > 2.2 * one.kv_tokens
