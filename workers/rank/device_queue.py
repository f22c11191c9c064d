"""The way in which a rank's thread hands work to a device: the order of kernels, events, copies out, and
graphs.

A device computes in the order in which work is queued, while the thread runs ahead. On a CPU a call has done
its work when it returns, so the same executor runs there with nothing left to wait for."""

from __future__ import annotations

import importlib.util
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvtransfer.blocks.cuda_memory import view_memory

# Torch keeps pinned memory in powers of two. Steps copy less than the largest of these at a time, and those
# that are under way together have no more copies of a size than this.
_STAGED_BYTES = tuple(4 << power for power in range(19))
_NUM_STAGED = 8


class Event(Protocol):
    """A point in a device's work."""

    def query(self) -> bool:
        """Return whether the device has passed it. Raises RuntimeError if the device has failed."""

    def synchronize(self) -> None:
        """Wait until the device has passed it. Raises RuntimeError if the device has failed."""


class CopiedOut(NamedTuple):
    """A tensor on its way to host memory: `host` holds it once `event` is passed. Keep the object until then,
    with `source`, which the device still reads."""

    host: Tensor
    source: Tensor
    event: Event


# The work that a graph computes.
Work = Callable[[], tuple[Tensor, ...]]


class Graph(ABC):
    """Recorded work, which reads and writes the same memory each time."""

    @abstractmethod
    def replay(self) -> tuple[Tensor, ...]:
        """Queue the work. What it returns is overwritten by the next replay of any graph of its recorder."""


class Recorder(ABC):
    """Records graphs that share memory: they are replayed one after another, so each may use what the others
    used."""

    @abstractmethod
    def record(self, work: Work) -> Graph:
        """Record work, which must not read the device from the host. Tensors that it does not make itself
        must stay where they are."""


class DeviceQueue(ABC):
    """The work of one rank's device."""

    # Whether work may still be under way when the call that queued it returns.
    runs_behind: bool
    # Whether kernels of Triton run there.
    has_triton: bool

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def upload(self, arrays: Sequence[NDArray[np.int32]]) -> list[Tensor]:
        """Copy arrays to the device at once. Returns them there."""
        staging = self._staging(sum(map(len, arrays)))
        np.concatenate(arrays, out=staging.numpy())
        there = staging.to(self.device, non_blocking=True)
        return list(torch.split(there, [len(array) for array in arrays]))

    @abstractmethod
    def _staging(self, num_words: int) -> Tensor:
        """Return int32 host memory [num_words] for one copy to the device. It may be dropped when the copy is
        queued."""

    @abstractmethod
    def keep_staging(self) -> None:
        """Take host memory for copies from and to the device now, so that no step has to wait for it."""

    @abstractmethod
    def event(self) -> Event:
        """Return the point at which all that is queued so far is done."""

    @abstractmethod
    def host_memory(self, source: Tensor) -> Tensor:
        """Return host memory for a copy of `source`."""

    @abstractmethod
    def copy_out(self, source: Tensor, host: Tensor) -> CopiedOut:
        """Begin to copy the contents that `source` will have to `host`, as `host_memory` returns it, parallel
        to the work that is queued afterwards. That work must not change it."""

    @abstractmethod
    def recorder(self) -> Recorder:
        """Return what records graphs, apart from those of other recorders."""


class CpuQueue(DeviceQueue):
    """A CPU, which is never behind."""

    runs_behind = False

    def __init__(self, *, has_triton: bool = False) -> None:
        """`has_triton`: Triton interprets its kernels in this process."""
        super().__init__(torch.device("cpu"))
        self.has_triton = has_triton

    def _staging(self, num_words: int) -> Tensor:
        return torch.empty(num_words, dtype=torch.int32)

    def keep_staging(self) -> None:
        pass

    def event(self) -> Event:
        return _PASSED

    def host_memory(self, source: Tensor) -> Tensor:
        return torch.empty_like(source)

    def copy_out(self, source: Tensor, host: Tensor) -> CopiedOut:
        return CopiedOut(host.copy_(source), source, _PASSED)

    def recorder(self) -> Recorder:
        return _Repeater()


