"""Declare in which format the weights of a checkpoint's products are stored. No torch."""

from __future__ import annotations

import dataclasses
import enum
import re

# The class by which configurations mean all linear products.
_LINEAR = "Linear"
# What regular expressions begin with.
_PATTERN = "re:"
# No row of a product's weight is taken for shorter, where memory is computed.
_ROW = 256


class Layout(enum.StrEnum):
    """The tensors that hold a weight, `weight` being its plain name and `product` that without `.weight`."""

    # `weight` with a code for each element, and `weight_scale` or `weight_scale_inv`.
    PLAIN = "plain"
    # `weight_packed` with the codes of a row one after another, `weight_scale` and `weight_zero_point`.
    PACKED = "packed"
    # `product.qweight` with the codes of an output in a column, `qzeros`, `scales` and `g_idx`.
    GPTQ = "gptq"
    # `product.qweight` with the codes of an input in a row, eight outputs interleaved, `qzeros` and `scales`.
    AWQ = "awq"
    # `weight_codes`, `weight_scales` and `weight_offsets`, as `workers.model.quantization.own_format` says.
    OWN = "own"


class CodeType(enum.StrEnum):
    """The codes of the elements."""

    INT4 = "int4"
    INT8 = "int8"
    FP8 = "fp8"
    FP4 = "fp4"
    IQ4_NL = "iq4_nl"

    @property
    def num_bits(self) -> int:
        """The bits of a code."""
        return 8 if self in (CodeType.INT8, CodeType.FP8) else 4


@dataclasses.dataclass(frozen=True, slots=True)
class StoredFormat:
    """The format of a product's weight: a scale belongs to `group` inputs of `num_rows` outputs; 0: to all.
    `has_zeros`: groups have zero points; `is_one_less`: these are stored less one. `has_order`: groups are
    not of neighbors. `quantizes_inputs`: the product is meant to be computed with quantized inputs as
    well."""

    layout: Layout
    codes: CodeType
    group: int = 0
    num_rows: int = 1
    has_zeros: bool = False
    has_order: bool = False
    is_one_less: bool = False
    quantizes_inputs: bool = False

    @property
    def name(self) -> str:
        """What identifies weights of this format, such as `int4 group 128`."""
        if self.num_rows > 1:
            return f"{self.codes} block {self.num_rows}x{self.group}"
        return f"{self.codes} group {self.group}" if self.group else str(self.codes)

    @property
    def bytes_each(self) -> float:
        """The bytes of a weight in memory, with its part of a scale and of an offset."""
        scale_bytes = 4 if self.codes is CodeType.FP8 else 2
        return self.codes.num_bits / 8 + (scale_bytes + 4 * self.has_zeros) / (self.group or _ROW)


# That of the experts of gpt-oss, whose tensors have names of their own.
MXFP4 = StoredFormat(Layout.PACKED, CodeType.FP4, 32)


@dataclasses.dataclass(frozen=True, slots=True)
class TargetedFormat:
    """A format, and the products that have it: by names, by regular expressions behind `re:`, or by their
    class."""

    targets: tuple[str, ...]
    format: StoredFormat
    # The targets that are names, of which each product of each expert may have one, and the others.
    _names: frozenset[str] = dataclasses.field(init=False, repr=False, compare=False)
    _patterns: tuple[str, ...] = dataclasses.field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        patterns = [it.removeprefix(_PATTERN) for it in self.targets if it.startswith(_PATTERN)]
        object.__setattr__(self, "_names", frozenset(self.targets))
        object.__setattr__(self, "_patterns", tuple(patterns))

    def names(self, product: str) -> bool:
        """Whether a target names the product itself."""
        return product in self._names or any(re.match(it, product) for it in self._patterns)

    @property
    def has_all(self) -> bool:
        """Whether it is that of all linear products which no target names."""
        return _LINEAR in self.targets


@dataclasses.dataclass(frozen=True, slots=True)
class QuantizationScheme:
    """The quantization of a checkpoint: its method, and the formats of its products. Which products are
    quantized at all is seen by their tensors."""

    method: str
    formats: tuple[TargetedFormat, ...]

    def format_of(self, product: str) -> StoredFormat | None:
        """Return the format of the product of this name, without `.weight`; None where nothing says it."""
        for targeted in self.formats:
            if targeted.names(product):
                return targeted.format
        return next((targeted.format for targeted in self.formats if targeted.has_all), None)

    @property
    def quantizes_inputs(self) -> bool:
        """Whether some products are meant to be computed with quantized inputs."""
        return any(targeted.format.quantizes_inputs for targeted in self.formats)

    @property
    def name(self) -> str:
        """What identifies weights of this scheme: the names of their formats."""
        return " and ".join(dict.fromkeys(targeted.format.name for targeted in self.formats))


def of_all(method: str, stored: StoredFormat) -> QuantizationScheme:
    """Return the scheme in which all quantized products have one format."""
    return QuantizationScheme(method, (TargetedFormat((_LINEAR,), stored),))


# What stands behind the plain name of a weight in the names of the tensors that hold it.
_OF_WEIGHTS = (
    "_packed",
    "_scale",
    "_scale_inv",
    "_scale_2",
    "_global_scale",
    "_zero_point",
    "_shape",
    "_g_idx",
    "_codes",
    "_scales",
    "_offsets",
)
# What stands behind the name of a product in the names of such tensors.
_OF_PRODUCTS = (".qweight", ".qzeros", ".scales", ".g_idx")
# Factors of inputs, outputs and KV, which are computed as they come.
_PASSED_OVER = re.compile(
    r".*\.((input|output|activation)_(scale|zero_point|global_scale)|[qkv]_(scale|zero_point)|activation_scale)"
)


def plain_name(name: str) -> str:
    """Return the name that the weight which the tensor belongs to would have if it were not quantized; "" of
    a tensor that is passed over."""
    if _PASSED_OVER.fullmatch(name):
        return ""
    for ending in _OF_PRODUCTS:
        if name.endswith(ending):
            return f"{name.removesuffix(ending)}.weight"
    for ending in _OF_WEIGHTS:
        if name.endswith(f".weight{ending}"):
            return name.removesuffix(ending)
    # Of experts in one tensor, whose name is that of their product.
    return name.removesuffix("_scale_inv")


def num_weights(name: str, num_items: int, num_item_bits: int, scheme: QuantizationScheme) -> int:
    """Return how many weights are in a tensor of this name, with so many items, of so many bits where they
    may be codes: none where it has but scales or the like."""
    plain = plain_name(name)
    if not plain:
        return 0
    stored = scheme.format_of(product_of(plain))
    if name == plain and (stored is None or num_item_bits == 0 or stored.codes is not CodeType.FP4):
        return num_items
    if stored is None or not (name == plain or name.endswith(("_packed", "_codes", ".qweight"))):
        return 0
    return num_items * num_item_bits // stored.codes.num_bits


def product_of(weight: str) -> str:
    """Return the name of the product that has the weight of this plain name."""
    return weight.removesuffix(".weight")
