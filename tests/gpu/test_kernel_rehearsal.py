"""Variants of kernels that are found without a device are those that the rank's warm-up meets."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from kernel_variants import launched_variants
from rank_specs import cuda_spec

from benchmarks.random_checkpoint import write_random_checkpoint
from kvtransfer.common.clock import SystemClock
from workers.messages.rank_channel import RankSpec
from workers.model import cuda, native
from workers.rank import warm_up
from workers.rank.device_queue import CpuQueue
from workers.rank.model_runner import ModelRunner
from workers.rank.runner_settings import CheckpointFolder, ComputeSettings, RankCapacity

VOCAB = 32
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
WINDOWS = {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}


@pytest.fixture(autouse=True)
def _interpreted(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let kernels run on CPU tensors, in steps that do not take the interpreter long."""
    if device.type != "cpu":
        pytest.skip("the variants are compared with those of Triton's interpreter")
    from workers.model.cuda import sampling

    monkeypatch.setattr(cuda, "DEVICE_TYPES", {"cpu", "meta"})
    monkeypatch.setattr(native, "load", lambda: None)
    monkeypatch.setattr(warm_up, "WARM_UP_TOKENS", 7)
    monkeypatch.setattr(sampling, "_PIECE", VOCAB)
    monkeypatch.setattr(sampling, "_CANDIDATES", 16)


def met_by(spec: RankSpec) -> set[tuple[Any, ...]]:
    """Return what a rank launches until it serves."""
    compute = ComputeSettings.of(spec, torch.device("cpu"))._replace(queue=CpuQueue(has_triton=True))
    with launched_variants() as met:
        runner = ModelRunner(
            CheckpointFolder(Path(spec.model_dir)), compute, RankCapacity.of(spec), SystemClock()
        )
        runner.warm_up(spec.max_batch_tokens)
    runner.close()
    return met


@pytest.mark.parametrize(
    ("family", "fields", "is_deterministic"),
    [
        ("qwen3", WINDOWS, True),
        ("qwen3_moe", EXPERTS, False),
        ("deepseek_v3", {}, False),
    ],
)
def test_the_rehearsal_finds_every_variant(
    tmp_path: Path, family: str, fields: dict[str, Any], is_deterministic: bool
) -> None:
    from workers.rank.kernel_rehearsal import collected_variants, run_rehearsal

    write_random_checkpoint(tmp_path, family, seed=3, vocab_size=VOCAB, **fields)
    spec = cuda_spec(tmp_path, deterministic=is_deterministic)
    met = met_by(spec)
    with collected_variants(), launched_variants() as found:
        run_rehearsal(spec)
    assert met
    assert met - found == set()


def test_nothing_is_launched_and_no_weight_is_read(tmp_path: Path) -> None:
    from workers.rank.kernel_rehearsal import collected_variants, run_rehearsal

    write_random_checkpoint(tmp_path, "llama", seed=3, vocab_size=VOCAB)
    (file,) = tmp_path.glob("*.safetensors")
    header = 8 + int.from_bytes(file.read_bytes()[:8], "little")
    with file.open("r+b") as weights:  # NaN everywhere
        num_bytes = file.stat().st_size - header
        weights.seek(header)
        weights.write(b"\xff" * num_bytes)
    with collected_variants() as variants:
        run_rehearsal(cuda_spec(tmp_path))
    assert variants == [], "the interpreter compiles nothing"
