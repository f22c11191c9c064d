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
from kvtransfer.common.clock import ManualClock
from workers.messages.rank_channel import RankSpec
from workers.model import cuda, native
from workers.model.attention import choice
from workers.model.experts import host_experts
from workers.model.experts.expert_products import TorchExperts
from workers.model.experts.make_experts import make_experts
from workers.model.quantization.exact_scales import assumptions
from workers.model.weights import ShardSpec
from workers.rank import step_runner, warm_up
from workers.rank.device_queue import CpuQueue, DeviceQueue, make_queue
from workers.rank.model_runner import ModelRunner
from workers.rank.rehearsed_groups import RehearsedGroups
from workers.rank.rehearsed_shards import rehearsed_shards
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


def met_by(spec: RankSpec, layers: tuple[int, int] | None = None) -> set[tuple[Any, ...]]:
    """Return what a rank launches until it serves; one of several stages has `layers`, [start, end)."""
    cpu = torch.device("cpu")
    compute = ComputeSettings.of(spec, cpu)
    if spec.pp == 1:
        compute = compute._replace(queue=CpuQueue(has_triton=True))
        (shard,) = rehearsed_shards(spec)
    else:
        assert layers is not None
        shard = ShardSpec(*layers, spec.tp_rank, spec.tp, spec.ep)
    groups = SamplingGroups(spec, cpu)
    with launched_variants() as met:
        runner = ModelRunner(
            CheckpointFolder(Path(spec.model_dir)),
            compute,
            RankCapacity.of(spec),
            ManualClock(),
            place=RankPlace(shard, groups),
        )
        runner.warm_up(spec.max_batch_tokens)
    runner.close()
    return met


class SamplingGroups(RehearsedGroups):
    """Those of a rank that samples if it is the first of the last stage, and sends its tokens to nobody."""

    def __init__(self, spec: RankSpec, device: torch.device) -> None:
        super().__init__(spec, device)
        self.is_sampler = self.is_last_stage and self.tp_rank == 0

    def send_tokens(self, step: int, tokens: object) -> None: ...


class BehindQueue(CpuQueue):
    """Stands for a device that runs behind the host."""

    runs_behind = True


def queue_of(device: torch.device) -> DeviceQueue:
    return BehindQueue() if device.type == "cpu" else make_queue(device)


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


@pytest.mark.parametrize(
    ("family", "fields", "pp", "rank", "layers"),
    [
        ("qwen2_moe", DENSE_BETWEEN, 3, 0, (0, 1)),
        ("qwen2_moe", DENSE_BETWEEN, 3, 1, (1, 3)),
        ("qwen2_moe", DENSE_BETWEEN, 3, 1, (2, 3)),
        ("qwen2_moe", DENSE_BETWEEN, 3, 2, (2, 4)),
        ("gemma4_text", SCALARS, 2, 1, (1, 2)),
    ],
)
def test_whatever_layers_a_stage_gets_they_are_rehearsed(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    family: str,
    fields: dict[str, Any],
    pp: int,
    rank: int,
    layers: tuple[int, int],
) -> None:
    """The first, middle ones, of which one begins with a dense layer, and the last, with the sampler."""
    monkeypatch.setattr(step_runner, "make_queue", queue_of)
    monkeypatch.setattr(choice, "_DECODE_CONTEXT", 20)
    monkeypatch.setattr(choice, "_CHUNK_TOKENS", 5)
    monkeypatch.setattr(choice, "_NUM_ROUNDS", 1)
    write_random_checkpoint(tmp_path, family, seed=3, vocab_size=VOCAB, **fields)
    spec = cuda_spec(tmp_path, pp=pp, rank=rank)
    met = met_by(spec, layers)
    assert "_rotate_and_write_kernel" in {name for name, *_ in met}
    assert "_rows_kernel" not in {name for name, *_ in met}, "the host samples"
    assert met - rehearsed_by(spec) == set()


@pytest.mark.parametrize(("rank", "num_copies"), [(0, 0), (1, 0), (1, 1)])
def test_divided_experts_are_rehearsed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rank: int, num_copies: int
) -> None:
    """Three experts on two ranks, which hold one and two of them, or a copy of another's."""
    from workers.model.cuda import one_shot_sums

    monkeypatch.setattr(one_shot_sums, "exchange", partial(one_shot_sums.exchange, writes=False, reads=False))
    fields = {**EXPERTS, "num_experts": 3}
    write_random_checkpoint(tmp_path, "qwen3_moe", seed=3, vocab_size=VOCAB, num_hidden_layers=1, **fields)
    spec = cuda_spec(tmp_path, tp=2, ep=2, rank=rank, expert_copies=num_copies)
    met = met_by(spec)
    sorts = [dict(fields) for name, *fields in met if name == "_sort_kernel"]
    assert {it["NUM_EXPERTS"] for it in sorts} == {1 + rank + num_copies}
    assert met - rehearsed_by(spec) == set()


def test_experts_beside_those_in_host_memory_are_rehearsed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_experts, "_device_experts", make_experts)
    monkeypatch.setattr(host_experts, "make_experts", TorchExperts)  # those of the CPU
    write_random_checkpoint(tmp_path, "qwen3_moe", seed=3, vocab_size=VOCAB, num_hidden_layers=1, **EXPERTS)
    spec = cuda_spec(tmp_path, expert_offload=1)
    met = met_by(spec)
    sorts = [dict(fields) for name, *fields in met if name == "_sort_kernel"]
    assert {it["NUM_EXPERTS"] for it in sorts} == {3}
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
