"""What a layer launches in a step that decodes, outside of CUDA graphs."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from launch_recorder import recorded_launches

from benchmarks.random_checkpoint import write_random_checkpoint
from workers.model import cuda, native
from workers.model.attention.interface import SequenceSpan, StepInput
from workers.model.decoder import load_decoder
from workers.model.model_config import read_model_config
from workers.model.parallel import parallelize
from workers.model.weights import ShardSpec

pytest.importorskip("triton", reason="triton is not installed (the extra gpu-tests)")

from workers.model.attention.triton_backend import TritonAttention
from workers.model.cuda import thin_choice, thin_product

BLOCK = 16
NORM, THIN = "_rms_norm_kernel", "_thin_product_kernel"
ROTATE_AND_ATTEND = ["_rotate_and_write_kernel", "_attend_pieces", "_reduce_pieces"]
# Stands for the ranks of a stage, of which the others add nothing.
ALONE: Any = SimpleNamespace(
    tp=2, tp_rank=0, shares_memory=True, all_reduce=lambda tensor: None, gather_columns=None
)


@pytest.fixture(autouse=True)
def _use_triton(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let Triton serve the device of the tests, and nothing else the CPU."""
    monkeypatch.setattr(cuda, "DEVICE_TYPES", {device.type})
    monkeypatch.setattr(native, "load", lambda: None)


class LayerStep(NamedTuple):
    """The launches of a layer, and the hidden states behind it."""

    launches: list[str]
    hidden: torch.Tensor


def step_of_a_layer(
    device: torch.device,
    folder: Path,
    family: str,
    dtype: torch.dtype = torch.float32,
    *,
    is_deterministic: bool = False,
    shard: ShardSpec | None = None,
    **keys: Any,
) -> LayerStep:
    write_random_checkpoint(folder, family, seed=1, num_hidden_layers=1, **keys)
    decoder = load_decoder(folder, dtype, device, shard, is_deterministic=is_deterministic)
    config, shape = decoder.config, decoder.attention_shape
    if shard is not None:
        parallelize(decoder, ALONE)
    num_kv_heads = config.num_kv_heads // decoder.shard.tp_size
    kv = torch.zeros(4, 1, 2, num_kv_heads, BLOCK, config.head_dim, dtype=dtype, device=device)
    backend = TritonAttention(shape, kv, is_deterministic=is_deterministic)
    plan = backend.plan(StepInput.of([SequenceSpan(17, 1, (0, 1)), SequenceSpan(3, 1, (2,))], BLOCK))
    hidden = torch.randn(2, config.hidden_size, generator=torch.Generator().manual_seed(2)).to(device, dtype)
    (layer,) = decoder.layers
    layer.forward(hidden.clone(), plan)  # what is made in the first step alone
    with recorded_launches() as launches:
        residual = layer.forward(hidden, plan)
    return LayerStep(launches, hidden if residual is None else hidden.add_(residual))


def launches_of_a_layer(*args: Any, **options: Any) -> list[str]:
    """Return what a layer launches, of the arguments of `step_of_a_layer`."""
    return step_of_a_layer(*args, **options).launches


@pytest.mark.parametrize("has_bias", [False, True])
def test_a_layer_that_decodes_is_ten_launches(device: torch.device, tmp_path: Path, has_bias: bool) -> None:
    product = "aten::addmm" if has_bias else "aten::mm"
    # With a bias a product is added to the hidden states by the norm that follows.
    added = "aten::addmm" if has_bias else "aten::addmm_"
    launches = launches_of_a_layer(device, tmp_path, "llama", attention_bias=has_bias, mlp_bias=has_bias)
    assert launches == [
        NORM, product, *ROTATE_AND_ATTEND, added, NORM, product, "_gate_mul_kernel", added,
    ]  # fmt: skip


