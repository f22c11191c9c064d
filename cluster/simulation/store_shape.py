"""The store of each node of a simulation: its sizes, and the rates at which it copies."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple, get_args

from cluster.errors import ConfigError
from kvtransfer.config import Admission

SEGMENT_BYTES = 256 << 20
_ADMISSIONS = get_args(Admission)


class StoreShape(NamedTuple):
    """The tiers of a node, in bytes, and the copies, in bytes a second. `link_bytes_s` is what a replica
    copies to and from the arena, in each direction; `network_bytes_s` what a node sends to others, and what
    it receives. Without `shares`, nodes do not look for records of others."""

    dram_bytes: int
    nvme_bytes: int = 0
    # Half of what copies to and from pinned memory reach on an H100 (benchmarks/README.md): records are
    # copied and summed. Not yet validated on a card.
    link_bytes_s: float = 25e9
    # What a data-center drive on PCIe 4 publishes.
    read_bytes_s: float = 6.5e9
    write_bytes_s: float = 4e9
    # As of `tandem plan`, for one device.
    network_bytes_s: float = 12.5e9
    admission: Admission = "adaptive"
    replicas_per_node: int = 8
    shares: bool = True


def parse_store(text: str, num_devices: int = 1, replicas_per_node: int = 8) -> StoreShape | None:
    """Parse `dram=64,nvme=500,read=6.5`, sizes in GB and rates in GB/s; "": there is no store. `link` is that
    of a device, of which a replica has `num_devices`. Raises `ConfigError`."""
    if not text:
        return None
    values: dict[str, float] = {}
    admission, shares = "adaptive", True
    for entry in text.split(","):
        name, _, value = (part.strip() for part in entry.partition("="))
        if name == "admission" and value in _ADMISSIONS:
            admission = value
        elif name == "shared" and value in ("yes", "no"):
            shares = value == "yes"
        elif name in _NUMBERS:
            values[name] = _number(entry, value, is_size=name in ("dram", "nvme"))
        else:
            raise ConfigError(
                f"--store {entry}: give {', '.join(_NUMBERS)} as a number, admission as one of "
                f"{', '.join(_ADMISSIONS)}, and shared as yes or no"
            )
    shape = StoreShape(0, replicas_per_node=replicas_per_node, admission=admission, shares=shares)  # type: ignore[arg-type]
    shape = shape._replace(link_bytes_s=num_devices * shape.link_bytes_s)
    for name, number in values.items():
        shape = _NUMBERS[name](shape, 1e9 * number * (num_devices if name == "link" else 1))
    if not shape.dram_bytes:
        raise ConfigError("--store: give dram=GB, through which NVMe is read and written too")
    if 0 < shape.nvme_bytes < 2 * SEGMENT_BYTES:
        raise ConfigError(f"--store nvme={shape.nvme_bytes / 1e9:g}: give at least 0.54, two segments")
    return shape


_NUMBERS: dict[str, Callable[[StoreShape, float], StoreShape]] = {
    "dram": lambda shape, num: shape._replace(dram_bytes=int(num)),
    "nvme": lambda shape, num: shape._replace(nvme_bytes=int(num)),
    "link": lambda shape, num: shape._replace(link_bytes_s=num),
    "read": lambda shape, num: shape._replace(read_bytes_s=num),
    "write": lambda shape, num: shape._replace(write_bytes_s=num),
    "network": lambda shape, num: shape._replace(network_bytes_s=num),
}


def _number(entry: str, value: str, *, is_size: bool) -> float:
    try:
        number = float(value)
    except ValueError:
        number = math.nan
    if not math.isfinite(number) or number < 0 or (number == 0 and not is_size):
        raise ConfigError(f"--store {entry}: give a number above 0")
    return number
