"""A rank's KV pool as a torch tensor, on any device: pieces are copied, packed, unpacked and summed there.

On CUDA the kernels of `device_checksum` copy and sum in one pass, as `copy_stream` describes. Each thread has
streams of its own and waits, when it waits, for an event of one: never for the device, nor for the stream
that computes. That suffices, because orders name what reported steps have written, and a rank reports a step
when its event has passed; and because no plan names what a thread writes before the thread has seen its own
event. Elsewhere torch copies and sums, except into the memory of other processes, where it cannot write
(`mapped_blocks`). The checksums equal those of `kvtransfer.blocks.checksum` bit for bit:
int64 arithmetic wraps in the same way everywhere."""

from __future__ import annotations

import contextlib
import functools
import logging
import threading
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch

from kvtransfer.blocks.checksum import WORD_BYTES, finish_all
from kvtransfer.blocks.copy_stream import CopyStream, Mark, PieceTable
from kvtransfer.blocks.cuda_memory import pin, unpin
from kvtransfer.blocks.layout import BlockLayout, intersect, piece_grid
from kvtransfer.blocks.mapped_blocks import MappedBlocks
from kvtransfer.blocks.pool import KvPool
from kvtransfer.blocks.runs import ByteRegion
from kvtransfer.blocks.torch_checksum import finish_totals, piece_totals
from kvtransfer.blocks.transfer_memory import BATCH_BYTES, transfer_buffer_bytes
from kvtransfer.messages import Shard

_log = logging.getLogger(__name__)

_BATCH_BYTES = BATCH_BYTES
# Pieces that one kernel moves at most: the third dimension of a grid of CUDA.
_MOST_PIECES = 65535

# Writable contiguous bytes: host memory, or a uint8 tensor on the host or on the pool's device.
Staging = memoryview | torch.Tensor


class Blocks(NamedTuple):
    """Blocks of one layout: contiguous uint8 [num_blocks, block_bytes] on the pool's device."""

    data: torch.Tensor
    layout: BlockLayout

    @property
    def address(self) -> int:
        return self.data.data_ptr()


# The sums of a launch: those of a table, or int64 [num_pieces] on the device or the host.
Totals = PieceTable | torch.Tensor


class PendingSums:
    """Copies that are queued on a stream up to `mark`, and the sums of their pieces."""

    def __init__(self, totals: Sequence[Totals], num_bytes: int, stream: CopyStream) -> None:
        """Pieces have `num_bytes`. The totals are in host memory when the stream has passed this point."""
        self._totals = totals
        self._num_bytes = num_bytes
        self._stream = stream
        self.mark: Mark = stream.mark()
        self._sums: list[int] | None = None

    def result(self) -> list[int]:
        """Wait until the copies are done. Returns the checksums of the pieces."""
        if self._sums is None:
            self.mark.wait()
            self._sums = [checksum for totals in self._totals for checksum in self._finished(totals)]
        return self._sums

    def _finished(self, totals: Totals) -> list[int]:
        if isinstance(totals, torch.Tensor):
            return finish_totals(totals, self._num_bytes)
        sums = finish_all(totals.totals(), self._num_bytes)
        self._stream.give_back(totals)
        return sums


def transfer_bytes(layout: BlockLayout) -> int:
    """Return how much memory of the device transfers take in addition to a pool of this layout."""
    return transfer_buffer_bytes(layout.block_bytes)


