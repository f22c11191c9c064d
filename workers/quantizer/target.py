"""What a checkpoint is quantized to, and how compressed-tensors calls it."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, Literal

from workers.errors import QuantizationError

TargetName = Literal["int8", "w8a8", "int4", "fp8"]
TARGETS: tuple[TargetName, ...] = ("int8", "w8a8", "int4", "fp8")

_INT4_GROUP = 32
_GROUP_STEP = 8
_LARGEST_FP8 = 448
# The formats of compressed-tensors.
_FORMATS: dict[TargetName, str] = {
    "int8": "pack-quantized",
    "w8a8": "int-quantized",
    "int4": "pack-quantized",
    "fp8": "float-quantized",
}
# Of the specification that the folders follow.
_VERSION = "0.12.0"


@dataclasses.dataclass(frozen=True, slots=True)
class QuantizationTarget:
    """The bits of a weight, and how many inputs of an output share a scale (0: all of them). With
    `quantizes_inputs`, engines round the inputs of products to 8 bits as well, by a scale of each token."""

    name: TargetName
    num_bits: int
    group: int
    quantizes_inputs: bool = False
    # Each group has a code that means zero, in place of the middle one.
    is_asymmetric: bool = False

    @staticmethod
    def of(name: str, group: int | None = None, *, is_asymmetric: bool = False) -> QuantizationTarget:
        """Return the target of this name; `group` None: that which is usual. Raises `QuantizationError`."""
        if name not in TARGETS:
            raise QuantizationError(f"{name!r} is none of {', '.join(TARGETS)}")
        if group is not None and name in ("w8a8", "fp8"):
            raise QuantizationError(f"{name} has one scale for each output; leave the group out")
        if group is not None and (group < _GROUP_STEP or group % _GROUP_STEP):
            raise QuantizationError(f"a group of {group} inputs is no multiple of {_GROUP_STEP}")
        if is_asymmetric and name != "int4":
            raise QuantizationError(f"zero points are for int4; {name} is as good without them")
        if name == "int4":
            return QuantizationTarget("int4", 4, group or _INT4_GROUP, is_asymmetric=is_asymmetric)
        if name == "int8":
            return QuantizationTarget("int8", 8, group or 0)
        if name == "fp8":
            return QuantizationTarget("fp8", 8, 0)
        return QuantizationTarget("w8a8", 8, 0, quantizes_inputs=True)

    @property
    def is_packed(self) -> bool:
        """Whether codes lie several in a number of 32 bits."""
        return _FORMATS[self.name] == "pack-quantized"

    @property
    def is_float(self) -> bool:
        """Whether codes are numbers of float8 (e4m3)."""
        return self.name == "fp8"

    @property
    def largest(self) -> int:
        """The value of the largest code; the smallest of integers is `-largest - 1`."""
        return _LARGEST_FP8 if self.is_float else (1 << self.num_bits - 1) - 1

    def fits(self, shape: Sequence[int]) -> bool:
        """Whether a weight [num_outputs, num_inputs] of this shape has whole groups."""
        return len(shape) == 2 and shape[1] % (self.group or 1) == 0

    def num_groups(self, num_inputs: int) -> int:
        """The scales of an output."""
        return num_inputs // (self.group or num_inputs)

    def config(self, ignored: Sequence[str]) -> dict[str, Any]:
        """Return the `quantization_config` of a model whose modules of the names `ignored` stay as they
        are."""
        form = _FORMATS[self.name]
        weights: dict[str, Any] = {
            "num_bits": self.num_bits,
            "type": "float" if self.is_float else "int",
            "symmetric": not self.is_asymmetric,
            "strategy": "group" if self.group else "channel",
            "group_size": self.group or None,
            "dynamic": False,
            "actorder": None,
            "block_structure": None,
            "observer": "minmax",
            "observer_kwargs": {},
        }
        if self.is_asymmetric:
            weights["zp_dtype"] = "torch.int8"
        inputs = None
        if self.quantizes_inputs:
            inputs = weights | {"strategy": "token", "dynamic": True, "observer": None}
        group = {
            "targets": ["Linear"],
            "weights": weights,
            "input_activations": inputs,
            "output_activations": None,
            "format": form,
        }
        return {
            "quant_method": "compressed-tensors",
            "version": _VERSION,
            "format": form,
            "quantization_status": "compressed",
            "config_groups": {"group_0": group},
            "ignore": list(ignored),
            "kv_cache_scheme": None,
            "global_compression_ratio": None,
        }
