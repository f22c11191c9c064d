"""Describe devices by what decides how fast they serve: memory, the rate at which they read it, and the rate
at which they multiply."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Literal

import msgspec

from cluster.errors import ConfigError

Precision = Literal["bf16", "fp8", "int8"]


class DeviceProfile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A kind of device, as it is or as `--hardware FILE` describes it.

    The defaults of what steps reach, and take besides, fit those of Llama 3 8B that were measured on an H100
    (benchmarks/README.md, "On a card"): within 1 % for decode and 3 % for prefill.
    """

    name: str
    memory_gb: float
    # Of large copies, reading and writing counted.
    read_gb_s: float
    # Of large products of 16 bits, and of 8 bits where the device has units for them.
    bf16_tflop_s: float
    fp8_tflop_s: float = 0.0
    int8_tflop_s: float = 0.0
    # Between two devices of a node, in one direction; and between nodes, for each device.
    link_gb_s: float = 25.0
    network_gb_s: float = 12.5
    devices_per_node: int = 8
    kind: Literal["cuda", "cpu"] = "cuda"
    # CPU threads of a rank; of a GPU one.
    threads: int = 1
    # Where the rates are from.
    source: str = "described by you"
    # Of `read_gb_s`, when weights are read; KV is read at all of it.
    weights_efficiency: float = 0.85
    # Of the rates of large products.
    products_efficiency: float = 0.83
    # Of a step's launches, and of each sequence's sampling and small kernels.
    step_us: float = 400.0
    sequence_us: float = 9.0
    # Of one sum over the ranks of a stage, whatever its size: an assumption, not measured.
    collective_us: float = 12.0

    @property
    def memory_bytes(self) -> float:
        return 1e9 * self.memory_gb

    def flop_s(self, precision: Precision) -> float:
        """Return the rate of large products; of 16 bits where the device has no units for fewer."""
        of_precision = {"fp8": self.fp8_tflop_s, "int8": self.int8_tflop_s}.get(precision, 0.0)
        return 1e12 * (of_precision or self.bf16_tflop_s)

    @property
    def ridge(self) -> float:
        """The operations of 16 bits for each byte read above which multiplying takes longer than reading."""
        return 1e3 * self.bf16_tflop_s / self.read_gb_s


# What an H100 reached of its published rates: 2,990 of 3,350 GB/s, 769 of 989 TFLOP/s.
_READ, _PRODUCTS = 2990 / 3350, 769 / 989
_ESTIMATED = "published peaks, times what an H100 reaches of its own"


def _estimated(
    name: str,
    memory_gb: float,
    published_gb_s: float,
    published_tflop_s: float,
    link_gb_s: float,
    *,
    eight_bits: tuple[float, float] = (0.0, 0.0),
) -> DeviceProfile:
    """Estimate a device from its published rates, without sparsity; `eight_bits` are those of fp8 and
    int8."""
    fp8, int8 = eight_bits
    return DeviceProfile(
        name,
        memory_gb,
        read_gb_s=_READ * published_gb_s,
        bf16_tflop_s=_PRODUCTS * published_tflop_s,
        fp8_tflop_s=_PRODUCTS * fp8,
        int8_tflop_s=_PRODUCTS * int8,
        link_gb_s=link_gb_s,
        source=_ESTIMATED,
    )


# The H100 and the H200 with the rates that benchmarks/README.md has, the others estimated.
_MEASURED = "measured (benchmarks/README.md)"
_ALL = (
    DeviceProfile("H100", 80, 2990, 769, _PRODUCTS * 1979, _PRODUCTS * 1979, link_gb_s=450, source=_MEASURED),
    DeviceProfile(
        "H200", 141, 4214, 786, _PRODUCTS * 1979, _PRODUCTS * 1979, link_gb_s=450, source=_MEASURED
    ),
    _estimated("A100", 80, 2039, 312, 300, eight_bits=(0, 624)),
    _estimated("B200", 180, 8000, 2250, 900, eight_bits=(4500, 4500)),
    _estimated("L40S", 48, 864, 362, 32, eight_bits=(733, 733)),
    _estimated("MI300X", 192, 5300, 1307, 448, eight_bits=(2615, 2615)),
    _estimated("RTX4090", 24, 1008, 165, 32, eight_bits=(330, 660)),
)
NAME_TO_PROFILE: Mapping[str, DeviceProfile] = MappingProxyType({it.name: it for it in _ALL})


def device_profile(name: str) -> DeviceProfile:
    """Return the profile of this name, in whatever case. Raises `ConfigError` for another one."""
    profile = NAME_TO_PROFILE.get(name.upper().replace(" ", "").replace("-", ""))
    if profile is None:
        raise ConfigError(
            f"--gpu {name}: not known; there are {', '.join(NAME_TO_PROFILE)}, and --hardware FILE for "
            "another device"
        )
    return profile


def read_profile(file: Path) -> DeviceProfile:
    """Read a profile from a JSON file. Raises `ConfigError`, naming the file and the field."""
    try:
        profile = msgspec.json.decode(file.read_bytes(), type=DeviceProfile)
    except OSError as error:
        raise ConfigError(f"--hardware {file}: {error.strerror}") from error
    except msgspec.DecodeError as error:
        raise ConfigError(f"--hardware {file}: {error}") from error
    rates = ("read_gb_s", "bf16_tflop_s", "link_gb_s", "network_gb_s")
    shares = ("weights_efficiency", "products_efficiency")
    for field in ("memory_gb", "devices_per_node", "threads", *rates, *shares):
        if getattr(profile, field) <= 0:
            raise ConfigError(f"--hardware {file}: {field} must be above 0")
    return profile