class DevicePool(KvPool):
    """A pool in `tensor`, contiguous uint8 [num_blocks, block_bytes]."""

    def __init__(
        self,
        layout: BlockLayout,
        tensor: torch.Tensor,
        *,
        kernels: bool | None = None,
        streams: type[CopyStream] = CopyStream,
    ) -> None:
        """`kernels`: whether Triton's move the pieces, on CUDA or in its interpreter, rather than torch
        (None: on CUDA, if pieces are whole 64-bit words), on `streams`. Raises `ValueError` if the tensor is
        not such a pool."""
        if tensor.dtype != torch.uint8 or tensor.shape[1:] != (layout.block_bytes,):
            raise ValueError(f"{tensor.dtype} {list(tensor.shape)} is no pool of {layout.block_bytes} bytes")
        if not tensor.is_contiguous():
            raise ValueError("the pool's tensor is not contiguous")
        super().__init__(layout, tensor.shape[0], str(tensor.device))
        self.tensor = tensor
        self._is_cuda = tensor.is_cuda
        is_whole_words = layout.head_bytes % WORD_BYTES == 0 and tensor.data_ptr() % WORD_BYTES == 0
        self._has_kernels = is_whole_words and (self._is_cuda if kernels is None else kernels)
        self._make_stream = streams
        self._local = threading.local()
        # Addresses of attached memory.
        self._pinned: set[int] = set()
        if self._is_cuda and self._has_kernels and tensor.numel():  # compiled now, not in the first push
            staging = tensor.new_empty(layout.block_bytes)
            self.gather([0], layout.shard, staging)
            self.sums([0], layout.shard)

    def sums(self, block_ids: Sequence[int], piece: Shard) -> list[int]:
        return self.sums_of([(block_ids, piece)])[0]

    def sums_of(self, pieces: Sequence[tuple[Sequence[int], Shard]]) -> list[list[int]]:
        """Compute the checksums of several pieces, each of its own blocks: all are queued, then awaited."""
        pending: list[PendingSums] = []
        for block_ids, piece in pieces:
            self.check_blocks(block_ids)
            with self._working() as stream:
                totals = [
                    self._copy(stream, self._own, ids, None, (), piece)
                    for _, ids in self._batches(block_ids, piece, has_copies=not self._has_kernels)
                ]
                pending.append(self._pending(stream, totals, piece))
        return [each.result() for each in pending]

    def gather(self, block_ids: Sequence[int], piece: Shard, staging: Staging) -> list[int]:
        return self.start_gather(block_ids, piece, staging).result()

    def start_gather(self, block_ids: Sequence[int], piece: Shard, staging: Staging) -> PendingSums:
        """Queue what `gather` does."""
        self.check_blocks(block_ids)
        layout = replace(self.layout, shard=piece)
        with self._working() as stream:
            totals: list[Totals] = []
            for start, ids in self._batches(block_ids, piece):
                staged = self._staged(staging, start, len(ids), piece)
                is_here = staged.device == self.tensor.device
                packed = staged if is_here else self.tensor.new_empty(staged.shape)
                target = Blocks(packed, layout)
                totals.append(self._copy(stream, self._own, ids, target, range(len(ids)), piece))
                if not is_here:
                    stream.run(functools.partial(staged.copy_, packed, non_blocking=True))
            return self._pending(stream, totals, piece)

    def scatter(self, block_ids: Sequence[int], piece: Shard, staging: Staging) -> None:
        self.check_blocks(block_ids)
        layout = replace(self.layout, shard=piece)
        with self._working() as stream:
            totals: list[Totals] = []
            for start, ids in self._batches(block_ids, piece):
                staged = self._staged(staging, start, len(ids), piece)
                packed = Blocks(staged.to(self.tensor.device, non_blocking=True), layout)
                every = range(len(ids))
                totals.append(self._copy(stream, packed, every, self._own, ids, piece, is_summed=False))
            self._pending(stream, totals, piece).result()

    def copy_to(
        self, block_ids: Sequence[int], piece: Shard, target: Blocks | MappedBlocks, target_ids: Sequence[int]
    ) -> PendingSums:
        """Queue copies of that piece of each block to blocks of `target`. None is under way when this fails.
        Raises `PathError` if the driver refuses to copy to mapped blocks."""
        self.check_blocks(block_ids)
        with self._working() as stream, contextlib.ExitStack() as undo:
            undo.callback(lambda: stream.mark().wait())
            totals: list[Totals] = []
            for start, ids in self._batches(block_ids, piece, has_copies=not self._takes_kernel(target)):
                to = target_ids[start : start + len(ids)]
                totals.append(self._copy(stream, self._own, ids, target, to, piece))
            pending = self._pending(stream, totals, piece)
            undo.pop_all()
            return pending

    def allocate_staging(self, num_bytes: int) -> memoryview:
        """Allocate host memory, pinned if the pool is on CUDA."""
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=self._is_cuda).numpy().data

    def store(
        self,
        block_ids: Sequence[int],
        region: ByteRegion,
        offsets: Sequence[int],
        layers: tuple[int, ...] | None = None,
    ) -> list[int]:
        """Copy to host memory without a stop on the device."""
        assert self.layout.group == layers, "records have the layers of the pool's blocks"
        self.check_blocks(block_ids)
        shard, size = self.layout.shard, self.layout.block_bytes
        memory = _memory(region, offsets, size)
        with self._working(is_urgent=False) as stream:
            for block_id, offset in zip(block_ids, offsets, strict=True):
                memory[offset : offset + size].copy_(self.tensor[block_id], non_blocking=True)
            totals = [
                self._copy(stream, self._own, ids, None, (), shard)
                for _, ids in self._batches(block_ids, shard, has_copies=not self._has_kernels)
            ]
            return self._pending(stream, totals, shard).result()

    def load(
        self,
        block_ids: Sequence[int],
        piece: Shard,
        region: ByteRegion,
        offsets: Sequence[int],
        shard: Shard,
        layers: tuple[int, ...] | None = None,
    ) -> list[int]:
        """Copy whole records to the device, where they are summed and their part is taken."""
        assert self.layout.group == layers, "records have the layers of the pool's blocks"
        self.check_blocks(block_ids)
        memory = _memory(region, offsets, self.piece_bytes(shard))
        with self._working(is_urgent=False) as stream:
            totals: list[Totals] = []
            for start, ids in self._batches(block_ids, shard):
                part = offsets[start : start + len(ids)]
                totals.append(self._load_batch(stream, ids, piece, memory, part, shard))
            return self._pending(stream, totals, shard).result()

    def _load_batch(
        self,
        stream: CopyStream,
        ids: Sequence[int],
        piece: Shard,
        memory: torch.Tensor,
        offsets: Sequence[int],
        shard: Shard,
    ) -> Totals:
        """Queue a part of the work of `load`. Its memory is free for the next part when this returns."""
        size = self.piece_bytes(shard)
        data = self.tensor.new_empty((len(ids), size))
        for row, offset in zip(data, offsets, strict=True):
            row.copy_(memory[offset : offset + size], non_blocking=True)
        records, every = Blocks(data, replace(self.layout, shard=shard)), range(len(ids))
        if piece == shard:
            return self._copy(stream, records, every, self._own, ids, piece)
        totals = self._copy(stream, records, every, None, (), shard)
        self._copy(stream, records, every, self._own, ids, piece, is_summed=False)
        return totals

    def attach(self, region: ByteRegion) -> None:
        """Pin the memory for CUDA, which takes all of its pages. If that is refused, copies are slower."""
        if self._is_cuda and pin(region.address, len(region.bytes), self.tensor.device):
            self._pinned.add(region.address)

    def detach(self, region: ByteRegion) -> None:
        if region.address in self._pinned:
            self._pinned.discard(region.address)
            unpin(region.address)

    def close(self) -> None:
        self.tensor = torch.empty((0, self.layout.block_bytes), dtype=torch.uint8)
        self.num_blocks = 0

    @property
    def _own(self) -> Blocks:
        return Blocks(self.tensor, self.layout)

    @contextlib.contextmanager
    def computing(self) -> Iterator[None]:
        with self._working(is_urgent=False) as stream:
            yield
            stream.mark().wait()

    @contextlib.contextmanager
    def _working(self, *, is_urgent: bool = True) -> Iterator[CopyStream]:
        """Work on a stream of this thread, in inference mode because the tensor may have been made in it."""
        streams: dict[bool, CopyStream] | None = getattr(self._local, "streams", None)
        if streams is None:
            streams = self._local.streams = {}
        if is_urgent not in streams:
            streams[is_urgent] = self._make_stream(self.tensor.device, is_urgent=is_urgent)
        with torch.inference_mode(), streams[is_urgent].working():
            yield streams[is_urgent]

    def _pending(self, stream: CopyStream, totals: Sequence[Totals], piece: Shard) -> PendingSums:
        """Return the work that this thread has queued so far, with the sums S of its pieces."""
        taken: list[Totals] = []
        for each in totals:
            if isinstance(each, torch.Tensor) and each.is_cuda:
                pinned = torch.empty(each.shape, dtype=torch.int64, pin_memory=True)
                taken.append(pinned.copy_(each, non_blocking=True))
            else:
                taken.append(each)
        return PendingSums(taken, self.piece_bytes(piece), stream)

    def _batches(
        self, block_ids: Sequence[int], piece: Shard, *, has_copies: bool = True
    ) -> Iterator[tuple[int, Sequence[int]]]:
        """Yield (position of the first, ids) of as many blocks as are moved at a time; with `has_copies` each
        takes memory of the device."""
        count = max(1, _BATCH_BYTES // self.piece_bytes(piece)) if has_copies else _MOST_PIECES
        count = min(count, _MOST_PIECES)
        for start in range(0, len(block_ids), count):
            yield start, block_ids[start : start + count]

    def _staged(self, staging: Staging, start: int, count: int, piece: Shard) -> torch.Tensor:
        """View the part of the staging area for `count` pieces from the `start`-th, one a row."""
        size = self.piece_bytes(piece)
        if isinstance(staging, memoryview):
            data = torch.frombuffer(staging, dtype=torch.uint8, count=count * size, offset=start * size)
        else:
            data = staging[start * size : (start + count) * size]
        return data.view(count, size)

    def _copy(
        self,
        stream: CopyStream,
        source: Blocks,
        source_ids: Sequence[int],
        target: Blocks | MappedBlocks | None,
        target_ids: Sequence[int],
        piece: Shard,
        *,
        is_summed: bool = True,
    ) -> Totals:
        """Queue copies of the piece from blocks to blocks (None: to nowhere). Returns the sums S of mixed
        words, none of them without `is_summed`."""
        for blocks in (source, target):
            if blocks is not None and intersect(blocks.layout.shard, piece) != piece:
                raise ValueError(f"{piece} is not part of {blocks.layout.shard}")
        if self._takes_kernel(target):
            table = stream.take(len(source_ids))
            table.fill(source_ids, target_ids)
            stream.run(functools.partial(_launch, table, source, target, piece, is_summed))
            return table
        packed = _part(source, piece)[self._index(source_ids)]
        if isinstance(target, MappedBlocks):
            target.write(packed.contiguous(), target_ids, piece)
        elif target is not None:
            _part(target, piece)[self._index(target_ids)] = packed
        return piece_totals(packed.view(len(packed), -1)) if is_summed else packed.new_empty(0)

    def _takes_kernel(self, target: Blocks | MappedBlocks | None) -> bool:
        """Whether a kernel moves pieces of this pool there, which it does in whole words."""
        return self._has_kernels and (target is None or target.address % WORD_BYTES == 0)

    def _index(self, ids: Sequence[int]) -> torch.Tensor:
        index = torch.tensor(ids, dtype=torch.int64, pin_memory=self._is_cuda)
        return index.to(self.tensor.device, non_blocking=True)


def _launch(
    table: PieceTable, source: Blocks, target: Blocks | MappedBlocks | None, piece: Shard, is_summed: bool
) -> None:
    """Queue the kernel for the pieces of a table, with the copies of the table."""
    # Here, since Triton is where CUDA is and need not be elsewhere.
    from kvtransfer.blocks.device_checksum import copy_pieces

    target_layout = source.layout if target is None else target.layout
    table.upload()
    copy_pieces(
        source.data.view(torch.int64),
        None if target is None else target.address,
        target_layout.block_bytes,
        table.on_device,
        table.num_pieces,
        piece_grid(source.layout, target_layout, piece),
        is_summed=is_summed,
    )
    if is_summed:
        table.download()


def _part(blocks: Blocks, piece: Shard) -> torch.Tensor:
    """View the piece of the blocks, with those of its layers that they have, uint8
    [num_blocks, num_layers, num_kinds, num_heads, head_bytes]."""
    layout, shard = blocks.layout, blocks.layout.shard
    sizes = layout.num_layers(shard), layout.num_kinds, shard.num_heads, layout.head_bytes
    whole = blocks.data.view(len(blocks.data), *sizes)
    layers, heads = layout.part(piece)
    return whole[:, layers, :, heads]


def _memory(region: ByteRegion, offsets: Sequence[int], size: int) -> torch.Tensor:
    """View `region` as a uint8 tensor. Raises `IndexError` if `size` bytes at an offset leave it."""
    if offsets and (min(offsets) < 0 or max(offsets) + size > len(region.bytes)):
        raise IndexError(f"bytes up to {max(offsets) + size} of {len(region.bytes)}")
    return torch.from_numpy(region.bytes)


class StagingArea:
    """Memory for packed pieces in addition to a pool, on its device (`data`: uint8 [num_bytes])."""

    def __init__(self, pool: KvPool, num_bytes: int) -> None:
        self._pool = pool
        if pool.device == "cpu":
            self.data = torch.frombuffer(pool.allocate_staging(num_bytes), dtype=torch.uint8)
        else:
            self.data = torch.empty(num_bytes, dtype=torch.uint8, device=pool.device)
            # What is queued may still use this memory, which it has freed for its own stream; copies run in
            # other streams.
            if self.data.is_cuda:
                torch.cuda.current_stream(self.data.device).synchronize()

    def gather(self, block_ids: Sequence[int], piece: Shard) -> list[int]:
        """Pack the blocks' pieces one after another; returns their checksums."""
        if isinstance(self._pool, DevicePool):
            return self._pool.gather(block_ids, piece, self.data)
        return self._pool.gather(block_ids, piece, self.data.numpy().data)

    def start_gather(self, block_ids: Sequence[int], piece: Shard) -> PendingSums | None:
        """Queue what `gather` does on a pool that is a tensor; None: not on such a pool."""
        if isinstance(self._pool, DevicePool):
            return self._pool.start_gather(block_ids, piece, self.data)
        return None

    def scatter(self, block_ids: Sequence[int], piece: Shard) -> None:
        """Unpack pieces that lie one after another into the blocks."""
        if isinstance(self._pool, DevicePool):
            self._pool.scatter(block_ids, piece, self.data)
        else:
            self._pool.scatter(block_ids, piece, self.data.numpy().data)

    def flip_first_bit(self) -> None:
        """Corrupt the first piece, for tests."""
        self.data[:1].bitwise_xor_(1)
        self.data[0].item()  # done when this returns, on any device
