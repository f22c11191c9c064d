"""Read folders of compressed-tensors by arithmetic alone: numbers of 32 bits are divided digit by digit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor


def stored_tensors(folder: Path) -> dict[str, Tensor]:
    """Return all tensors as they are stored."""
    return {name: it for file in sorted(folder.glob("*.safetensors")) for name, it in load_file(file).items()}


def unpacked(folder: Path) -> dict[str, Tensor]:
    """Return the weights under the names that they had, in the dtype of their scales; others as stored."""
    scheme = json.loads((folder / "config.json").read_text())["quantization_config"]
    (group,) = scheme["config_groups"].values()
    tensors, found = stored_tensors(folder), dict[str, Tensor]()
    for name, tensor in tensors.items():
        if name.endswith("_packed"):
            name = name.removesuffix("_packed")
            shape = tensors[f"{name}_shape"].tolist()
            num_bits, scales = group["weights"]["num_bits"], tensors[f"{name}_scale"]
            codes = _digits(tensor, num_bits, shape[1])
            if f"{name}_zero_point" in tensors:
                assert not group["weights"]["symmetric"]
                zeros = _digits(tensors[f"{name}_zero_point"].t(), num_bits, shape[0]).T
                codes = codes - zeros.repeat(codes.shape[1] // zeros.shape[1], 1)
            found[name] = _values(codes, scales)
        elif f"{name}_scale" in tensors:
            is_float = group["weights"]["type"] == "float"
            assert tensor.dtype == (torch.float8_e4m3fn if is_float else torch.int8)
            found[name] = _values(tensor.double().numpy(), tensors[f"{name}_scale"])
        elif not name.endswith(("_scale", "_shape", "_zero_point")):
            found[name] = tensor
    return found


def write_unpacked(folder: Path, out: Path) -> Path:
    """Write the model of `folder` in 16 or 32 bits."""
    from safetensors.torch import save_file

    out.mkdir()
    config: dict[str, Any] = json.loads((folder / "config.json").read_text())
    del config["quantization_config"]
    (out / "config.json").write_text(json.dumps(config))
    save_file(unpacked(folder), out / "model.safetensors")
    return out


def _digits(words: Tensor, num_bits: int, num_columns: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    base, left, columns = 2**num_bits, words.numpy().astype(np.int64) % 2**32, []
    for _ in range(32 // num_bits):
        columns.append(left % base - base // 2)
        left //= base
    return np.stack(columns, -1).reshape(len(words), -1)[:, :num_columns]


def _values(codes: np.ndarray[Any, np.dtype[Any]], scales: Tensor) -> Tensor:
    wide = scales.double().numpy().repeat(codes.shape[1] // scales.shape[1], 1)
    return torch.from_numpy(codes * wide).to(scales.dtype)
