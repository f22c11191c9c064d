"""What a layer launches in a step that decodes, outside of CUDA graphs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from launch_recorder import recorded_launches

from benchmarks.random_checkpoint import write_random_checkpoint
from workers.model import cuda, native
from workers.model.attention.interface import SequenceSpan, StepInput
from workers.model.decoder import load_decoder

pytest.importorskip("triton", reason="triton is not installed (the extra gpu-tests)")

from workers.model.attention.triton_backend import TritonAttention

BLOCK = 16
NORM = "_rms_norm_kernel"
ROTATE_AND_ATTEND = ["_rotate_and_write_kernel", "_attend_pieces", "_reduce_pieces"]


@pytest.fixture(autouse=True)
def _use_triton(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let Triton serve the device of the tests, and nothing else the CPU."""
    monkeypatch.setattr(cuda, "DEVICE_TYPES", {device.type})
    monkeypatch.setattr(native, "load", lambda: None)


def launches_of_a_layer(device: torch.device, folder: Path, family: str, **keys: Any) -> list[str]:
    write_random_checkpoint(folder, family, seed=1, num_hidden_layers=1, **keys)
    decoder = load_decoder(folder, torch.float32, device)
    config = decoder.config
    kv = torch.zeros(4, 1, 2, config.num_kv_heads, BLOCK, config.head_dim, device=device)
    backend = TritonAttention(decoder.attention_shape, kv)
    plan = backend.plan(StepInput.of([SequenceSpan(17, 1, (0, 1)), SequenceSpan(3, 1, (2,))], BLOCK))
    hidden = torch.randn(2, config.hidden_size, device=device)
    (layer,) = decoder.layers
    layer.forward(hidden, plan)
    with recorded_launches() as launches:
        layer.forward(hidden, plan)
    return launches


@pytest.mark.parametrize("has_bias", [False, True])
def test_a_layer_that_decodes_is_ten_launches(device: torch.device, tmp_path: Path, has_bias: bool) -> None:
    product = "aten::addmm" if has_bias else "aten::mm"
    # With a bias a product is added to the hidden states by the norm that follows.
    added = "aten::addmm" if has_bias else "aten::addmm_"
    launches = launches_of_a_layer(device, tmp_path, "llama", attention_bias=has_bias, mlp_bias=has_bias)
    assert launches == [
        NORM, product, *ROTATE_AND_ATTEND, added, NORM, product, "_gate_mul_kernel", added,
    ]  # fmt: skip


def test_norms_of_what_a_layer_adds_are_four_launches_more(device: torch.device, tmp_path: Path) -> None:
    """A norm and an addition behind each of two products."""
    added = ["aten::mm", NORM, "aten::add_"]
    assert launches_of_a_layer(device, tmp_path, "gemma2") == [
        NORM, "aten::mm", *ROTATE_AND_ATTEND, *added, NORM, "aten::mm", "_gate_mul_kernel", *added,
    ]  # fmt: skip


def test_norms_of_rows_take_the_place_of_those_of_what_a_layer_reads(
    device: torch.device, tmp_path: Path
) -> None:
    added = ["aten::mm", NORM, "aten::add_"]
    assert launches_of_a_layer(device, tmp_path, "olmo2") == [
        "aten::mm", NORM, NORM, *ROTATE_AND_ATTEND, *added, "aten::mm", "_gate_mul_kernel", *added,
    ]  # fmt: skip
