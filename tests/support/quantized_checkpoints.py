"""Write checkpoints with quantized weights, packed bit by bit from the descriptions of the formats, and what
their weights are worth."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file
from torch import Tensor

Integers = NDArray[np.int64]
Tensors = dict[str, Tensor]
_HALF = torch.float16
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)

# A small model whose products have groups of every size that is tested.
LLAMA: dict[str, Any] = {
    "family": "llama",
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "intermediate_size": 192,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
}


@dataclasses.dataclass(frozen=True)
class Rounded:
    """Codes [num_outputs, num_inputs], and scales and zero points of the groups, float64; the group of each
    input."""

    codes: Integers
    scales: NDArray[np.float64]
    zeros: Integers
    groups: Integers

    @property
    def values(self) -> NDArray[np.float64]:
        return (self.codes - self.zeros[:, self.groups]) * self.scales[:, self.groups]


def rounded(weight: Tensor, group: int, bits: int, *, has_zeros: bool, order: int | None = None) -> Rounded:
    """Round a weight to codes without a sign, with scales that float16 holds. With an `order`, groups are
    not of neighbors, but drawn by this number."""
    wide, (num_outputs, num_inputs) = weight.double().numpy(), weight.shape
    size = group or num_inputs
    groups = np.arange(num_inputs) // size
    if order is not None:
        groups = np.random.default_rng(order).permutation(groups)
    middle, largest = 1 << (bits - 1), (1 << bits) - 1
    shape = num_outputs, groups.max() + 1
    scales, zeros = np.empty(shape), np.full(shape, middle, dtype=np.int64)
    for number in range(shape[1]):
        part = wide[:, groups == number]
        low, high = part.min(1), part.max(1)
        extent = (high - low) / largest if has_zeros else np.maximum(-low, high) / (middle - 1)
        scales[:, number] = (extent + 1e-4).astype(np.float16)
        if has_zeros:
            zeros[:, number] = np.clip(np.rint(-low / scales[:, number]), 0, largest)
    codes = np.rint(wide / scales[:, groups]) + zeros[:, groups]
    return Rounded(np.clip(codes, 0, largest).astype(np.int64), scales, zeros, groups)


def words(codes: Integers, bits: int, places: tuple[int, ...] | None = None) -> Tensor:
    """Put the codes of each row in words of 32 bits, int32; `places`: the place in its word of each."""
    per_word = 32 // bits
    padded = np.pad(codes, ((0, 0), (0, -codes.shape[1] % per_word)))
    found = np.zeros((len(codes), padded.shape[1] // per_word), dtype=np.uint64)
    for column in range(padded.shape[1]):
        number, inner = divmod(column, per_word)
        place = places[inner] if places else inner
        found[:, number] |= padded[:, column].astype(np.uint64) << np.uint64(bits * place)
    return torch.from_numpy(found.astype(np.uint32).view(np.int32))


@dataclasses.dataclass(frozen=True)
class Format:
    """A format: its `quantization_config`, and how a weight of this plain name is written in it, with what it
    is worth."""

    config: dict[str, Any]
    write: Callable[[str, Tensor], tuple[Tensors, NDArray[np.float64]]]


def compressed(bits: int, group: int, *, has_zeros: bool = False, has_order: bool = False) -> Format:
    """The format pack-quantized of compressed-tensors."""
    weights = {
        "num_bits": bits,
        "type": "int",
        "symmetric": not has_zeros,
        "strategy": "group" if group else "channel",
        "group_size": group or None,
        "actorder": "group" if has_order else None,
    }

    def write(name: str, weight: Tensor) -> tuple[Tensors, NDArray[np.float64]]:
        order = weight.shape[1] if has_order else None
        found = rounded(weight, group, bits, has_zeros=has_zeros, order=order)
        tensors = {
            f"{name}_packed": words(found.codes, bits),
            f"{name}_scale": torch.from_numpy(found.scales).to(_HALF),
            f"{name}_shape": torch.tensor(weight.shape),
        }
        if has_zeros:
            tensors[f"{name}_zero_point"] = words(found.zeros.T.copy(), bits).t().contiguous()
        if has_order:
            tensors[f"{name}_g_idx"] = torch.from_numpy(found.groups).int()
        return tensors, found.values

    return Format(_compressed_config("pack-quantized", weights), write)


def plain_int8(*, has_zeros: bool = False, bits: int = 8, group: int = 0) -> Format:
    """The formats int-quantized and naive-quantized, with a byte for each code."""
    weights = {
        "num_bits": bits,
        "type": "int",
        "symmetric": not has_zeros,
        "strategy": "group" if group else "channel",
        "group_size": group or None,
    }
    middle = 1 << (bits - 1)

    def write(name: str, weight: Tensor) -> tuple[Tensors, NDArray[np.float64]]:
        found = rounded(weight, group, bits, has_zeros=has_zeros)
        tensors = {
            name: torch.from_numpy(found.codes - middle).to(torch.int8),
            f"{name}_scale": torch.from_numpy(found.scales).to(torch.float32),
        }
        if has_zeros:
            tensors[f"{name}_zero_point"] = torch.from_numpy(found.zeros - middle).to(torch.int8)
        return tensors, found.values

    how = "int-quantized" if bits == 8 else "naive-quantized"
    return Format(_compressed_config(how, weights, {"num_bits": 8, "dynamic": True}), write)


def gptq(
    bits: int,
    group: int,
    *,
    version: int = 1,
    has_order: bool = False,
    sym: bool = True,
    has_own_orders: bool = False,
) -> Format:
    """GPTQ; in its first version zero points are stored less one. Products of the same inputs have one order
    of them, unless each `has_own_orders`."""
    config = {
        "quant_method": "gptq",
        "bits": bits,
        "group_size": group or -1,
        "desc_act": has_order,
        "sym": sym,
        "checkpoint_format": "gptq" if version == 1 else "gptq_v2",
    }

    def write(name: str, weight: Tensor) -> tuple[Tensors, NDArray[np.float64]]:
        order = (len(weight) if has_own_orders else weight.shape[1]) if has_order else None
        found = rounded(weight, group, bits, has_zeros=not sym, order=order)
        stored_zeros = (found.zeros - (version == 1)) % (1 << bits)
        product = name.removesuffix(".weight")
        tensors = {
            f"{product}.qweight": words(found.codes, bits).t().contiguous(),
            f"{product}.qzeros": words(stored_zeros.T.copy(), bits),
            f"{product}.scales": torch.from_numpy(found.scales.T.copy()).to(_HALF),
            f"{product}.g_idx": torch.from_numpy(found.groups).int(),
        }
        if "o_proj" in product:  # programs write biases that the model does not have
            tensors[f"{product}.bias"] = torch.zeros(len(weight), dtype=_HALF)
        return tensors, found.values

    return Format(config, write)


def awq(group: int) -> Format:
    """AWQ, version gemm: output 8 * i + j lies at this place of word i."""
    places = (0, 4, 1, 5, 2, 6, 3, 7)
    config = {
        "quant_method": "awq",
        "bits": 4,
        "group_size": group,
        "zero_point": True,
        "version": "gemm",
        "modules_to_not_convert": None,
    }

    def write(name: str, weight: Tensor) -> tuple[Tensors, NDArray[np.float64]]:
        found, product = rounded(weight, group, 4, has_zeros=True), name.removesuffix(".weight")
        tensors = {
            f"{product}.qweight": words(found.codes.T.copy(), 4, places),
            f"{product}.qzeros": words(found.zeros.T.copy(), 4, places),
            f"{product}.scales": torch.from_numpy(found.scales.T.copy()).to(_HALF),
        }
        return tensors, found.values

    return Format(config, write)


def fp8(rows: int, columns: int, *, config: dict[str, Any], scale: str, is_vector: bool = False) -> Format:
    """FP8 with a scale for each block of `rows` and `columns`; 0: all of them."""

    def write(name: str, weight: Tensor) -> tuple[Tensors, NDArray[np.float64]]:
        num_rows, num_columns = rows or len(weight), columns or weight.shape[1]
        of_rows = torch.arange(len(weight)) // num_rows
        of_columns = torch.arange(weight.shape[1]) // num_columns
        scales = torch.zeros(int(of_rows[-1]) + 1, int(of_columns[-1]) + 1)
        for row in range(len(scales)):
            for column in range(scales.shape[1]):
                block = weight[of_rows == row][:, of_columns == column]
                scales[row, column] = (block.abs().max().float() / 448).bfloat16().float()
        spread = scales[of_rows][:, of_columns]
        codes = (weight.float() / spread).clamp(-448, 448).to(torch.float8_e4m3fn)
        product = name.removesuffix(".weight")
        stored = scales.flatten() if is_vector else scales
        tensors = {name: codes, f"{name}{scale}": stored, f"{product}.input_scale": torch.ones(1)}
        return tensors, codes.double().numpy() * spread.double().numpy()

    return Format(config, write)


def nvfp4(*, by_modelopt: bool = False) -> Format:
    """NVFP4 of compressed-tensors: scales of 16 inputs in FP8, divided by one of the whole weight. By
    ModelOpt the tensors have other names, and the scales are multiplied."""
    weights = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16}
    numbers = np.array([*_E2M1, *(-it for it in _E2M1)])

    def write(name: str, weight: Tensor) -> tuple[Tensors, NDArray[np.float64]]:
        drawn = np.random.default_rng(len(weight))
        codes = drawn.integers(16, size=weight.shape)
        scales = torch.from_numpy(drawn.uniform(1, 9, (len(weight), weight.shape[1] // 16)))
        small = scales.to(torch.float8_e4m3fn)
        packed = torch.from_numpy(codes[:, ::2] + 16 * codes[:, 1::2]).to(torch.uint8)
        product = name.removesuffix(".weight")
        tensors = {f"{name}_packed": packed, f"{name}_scale": small}
        tensors[f"{name}_global_scale"] = torch.tensor([128.0])
        tensors[f"{product}.input_global_scale"] = torch.tensor([1.0])
        if by_modelopt:
            tensors = {name: packed, f"{name}_scale": small, f"{name}_scale_2": torch.tensor(1 / 128)}
            tensors[f"{product}.input_scale"] = torch.tensor(1.0)
        return tensors, numbers[codes] * np.repeat(small.double().numpy() / 128, 16, 1)

    if by_modelopt:
        return Format({"quant_method": "modelopt", "quant_algo": "NVFP4"}, write)
    return Format(_compressed_config("nvfp4-pack-quantized", weights), write)


def auto_round() -> Format:
    """AutoRound, in the form of GPTQ."""
    config = {"quant_method": "auto-round", "packing_format": "auto_round:auto_gptq", "bits": 4}
    return Format(config | {"group_size": 32, "sym": False}, gptq(4, 32, sym=False).write)


def block_fp8(rows: int, columns: int) -> Format:
    """FP8 as DeepSeek publishes it."""
    config = {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [rows, columns],
    }
    return fp8(rows, columns, config=config, scale="_scale_inv")


def static_fp8() -> Format:
    """FP8 with one scale of a weight, and one of its inputs."""
    config = {"quant_method": "fp8", "activation_scheme": "static"}
    return fp8(0, 0, config=config, scale="_scale", is_vector=True)


def compressed_fp8(strategy: str, block: tuple[int, int] = (0, 0)) -> Format:
    """FP8 of compressed-tensors."""
    weights = {"num_bits": 8, "type": "float", "strategy": strategy, "symmetric": True}
    if strategy == "block":
        weights["block_structure"] = list(block)
    rows, columns = {"tensor": (0, 0), "channel": (1, 0)}.get(strategy, block)
    config = _compressed_config("float-quantized", weights, {"num_bits": 8, "dynamic": True})
    return fp8(rows, columns, config=config, scale="_scale", is_vector=strategy == "tensor")


def _compressed_config(how: str, weights: dict[str, Any], inputs: Any = None) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs}
    return {
        "quant_method": "compressed-tensors",
        "format": how,
        "config_groups": {"group_0": group},
        "ignore": ["lm_head", "re:.*mlp.gate$"],
        "quantization_status": "compressed",
    }


# That in which products cannot be computed together as they are.
OWN_ORDERS = "gptq in orders of their own"
FORMATS: dict[str, Format] = {
    "int4": compressed(4, 32),
    "int4 with zero points": compressed(4, 32, has_zeros=True),
    "int4 of channels": compressed(4, 0),
    "int4 in another order": compressed(4, 32, has_order=True, has_zeros=True),
    "int8 packed": compressed(8, 32, has_zeros=True),
    "int8": plain_int8(),
    "int8 with zero points": plain_int8(has_zeros=True),
    "int4 in bytes": plain_int8(bits=4, group=32),
    "gptq": gptq(4, 32),
    "gptq with zero points": gptq(4, 32, sym=False),
    "gptq 2": gptq(4, 32, version=2, sym=False),
    "gptq in another order": gptq(4, 32, has_order=True),
    OWN_ORDERS: gptq(4, 32, has_order=True, has_own_orders=True),
    "gptq of 8 bits": gptq(8, 32, sym=False),
    "gptq of channels": gptq(4, 0),
    "awq": awq(32),
    "fp8 in blocks": block_fp8(32, 32),
    "fp8": static_fp8(),
    "fp8 of channels": compressed_fp8("channel"),
    "fp8 of tensors": compressed_fp8("tensor"),
    "fp8 in other blocks": compressed_fp8("block", (16, 32)),
    "nvfp4": nvfp4(),
    "nvfp4 by modelopt": nvfp4(by_modelopt=True),
    "auto-round": auto_round(),
}


def is_product(name: str) -> bool:
    """Whether the tensor is the weight of a product in a layer, or of those of all its experts."""
    endings = ("_proj.weight", ".w1.weight", ".w2.weight", ".w3.weight", ".gate_up_proj", ".down_proj")
    of_states = (".in_proj_qkvz.weight", ".in_proj_qkv.weight", ".in_proj_z.weight")
    return ".layers." in name and name.endswith((*endings, *of_states))


def is_table(name: str) -> bool:
    """Whether the tensor is the table of the embedding, of the head, or of the layers' own inputs."""
    return name.endswith(("embed_tokens.weight", "lm_head.weight", "embed_tokens_per_layer.weight"))


