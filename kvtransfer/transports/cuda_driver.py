"""The few calls of the CUDA driver that sharing device memory between processes needs, through ctypes.

torch can share tensors between processes too, but lets go of the mapping when its garbage is collected; here
the end of a mapping is a proof, so it is explicit. Has not run yet: no device was at hand.
"""

from __future__ import annotations

import ctypes
import functools
import threading
from ctypes import POINTER, Structure, byref, c_char, c_char_p, c_int, c_size_t, c_uint, c_uint64, c_void_p
from typing import NamedTuple

from kvtransfer.blocks.layout import BlockLayout
from kvtransfer.errors import PathError
from kvtransfer.messages import Shard

HANDLE_BYTES = 64

_LAZY_PEER_ACCESS = 1
_NON_BLOCKING = 1
_UNIFIED = 4


class Grid(NamedTuple):
    """A copy of `num_rows` rows of `row_bytes`, whose starts are `src_pitch` and `dst_pitch` apart."""

    src_offset: int
    src_pitch: int
    dst_offset: int
    dst_pitch: int
    row_bytes: int
    num_rows: int


def piece_grid(src: BlockLayout, dst: BlockLayout, piece: Shard) -> Grid:
    """The one copy that moves `piece` from a block of `src` to one of `dst`; both hold it. A row is K or V of
    the piece's heads in one layer; all rows are one where they follow one another in both blocks."""
    row_bytes = (piece.head_end - piece.head_start) * src.head_bytes
    num_rows = 2 * (piece.layer_end - piece.layer_start)
    pitches = [(layout.shard.head_end - layout.shard.head_start) * layout.head_bytes for layout in (src, dst)]
    if pitches == [row_bytes, row_bytes]:
        row_bytes, num_rows, pitches = row_bytes * num_rows, 1, [row_bytes * num_rows] * 2
    first = piece.layer_start, 0, piece.head_start
    return Grid(src.offset(*first), pitches[0], dst.offset(*first), pitches[1], row_bytes, num_rows)


def halves(grid: Grid) -> tuple[Grid, Grid]:
    """The same copy in two of about the same size."""
    if grid.num_rows == 1:
        size = grid.row_bytes // 2
        rest = grid._replace(
            src_offset=grid.src_offset + size,
            dst_offset=grid.dst_offset + size,
            row_bytes=grid.row_bytes - size,
        )
        return grid._replace(row_bytes=size), rest
    count = grid.num_rows // 2
    rest = grid._replace(
        src_offset=grid.src_offset + count * grid.src_pitch,
        dst_offset=grid.dst_offset + count * grid.dst_pitch,
        num_rows=grid.num_rows - count,
    )
    return grid._replace(num_rows=count), rest


class Exported(NamedTuple):
    """Memory that another process may map: the handle of its allocation, and where in it the memory lies."""

    handle: bytes
    offset: int


class _Handle(Structure):
    _fields_ = (("reserved", c_char * HANDLE_BYTES),)


class _Copy2D(Structure):
    """`CUDA_MEMCPY2D`."""

    _fields_ = (
        ("src_x", c_size_t),
        ("src_y", c_size_t),
        ("src_type", c_uint),
        ("src_host", c_void_p),
        ("src_device", c_uint64),
        ("src_array", c_void_p),
        ("src_pitch", c_size_t),
        ("dst_x", c_size_t),
        ("dst_y", c_size_t),
        ("dst_type", c_uint),
        ("dst_host", c_void_p),
        ("dst_device", c_uint64),
        ("dst_array", c_void_p),
        ("dst_pitch", c_size_t),
        ("width_bytes", c_size_t),
        ("height", c_size_t),
    )


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

    def export(self, address: int) -> Exported:
        """For memory of this process; it must have come from one `cuMemAlloc`."""
        self._bind()
        base, size, handle = c_uint64(), c_size_t(), _Handle()
        self._call("cuMemGetAddressRange_v2", byref(base), byref(size), c_uint64(address))
        self._call("cuIpcGetMemHandle", byref(handle), base)
        return Exported(bytes(memoryview(handle)), address - base.value)

    def map(self, handle: bytes) -> int:
        """The address of another process's allocation here. A process can open a handle only once, so its
        users share the mapping."""
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
        """The end of one use of a mapping, of which nothing may be under way any more."""
        self._bind()
        with self._lock:
            mapped = self._mapped[handle]
            mapped[1] -= 1
            if mapped[1] == 0:
                del self._mapped[handle]
                self._call("cuIpcCloseMemHandle", c_uint64(mapped[0]))

    def create_stream(self) -> int:
        """A stream that waits for no other."""
        self._bind()
        stream = c_void_p()
        self._call("cuStreamCreate", byref(stream), c_uint(_NON_BLOCKING))
        return int(stream.value or 0)

    def destroy_stream(self, stream: int) -> None:
        self._bind()
        self._call("cuStreamDestroy_v2", c_void_p(stream))

    def copy(self, src: int, dst: int, grid: Grid, stream: int) -> None:
        """Queue a copy between device addresses, which may be of two devices."""
        self._bind()
        copy = _Copy2D(
            src_type=_UNIFIED,
            src_device=src + grid.src_offset,
            src_pitch=grid.src_pitch,
            dst_type=_UNIFIED,
            dst_device=dst + grid.dst_offset,
            dst_pitch=grid.dst_pitch,
            width_bytes=grid.row_bytes,
            height=grid.num_rows,
        )
        self._call("cuMemcpy2DAsync_v2", byref(copy), c_void_p(stream))

    def synchronize(self, stream: int) -> None:
        """Return when all that is queued on the stream is done."""
        self._bind()
        self._call("cuStreamSynchronize", c_void_p(stream))

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
    """The driver for a device; `PathError` where there is none."""
    try:
        library = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise PathError(str(error)) from error
    library.cuGetErrorName.argtypes = [c_int, POINTER(c_char_p)]
    return CudaDriver(library, index)
