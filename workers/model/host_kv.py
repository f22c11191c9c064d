"""A rank's offload pool: KV blocks in host memory that attention reads in addition to those of the device.

There are two ways to read them, with the same numbers. *Streamed*: a layer's blocks are copied into one of
two staging buffers on the device while the layer before computes. *In place*: they are read where they lie,
on a CPU by the kernels as part of the block table, on CUDA over the bus (pinned memory has an address there).
Moves of whole blocks have a stream of their own on CUDA, parallel to the step that computes."""

from __future__ import annotations

import contextlib
import mmap
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Literal

import torch
from torch import Tensor

from kvtransfer.blocks.cuda_memory import pin, unpin, view_memory
from kvtransfer.blocks.layout import BlockLayout, Run
from kvtransfer.blocks.runs import ByteRegion, RunTable, copy_runs
from workers.errors import CapacityError
from workers.messages.rank_channel import BlockCopy
from workers.model.attention.interface import HostReader, LayerRead

OffloadMode = Literal["stream", "in_place"]
MODES: tuple[OffloadMode, ...] = ("stream", "in_place")


def streaming_bytes(layout: BlockLayout, num_blocks: int) -> int:
    """Return how much memory of the device streaming takes: two buffers of a layer of all blocks."""
    return 2 * num_blocks * layout.num_kinds * layout.shard.num_heads * layout.head_bytes


class HostKv:
    """`kv` [num_blocks, num_layers, 2, num_kv_heads, block_tokens, head_dim] in host memory, with the block
    ids from `first_id` on. Raises `CapacityError` if CUDA cannot have the memory pinned."""

    def __init__(self, device_kv: Tensor, num_blocks: int) -> None:
        self.first_id = device_kv.shape[0]
        self._device_kv = device_kv
        num_bytes = max(num_blocks * device_kv[0].nbytes, 1)  # a rank may have no layer of it
        self._memory = _host_memory(num_bytes)
        if device_kv[0].nbytes:
            self.kv = _as_blocks(self._memory, device_kv, device_kv.shape[1:])
        else:
            self.kv = device_kv.new_empty(num_blocks, *device_kv.shape[1:])
        self._moves: _MovesOnCuda | None = None
        if device_kv.is_cuda:
            if not pin(self.kv.data_ptr(), num_bytes, device_kv.device):
                raise CapacityError(f"offload_tokens: {num_bytes} bytes of host memory could not be pinned")
            self._moves = _MovesOnCuda(device_kv.device)
        self.mode: OffloadMode = "in_place"
        self.reader: HostReader = _InPlace(self.first_id, self.kv, device_kv)

    def use(self, mode: OffloadMode) -> None:
        """Set how steps read from now on."""
        self.reader.close()
        self.mode = mode
        if mode == "in_place":
            self.reader = _InPlace(self.first_id, self.kv, self._device_kv)
        elif self._device_kv.is_cuda:
            self.reader = _StreamedToCuda(self.first_id, self.kv, self._device_kv)
        else:
            region = ByteRegion(memoryview(self._memory))
            self.reader = _StreamedOnCpu(self.first_id, region, self._device_kv)

    def copy(self, copies: Sequence[BlockCopy]) -> list[BlockCopy]:
        """Make the copies of a plan into and out of host memory. Returns the others, to be made after them.

        As the scheduler plans them, a source was written by steps that are reported, and no step that is
        under way reads or writes a block of the device that is a target."""
        others = [copy for copy in copies if max(copy.src_block, copy.dst_block) < self.first_id]
        with contextlib.nullcontext() if self._moves is None else self._moves.queuing():
            for copy in copies:
                if max(copy.src_block, copy.dst_block) >= self.first_id:
                    self._block(copy.dst_block).copy_(self._block(copy.src_block), non_blocking=True)
        return others

    def _block(self, block_id: int) -> Tensor:
        in_host = block_id >= self.first_id
        return self.kv[block_id - self.first_id] if in_host else self._device_kv[block_id]

    def close(self) -> None:
        """Release the memory. Nothing may be read afterwards."""
        self.reader.close()
        if self._moves is not None:
            self._moves.finish()
            unpin(self.kv.data_ptr())
        self.kv = self._device_kv = torch.empty(0)