def quantize(
    source: Path, target: Path, how: Format, config: dict[str, Any] | None = None, *, has_tables: bool = False
) -> Path:
    """Write a copy of the checkpoint with its products quantized into `target`, and its embedding and head if
    it `has_tables`, and one with what these are worth in float32 into `target` / plain, which is returned."""
    tensors, plain = load_file(source / "model.safetensors"), target / "plain"
    quantized: Tensors = {}
    for name, weight in list(tensors.items()):
        if not is_product(name) and not (has_tables and is_table(name)):
            quantized[name] = weight
            continue
        written, values = _written(name, weight, how)
        # A bias of the model's own stays.
        quantized |= {key: it for key, it in written.items() if key == name or key not in tensors}
        tensors[name] = torch.from_numpy(values).float()
    shutil.copytree(source, plain)
    save_file(tensors, plain / "model.safetensors", {"format": "pt"})
    keys = json.loads((source / "config.json").read_text(encoding="utf-8"))
    keys["quantization_config"] = config or how.config
    (target / "config.json").write_text(json.dumps(keys), encoding="utf-8")
    save_file({name: it.contiguous() for name, it in quantized.items()}, target / "model.safetensors")
    return plain


def _written(name: str, weight: Tensor, how: Format) -> tuple[Tensors, NDArray[np.float64]]:
    """Write a weight, or those of all experts, [num_experts, num_outputs, num_inputs]."""
    if weight.dim() == 2:
        return how.write(name, weight)
    each = [how.write(name, of_expert) for of_expert in weight]
    stacked = {key: torch.stack([tensors[key] for tensors, _ in each]) for key in each[0][0]}
    return stacked, np.stack([values for _, values in each])


def draw_mxfp4(folder: Path) -> None:
    """Give the experts of a checkpoint of gpt-oss drawn codes and scales of MXFP4 in place of their
    weights."""
    file, drawn = folder / "model.safetensors", torch.Generator().manual_seed(3)
    tensors = load_file(file)
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
        num_experts, num_inputs, num_outputs = tensors.pop(name).shape
        shape = (num_experts, num_outputs, num_inputs // 32)
        blocks = torch.randint(256, (*shape, 16), generator=drawn, dtype=torch.uint8)
        tensors[f"{name}_blocks"] = blocks
        tensors[f"{name}_scales"] = torch.randint(121, 126, shape, generator=drawn, dtype=torch.uint8)
    save_file(tensors, file, {"format": "pt"})
    config = folder / "config.json"
    keys = json.loads(config.read_text(encoding="utf-8"))
    keys["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    config.write_text(json.dumps(keys), encoding="utf-8")
