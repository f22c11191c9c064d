"""What is written for a checkpoint: which of its tensors are quantized, and which file each goes to."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from kvtransfer.common.panics import PanicError, panics_as_errors
from workers.errors import CheckpointError, QuantizationError
from workers.model.model_config import ModelConfig, read_model_config, weight_files
from workers.model.safetensors_stream import StoredTensor, shard_name
from workers.model.tensor_names import TensorNames
from workers.quantizer.compressed_tensors import stored_forms
from workers.quantizer.target import QuantizationTarget

# The modules of a layer that are products of many inputs and outputs, in the names of all families. Routers,
# gates of single numbers and convolutions are none.
_PRODUCTS = re.compile(
    r"(q|k|v|o|qkv|out|gate|up|down|gate_up|q_a|q_b|kv_b|in)_proj|kv_a_proj_with_mqa|in_proj_(qkv|qkvz|z)|"
    r"w[123]|(in|out)put_linear"
)
_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
# A shard ends with the layer that makes it this large.
_SHARD_BYTES = 256 << 20


@dataclasses.dataclass(frozen=True, slots=True)
class PlannedTensor:
    """A tensor of the checkpoint, and what is stored for it. Of `layer` -1 are those before the first layer,
    of `num_layers` those behind the last."""

    source: StoredTensor
    layer: int
    stored: tuple[StoredTensor, ...]
    is_quantized: bool

    @property
    def num_bytes(self) -> int:
        """The bytes of what is stored."""
        return sum(it.num_bytes for it in self.stored)


@dataclasses.dataclass(frozen=True, slots=True)
class PlannedShard:
    """A file with weights: whole layers, one after another."""

    name: str
    tensors: tuple[PlannedTensor, ...]

    @property
    def stored(self) -> list[StoredTensor]:
        """What is stored in it, in this order."""
        return [stored for tensor in self.tensors for stored in tensor.stored]

    @property
    def num_bytes(self) -> int:
        return sum(tensor.num_bytes for tensor in self.tensors)

    def layers(self) -> Iterator[tuple[int, list[PlannedTensor]]]:
        """Iterate over the layers, in order, and their tensors."""
        for layer in sorted({tensor.layer for tensor in self.tensors}):
            yield layer, [tensor for tensor in self.tensors if tensor.layer == layer]


@dataclasses.dataclass(frozen=True, slots=True)
class CheckpointPlan:
    """All files with weights, and the modules of matrices that stay as they are."""

    shards: tuple[PlannedShard, ...]
    ignored: tuple[str, ...]

    @property
    def num_bytes(self) -> int:
        return sum(shard.num_bytes for shard in self.shards)

    @staticmethod
    def of(
        source: SourceTensors, target: QuantizationTarget, shard_bytes: int = _SHARD_BYTES
    ) -> CheckpointPlan:
        """Plan for the tensors of a checkpoint. Raises `QuantizationError` where none would be quantized."""
        planned = [_planned(tensor, source, target) for tensor in source.tensors]
        planned.sort(key=lambda it: (it.layer, it.source.name))
        if not any(it.is_quantized for it in planned):
            raise QuantizationError(
                f"{source.folder}: no weight has whole groups of {target.group} inputs, or all experts of a "
                "layer are in one tensor; choose another group, or another model"
            )
        groups = list(_groups(planned, shard_bytes))
        shards = [
            PlannedShard(shard_name(index, len(groups)), tuple(group)) for index, group in enumerate(groups)
        ]
        tables = {source.names.embedding, source.names.input_embedding}
        matrices = {it.source.name for it in planned if not it.is_quantized and len(it.source.shape) > 1}
        # The head is ignored where it is the embedding, too.
        ignored = {it.removesuffix(".weight") for it in (matrices - tables) | {source.names.head}}
        return CheckpointPlan(tuple(shards), tuple(sorted(ignored)))


class SourceTensors:
    """The tensors of a checkpoint in 16 or 32 bits, mapped. A context manager."""

    def __init__(self, folder: Path) -> None:
        """Raises `CheckpointError` for a folder that is not supported, `QuantizationError` for one that is
        quantized already."""
        self.folder = folder
        self.config: ModelConfig = read_model_config(folder)
        self._stack = ExitStack()
        self._name_to_file: dict[str, Any] = {}
        self.tensors: list[StoredTensor] = []
        self.names = TensorNames.of((), self.config)

    def __enter__(self) -> SourceTensors:
        for file in weight_files(self.folder):
            try:
                with panics_as_errors:
                    opened = self._stack.enter_context(safe_open(str(file), framework="pt", device="cpu"))
                    for name in opened.keys():  # noqa: SIM118 - it is no mapping
                        part = opened.get_slice(name)
                        self.tensors.append(StoredTensor(name, part.get_dtype(), tuple(part.get_shape())))
                        self._name_to_file[name] = opened
            except (OSError, SafetensorError, PanicError) as error:
                raise CheckpointError(f"{file}: unreadable: {error}") from error
        self.names = TensorNames.of(self._name_to_file, self.config)
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def tensor(self, name: str) -> Tensor:
        """Map a tensor."""
        try:
            with panics_as_errors:
                found: Tensor = self._name_to_file[name].get_tensor(name)
                return found
        except (SafetensorError, PanicError) as error:
            raise CheckpointError(f"{self.folder}: tensor {name} is unreadable: {error}") from error


def _planned(tensor: StoredTensor, source: SourceTensors, target: QuantizationTarget) -> PlannedTensor:
    layer, rest = source.names.layer_of(tensor.name) or (_outside(tensor.name, source), "")
    num_layers = source.config.num_layers
    if layer >= num_layers:  # of the prediction of further tokens
        layer, rest = num_layers, ""
    if _is_product(rest) and tensor.dtype in _DTYPES and target.fits(tensor.shape):
        forms = stored_forms(tensor.name, tensor.shape, tensor.dtype, target)
        return PlannedTensor(tensor, layer, tuple(forms), is_quantized=True)
    return PlannedTensor(tensor, layer, (tensor,), is_quantized=False)


def _outside(name: str, source: SourceTensors) -> int:
    """Return the place of a tensor of no layer."""
    names = source.names
    is_behind = name in (names.norm, names.norm_bias, names.head, names.head_bias)
    return source.config.num_layers if is_behind else -1


def _is_product(rest: str) -> bool:
    module, _, kind = rest.rpartition(".")
    return kind == "weight" and _PRODUCTS.fullmatch(module.rpartition(".")[2]) is not None


def _groups(planned: Sequence[PlannedTensor], shard_bytes: int) -> Iterator[list[PlannedTensor]]:
    """Part the tensors, which are ordered by layer, where a layer ends and a group is large enough."""
    group: list[PlannedTensor] = []
    num_bytes = 0
    for tensor in planned:
        if group and num_bytes >= shard_bytes and tensor.layer != group[-1].layer:
            yield group
            group, num_bytes = [], 0
        group.append(tensor)
        num_bytes += tensor.num_bytes
    yield group
