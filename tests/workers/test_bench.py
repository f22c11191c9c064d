"""The engine benchmark on a random model: its lines, its check, and its limits by hand."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from benchmarks.random_checkpoint import write_random_checkpoint
from workers.errors import CapacityError
from workers.model.model_config import read_model_config
from workers.rank import engine_bench
from workers.rank.engine_bench import Roofline, run_engine_bench
from workers.rank.probe import DeviceLimits


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    write_random_checkpoint(path, "llama", seed=3)
    return path


@pytest.fixture(autouse=True)
def _small_probes(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(engine_bench, "_GEMM_SIZE", 128)
    monkeypatch.setattr(engine_bench, "_READ_BYTES", 1 << 20)
    num_threads = torch.get_num_threads()
    yield
    torch.set_num_threads(num_threads)


def run(model_dir: Path, **options: Any) -> list[dict[str, Any]]:
    lines: list[dict[str, Any]] = []
    defaults: dict[str, Any] = {
        "dtype": "fp32",
        "threads": 1,
        "prefill_tokens": [40],
        "decode_batches": [1, 3],
        "context_tokens": 20,
        "repeat": 1,
        "block_tokens": 16,
    }
    run_engine_bench(model_dir, emit=lines.append, **{**defaults, **options})
    return lines


def test_every_measurement_has_its_limit_and_its_peer(model_dir: Path) -> None:
    check, limits, *measured = run(model_dir, peer=True)
    assert check["what"] == "check"
    assert check["max_error"] < 1e-5
    assert check["argmax_agreement"] == 1.0
    assert limits["gemm_gflop_s"] > 0
    assert limits["read_gb_s"] > 0
    assert [line["what"] for line in measured] == ["prefill", "peer", "decode", "peer", "decode", "peer"]
    for line, peer in zip(measured[::2], measured[1::2], strict=True):
        assert line["tok_s"] > 0
        assert line["ratio"] == pytest.approx(line["tok_s"] / line["limit_tok_s"], rel=0.02, abs=1e-4)
        assert peer["of"] == line["what"]
        assert peer["ratio"] == pytest.approx(line["tok_s"] / peer["peer_tok_s"], rel=0.01)
    assert [(line["tokens"], line["batch"], line["context"]) for line in measured[::2]] == [
        (40, 1, 0),
        (16, 1, 20),
        (48, 3, 20),
    ]


def test_limits_by_hand(model_dir: Path) -> None:
    """Weights counted in the checkpoint itself; at 1 flop a nanosecond and 1 byte a nanosecond."""
    tensors = load_file(model_dir / "model.safetensors")
    head = tensors["lm_head.weight"].numel()
    layers = sum(tensor.numel() for name, tensor in tensors.items() if "_proj.weight" in name)
    config = read_model_config(model_dir)
    kv_items_per_token = 2 * 2 * 2 * 16  # K and V, 2 layers, 2 heads of 16
    pair_flops = 2 * 2 * 4 * 16 * 2  # multiply and add, for scores and values: 4 heads of 16, 2 layers
    compute_bound = Roofline(config, 4, DeviceLimits(flop_s=1e9, byte_s=1e30))
    assert compute_bound.prefill_tok_s(3) == pytest.approx(
        3e9 / (2 * 3 * layers + 2 * head + (1 + 2 + 3) * pair_flops)
    )
    assert compute_bound.decode_tok_s(5, 100) == pytest.approx(1e9 / (2 * (layers + head) + 100 * pair_flops))
    read_bound = Roofline(config, 4, DeviceLimits(flop_s=1e30, byte_s=1e9))
    assert read_bound.prefill_tok_s(3) == pytest.approx(3e9 / (4 * (layers + head)))
    assert read_bound.decode_tok_s(5, 100) == pytest.approx(
        5e9 / (4 * (layers + head + 5 * 100 * kv_items_per_token))
    )


def test_without_peer_there_are_no_peer_lines(model_dir: Path) -> None:
    lines = run(model_dir, dtype="bf16", decode_batches=[])
    assert [line["what"] for line in lines] == ["check", "limits", "prefill"]
    assert lines[-1]["dtype"] == "bf16"


def test_lengths_beyond_the_model_are_refused(model_dir: Path) -> None:
    with pytest.raises(CapacityError, match="3000 tokens exceed the model's 2048 positions"):
        run(model_dir, prefill_tokens=[3000])
