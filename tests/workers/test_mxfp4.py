"""Experts of gpt-oss as they are published, quantized to MXFP4: they are dequantized as they are read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from family_checkpoints import write_family_checkpoint
from optional_programs import uses_compiler
from paged_model import PagedModel, error_of, reference_logits, tokens_of
from quantized_checkpoints import draw_mxfp4
from transformers import AutoModelForCausalLM, Mxfp4Config

from workers.errors import CheckpointError
from workers.model import native
from workers.model.decoder import load_decoder
from workers.model.experts.expert_products import ExpertWeights
from workers.model.experts.mxfp4 import dequantized
from workers.model.experts.packed_quantized_experts import PackedQuantizedExperts
from workers.model.model_config import read_model_config
from workers.model.quantization.weight_form import AS_STORED, DEQUANTIZED
from workers.model.rank_memory import Checkpoint, RankShape
from workers.model.weights import ShardSpec, WeightReader

pytestmark = uses_compiler

CPU = torch.device("cpu")
# A product's inputs are whole blocks of 32, and its outputs are no multiple of what kernels take at a time.
SHAPE: dict[str, Any] = {
    "family": "gpt_oss",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_local_experts": 5,
    "num_experts_per_tok": 2,
    "sliding_window": 20,
}


def write_quantized(path: Path) -> None:
    """Write a checkpoint whose experts have drawn codes and scales in place of their weights."""
    write_family_checkpoint(path, **SHAPE)
    draw_mxfp4(path)


def test_codes_and_scales_mean_numbers() -> None:
    """All codes, with the first of a pair in the lower bits, and the scales at both ends of bfloat16."""
    blocks = torch.arange(16, dtype=torch.uint8).repeat(3, 1, 1)
    scales = torch.tensor([[127], [1], [250]], dtype=torch.uint8)
    found = dequantized(blocks, scales, torch.bfloat16).double().numpy()
    numbers = [0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6]
    of_pairs = np.array([value for first in numbers for value in (first, 0.0)])
    assert np.array_equal(found, np.outer(2.0 ** np.array([0, -126, 123]), of_pairs))


def test_logits_equal_those_of_dequantized_weights(tmp_path: Path) -> None:
    write_quantized(tmp_path)
    reference = AutoModelForCausalLM.from_pretrained(
        tmp_path,
        dtype=torch.float32,
        attn_implementation="eager",
        experts_implementation="eager",
        quantization_config=Mxfp4Config(dequantize=True),
    ).float()
    prompt = tokens_of(1, 70)
    expected = reference_logits(reference.eval(), prompt)
    assert expected.std() >= 0.3
    for form in (AS_STORED, DEQUANTIZED):
        decoder = load_decoder(tmp_path, torch.float32, CPU, form=form)
        kept = [isinstance(it._experts, PackedQuantizedExperts) for it in decoder.mixtures.values()]
        assert kept == [form is AS_STORED and native.load() is not None] * 4
        assert error_of(PagedModel(decoder, torch.float32).chunked(0, prompt, 32), expected) <= 1e-4


@pytest.mark.parametrize(("tp", "ep"), [(1, 1), (2, 1), (2, 2), (3, 3)])
def test_every_rank_holds_its_part(tp: int, ep: int, tmp_path: Path) -> None:
    """The weights of all ranks are those of one, and as large as they are counted."""
    write_quantized(tmp_path)
    config = load_decoder(tmp_path, torch.float32, CPU).config
    checkpoint, total = Checkpoint.read(tmp_path), torch.zeros(())
    parts: list[torch.Tensor] = []
    for rank in range(tp):
        shard = ShardSpec(0, 1, rank, tp, ep)
        with WeightReader(tmp_path, config, shard, torch.float32, CPU, form=DEQUANTIZED) as reader:
            mixture = reader.layer(0).mixture
        assert mixture is not None
        experts = mixture.experts
        assert isinstance(experts, ExpertWeights)
        assert experts.down_bias is not None
        parts += [torch.cat((gate, up)) for gate, up in zip(experts.gates, experts.ups, strict=True)]
        total = total + sum(down.double().sum() for down in experts.downs) + experts.down_bias.double().sum()
        shapes = [RankShape(config, 0, 1, rank, tp, ep), RankShape(config, 0, 2, rank, tp, ep)]
        one, two = (checkpoint.weight_bytes(shape, 4) for shape in shapes)
        of_experts = sum(it.nbytes for it in (*experts.gates, *experts.ups, *experts.downs))
        assert two - one > of_experts
        assert two - one < of_experts + 4 * 64 * 400
    with WeightReader(tmp_path, config, ShardSpec(0, 1), torch.float32, CPU, form=DEQUANTIZED) as reader:
        whole = reader.layer(0).mixture
    assert whole is not None
    assert isinstance(whole.experts, ExpertWeights)
    assert whole.experts.down_bias is not None
    downs = sum(down.double().sum() for down in whole.experts.downs) + whole.experts.down_bias.double().sum()
    torch.testing.assert_close(total, torch.as_tensor(downs))
    assert sum(map(torch.numel, parts)) == 2 * 5 * 96 * 64


def test_codes_of_experts_are_counted_on_every_device(tmp_path: Path) -> None:
    write_quantized(tmp_path)
    rank, checkpoint = RankShape(read_model_config(tmp_path), 0, 2), Checkpoint.read(tmp_path)
    floats, *kept = (
        checkpoint.weight_bytes(rank, 2, form)
        for form in (DEQUANTIZED, AS_STORED.on("cpu"), AS_STORED.on("cuda"))
    )
    num_weights = 2 * 5 * 3 * 96 * 64
    assert [floats - it for it in kept] == [num_weights * (2 - 0.5625)] * 2


def test_blocks_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    write_quantized(tmp_path)
    config = tmp_path / "config.json"
    keys = json.loads(config.read_text(encoding="utf-8"))
    config.write_text(json.dumps(keys | {"intermediate_size": 90}), encoding="utf-8")
    with pytest.raises(CheckpointError, match=r"config.json says \[5, 180, 2, 16\]"):
        load_decoder(tmp_path, torch.float32, CPU)
    config.write_text(json.dumps(keys | {"quantization_config": {"quant_method": "hqq"}}), encoding="utf-8")
    with pytest.raises(CheckpointError, match=r"quantized \(hqq\)"):
        load_decoder(tmp_path, torch.float32, CPU)
