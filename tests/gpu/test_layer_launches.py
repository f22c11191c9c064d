"""What a layer launches in a step that decodes, outside of CUDA graphs: at most 12 kernels."""

from __future__ import annotations

import pytest
import torch
from launch_recorder import recorded_launches
from torch import Tensor

from workers.model import cuda, native
from workers.model.attention.interface import AttentionShape, SequenceSpan, StepInput
from workers.model.decoder_layer import DecoderLayer
from workers.model.products import Workspace
from workers.model.weights import LayerWeights, LinearWeights

pytest.importorskip("triton", reason="triton is not installed (the extra gpu-tests)")

from workers.model.attention.triton_backend import TritonAttention

HIDDEN, INTERMEDIATE, HEADS, KV_HEADS, HEAD_DIM = 32, 64, 4, 2, 16
ROTATE_AND_ATTEND = ["_rotate_and_write_kernel", "_attend_pieces", "_reduce_pieces"]


def launches_of_a_layer(device: torch.device, *, has_bias: bool) -> list[str]:
    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, device=device)

    def linear(num_outputs: int, num_inputs: int) -> LinearWeights:
        return LinearWeights((normal(num_outputs, num_inputs),), normal(num_outputs) if has_bias else None)

    weights = LayerWeights(
        input_norm=normal(HIDDEN),
        qkv=linear((HEADS + 2 * KV_HEADS) * HEAD_DIM, HIDDEN),
        q_norm=normal(HEAD_DIM),
        k_norm=normal(HEAD_DIM),
        output=linear(HIDDEN, HEADS * HEAD_DIM),
        post_norm=normal(HIDDEN),
        gate_up=linear(2 * INTERMEDIATE, HIDDEN),
        down=linear(HIDDEN, INTERMEDIATE),
    )
    layer = DecoderLayer(weights, 0, 1e-6, 0, Workspace())
    kv = torch.zeros(4, 1, 2, KV_HEADS, 16, HEAD_DIM, device=device)
    backend = TritonAttention(AttentionShape(HEADS, (0,), torch.zeros(HEAD_DIM // 2, device=device)), kv)
    plan = backend.plan(StepInput.of([SequenceSpan(17, 1, (0, 1)), SequenceSpan(3, 1, (2,))], 16))
    hidden = normal(2, HIDDEN)
    layer.forward(hidden, plan)
    with recorded_launches() as launches:
        layer.forward(hidden, plan)
    return launches


@pytest.mark.parametrize("has_bias", [False, True])
def test_a_layer_that_decodes_is_ten_launches(
    device: torch.device, monkeypatch: pytest.MonkeyPatch, has_bias: bool
) -> None:
    monkeypatch.setattr(cuda, "DEVICE_TYPES", {device.type})
    monkeypatch.setattr(native, "load", lambda: None)
    product = "aten::addmm" if has_bias else "aten::mm"
    # With a bias a product is added to the hidden states by the norm that follows.
    added = "aten::addmm" if has_bias else "aten::addmm_"
    assert launches_of_a_layer(device, has_bias=has_bias) == [
        "_rms_norm_kernel",
        product,
        *ROTATE_AND_ATTEND,
        added,
        "_rms_norm_kernel",
        product,
        "_silu_mul_kernel",
        added,
    ]
