"""How a replica is split: one specification a rank; stages by cost, by configuration, by device."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest
from trust_files import FILES

from benchmarks.random_checkpoint import write_random_checkpoint
from kvtransfer.config import TransferConfig
from kvtransfer.messages import ReplicaIdentity
from workers.config import EngineConfig, Parallel
from workers.errors import WorkerError
from workers.messages.rank_channel import RankJoined, StageCost
from workers.replica.partition import ReplicaSpec, Shape

ENGINE = EngineConfig(chunk_tokens=32, max_sequences=8)


def shape(model_dir: Path, parallel: Parallel, role: str = "both", engine: EngineConfig = ENGINE) -> Shape:
    write_random_checkpoint(model_dir, "llama", seed=1, num_hidden_layers=6)
    spec = ReplicaSpec(
        pool="pool",
        identity=ReplicaIdentity("r", 1),
        role=role,
        model_dir=str(model_dir),
        dtype="float32",
        parallel=parallel,
        engine=engine,
        transfer=TransferConfig(),
        trust=FILES,
    )
    return Shape(spec)


def joined(*costs: StageCost) -> list[RankJoined]:
    return [RankJoined(rank, 1, "", cost, 0.001 * (rank + 1)) for rank, cost in enumerate(costs)]


def test_ranks_are_numbered_stage_by_stage(tmp_path: Path) -> None:
    specs = shape(tmp_path, Parallel(tp=2, pp=2, devices=("cuda", "cpu"))).specs
    assert [(spec.rank, spec.stage, spec.tp_rank, spec.device) for spec in specs] == [
        (0, 0, 0, "cuda"),
        (1, 0, 1, "cuda"),
        (2, 1, 0, "cpu"),
        (3, 1, 1, "cpu"),
    ]


def test_every_rank_knows_how_experts_are_divided(tmp_path: Path) -> None:
    specs = shape(tmp_path, Parallel(tp=4, ep=2)).specs
    assert [(spec.tp_rank, spec.tp, spec.ep) for spec in specs] == [(rank, 4, 2) for rank in range(4)]


@pytest.mark.parametrize(
    ("pp", "role", "rows"), [(1, "both", (0, 1)), (2, "prefill", (32, 1)), (2, "decode", (8, 8))]
)
def test_stages_measure_the_steps_of_their_role(
    tmp_path: Path, pp: int, role: str, rows: tuple[int, int]
) -> None:
    spec = shape(tmp_path, Parallel(pp=pp, devices=("cpu",) * pp), role).specs[0]
    assert (spec.probe_rows, spec.probe_sampled_rows) == rows


def test_no_longer_chunk_is_measured_than_a_step_holds(tmp_path: Path) -> None:
    engine = EngineConfig(chunk_tokens=10**9, max_batch_tokens=64)
    spec = shape(tmp_path, Parallel(pp=2, devices=("cpu", "cpu")), engine=engine).specs[0]
    assert spec.probe_rows == 64


def test_a_disturbed_measure_does_not_tilt_equal_stages(tmp_path: Path) -> None:
    split = shape(tmp_path, Parallel(pp=2, devices=("cpu", "cpu")))
    assert split.plan_stages(joined(StageCost(1.0), StageCost(1.6))) == ((0, 3), (3, 6))
    assert split.stages == ((0, 3), (3, 6))
    assert split.attention_ratio == pytest.approx(0.0015)


def test_a_slower_device_gets_fewer_layers(tmp_path: Path) -> None:
    split = shape(tmp_path, Parallel(pp=2, devices=("cuda", "cpu")))
    assert split.plan_stages(joined(StageCost(1.0), StageCost(1.6))) == ((0, 4), (4, 6))
    same_name = shape(tmp_path, Parallel(pp=2, devices=("cpu", "cpu")))
    assert same_name.plan_stages(joined(StageCost(1.0), StageCost(5.0))) == ((0, 5), (5, 6))


def test_configured_layers_win_over_measures(tmp_path: Path) -> None:
    given = shape(tmp_path, Parallel(pp=2, devices=("cpu", "cpu"), layers=(1, 5)))
    assert given.plan_stages(joined(StageCost(1.0), StageCost(1.0))) == ((0, 1), (1, 6))
    wrong = shape(tmp_path, Parallel(pp=2, devices=("cpu", "cpu"), layers=(1, 4)))
    with pytest.raises(WorkerError, match="num_hidden_layers"):
        wrong.plan_stages(joined(StageCost(1.0), StageCost(1.0)))


def test_what_is_left_out_of_the_configuration_is_logged_by_name(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    whole = shape(tmp_path, Parallel())
    file = tmp_path / "config.json"
    keys = {"logits_scaling": 8.0}
    file.write_text(json.dumps(json.loads(file.read_text()) | keys))
    with caplog.at_level(logging.WARNING, "tandem.engine_core"):
        whole.plan_stages(joined(StageCost()))
    (record,) = caplog.records
    assert "r: logits_scaling of config.json is ignored" in record.getMessage()