@pytest.mark.parametrize("has_bias", [False, True])
def test_few_rows_in_bfloat16_are_seven_launches(
    device: torch.device, tmp_path: Path, has_bias: bool
) -> None:
    """Norms, the activation and additions are within the four products."""
    launches = launches_of_a_layer(
        device, tmp_path, "llama", torch.bfloat16, attention_bias=has_bias, mlp_bias=has_bias
    )
    assert launches == [THIN, *ROTATE_AND_ATTEND, THIN, THIN, THIN]


@pytest.mark.parametrize(("family", "has_bias"), [("llama", True), ("gemma2", False)])
def test_few_rows_have_the_results_of_the_former_kernels(
    device: torch.device, tmp_path: Path, family: str, has_bias: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys: dict[str, Any] = {"attention_bias": True, "mlp_bias": True} if has_bias else {}
    ours = step_of_a_layer(device, tmp_path / "ours", family, torch.bfloat16, **keys)
    monkeypatch.setattr(thin_choice, "usable_plan", lambda *_, **__: None)
    former = step_of_a_layer(device, tmp_path / "former", family, torch.bfloat16, **keys)
    assert THIN not in former.launches
    assert len(former.launches) == len(ours.launches) + 3
    # A few units in the last place of values of about 1, which the interpreter rounds down.
    torch.testing.assert_close(ours.hidden, former.hidden, rtol=2e-2, atol=5e-2)


def test_float16_keeps_the_norms(device: torch.device, tmp_path: Path) -> None:
    launches = launches_of_a_layer(device, tmp_path, "llama", torch.float16)
    assert launches == [NORM, THIN, *ROTATE_AND_ATTEND, THIN, NORM, THIN, THIN]


def test_norms_of_what_few_rows_add_are_launches(device: torch.device, tmp_path: Path) -> None:
    launches = launches_of_a_layer(device, tmp_path, "gemma2", torch.bfloat16)
    assert launches == [THIN, *ROTATE_AND_ATTEND, THIN, NORM, THIN, THIN, NORM]


def test_more_rows_have_the_former_kernels(
    device: torch.device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(thin_product, "MOST_ROWS", 1)
    assert launches_of_a_layer(device, tmp_path, "llama", torch.bfloat16) == [
        NORM, "aten::mm", *ROTATE_AND_ATTEND, "aten::addmm_", NORM, "aten::mm", "_gate_mul_kernel",
        "aten::addmm_",
    ]  # fmt: skip


def test_deterministic_mode_has_norms_of_their_own(device: torch.device, tmp_path: Path) -> None:
    launches = launches_of_a_layer(device, tmp_path, "llama", torch.bfloat16, is_deterministic=True)
    assert THIN not in launches
    assert launches.count(NORM) == 2


def test_what_other_ranks_add_leaves_norms_to_kernels(device: torch.device, tmp_path: Path) -> None:
    """Their sums come after the products, and before the norms."""
    write_random_checkpoint(tmp_path, "llama", seed=1, num_hidden_layers=1)
    shard = dataclasses.replace(ShardSpec.whole(read_model_config(tmp_path)), tp_size=2)
    launches = launches_of_a_layer(device, tmp_path, "llama", torch.bfloat16, shard=shard)
    assert launches == [NORM, THIN, *ROTATE_AND_ATTEND, THIN, NORM, THIN, THIN]


def test_norms_of_what_a_layer_adds_are_two_launches_more(device: torch.device, tmp_path: Path) -> None:
    """A norm with its addition behind each of two products."""
    added = ["aten::mm", NORM]
    assert launches_of_a_layer(device, tmp_path, "gemma2") == [
        NORM, "aten::mm", *ROTATE_AND_ATTEND, *added, NORM, "aten::mm", "_gate_mul_kernel", *added,
    ]  # fmt: skip


def test_norms_of_rows_take_the_place_of_those_of_what_a_layer_reads(
    device: torch.device, tmp_path: Path
) -> None:
    added = ["aten::mm", NORM]
    assert launches_of_a_layer(device, tmp_path, "olmo2") == [
        "aten::mm", NORM, NORM, *ROTATE_AND_ATTEND, *added, "aten::mm", "_gate_mul_kernel", *added,
    ]  # fmt: skip
