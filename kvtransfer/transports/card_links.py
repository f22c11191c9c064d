"""What joins the cards of a host, by NVIDIA's management library. Unlike the driver it knows the cards that a
process does not see, and Ray shows each rank its own alone."""

from __future__ import annotations

import ctypes
from typing import Any

from kvtransfer.errors import PathError

# `nvmlGpuP2PCapsIndex_t` and `nvmlGpuP2PStatus_t` of nvml.h.
_ATOMICS = 3
_SUPPORTED = 0


def check_atomics(bus_id: str, other_bus_id: str, library: Any = None) -> None:
    """Raise `PathError` if the card at `bus_id` has no native atomics in the memory of the other. `library`
    takes the place of the management library."""
    if bus_id == other_bus_id:
        return
    try:
        nvml = library or ctypes.CDLL("libnvidia-ml.so.1")
    except OSError as error:
        raise PathError(f"what joins {bus_id} and {other_bus_id} is not known: {error}") from error
    _call(nvml, "nvmlInit_v2")
    try:
        cards = [ctypes.c_void_p(), ctypes.c_void_p()]
        for card, name in zip(cards, (bus_id, other_bus_id), strict=True):
            _call(nvml, "nvmlDeviceGetHandleByPciBusId_v2", name.encode(), ctypes.byref(card))
        status = ctypes.c_uint()
        _call(nvml, "nvmlDeviceGetP2PStatus", *cards, ctypes.c_uint(_ATOMICS), ctypes.byref(status))
    finally:
        nvml.nvmlShutdown()
    if status.value != _SUPPORTED:
        raise PathError(f"no native atomics between {bus_id} and {other_bus_id} (not joined by NVLink)")


def _call(nvml: Any, name: str, *arguments: object) -> None:
    try:
        status = getattr(nvml, name)(*arguments)
    except AttributeError as error:  # an old library
        raise PathError(str(error)) from error
    if status:
        raise PathError(f"{name}: NVML error {status}")
