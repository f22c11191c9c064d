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
    # Of `read_gb_s`, when weights are read.
    weights_efficiency: float = 0.85
    # Of the rates of large products.
    products_efficiency: float = 0.83
    # Of a step's launches, and of each sequence's sampling and small kernels.
    step_us: float = 400.0
    sequence_us: float = 9.0
    # Of one sum over the ranks of a stage, whatever its size: an assumption, not measured.
    collective_us: float = 12.0
    # Of `read_gb_s`, when KV is read.
    kv_efficiency: float = 1.0
    # Between a device and its node's host memory, in one direction: an H100's, from pinned memory.
    host_link_gb_s: float = 47.5
    # Of a node: its host memory, the rate at which its CPUs read that, and their products of 16 bits. All of
    # these are assumptions.
    host_memory_gb: float = 512.0
    host_read_gb_s: float = 200.0
    host_tflop_s: float = 5.0
    # Of each layer with experts in host memory: choices reach the host, results come back. An assumption.
    host_layer_us: float = 60.0
    # Of a node's disks: their size, and the rate at which they are read. Assumptions.
    nvme_gb: float = 3200.0
    nvme_gb_s: float = 6.0

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
# Copies from pinned memory: 47.5 of 64 GB/s.
_BUS = 47.5 / 64
_ESTIMATED = "published peaks, times what an H100 reaches of its own"


def _estimated(
    name: str,
    memory_gb: float,
    published_gb_s: float,
    published_tflop_s: float,
    link_gb_s: float,
    *,
    eight_bits: tuple[float, float] = (0.0, 0.0),
    bus_gb_s: float = 64.0,
) -> DeviceProfile:
    """Estimate a device from its published rates, without sparsity; `eight_bits` are those of fp8 and int8,
    `bus_gb_s` that of its bus in one direction."""
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
        host_link_gb_s=_BUS * bus_gb_s,
    )


# What CPUs reach of their own rates, by the engine's tables in benchmarks/README.md: with AVX-512 bf16,
# fitted to a Zen 5, and with AMX, whose products are so fast that attention decides.
_CPU: Mapping[str, float] = {"step_us": 0.0, "sequence_us": 150.0}
AVX512_EFFICIENCY: Mapping[str, float] = MappingProxyType(
    {"weights_efficiency": 0.96, "kv_efficiency": 0.75, "products_efficiency": 0.9, **_CPU}
)
AMX_EFFICIENCY: Mapping[str, float] = MappingProxyType(
    {"weights_efficiency": 0.77, "kv_efficiency": 0.6, "products_efficiency": 0.62, **_CPU}
)


def _socket(
    name: str, num_cores: int, published_gb_s: float, core_gflop_s: float, efficiency: Mapping[str, float]
) -> DeviceProfile:
    """Estimate a socket: four fifths of its published bandwidth, and what a core was measured to multiply,
    at the clock of all cores. Two sockets share a node; its store is in the same memory."""
    socket = DeviceProfile(
        name,
        768,
        read_gb_s=0.8 * published_gb_s,
        bf16_tflop_s=num_cores * core_gflop_s / 1e3,
        link_gb_s=40.0,
        devices_per_node=2,
        kind="cpu",
        threads=num_cores,
        source="published bandwidth times 0.8, products of a measured core",
        host_link_gb_s=7.0,
        host_memory_gb=1536,
    )
    return msgspec.structs.replace(socket, **efficiency)


# The H100 and the H200 with the rates that benchmarks/README.md has, the others estimated. The products of a
# core are those of AVX-512 bf16 at 3 GHz of Zen 4, at 2.7 GHz of Zen 5, and of AMX.
_MEASURED = "measured (benchmarks/README.md)"
_ALL = (
    DeviceProfile("H100", 80, 2990, 769, _PRODUCTS * 1979, _PRODUCTS * 1979, link_gb_s=450, source=_MEASURED),
    DeviceProfile(
        "H200", 141, 4214, 786, _PRODUCTS * 1979, _PRODUCTS * 1979, link_gb_s=450, source=_MEASURED
    ),
    _estimated("A100", 80, 2039, 312, 300, eight_bits=(0, 624), bus_gb_s=32),
    _estimated("B200", 180, 8000, 2250, 900, eight_bits=(4500, 4500), bus_gb_s=128),
    _estimated("L40S", 48, 864, 362, 32, eight_bits=(733, 733), bus_gb_s=32),
    _estimated("MI300X", 192, 5300, 1307, 448, eight_bits=(2615, 2615)),
    _estimated("RTX4090", 24, 1008, 165, 32, eight_bits=(330, 660), bus_gb_s=32),
    _socket("EPYC9654", 96, 461, 190, AVX512_EFFICIENCY),
    _socket("EPYC9755", 128, 576, 345, AVX512_EFFICIENCY),
    _socket("XEON8480", 56, 307, 1100, AMX_EFFICIENCY),
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
        needed = ", ".join(it.name for it in msgspec.structs.fields(DeviceProfile) if it.required)
        raise ConfigError(f"--hardware {file}: {error}; give a JSON object with at least {needed}") from error
    rates = ("read_gb_s", "bf16_tflop_s", "link_gb_s", "network_gb_s", "host_link_gb_s", "nvme_gb_s")
    shares = ("weights_efficiency", "kv_efficiency", "products_efficiency", "host_read_gb_s", "host_tflop_s")
    for field in ("memory_gb", "devices_per_node", "threads", *rates, *shares):
        if getattr(profile, field) <= 0:
            raise ConfigError(f"--hardware {file}: {field} must be above 0")
    tflop_s, times = (
        ("fp8_tflop_s", "int8_tflop_s"),
        ("step_us", "sequence_us", "collective_us", "host_layer_us"),
    )
    for field in (*tflop_s, *times, "host_memory_gb", "nvme_gb"):
        if getattr(profile, field) < 0:
            raise ConfigError(f"--hardware {file}: {field} must not be below 0")
    return profile
