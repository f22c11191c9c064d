"""Checkpoints with quantized weights are worth what their formats say, on every rank."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from family_checkpoints import write_family_checkpoint
from quantized_checkpoints import FORMATS, LLAMA, is_product, quantize
from safetensors.torch import load_file

from workers.model.model_config import read_model_config
from workers.model.quantization.quantized_files import QuantizedTensorFiles

CPU = torch.device("cpu")


@pytest.fixture
def source(tmp_path: Path) -> Path:
    write_family_checkpoint(tmp_path / "source", **LLAMA)
    return tmp_path / "source"


@pytest.mark.parametrize("how", FORMATS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_are_those_of_the_codes(how: str, dtype: torch.dtype, source: Path, tmp_path: Path) -> None:
    """Whole and in parts, bit for bit, whatever the parts cut."""
    plain = load_file(quantize(source, tmp_path, FORMATS[how]) / "model.safetensors")
    scheme = read_model_config(tmp_path).quantization
    assert scheme is not None
    with QuantizedTensorFiles(tmp_path, dtype, CPU, scheme) as files:
        assert files.names == set(plain)
        products = [name for name in plain if is_product(name)]
        assert len(products) == 14
        for name in products:
            shape, expected = tuple(plain[name].shape), plain[name].to(dtype)
            assert files.is_quantized(name)
            assert torch.equal(files.tensor(name, shape), expected)
            for rows in (slice(0, 11), slice(16, 32)):
                for columns in (slice(32, 64), slice(21, 43), slice(16, 48)):
                    assert torch.equal(files.tensor(name, shape, rows, columns), expected[rows, columns])
