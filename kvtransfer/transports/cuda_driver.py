"""The few calls of the CUDA driver that sharing device memory between processes needs, through ctypes.

torch can share tensors between processes too, but lets go of the mapping when its garbage is collected;
here the end of a mapping is a proof, so it is explicit.
"""

from __future__ import annotations

import ctypes
import functools
import threading
from ctypes import POINTER, Structure, byref, c_char, c_char_p, c_int, c_size_t, c_uint, c_uint64, c_void_p
from typing import NamedTuple

from kvtransfer.errors import PathError
from kvtransfer.transports.card_links import check_atomics

HANDLE_BYTES = 64

_LAZY_PEER_ACCESS = 1
_BUS_ID_BYTES = 32


class Exported(NamedTuple):
    """Memory that another process may map: the handle of its allocation, and where in it the memory lies."""

    handle: bytes
    offset: int


class _Handle(Structure):
    _fields_ = (("reserved", c_char * HANDLE_BYTES),)


class CudaDriver:
    """Device `index` of this process, for any thread. `PathError` carries the driver's error."""

    def __init__(self, library: ctypes.CDLL, index: int) -> None:
        self._library = library
        self._lock = threading.Lock()
        self._mapped: dict[bytes, list[int]] = {}  # handle: [address, number of users]
        device, context = c_int(), c_void_p()
        self._call("cuInit", c_uint(0))
        self._call("cuDeviceGet", byref(device), c_int(index))
        self._call("cuDevicePrimaryCtxRetain", byref(context), device)  # the one that torch uses
        self._context = context
        name = ctypes.create_string_buffer(_BUS_ID_BYTES)
        self._call("cuDeviceGetPCIBusId", name, c_int(_BUS_ID_BYTES), device)
        # The card of the device, by its place on the bus.
        self.bus_id = name.value.decode()

    def export(self, address: int) -> Exported:
        """Export memory of this process, which must have come from one `cuMemAlloc`."""
        self._bind()
        base, size, handle = c_uint64(), c_size_t(), _Handle()
        self._call("cuMemGetAddressRange_v2", byref(base), byref(size), c_uint64(address))
        self._call("cuIpcGetMemHandle", byref(handle), base)
        return Exported(bytes(memoryview(handle)), address - base.value)

    def map(self, handle: bytes) -> int:
        """Return the address at which this device reaches another process's allocation, on this card or on
        another one, which the process need not see. A process can open a handle only once, so its users
        share the mapping. `PathError` also where the cards have no access to each other."""
        if len(handle) != HANDLE_BYTES:
            raise PathError(f"a handle of {len(handle)} bytes")
        self._bind()
        with self._lock:
            if handle not in self._mapped:
                address = c_uint64()
                opened = _Handle.from_buffer_copy(handle)
                self._call("cuIpcOpenMemHandle_v2", byref(address), opened, c_uint(_LAZY_PEER_ACCESS))
                self._mapped[handle] = [address.value, 0]
            mapped = self._mapped[handle]
            mapped[1] += 1
            return mapped[0]

    def unmap(self, handle: bytes) -> None:
        """End one use of a mapping; no copy of that use may be under way any more."""
        self._bind()
        with self._lock:
            mapped = self._mapped[handle]
            mapped[1] -= 1
            if mapped[1] == 0:
                del self._mapped[handle]
                self._call("cuIpcCloseMemHandle", c_uint64(mapped[0]))

    def check_atomics(self, bus_id: str) -> None:
        """Raise `PathError` if this device has no native atomics in the memory of the card at `bus_id`."""
        check_atomics(self.bus_id, bus_id)

    def copy(self, source: int, target: int, num_bytes: int, stream: int) -> None:
        """Queue a copy between addresses of the device's, or mapped, memory on a stream of the device."""
        self._bind()
        addresses = c_uint64(target), c_uint64(source)
        self._call("cuMemcpyDtoDAsync_v2", *addresses, c_size_t(num_bytes), c_void_p(stream))

    def _bind(self) -> None:
        """Make the device's context the calling thread's."""
        self._call("cuCtxSetCurrent", self._context)

    def _call(self, name: str, *arguments: object) -> None:
        status = getattr(self._library, name)(*arguments)
        if status:
            text = c_char_p()
            self._library.cuGetErrorName(c_int(status), byref(text))
            raise PathError(f"{name}: {(text.value or b'').decode() or status}")


@functools.cache
def cuda_driver(index: int) -> CudaDriver:
    """Return the driver for a device; `PathError` where there is none."""
    try:
        library = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise PathError(str(error)) from error
    library.cuGetErrorName.argtypes = [c_int, POINTER(c_char_p)]
    return CudaDriver(library, index)
