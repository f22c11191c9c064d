"""Read what config.json says of quantized weights. No torch."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NoReturn

from workers.errors import CheckpointError
from workers.model.config_values import shown
from workers.model.quantization.own_format import METHOD, own_scheme
from workers.model.quantization.stored_format import (
    CodeType,
    Layout,
    QuantizationScheme,
    StoredFormat,
    TargetedFormat,
    of_all,
)

_KEY = "quantization_config"
_INSTEAD = (
    "take the checkpoint in 16 or 32 bits of which this one was made, or one in compressed-tensors, GPTQ, "
    "AWQ or FP8"
)
_INT_CODES = {4: CodeType.INT4, 8: CodeType.INT8}
# The layouts of compressed-tensors by the name of its format, and the types and bits of codes that they have.
_COMPRESSED = {
    "pack-quantized": (Layout.PACKED, {("int", 4), ("int", 8)}),
    "int-quantized": (Layout.PLAIN, {("int", 4), ("int", 8)}),
    "float-quantized": (Layout.PLAIN, {("float", 8)}),
    "naive-quantized": (Layout.PLAIN, {("int", 4), ("int", 8), ("float", 8)}),
    "nvfp4-pack-quantized": (Layout.PACKED, {("float", 4)}),
    "mxfp4-pack-quantized": (Layout.PACKED, {("float", 4)}),
}


class SchemeReader:
    """Reads one `quantization_config`."""

    def __init__(self, file: Path, config: Any) -> None:
        self._file = file
        self._config: Mapping[str, Any] = config if isinstance(config, dict) else {}

    def read(self) -> QuantizationScheme:
        """Return the scheme. Raises `CheckpointError` with the method's name where it is not read."""
        method = self._config.get("quant_method")
        readers: dict[str, Callable[[], QuantizationScheme]] = {
            "compressed-tensors": self._compressed,
            "gptq": self._gptq,
            "awq": self._awq,
            "fp8": self._fp8,
            METHOD: lambda: own_scheme(self._config, self._refuse),
            "modelopt": self._modelopt,
            "auto-round": self._auto_round,
            "fbgemm_fp8": lambda: of_all("fbgemm_fp8", _row_wise_fp8()),
        }
        if not isinstance(method, str):
            self._refuse("is there without a quant_method")
        if method not in readers:
            self._refuse(
                f"says that the weights are quantized ({shown(method)[1:-1]}), a form that is not read"
            )
        return readers[method]()

    def _refuse(self, problem: str) -> NoReturn:
        raise CheckpointError(f"{self._file}: {_KEY} {problem}; {_INSTEAD}")

    def _compressed(self) -> QuantizationScheme:
        sparsity = self._section("sparsity_config").get("format", "dense")
        if sparsity != "dense":
            self._refuse(f"has sparse weights ({shown(sparsity)}), which are not read")
        if self._section("transform_config").get("config_groups"):
            self._refuse("has transforms of activations, which are not computed")
        groups = self._section("config_groups")
        if not groups:
            self._refuse("has no config_groups")
        formats = [self._compressed_group(name, group) for name, group in groups.items()]
        return QuantizationScheme("compressed-tensors", tuple(formats))

    def _compressed_group(self, name: str, group: Any) -> TargetedFormat:
        weights = group.get("weights") if isinstance(group, dict) else None
        if not isinstance(weights, dict):
            self._refuse(f"says nothing of the weights of config_groups.{name}")
        targets = group.get("targets")
        if not isinstance(targets, list) or not all(isinstance(target, str) for target in targets):
            self._refuse(f"has no list of targets in config_groups.{name}")
        for target in targets:
            if target.startswith("re:"):
                self._refuse_bad_pattern(target.removeprefix("re:"), f"config_groups.{name}.targets")
        how = group.get("format") or self._config.get("format")
        if not isinstance(how, str) or how not in _COMPRESSED:
            self._refuse(f"has the format {shown(how)}, which is not read")
        layout, known = _COMPRESSED[how]
        named, num_bits = weights.get("type", "int"), weights.get("num_bits")
        if (kind := (str(named), num_bits if isinstance(num_bits, int) else 0)) not in known:
            which = f"of type {shown(named)} and {shown(num_bits)} bits"
            self._refuse(f"has {how} weights {which}, which are not read")
        codes = _INT_CODES[kind[1]] if kind[0] == "int" else CodeType.FP8 if kind[1] == 8 else CodeType.FP4
        num_rows, size = self._compressed_sizes(weights, name)
        quantizes_inputs = bool(group.get("input_activations")) and codes in (CodeType.INT8, CodeType.FP8)
        has_zeros = kind[0] == "int" and not weights.get("symmetric", True)
        has_order = weights.get("actorder") in (True, "group", "dynamic")
        stored = StoredFormat(
            layout, codes, size, num_rows, has_zeros, has_order, quantizes_inputs=quantizes_inputs
        )
        return TargetedFormat(tuple(targets), stored)

    def _compressed_sizes(self, weights: Mapping[str, Any], name: str) -> tuple[int, int]:
        """Return the outputs and inputs that share a scale."""
        strategy = weights.get("strategy") or ("group" if weights.get("group_size") else "tensor")
        if strategy in ("tensor", "channel"):
            return 1, 0
        if strategy in ("group", "tensor_group"):
            return 1, self._group(weights)
        if strategy == "block":
            return self._block(weights, "block_structure")
        self._refuse(f"has the strategy {shown(strategy)} in config_groups.{name}, which is not read")

    def _gptq(self) -> QuantizationScheme:
        config, how = self._config, self._config.get("checkpoint_format", "gptq")
        if how not in ("gptq", "gptq_v2"):
            self._refuse(f"has the checkpoint_format {shown(how)}, which is not read")
        formats = [
            TargetedFormat(
                (f"re:{pattern.removeprefix('+:')}",), self._gptq_format({**config, **of_some}, how)
            )
            for pattern, of_some in self._exceptions("dynamic").items()
            if not pattern.startswith("-:")
        ]
        for targeted in formats:
            self._refuse_bad_pattern(targeted.targets[0].removeprefix("re:"), "dynamic")
        whole = of_all("gptq", self._gptq_format(config, how))
        return QuantizationScheme("gptq", (*formats, *whole.formats))

    def _gptq_format(self, config: Mapping[str, Any], how: str) -> StoredFormat:
        num_bits = config.get("bits")
        codes = _INT_CODES.get(num_bits) if isinstance(num_bits, int) else None
        if codes is None:
            self._refuse(f"has GPTQ weights of {shown(num_bits)} bits, and 4 and 8 are read")
        return StoredFormat(
            Layout.GPTQ,
            codes,
            self._group(config),
            has_zeros=not config.get("sym", True),
            has_order=bool(config.get("desc_act")),
            is_one_less=how == "gptq",
        )

    def _auto_round(self) -> QuantizationScheme:
        packing = str(self._config.get("packing_format"))
        is_awq = packing.endswith("awq")
        if not is_awq and not packing.endswith("gptq"):
            self._refuse(f"has the packing_format {shown(packing)}, which is not read")
        formats: list[TargetedFormat] = []
        for product, of_some in self._exceptions("extra_config").items():
            # Products of 16 bits have other tensors.
            if not is_awq and of_some.get("bits", 4) != 16:
                stored = self._gptq_format({**self._config, **of_some}, "gptq")
                formats.append(TargetedFormat((product,), stored))
        whole = self._awq() if is_awq else of_all("gptq", self._gptq_format(self._config, "gptq"))
        return QuantizationScheme("auto-round", (*formats, *whole.formats))

    def _modelopt(self) -> QuantizationScheme:
        algorithm = self._config.get("quant_algo")
        if algorithm == "FP8":
            return of_all("modelopt", _row_wise_fp8())
        if algorithm == "NVFP4":
            return of_all("modelopt", StoredFormat(Layout.PLAIN, CodeType.FP4, 16))
        self._refuse(f"has weights by ModelOpt in {shown(algorithm)}, and FP8 and NVFP4 are read")

    def _awq(self) -> QuantizationScheme:
        config = self._config
        version = str(config.get("version") or config.get("format") or "gemm").lower()
        if version != "gemm":
            self._refuse(f"has AWQ weights of version {shown(version)}, and gemm is read")
        if config.get("bits", config.get("w_bit", 4)) != 4:
            self._refuse(f"has AWQ weights of {shown(config.get('bits'))} bits, and 4 are read")
        return of_all("awq", StoredFormat(Layout.AWQ, CodeType.INT4, self._group(config), has_zeros=True))

    def _fp8(self) -> QuantizationScheme:
        if self._config.get("expert_dtype", "fp8") != "fp8":
            self._refuse(f"has experts of {shown(self._config['expert_dtype'])}, which are not read")
        if self._config.get("weight_block_size") is None:
            return of_all("fp8", _row_wise_fp8())
        num_rows, size = self._block(self._config, "weight_block_size")
        stored = StoredFormat(Layout.PLAIN, CodeType.FP8, size, num_rows, quantizes_inputs=True)
        return of_all("fp8", stored)

    def _section(self, key: str) -> Mapping[str, Any]:
        """Return the object of this key, empty where there is none."""
        found = self._config.get(key) or {}
        if not isinstance(found, dict):
            self._refuse(f"has the {key} {shown(found)}, which is no object")
        return found

    def _exceptions(self, key: str) -> Mapping[str, Mapping[str, Any]]:
        """Return the object of this key, whose values are objects."""
        found = self._section(key)
        for name, of_some in found.items():
            if not isinstance(of_some, dict):
                self._refuse(f"has {shown(of_some)} for {shown(name)} in {key}, which is no object")
        return found

    def _group(self, config: Mapping[str, Any]) -> int:
        """Return the inputs that share a scale; 0: all."""
        size = config.get("group_size", config.get("q_group_size", 128))
        if size in (None, -1, 0):
            return 0
        if not isinstance(size, int) or not _is_size(size) or size % 2:
            self._refuse(f"has the group_size {shown(size)}, which is no even number")
        return size

    def _block(self, config: Mapping[str, Any], key: str) -> tuple[int, int]:
        """Return the outputs and inputs of a block."""
        block = config.get(key)
        if not isinstance(block, list) or len(block) != 2 or not all(map(_is_size, block)):
            self._refuse(f"has the {key} {shown(block)}, which is no pair of positive integers")
        return block[0], block[1]

    def _refuse_bad_pattern(self, pattern: str, where: str) -> None:
        try:
            re.compile(pattern)
        except re.error as error:
            self._refuse(f"has a pattern in {where} that cannot be read: {shown(pattern)} ({error})")


def _row_wise_fp8() -> StoredFormat:
    return StoredFormat(Layout.PLAIN, CodeType.FP8, quantizes_inputs=True)


def _is_size(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0
