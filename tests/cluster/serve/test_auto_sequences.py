"""`max_sequences: auto`: what it is by devices and model, and that all that is computed from it agrees."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from doctor_harness import TINY, FakeMachine, config_of
from state_families import STATE_FAMILIES, write_state_checkpoint

from benchmarks.random_checkpoint import write_random_checkpoint
from cluster.config import ClusterConfig
from cluster.serve.auto_kv import engine_config, planned_needs
from cluster.serve.resource_needs import needs_of
from kvtransfer.config import TransferConfig
from kvtransfer.messages import ReplicaIdentity
from kvtransfer.rpc.trust import TrustFiles
from workers.config import EngineConfig
from workers.model.kv_form import KvForm
from workers.model.kv_groups import StateCapacity, group_limits, kv_groups
from workers.model.model_config import read_model_config
from workers.rank.runner_settings import RankCapacity
from workers.replica.partition import ReplicaSpec, Shape

# A window of one of three layers, far shorter than the context of 2,048 tokens.
_WINDOWS: dict[str, Any] = {
    "num_hidden_layers": 3,
    "sliding_window": 100,
    "layer_types": ["sliding_attention", "full_attention", "full_attention"],
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    path = tmp_path_factory.mktemp("models")
    for family in STATE_FAMILIES:
        write_state_checkpoint(path / family, family)
    write_random_checkpoint(path / "windows", "gemma3_text", seed=1, **_WINDOWS)
    return {"alike": TINY, **{folder.name: folder for folder in path.iterdir()}}


def config(
    model: Path, dram_gb: float = 1.0, *, engine: Mapping[str, Any] = {}, **pool: Any
) -> ClusterConfig:
    """Return a configuration with one pool, on a GPU where `pool` says nothing else."""
    fields = {"name": "both", "role": "both", "device": "cuda", **pool}
    return config_of(model, [{**fields, "engine": dict(engine)}], store={"dram_gb": dram_gb})


def decided(given: ClusterConfig, folder: Path) -> EngineConfig:
    """Return the engine that starts on a machine with 64 GB."""
    memory = "MemTotal: 64000000 kB\nMemAvailable: 64000000 kB\n"
    return engine_config(given, "both", FakeMachine(folder, {"proc/meminfo": memory}).view())


@pytest.mark.parametrize(
    ("model", "dram_gb", "pool", "expected"),
    [
        ("alike", 1.0, {"device": "cpu"}, 64),
        ("alike", 1.0, {}, 256),
        ("alike", 1.0, {"pp": 2}, 256),
        ("alike", 1.0, {"pp": 2, "devices": ["cuda", "cpu"]}, 64),
        *((family, dram_gb, {}, 64) for family in STATE_FAMILIES for dram_gb in (0.0, 1.0)),
        ("qwen3_next", 1.0, {"device": "cpu"}, 64),
        # Beside a store, pools on GPUs keep all tokens in all layers.
        ("windows", 1.0, {}, 256),
        ("windows", 0.0, {}, 64),
        ("windows", 0.0, {"device": "cpu"}, 64),
    ],
)
@pytest.mark.parametrize("kv_tokens", ["auto", 4096])
def test_the_decision_follows_devices_and_model(
    folders: dict[str, Path],
    tmp_path: Path,
    model: str,
    dram_gb: float,
    pool: dict[str, Any],
    expected: int,
    kv_tokens: int | str,
) -> None:
    given = config(folders[model], dram_gb, engine={"kv_tokens": kv_tokens}, **pool)
    assert decided(given, tmp_path).max_sequences == expected
    assert needs_of(given).of("both").max_sequences == expected


@pytest.mark.parametrize("model", ["alike", "qwen3_next", "windows"])
@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("number", [1, 65, 1000])
def test_a_number_is_kept(
    folders: dict[str, Path], tmp_path: Path, model: str, device: str, number: int
) -> None:
    given = config(folders[model], 0.0, engine={"max_sequences": number}, device=device)
    assert decided(given, tmp_path).max_sequences == number
    assert needs_of(given).of("both").max_sequences == number


def test_kv_is_limited_by_the_contexts_of_so_many(folders: dict[str, Path], tmp_path: Path) -> None:
    context_tokens = read_model_config(folders["alike"]).max_context_tokens
    assert decided(config(folders["alike"]), tmp_path).kv_tokens == 256 * context_tokens
    on_cpu = config(folders["alike"], device="cpu")
    memory = "MemTotal: 64000000 kB\nMemAvailable: 64000000 kB\n"
    need = planned_needs(on_cpu, FakeMachine(tmp_path, {"proc/meminfo": memory}).view()).of("both")
    assert need.kv_tokens == decided(on_cpu, tmp_path).kv_tokens == 64 * context_tokens


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("model", ["alike", "qwen3_next", "lfm2", "windows"])
def test_the_estimate_and_the_ranks_that_start_agree(
    folders: dict[str, Path], tmp_path: Path, model: str, device: str
) -> None:
    """What is counted of a pool is what it would be with the number that its engine got, and the ranks of
    that engine have as many blocks for groups of layers as were counted."""
    given = config(folders[model], 0.0, device=device)
    engine, need = decided(given, tmp_path), needs_of(given).of("both")
    named = config(folders[model], 0.0, device=device, engine={"max_sequences": engine.max_sequences})
    assert needs_of(named).of("both") == need
    spec = ReplicaSpec(
        identity=ReplicaIdentity("both", 1),
        pool="both",
        role="both",
        model_dir=str(folders[model]),
        dtype="fp32",
        parallel=given.pools[0].parallel,
        engine=engine,
        transfer=TransferConfig(),
        trust=TrustFiles("secret"),
        frees_windows=given.frees_windows,
    )
    (rank,) = Shape(spec).specs
    capacity, shape = RankCapacity.of(rank), read_model_config(folders[model])
    assert capacity.max_sequences == need.max_sequences
    limits = group_limits(
        shape,
        kv_groups(shape),
        KvForm.of("auto", 4, len(shape.kv_cells.parts)),
        capacity.windows,
        capacity.states or StateCapacity(0),
        engine.block_tokens,
    )
    assert [limit.num_fixed for limit in need.ranks[0].block_bytes.limits] == [
        limit.num_fixed for limit in limits
    ]
    assert bool(limits) == (model != "alike")
