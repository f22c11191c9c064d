"""Quantized checkpoints, GGUF files and experts are uploaded through pinned buffers alone, with CPU tensors
in place of the device's, whose copies are made as late as they may be."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import gguf_files
import pytest
import torch
from delayed_copies import DelayedCopies, PageableUploads
from family_checkpoints import write_family_checkpoint
from gguf import GGMLQuantizationType
from optional_programs import uses_compiler
from quantized_checkpoints import FORMATS, LLAMA, OWN_ORDERS, draw_mxfp4, quantize
from safetensors.torch import load_file, save_file
from torch import Tensor

from workers.errors import CheckpointError
from workers.model import tensor_files
from workers.model.experts.expert_products import ExpertWeights, TorchExperts
from workers.model.experts.host_experts import split_experts
from workers.model.model_config import read_model_config
from workers.model.model_folder import weights_folder
from workers.model.quantization.weight_form import WeightForm
from workers.model.weight_uploads import WeightUploads
from workers.model.weights import ShardSpec, WeightReader

pytestmark = uses_compiler

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
# Less than most tensors, and than the rows of some.
BUFFER_BYTES = 1000
FILE = "model.safetensors"
MIXTURE: dict[str, Any] = {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
GPT_OSS: dict[str, Any] = {
    "family": "gpt_oss",
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_local_experts": 5,
    "num_experts_per_tok": 2,
}
# A format of `FORMATS`, and what the family has.
QUANTIZED: dict[str, tuple[str, dict[str, Any]]] = {
    "awq": ("awq", {}),
    "gptq in another order": ("gptq in another order", {"attention_bias": True}),
    "gptq in many orders": (OWN_ORDERS, {}),
    "compressed tensors": ("int4 with zero points", {}),
    "int8": ("int8", {}),
    "fp8": ("fp8 in blocks", {}),
    "nvfp4": ("nvfp4", {}),
    "quantized experts": ("awq", {"family": "qwen3_moe", **MIXTURE}),
    "experts in another order": ("gptq in another order", {"family": "qwen3_moe", **MIXTURE}),
}
CASES = [*QUANTIZED, "gguf", "experts", "experts with inputs as rows", "mxfp4"]


def written(case: str, folder: Path, make_checkpoint: Callable[..., Path]) -> Path:
    """Write a checkpoint and return its folder."""
    if case in QUANTIZED:
        how, keys = QUANTIZED[case]
        write_family_checkpoint(folder / "source", **LLAMA | keys)
        quantize(folder / "source", folder, FORMATS[how])
        return folder
    if case == "gguf":
        shape = {"vocab_size": 256, "hidden_size": 512, "intermediate_size": 256, "head_dim": 128}
        checkpoint = make_checkpoint("llama", **shape, eos_token_id=None)
        file = gguf_files.write_gguf(folder / "model.gguf", checkpoint, GGMLQuantizationType.Q4_K)
        return weights_folder(file, "fp32", folder / "cache", keeps_quantized=True)
    write_family_checkpoint(
        folder, **(LLAMA | {"family": "qwen3_moe"} | MIXTURE if case == "experts" else GPT_OSS)
    )
    if case == "mxfp4":
        draw_mxfp4(folder)
    return folder


@pytest.fixture
def copies(monkeypatch: pytest.MonkeyPatch) -> DelayedCopies:
    """Those of every device of CUDA."""
    delayed = DelayedCopies()
    monkeypatch.setattr(tensor_files, "CudaCopies", lambda device: delayed)
    monkeypatch.setattr(tensor_files, "WeightUploads", lambda of: WeightUploads(of, BUFFER_BYTES))
    return delayed


def tensors_of(weights: object) -> Iterator[Tensor]:
    """Iterate over the tensors in weights as a reader returns them, of which some are read only now."""
    if isinstance(weights, Tensor):
        yield weights
    elif dataclasses.is_dataclass(weights):
        for field in dataclasses.fields(weights):
            yield from tensors_of(getattr(weights, field.name))
    elif isinstance(weights, Sequence) and not isinstance(weights, str | range):
        for item in weights:
            yield from tensors_of(item)


def read(reader: WeightReader, num_layers: int) -> list[Tensor]:
    """Read all that a decoder does."""
    embedding = reader.embedding()
    rest = [reader.head(embedding), reader.final_norm(), *map(reader.layer, range(num_layers))]
    reader.finish()
    return [it for weights in (embedding, *rest) for it in tensors_of(weights)]


def check_read(folder: Path, copies: DelayedCopies, pageable: PageableUploads, form: WeightForm) -> int:
    """Compare the weights of a device with those of a CPU. Returns the bytes that were read, as stored."""
    config = read_model_config(folder)
    whole = ShardSpec.whole(config)
    with WeightReader(folder, config, whole, torch.float32, CPU, form=form) as on_cpu:
        expected = read(on_cpu, config.num_layers)
        with (
            pageable,
            copies.in_order(),
            WeightReader(folder, config, whole, torch.float32, CUDA, form=form) as reader,
        ):
            found = read(reader, config.num_layers)
        assert [it.dtype for it in found] == [it.dtype for it in expected]
        assert all(map(torch.equal, found, expected))
    assert len(found) == len(expected)
    return reader.num_bytes


@pytest.mark.parametrize("form", ["auto", "fp32"])
@pytest.mark.parametrize("case", CASES)
def test_all_weights_go_through_pinned_buffers(
    case: str, form: str, copies: DelayedCopies, make_checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    pageable = PageableUploads()
    folder = written(case, tmp_path, make_checkpoint)
    num_bytes = check_read(folder, copies, pageable, WeightForm(form))
    assert pageable.num_bytes == 0
    assert copies.num_bytes >= 0.9 * num_bytes  # zero points and the groups of inputs are repacked
    assert copies.num_buffers == 2
    assert not copies.held


def test_experts_of_a_device_beside_those_of_the_host_do_too(
    copies: DelayedCopies, make_checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    folder, pageable = written("experts with inputs as rows", tmp_path, make_checkpoint), PageableUploads()
    config = read_model_config(folder)
    whole = ShardSpec.whole(config)
    with pageable, WeightReader(folder, config, whole, torch.float32, CUDA, expert_offload=2) as reader:
        mixture = reader.layer(0).mixture
        assert mixture is not None
        assert mixture.offload is not None
        weights = mixture.experts
        assert isinstance(weights, ExpertWeights)
        before = copies.num_bytes
        with copies.in_order():
            split = split_experts(weights, CPU, 2, mixture.offload.upload)
            copies.catch_up()
        on_device, in_host = split._device, split._host
        assert isinstance(on_device, TorchExperts)
        assert on_device.num_experts == 3
        for expert in range(3):
            found, expected = (list(tensors_of(it.rows(expert))) for it in (on_device, in_host))
            assert len(found) == 4
            assert all(map(torch.equal, found, expected))
        of_one = sum(it.nbytes for it in found)
        assert copies.num_bytes - before >= 3 * of_one
    assert pageable.num_bytes == 0
    assert not copies.held


def check_failing(folder: Path, error: str) -> None:
    config = read_model_config(folder)
    with (
        pytest.raises(CheckpointError, match=re.escape(error)),
        WeightReader(folder, config, ShardSpec.whole(config), torch.float32, CUDA) as reader,
        PageableUploads(),
    ):
        read(reader, config.num_layers)


@pytest.mark.parametrize("case", ["awq", "quantized experts", "gguf", "experts"])
def test_a_load_that_fails_gives_the_buffers_back(
    case: str, copies: DelayedCopies, make_checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    """Of a file that is cut short, which nothing is read of, and where a tensor of the last layer is."""
    folder = written(case, tmp_path, make_checkpoint)
    whole = (folder / FILE).read_bytes()
    (folder / FILE).write_bytes(whole[: len(whole) // 2])
    check_failing(folder, f"{folder / FILE}: unreadable")
    assert copies.num_buffers == 0
    (folder / FILE).write_bytes(whole)
    tensors = load_file(folder / FILE)
    name = max(name for name in tensors if name.startswith("model.layers.1.") and ".down_proj." in name)
    save_file(tensors | {name: tensors[name][:-1].contiguous()}, folder / FILE)
    check_failing(folder, name)
    assert copies.num_buffers == 2
    assert not copies.held
