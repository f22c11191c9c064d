"""Variants of kernels that are found without a device are those that the rank's warm-up meets."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from kernel_variants import launched_variants
from quantized_checkpoints import FORMATS, quantize
from rank_specs import cuda_spec
from safetensors.torch import load_file, save_file

from benchmarks.random_checkpoint import write_random_checkpoint
from kvtransfer.common.clock import SystemClock
from workers.messages.rank_channel import RankSpec
from workers.model import cuda, native
from workers.model.quantization.exact_scales import assumptions
from workers.rank import warm_up
from workers.rank.device_queue import CpuQueue
from workers.rank.model_runner import ModelRunner
from workers.rank.rehearsed_groups import rehearsed_place
from workers.rank.runner_settings import CheckpointFolder, ComputeSettings, RankCapacity, RankPlace

VOCAB = 32
EXPERTS: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
# A norm adds what a layer with experts leaves, and not what a dense one has added by itself.
DENSE_BETWEEN: dict[str, Any] = {
    **EXPERTS,
    "num_hidden_layers": 4,
    "mlp_only_layers": [0, 2],
    "shared_expert_intermediate_size": 40,
}
# Layers with a number of their own, with which the host computes.
SCALARS: dict[str, Any] = {
    "layer_types": ["sliding_attention", "full_attention"],
    "sliding_window": 7,
    "global_head_dim": 32,
    "hidden_size_per_layer_input": 16,
    "vocab_size_per_layer_input": VOCAB,
}
LAST_DOWN = "model.layers.2.mlp.down_proj"
WINDOWS: dict[str, Any] = {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}


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
    place = RankPlace(*rehearsed_place(spec, torch.device("cpu")))
    with launched_variants() as met:
        runner = ModelRunner(
            CheckpointFolder(Path(spec.model_dir)),
            compute,
            RankCapacity.of(spec),
            SystemClock(),
            place=place,
        )
        runner.warm_up(spec.max_batch_tokens)
    runner.close()
    return met


def rehearsed_by(spec: RankSpec) -> set[tuple[Any, ...]]:
    """Return what is found for the rank, whatever the values of its weights are."""
    from workers.rank.kernel_rehearsal import collected_variants, run_rehearsal

    with collected_variants(), launched_variants() as found:
        for _ in assumptions():
            run_rehearsal(spec)
    return found


@pytest.mark.parametrize(
    ("family", "fields", "is_deterministic"),
    [
        ("qwen3", WINDOWS, True),
        ("qwen3_moe", EXPERTS, False),
        ("qwen2_moe", DENSE_BETWEEN, False),
        ("deepseek_v3", {}, False),
        ("gemma4_text", SCALARS, False),
    ],
)
def test_the_rehearsal_finds_every_variant(
    tmp_path: Path, family: str, fields: dict[str, Any], is_deterministic: bool
) -> None:
    write_random_checkpoint(tmp_path, family, seed=3, vocab_size=VOCAB, **fields)
    spec = cuda_spec(tmp_path, deterministic=is_deterministic)
    met = met_by(spec)
    assert met
    assert met - rehearsed_by(spec) == set()


@pytest.mark.parametrize("family", ["qwen3", "lfm2"])
def test_layers_with_memory_apart_are_rehearsed(tmp_path: Path, family: str) -> None:
    """Layers with a window whose KV lies apart, and layers with a state, also in graphs."""
    if family == "qwen3":
        write_random_checkpoint(tmp_path, family, seed=3, vocab_size=VOCAB, **WINDOWS)
    else:
        pytest.importorskip("transformers", reason="transformers, which makes the model, is not installed")
        from state_families import write_state_checkpoint

        write_state_checkpoint(tmp_path, family)
    spec = cuda_spec(tmp_path, frees_windows=True, mixed_graphs=True)
    met = met_by(spec)
    assert met
    assert met - rehearsed_by(spec) == set()


@pytest.mark.parametrize("rank", [0, 1])
def test_sums_of_ranks_are_rehearsed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rank: int) -> None:
    """The kernel of the sums runs without the other rank: it writes nothing, and waits for nothing."""
    from workers.model.cuda import one_shot_sums

    monkeypatch.setattr(one_shot_sums, "exchange", partial(one_shot_sums.exchange, writes=False, reads=False))
    write_random_checkpoint(tmp_path, "llama", seed=3, vocab_size=VOCAB)
    spec = cuda_spec(tmp_path, tp=2, rank=rank)
    met = met_by(spec)
    assert "_exchange_kernel" in {name for name, *_ in met}
    assert ("_rows_kernel" in {name for name, *_ in met}) == (rank == 0), "the first samples"
    assert met - rehearsed_by(spec) == set()


@pytest.mark.parametrize("how", ["int4", "int4 with zero points", "fp8 in blocks", "gptq in another order"])
def test_no_value_of_a_quantized_weight_is_needed(tmp_path: Path, how: str) -> None:
    """Whether 16 bits hold its scales, and whether its codes have one zero, decide what kernels there are."""
    write_random_checkpoint(tmp_path / "source", "llama", seed=3, vocab_size=VOCAB)
    (tmp_path / "model").mkdir()
    quantize(tmp_path / "source", tmp_path / "model", FORMATS[how])
    spec = cuda_spec(tmp_path / "model", dtype="bf16")
    met = met_by(spec)
    assert "_quantized_product_kernel" in {name for name, *_ in met}
    assert met - rehearsed_by(spec) == set()


def test_layers_whose_weights_are_stored_in_other_ways_are_rehearsed(tmp_path: Path) -> None:
    """The last of three layers has a form of its own: the first ones do not stand for it."""
    write_random_checkpoint(tmp_path / "source", "llama", seed=3, vocab_size=VOCAB, num_hidden_layers=3)
    (tmp_path / "model").mkdir()
    how = FORMATS["int4"]
    quantize(tmp_path / "source", tmp_path / "model", how, {**how.config, "ignore": ["lm_head", LAST_DOWN]})
    weights = load_file(tmp_path / "model" / "model.safetensors")
    plain = load_file(tmp_path / "source" / "model.safetensors")
    kept = {name: it for name, it in weights.items() if not name.startswith(LAST_DOWN)}
    name = f"{LAST_DOWN}.weight"
    save_file({**kept, name: plain[name]}, tmp_path / "model" / "model.safetensors")
    spec = cuda_spec(tmp_path / "model", dtype="bf16")
    met = met_by(spec)
    assert "_thin_product_kernel" in {name for name, *_ in met}
    assert met - rehearsed_by(spec) == set()


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