class MetaQueue(CpuQueue):
    """The device "meta", where torch computes shapes alone. Steps are launched as on a device that is behind
    the host."""

    runs_behind = True

    def __init__(self, device: torch.device) -> None:
        super().__init__(has_triton=True)
        self.device = device

    def host_memory(self, source: Tensor) -> Tensor:
        return torch.zeros(source.shape, dtype=source.dtype)

    def copy_out(self, source: Tensor, host: Tensor) -> CopiedOut:
        return CopiedOut(host, source, _PASSED)


class _Passed:
    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        pass


_PASSED = _Passed()


class _Repeater(Recorder):
    def record(self, work: Work) -> Graph:
        return _Repeated(work)


class _Repeated(Graph):
    """Work that is done again."""

    def __init__(self, work: Work) -> None:
        self._work = work

    def replay(self) -> tuple[Tensor, ...]:
        return self._work()


class CudaQueue(DeviceQueue):
    """A CUDA device, its current stream, and a stream on which results are copied out."""

    runs_behind = True

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self.has_triton = importlib.util.find_spec("triton") is not None
        self._results = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def _staging(self, num_words: int) -> Tensor:
        # Torch keeps pinned memory, and uses it again when the copy that read it is done.
        return torch.empty(num_words, dtype=torch.int32, pin_memory=True)

    def keep_staging(self) -> None:
        taken: list[Tensor] = []  # at a time, else they would be one
        for num_bytes in _STAGED_BYTES * _NUM_STAGED:
            taken.append(torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True))

    def event(self) -> Event:
        return self._record_event(torch.cuda.current_stream(self.device))

    def host_memory(self, source: Tensor) -> Tensor:
        return torch.empty(source.shape, dtype=source.dtype, pin_memory=True)

    def copy_out(self, source: Tensor, host: Tensor) -> CopiedOut:
        self._results.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._results):
            host.copy_(source, non_blocking=True)
        return CopiedOut(host, source, self._record_event(self._results))

    def recorder(self) -> Recorder:
        return _CudaRecorder(self.device)

    @staticmethod
    def _record_event(stream: torch.cuda.Stream) -> Event:
        # The thread that waits for it sleeps: it shares the cores with transfers.
        event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        event.record(stream)
        return event


class _CudaRecorder(Recorder):
    """Records into a memory pool and on a stream of its own. Torch refuses a pool whose graphs are gone while
    something of it is in use, and keeps the workspace of cuBLAS by stream, in the pool of the graph that used
    it first."""

    def __init__(self, device: torch.device) -> None:
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def record(self, work: Work) -> Graph:
        graph = torch.cuda.CUDAGraph()
        # Other threads of the process (transfers, NCCL's watchdog) may call CUDA during a recording.
        with torch.cuda.graph(graph, self._pool, self._stream, capture_error_mode="thread_local"):
            results = work()
        # Without owners, their memory serves the graphs that are recorded next as well.
        return _CudaGraph(graph, tuple(_unowned(result) for result in results))


class _CudaGraph(Graph):
    def __init__(self, graph: torch.cuda.CUDAGraph, results: tuple[Tensor, ...]) -> None:
        self._graph = graph
        self._results = results

    def replay(self) -> tuple[Tensor, ...]:
        self._graph.replay()
        return self._results


def _unowned(tensor: Tensor) -> Tensor:
    """Return a view of a contiguous tensor of the device that does not keep its memory from being used
    again."""
    if not tensor.numel():
        return tensor
    return view_memory(tensor.data_ptr(), tensor.nbytes).view(tensor.dtype).view(tensor.shape)


def take_device(device: torch.device) -> torch.device:
    """Make a CUDA device that of this thread, on which kernels of Triton are launched. Returns the device
    with its index, which NCCL needs; one without is that of this thread already."""
    if device.type != "cuda":
        return device
    index = torch.cuda.current_device() if device.index is None else device.index
    torch.cuda.set_device(index)
    return torch.device("cuda", index)


def make_queue(device: torch.device) -> DeviceQueue:
    """Return the queue of a device."""
    if device.type == "meta":
        return MetaQueue(device)
    return CudaQueue(device) if device.type == "cuda" else CpuQueue()
