"""A rank's KV pool as a torch tensor, on any device: pieces are gathered, scattered and summed there.

On CUDA each thread works on a stream of its own and returns when that stream is done. It need not wait for
the stream that computes: a finished step's writes are complete, because the rank synchronizes before it
reports the step, and scattered pieces are complete before any order that uses them is given. Checksums are
equal bit for bit to those of `kvtransfer.blocks.checksum`: int64 arithmetic wraps the same way on the CPU and
on CUDA."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Iterator, Sequence

import torch

from kvtransfer.blocks.checksum import GOLDEN, MASK, MULTIPLIER_1, MULTIPLIER_2, SHIFT, WORD_BYTES, finish
from kvtransfer.blocks.layout import BlockLayout, intersect
from kvtransfer.blocks.pool import KvPool
from kvtransfer.blocks.runs import ByteRegion
from kvtransfer.messages import Shard

_log = logging.getLogger(__name__)

# Bytes moved by one operation; the temporaries of the checksum are a few times as large.
_BATCH_BYTES = 32 << 20
# cudaHostRegisterPortable: pinned for every device of the process.
_PORTABLE = 1
_LOW = (1 << SHIFT) - 1

# Writable contiguous bytes: host memory, or a uint8 tensor on the host or on the pool's device.
Staging = memoryview | torch.Tensor


class DevicePool(KvPool):
    """A pool in `tensor`, contiguous uint8 [num_blocks, block_bytes].

    With `indexed`, blocks are taken by one indexed operation per batch instead of one copy per range of
    adjacent blocks. That is faster on CUDA and much slower on a CPU."""

    def __init__(self, layout: BlockLayout, tensor: torch.Tensor, *, indexed: bool | None = None) -> None:
        """Raises `ValueError` if the tensor is not such a pool."""
        if tensor.dtype != torch.uint8 or tensor.shape[1:] != (layout.block_bytes,):
            raise ValueError(f"{tensor.dtype} {list(tensor.shape)} is no pool of {layout.block_bytes} bytes")
        if not tensor.is_contiguous():
            raise ValueError("the pool's tensor is not contiguous")
        super().__init__(layout, tensor.shape[0], str(tensor.device))
        self.tensor = tensor
        self._is_cuda = tensor.is_cuda
        self._indexed = self._is_cuda if indexed is None else indexed
        wide = layout.head_bytes % WORD_BYTES == 0 and tensor.storage_offset() % WORD_BYTES == 0
        self._word = torch.int64 if wide else torch.uint8
        self._streams = threading.local()
        # Addresses of attached memory.
        self._pinned: set[int] = set()

    def sums(self, block_ids: Sequence[int], piece: Shard) -> list[int]:
        self.check_blocks(block_ids)
        pieces = self._pieces(piece)
        with self._working():
            totals = [
                self._totals(self._take(pieces, ids, None)) for _, ids in self._batches(block_ids, piece)
            ]
            return self._finish(totals, piece)

    def gather(self, block_ids: Sequence[int], piece: Shard, staging: Staging) -> list[int]:
        self.check_blocks(block_ids)
        pieces = self._pieces(piece)
        with self._working():
            totals: list[torch.Tensor] = []
            for start, ids in self._batches(block_ids, piece):
                staged = self._staged(staging, start, len(ids), piece)
                packed = self._take(pieces, ids, staged if staged.device == self.tensor.device else None)
                if packed is not staged:
                    staged.copy_(packed, non_blocking=True)
                totals.append(self._totals(packed))
            sums = self._finish(totals, piece)
            self._synchronize()
            return sums

    def scatter(self, block_ids: Sequence[int], piece: Shard, staging: Staging) -> None:
        self.check_blocks(block_ids)
        pieces = self._pieces(piece)
        with self._working():
            for start, ids in self._batches(block_ids, piece):
                staged = self._staged(staging, start, len(ids), piece)
                self._put(pieces, ids, staged.to(self.tensor.device, non_blocking=True))
            self._synchronize()

    def allocate_staging(self, num_bytes: int) -> memoryview:
        """Allocate host memory, pinned if the pool is on CUDA."""
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=self._is_cuda).numpy().data

    def store(self, block_ids: Sequence[int], region: ByteRegion, offsets: Sequence[int]) -> list[int]:
        self.check_blocks(block_ids)
        shard = self.layout.shard
        pieces, memory = self._pieces(shard), _memory(region, offsets, self.layout.block_bytes)
        with self._working():
            totals: list[torch.Tensor] = []
            for start, ids in self._batches(block_ids, shard):
                packed = self._take(pieces, ids, None)
                rows = packed.view(len(ids), -1).view(torch.uint8)
                for row, offset in zip(rows, offsets[start : start + len(ids)], strict=True):
                    memory[offset : offset + len(row)].copy_(row, non_blocking=True)
                totals.append(self._totals(packed))
            sums = self._finish(totals, shard)
            self._synchronize()
            return sums

    def load(
        self, block_ids: Sequence[int], piece: Shard, region: ByteRegion, offsets: Sequence[int], shard: Shard
    ) -> list[int]:
        """Copy whole records to the device, where they are summed before their part is taken."""
        self.check_blocks(block_ids)
        size = self.piece_bytes(shard)
        pieces, memory = self._pieces(piece), _memory(region, offsets, size)
        with self._working():
            totals: list[torch.Tensor] = []
            for start, ids in self._batches(block_ids, shard):
                records = torch.empty((len(ids), size), dtype=torch.uint8, device=self.tensor.device)
                for row, offset in zip(records, offsets[start : start + len(ids)], strict=True):
                    row.copy_(memory[offset : offset + size], non_blocking=True)
                totals.append(self._totals(records))
                self._put(pieces, ids, self._part(records, shard, piece))
            sums = self._finish(totals, shard)
            self._synchronize()
            return sums

    def attach(self, region: ByteRegion) -> None:
        """Pin the memory for CUDA, which takes all of its pages. If that is refused, copies are slower."""
        if self._is_cuda:
            runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
            with torch.cuda.device(self.tensor.device):
                status = runtime.cudaHostRegister(region.address, len(region.bytes), _PORTABLE)
            if status != runtime.cudaError.success:
                _log.warning("%d bytes of host memory could not be pinned: %s", len(region.bytes), status)
            else:
                self._pinned.add(region.address)

    def detach(self, region: ByteRegion) -> None:
        if region.address in self._pinned:
            self._pinned.discard(region.address)
            runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
            torch.cuda.check_error(int(runtime.cudaHostUnregister(region.address)))

    def close(self) -> None:
        self.tensor = torch.empty((0, self.layout.block_bytes), dtype=torch.uint8)
        self.num_blocks = 0

    @contextlib.contextmanager
    def _working(self) -> Iterator[None]:
        """Work on this thread's stream, in inference mode because the tensor may have been made in it."""
        with torch.inference_mode(), contextlib.ExitStack() as stack:
            if self._is_cuda:
                stream = getattr(self._streams, "stream", None)
                if stream is None:
                    stream = torch.cuda.Stream(self.tensor.device)  # type: ignore[no-untyped-call]
                    self._streams.stream = stream
                stack.enter_context(torch.cuda.stream(stream))
            yield

    def _synchronize(self) -> None:
        if self._is_cuda:
            torch.cuda.current_stream(self.tensor.device).synchronize()

    def _pieces(self, piece: Shard) -> torch.Tensor:
        """View the pool as words [num_blocks, num_layers, 2, num_heads, num_words] of the piece."""
        return self._part(self.tensor, self.layout.shard, piece)

    def _part(self, blocks: torch.Tensor, shard: Shard, piece: Shard) -> torch.Tensor:
        """View the piece of packed `shard`s, uint8 [num_blocks, num_bytes], as words."""
        if intersect(shard, piece) != piece:
            raise ValueError(f"{piece} is not part of {shard}")
        whole = blocks.view(self._word).view(len(blocks), shard.num_layers, 2, shard.num_heads, -1)
        layers = slice(piece.layer_start - shard.layer_start, piece.layer_end - shard.layer_start)
        return whole[:, layers, :, piece.head_start - shard.head_start : piece.head_end - shard.head_start]

    def _batches(self, block_ids: Sequence[int], piece: Shard) -> Iterator[tuple[int, Sequence[int]]]:
        """Yield (position of the first, ids) of as many blocks as one operation moves."""
        count = max(1, _BATCH_BYTES // self.piece_bytes(piece))
        for start in range(0, len(block_ids), count):
            yield start, block_ids[start : start + count]

    def _staged(self, staging: Staging, start: int, count: int, piece: Shard) -> torch.Tensor:
        """View the part of the staging area for `count` pieces from the `start`-th, in the shape of
        `_pieces`."""
        size = self.piece_bytes(piece)
        if isinstance(staging, memoryview):
            data = torch.frombuffer(staging, dtype=torch.uint8, count=count * size, offset=start * size)
        else:
            data = staging[start * size : (start + count) * size]
        return data.view(self._word).view(count, piece.num_layers, 2, piece.num_heads, -1)

    def _take(self, pieces: torch.Tensor, ids: Sequence[int], out: torch.Tensor | None) -> torch.Tensor:
        """Pack the blocks' pieces into `out` (None: into new memory)."""
        if out is None:
            out = pieces.new_empty((len(ids), *pieces.shape[1:]))
        if self._indexed:
            return torch.index_select(pieces, 0, self._index(ids), out=out)
        for first, count, start in _ranges(ids):
            out[start : start + count].copy_(pieces[first : first + count])
        return out

    def _put(self, pieces: torch.Tensor, ids: Sequence[int], packed: torch.Tensor) -> None:
        if self._indexed:
            pieces.index_copy_(0, self._index(ids), packed)
            return
        for first, count, start in _ranges(ids):
            pieces[first : first + count].copy_(packed[start : start + count])

    def _index(self, ids: Sequence[int]) -> torch.Tensor:
        return torch.tensor(ids, dtype=torch.int64).to(self.tensor.device)

    def _totals(self, packed: torch.Tensor) -> torch.Tensor:
        return piece_totals(packed.view(packed.shape[0], -1).view(torch.uint8))

    def _finish(self, totals: Sequence[torch.Tensor], piece: Shard) -> list[int]:
        return finish_totals(torch.cat(list(totals)), self.piece_bytes(piece)) if totals else []


def _memory(region: ByteRegion, offsets: Sequence[int], size: int) -> torch.Tensor:
    """View `region` as a uint8 tensor. Raises `IndexError` if `size` bytes at an offset leave it."""
    if offsets and (min(offsets) < 0 or max(offsets) + size > len(region.bytes)):
        raise IndexError(f"bytes up to {max(offsets) + size} of {len(region.bytes)}")
    return torch.from_numpy(region.bytes)


def _ranges(ids: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """Yield (first id, count, position of the first) of each range of consecutive ids."""
    start = 0
    for end in range(1, len(ids) + 1):
        if end == len(ids) or ids[end] != ids[end - 1] + 1:
            yield ids[start], end - start, start
            start = end


class StagingArea:
    """Memory for packed pieces beside a pool, on its device (`data`: uint8 [num_bytes])."""

    def __init__(self, pool: KvPool, num_bytes: int) -> None:
        self._pool = pool
        if pool.device == "cpu":
            self.data = torch.frombuffer(pool.allocate_staging(num_bytes), dtype=torch.uint8)
        else:
            self.data = torch.empty(num_bytes, dtype=torch.uint8, device=pool.device)

    def gather(self, block_ids: Sequence[int], piece: Shard) -> list[int]:
        """Pack the blocks' pieces one after another; returns their checksums."""
        if isinstance(self._pool, DevicePool):
            return self._pool.gather(block_ids, piece, self.data)
        return self._pool.gather(block_ids, piece, self.data.numpy().data)

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


# ---------------------------------------------------- the checksum of kvtransfer.blocks.checksum in torch


def checksum_torch(tensor: torch.Tensor) -> int:
    """Compute the checksum of a tensor's bytes in logical (row-major) order. Synchronizes with the device."""
    data = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    return finish_totals(piece_totals(data.unsqueeze(0)), data.numel())[0]


def piece_totals(pieces: torch.Tensor) -> torch.Tensor:
    """Sum the mixed words of each row of uint8 [num_pieces, num_bytes], for `finish_totals`. Only queues work
    on the pieces' device, which needs three temporaries of their size."""
    words = _as_words(pieces)
    mixed = torch.arange(1, words.shape[1] + 1, dtype=torch.int64, device=words.device)
    mixed = mixed.mul_(_signed(GOLDEN)) + words
    for multiplier in (MULTIPLIER_1, MULTIPLIER_2):
        mixed.bitwise_xor_(_shifted(mixed)).mul_(_signed(multiplier))
    return mixed.bitwise_xor_(_shifted(mixed)).sum(dim=1)


def finish_totals(totals: torch.Tensor, num_bytes: int) -> list[int]:
    """Compute the checksums of pieces of `num_bytes` from their totals. Synchronizes with the device."""
    return [finish(total & MASK, num_bytes) for total in totals.tolist()]


def _as_words(pieces: torch.Tensor) -> torch.Tensor:
    """Convert uint8 [num_pieces, num_bytes] to zero-padded int64 words; a view if possible."""
    padding = -pieces.shape[1] % WORD_BYTES
    if padding:
        pieces = torch.nn.functional.pad(pieces, (0, padding))
    elif pieces.data_ptr() % WORD_BYTES or pieces.storage_offset() % WORD_BYTES or not pieces.is_contiguous():
        pieces = pieces.clone(memory_format=torch.contiguous_format)
    return pieces.view(torch.int64)


def _shifted(words: torch.Tensor) -> torch.Tensor:
    """Shift int64 right logically; its own shift keeps the sign."""
    return (words >> SHIFT).bitwise_and_(_LOW)


def _signed(word: int) -> int:
    return word - (1 << 64) if word >> 63 else word