class _MovesOnCuda:
    """A stream for the moves of whole blocks. Later steps wait for them. They do not wait for the step that
    computes, but for those that were queued before the previous moves: when a block left its place in host
    memory by these, the tables of earlier steps named the place."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._last = torch.cuda.Event()  # type: ignore[no-untyped-call]  # of the stream that computes

    @contextlib.contextmanager
    def queuing(self) -> Iterator[None]:
        """Queue the copies of the block there."""
        computing = torch.cuda.current_stream(self._device)
        self._stream.wait_event(self._last)
        self._last.record(computing)
        with torch.cuda.stream(self._stream):
            yield
        computing.wait_stream(self._stream)

    def finish(self) -> None:
        """Wait for all moves."""
        self._stream.synchronize()


class _InPlace(HostReader):
    is_staged = False

    def __init__(self, first_id: int, kv: Tensor, device_kv: Tensor) -> None:
        super().__init__(first_id)
        self._kv = _on_the_bus(kv) if device_kv.is_cuda else kv

    def begin(self, reads: Sequence[LayerRead]) -> None:
        pass

    def layer(self, layer: int) -> Tensor:
        return self._kv[:, layer]

    def in_place(self) -> Tensor:
        return self._kv

    def done(self, layer: int) -> None:
        pass

    def close(self) -> None:
        pass


class _Streamed(HostReader):
    """Stages the layers that see blocks in host memory, in their order, into two alternating buffers: the
    copy for a layer begins when the attention of the layer that used the buffer before has read it."""

    def __init__(self, first_id: int) -> None:
        super().__init__(first_id)
        self._work: list[LayerRead] = []
        # The turns of each layer, the next one last.
        self._layer_to_turns: dict[int, list[int]] = {}

    def begin(self, reads: Sequence[LayerRead]) -> None:
        self._work = [read for read in reads if read.ids]
        self._layer_to_turns = {read.layer: [] for read in self._work}
        for turn in reversed(range(len(self._work))):
            self._layer_to_turns[self._work[turn].layer].append(turn)
        self._begin()
        for turn in range(min(2, len(self._work))):
            self._stage(turn, *self._work[turn])

    def layer(self, layer: int) -> Tensor:
        return self._staged(self._layer_to_turns[layer][-1])

    def in_place(self) -> Tensor:
        raise NotImplementedError("staged blocks are read layer by layer")

    def done(self, layer: int) -> None:
        turn = self._layer_to_turns[layer].pop()
        self._release(turn)
        if turn + 2 < len(self._work):
            self._stage(turn + 2, *self._work[turn + 2])

    def _places(self, host_ids: Sequence[int]) -> list[int]:
        return [host_id - self.first_id for host_id in host_ids]

    @abstractmethod
    def _begin(self) -> None:
        """Begin a step; both buffers are free."""

    @abstractmethod
    def _stage(self, turn: int, layer: int, host_ids: Sequence[int]) -> None:
        """Begin to copy the blocks of a layer into the turn's buffer."""

    @abstractmethod
    def _staged(self, turn: int) -> Tensor:
        """Return the turn's buffer when later work finds the blocks there."""

    @abstractmethod
    def _release(self, turn: int) -> None:
        """Release the turn's buffer: it is read, or will have been before later work."""


class _StreamedOnCpu(_Streamed):
    """Copies on a thread, without the GIL. The buffers' pages are taken as they are used."""

    def __init__(self, first_id: int, host: ByteRegion, device_kv: Tensor) -> None:
        super().__init__(first_id)
        self._host = host
        self._block_bytes = device_kv[0].nbytes
        self._layer_bytes = device_kv[0, 0].nbytes
        num_bytes = len(host.bytes) // self._block_bytes * self._layer_bytes
        memories = [_host_memory(num_bytes) for _ in range(2)]
        self._buffer_regions = [ByteRegion(memoryview(memory)) for memory in memories]
        self._buffers = [_as_blocks(memory, device_kv, device_kv.shape[2:]) for memory in memories]
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="offload")
        self._copies: list[Future[None]] = []

    def _begin(self) -> None:
        self._copies = []

    def _stage(self, turn: int, layer: int, host_ids: Sequence[int]) -> None:
        self._copies.append(self._thread.submit(self._copy, turn, layer, host_ids))

    def _copy(self, turn: int, layer: int, host_ids: Sequence[int]) -> None:
        table = RunTable([Run(layer * self._layer_bytes, 0, self._layer_bytes)])
        sources = [place * self._block_bytes for place in self._places(host_ids)]
        targets = range(0, len(host_ids) * self._layer_bytes, self._layer_bytes)
        buffer = self._buffer_regions[turn % 2]
        copy_runs(self._host, sources, buffer, targets, table, sums=False, streamed=True)

    def _staged(self, turn: int) -> Tensor:
        self._copies[turn].result()
        return self._buffers[turn % 2]

    def _release(self, turn: int) -> None:
        pass

    def close(self) -> None:
        self._thread.shutdown()


class _StreamedToCuda(_Streamed):
    """Copies on a CUDA stream of its own, ordered by events with the stream that computes."""

    def __init__(self, first_id: int, kv: Tensor, device_kv: Tensor) -> None:
        super().__init__(first_id)
        self._kv = kv
        self._device = device_kv.device
        self._buffers = [device_kv.new_empty((len(kv), *device_kv.shape[2:])) for _ in range(2)]
        self._stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        self._ready = [torch.cuda.Event() for _ in range(2)]  # type: ignore[no-untyped-call]

    def _begin(self) -> None:
        self._stream.wait_stream(torch.cuda.current_stream(self._device))

    def _stage(self, turn: int, layer: int, host_ids: Sequence[int]) -> None:
        buffer = self._buffers[turn % 2]
        with torch.cuda.stream(self._stream):
            for target, source in enumerate(self._places(host_ids)):
                buffer[target].copy_(self._kv[source, layer], non_blocking=True)
            self._ready[turn % 2].record(self._stream)

    def _staged(self, turn: int) -> Tensor:
        torch.cuda.current_stream(self._device).wait_event(self._ready[turn % 2])
        return self._buffers[turn % 2]

    def _release(self, turn: int) -> None:
        self._stream.wait_stream(torch.cuda.current_stream(self._device))

    def close(self) -> None:
        self._stream.synchronize()
        self._buffers = []


def _host_memory(num_bytes: int) -> mmap.mmap:
    """Allocate zeroed private memory, with huge pages where the kernel gives them."""
    memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError, AttributeError):  # a system without huge pages
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memory


def _as_blocks(memory: mmap.mmap, like: Tensor, block_shape: torch.Size) -> Tensor:
    """Return a view of the memory as [num_blocks, *block_shape] of the dtype of `like`."""
    return torch.frombuffer(memory, dtype=like.dtype).view(-1, *block_shape)


def _on_the_bus(pinned: Tensor) -> Tensor:
    """Return a view of pinned memory as a tensor of the device that pinned it. `pinned` must outlive the
    view."""
    return view_memory(pinned.data_ptr(), pinned.nbytes).view(pinned.dtype).view(pinned.shape)
