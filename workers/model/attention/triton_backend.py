"""Attention by Triton kernels on CUDA: paged blocks are read in place, on the device and in host memory.

A layer is three launches in a step that only decodes: rotation and KV write, pieces of keys, and their
reduction. Chunks of prompts are a fourth. Nothing in a step waits for the device. Kernels and tiles are
described in `workers.model.cuda.attention`."""

from __future__ import annotations

from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from workers.model.attention.interface import (
    AttentionBackend,
    AttentionPlan,
    AttentionShape,
    HostReader,
    LayerAttention,
    LayerRead,
    StepInput,
    kv_shape,
    to_device,
)
from workers.model.attention.rotary import rope_table
from workers.model.cuda.attention import (
    LayerKv,
    PagedSequences,
    Partials,
    Scoring,
    attend_chunks,
    attend_decodes,
    chunk_tile,
)
from workers.model.cuda.card import card_of
from workers.model.cuda.layer_ops import rotate_and_write
from workers.model.cuda.pieced_attention import allocate_partials, attend_split, attend_whole, num_pieces
from workers.model.cuda.pieced_choice import AttentionKind, PiecedTiles, usable_tiles

Ids = NDArray[np.int32]
# Chunks behind at least this many tokens are split over their keys, where their tiles are fewer programs than
# a large card has multiprocessors. The memory for the pieces of all that are split in a step.
MIN_SPLIT_TOKENS, _FEW_PROGRAMS, MOST_SPLIT_BYTES = 4096, 132, 64 << 20


class TritonAttention(AttentionBackend):
    """Attention by Triton kernels.

    With `is_deterministic` a row is computed in one order whether it decodes or belongs to a chunk: piece by
    piece, where `workers.model.cuda.pieced_choice` finds that this works on the device. Where it does not,
    one kernel computes every row, and a sequence that decodes is one program for each key-value head, however
    long it is. Without `is_deterministic` rows that decode are computed in pieces of their own, which rounds
    otherwise than in a chunk. Short chunks behind many keys are computed piece by piece in both cases."""

    name = "triton"
    can_stage = True
    can_capture = True

    def __init__(self, shape: AttentionShape, kv: Tensor, *, is_deterministic: bool = False) -> None:
        super().__init__(shape, kv)
        self.is_deterministic = is_deterministic
        self.kv_shape = kv_shape(kv, shape.num_scales)
        self.group = shape.num_heads // self.kv_shape.num_kv_heads
        self.scoring = Scoring(shape.scale(self.kv_shape.head_dim), shape.softcap)
        self._lengths_to_constants: dict[bytes, list[Tensor]] = {}
        if kv.device.type == "cuda":  # where trying takes a compiler's time, which no step has
            _ = self.pieced

    @cached_property
    def pieced(self) -> PiecedTiles | None:
        """The tiles of attention by pieces; None where it is not used."""
        sizes, kv = self.kv_shape, self.kv
        kind = AttentionKind(self.dtype, kv.dtype, sizes.head_dim, sizes.block_tokens, self.group)
        tiles = usable_tiles(kv.device, kind)
        return tiles if tiles is not None and (tiles.is_invariant or not self.is_deterministic) else None

    @cached_property
    def split_bytes(self) -> Tensor:
        """Memory for the pieces of short chunks, which the layers of a step use one after another."""
        return torch.empty(MOST_SPLIT_BYTES, dtype=torch.uint8, device=self.kv.device)

    @property
    def mixed_dim(self) -> int:
        """The columns of what attention mixes for a head."""
        return self.kv_shape.head_dim

    @property
    def chunk_rows(self) -> int:
        """The packed rows of a tile of a chunk."""
        if self.is_deterministic and self.pieced is not None:
            return self.pieced.whole.rows
        return chunk_tile(self.dtype, self.kv_shape.head_dim, card_of(self.kv.device)).rows

    @property
    def split_tokens(self) -> int:
        return 0 if self.pieced is None else MIN_SPLIT_TOKENS

    @property
    def split_rows(self) -> int:
        """The packed rows of a tile of a short chunk."""
        return 0 if self.pieced is None else self.pieced.split.rows

    def is_split(self, step: StepInput) -> NDArray[np.bool_]:
        """Return which sequences of a step are computed piece by piece side by side: those of few tiles
        behind many keys, whose tiles would be few programs, as far as there is memory for their pieces."""
        starts, lengths = step.starts, step.lengths
        is_long = (lengths > 1) & (starts >= MIN_SPLIT_TOKENS)
        if not is_long.any() or self.pieced is None:
            return np.zeros_like(is_long)
        sizes, num_rows = self.kv_shape, self.pieced.split.rows
        num_tiles = -(-lengths * self.group // num_rows)
        is_split: NDArray[np.bool_] = is_long & (num_tiles * sizes.num_kv_heads < _FEW_PROGRAMS)
        most_pieces = num_pieces(int((starts + lengths).max()))
        piece_bytes = sizes.num_kv_heads * num_rows * (self.mixed_dim + 2) * 4
        has_memory = np.cumsum(num_tiles * is_split) * most_pieces * piece_bytes <= MOST_SPLIT_BYTES
        return is_split & has_memory

    def plan(self, step: StepInput) -> TritonPlan:
        return TritonPlan(self, step)

    def constants(self, lengths: Ids, tasks: list[Ids]) -> list[Tensor]:
        """Return on the device, for each token of a step that is recorded, its sequence and its place behind
        that sequence's start, and the `tasks`. They are uploaded once for all steps of these lengths: a
        recording must not."""
        key = lengths.tobytes()
        if key not in self._lengths_to_constants:
            rows = np.repeat(np.arange(len(lengths), dtype=np.int32), lengths)
            offsets = np.arange(len(rows), dtype=np.int32) - np.repeat(_first_rows(lengths), lengths)
            self._lengths_to_constants[key] = _upload([rows, offsets, *tasks], self.kv.device)
        return self._lengths_to_constants[key]

    def over(self, shape: AttentionShape, kv: Tensor) -> AttentionBackend:
        return TritonAttention(shape, kv, is_deterministic=self.is_deterministic)


class TritonPlan(AttentionPlan):
    """The attention of one step by Triton kernels."""

    def __init__(self, backend: TritonAttention, step: StepInput) -> None:
        super().__init__(step)
        self._backend = backend
        device = backend.kv.device
        # The tiles in which rows that decode are computed as rows of chunks are.
        self._invariant = backend.pieced if backend.is_deterministic else None
        self._short: Tensor | None = None
        if (step.lengths == 1).all():
            sequences = _uploaded(step, device)
            positions, slots = sequences.starts, sequences.slots
            decodes, chunks = None, None
            num_decodes = len(step.lengths)
            if backend.is_deterministic and self._invariant is None:
                num_decodes = 0
                num_tiles = -(-backend.group // backend.chunk_rows)
                tiles = torch.arange(len(step.lengths) * num_tiles, dtype=torch.int32, device=device)
                each = tiles // num_tiles
                chunks = torch.stack((each, each, tiles % num_tiles), 1)
        else:
            is_chunk = step.lengths > 1
            if backend.is_deterministic and self._invariant is None:
                is_chunk = np.ones_like(is_chunk)
            is_short = is_chunk & backend.is_split(step)
            decode_tasks = _decode_tasks(step, ~is_chunk)
            if self._invariant is not None:  # tiles, the first of their sequences
                decode_tasks = np.pad(decode_tasks, ((0, 0), (0, 1)))
            tasks = [
                decode_tasks,
                _chunk_tasks(step, is_chunk & ~is_short, backend.chunk_rows, backend.group),
                _chunk_tasks(step, is_short, backend.split_rows, backend.group),
            ]
            sequences = _uploaded(step, device)
            if step.device is not None and step.device.is_recorded:
                rows, offsets, decodes, chunks, self._short = backend.constants(step.lengths, tasks)
                positions, slots = sequences.starts[rows] + offsets, sequences.slots[rows]
            else:
                token_slots = np.repeat(step.slots, step.lengths)
                positions, slots, decodes, chunks, self._short = _upload(
                    [step.positions().astype(np.int32), token_slots, *tasks], device
                )
            num_decodes = len(decodes)
        self._sequences, self._positions, self._token_slots = sequences, positions, slots
        self._decodes, self._chunks = decodes, chunks
        self._window_to_view = self._views(step, sequences.tables)
        shape = backend.shape
        self._rotations = [rope_table(positions, it, backend.dtype) for it in shape.rotations]
        most = step.device.max_context_tokens if step.device else int((step.starts + step.lengths).max())
        self._partials = self._short_partials = None
        sizes, mixed_dim = backend.kv_shape, backend.mixed_dim
        if num_decodes and self._invariant is not None:
            self._partials = allocate_partials(
                num_decodes, backend.group, sizes.num_kv_heads, mixed_dim, most, device
            )
        elif num_decodes:
            self._partials = Partials.allocate(
                num_decodes, shape.num_heads, mixed_dim, most, device, has_few=decodes is None
            )
        if self._short is not None and len(self._short):
            most = int((step.starts + step.lengths)[is_short].max())
            self._short_partials = allocate_partials(
                len(self._short), backend.split_rows, sizes.num_kv_heads, mixed_dim, most, device,
                memory=backend.split_bytes,
            )  # fmt: skip

    def run(self, layer: LayerAttention, qkv: Tensor) -> Tensor:
        queries = rotate_and_write(
            qkv,
            self._backend.kv[:, layer.index],
            self._sequences.tables,
            self._token_slots,
            self._positions,
            *self._rotations[layer.rotation],
            q_norm=layer.q_norm,
            k_norm=layer.k_norm,
            is_written=layer.has_own_kv,
        )
        return self._attend(layer, queries)

    def attend(self, layer: LayerAttention, queries: Tensor) -> Tensor:
        return self._attend(layer, queries.view(len(queries), -1, self._backend.kv_shape.head_dim))

    def _attend(self, layer: LayerAttention, queries: Tensor) -> Tensor:
        """Attend from `queries` [num_tokens, num_heads, head_dim], which are rotated."""
        kv, sequences = self._seen(layer)
        scoring = self._backend.scoring
        if layer.sinks is not None:
            scoring = scoring._replace(sinks=layer.sinks)
        out = torch.empty_like(queries, memory_format=torch.contiguous_format)
        pieced, window = self._backend.pieced if self._short_partials else self._invariant, layer.window
        if self._partials is not None and self._invariant is not None:
            tile, decodes = self._invariant.split, self._decodes
            attend_split(queries, kv, sequences, decodes, window, scoring, tile, self._partials, out)
        elif self._partials is not None:
            attend_decodes(queries, kv, sequences, self._decodes, window, scoring, self._partials, out)
        if self._short_partials is not None and pieced is not None:
            tile, short = pieced.split, self._short
            attend_split(queries, kv, sequences, short, window, scoring, tile, self._short_partials, out)
        if self._chunks is not None and len(self._chunks):
            if self._invariant is not None:
                attend_whole(
                    queries, kv, sequences, self._chunks, window, scoring, self._invariant.whole, out
                )
            else:
                attend_chunks(queries, kv, sequences, self._chunks, window, scoring, out)
        self._done(layer)
        return out.flatten(1)

    def _seen(self, layer: LayerAttention) -> tuple[LayerKv, PagedSequences]:
        """Return what a layer sees of the KV, and the tables that name it."""
        blocks, view = self._backend.kv[:, layer.index], self._window_to_view[layer.window]
        head_dim = self._backend.kv_shape.head_dim
        kv = LayerKv.of(blocks, head_dim)
        if view.host is not None:
            kv = LayerKv.of(blocks, head_dim, view.host.layer(layer.index), view.host.first_id)
        return kv, self._sequences._replace(tables=view.tables)

    def _done(self, layer: LayerAttention) -> None:
        """Release what a layer has seen in host memory."""
        host = self._window_to_view[layer.window].host
        if host is not None:
            host.done(layer.index)

    def _views(self, step: StepInput, tables: Tensor) -> dict[int, _WindowView]:
        """Return the views of the layers with each window, and stage the blocks in host memory that they
        see."""
        windows, host = self._backend.shape.windows, step.host
        if host is None or not host.is_staged:
            return dict.fromkeys(windows, _WindowView(tables, host))
        window_to_ids = {window: _host_ids(step, host.first_id, window) for window in dict.fromkeys(windows)}
        views = dict.fromkeys(windows, _WindowView(tables, None))
        for window, ids in window_to_ids.items():
            if len(ids):
                staged = to_device(_staged_tables(step.tables, ids, host.first_id), tables.device)
                views[window] = _WindowView(staged, host)
        host.begin([LayerRead(layer, window_to_ids[window].tolist()) for layer, window in enumerate(windows)])
        return views


class _WindowView(NamedTuple):
    """The tables that layers with one window read, and the reader of host memory if these name any of its
    blocks."""

    tables: Tensor
    host: HostReader | None


def _uploaded(step: StepInput, device: torch.device) -> PagedSequences:
    """Return the places of the step's sequences, uploaded where they were not yet."""
    if step.device is not None:
        there = step.device
        return PagedSequences(there.tables, there.slots, there.starts, there.lengths)
    return PagedSequences(*_upload([step.tables, step.slots, step.starts, step.lengths], device))


def _upload(arrays: list[Ids], device: torch.device) -> list[Tensor]:
    """Copy arrays to the device, in one copy."""
    together = to_device(np.concatenate([array.reshape(-1) for array in arrays]), device)
    parts = torch.split(together, [array.size for array in arrays])
    return [part.view(array.shape) for part, array in zip(parts, arrays, strict=True)]


# -------------------------------------------------------------------------------------------- tasks


def _first_rows(lengths: Ids) -> Ids:
    """Return the row of each sequence's first token."""
    rows: Ids = np.cumsum(lengths, dtype=np.int32) - lengths
    return rows


def _decode_tasks(step: StepInput, is_decode: NDArray[np.bool_]) -> Ids:
    """Return sequences that decode and their rows, [num_decodes, 2]."""
    (sequences,) = is_decode.nonzero()
    return np.stack((sequences, _first_rows(step.lengths)[sequences]), 1).astype(np.int32)


def _chunk_tasks(step: StepInput, is_chunk: NDArray[np.bool_], tile_rows: int, group: int) -> Ids:
    """Return the tiles of packed rows of chunks, [num_tiles, 3] as `attend_chunks` takes them, those that see
    the most keys first, so that the last to begin end soon."""
    (chunks,) = is_chunk.nonzero()
    num_tiles = -(-step.lengths[chunks] * group // tile_rows)
    sequences = np.repeat(chunks, num_tiles)
    tiles = np.arange(len(sequences)) - np.repeat(np.cumsum(num_tiles) - num_tiles, num_tiles)
    rows = _first_rows(step.lengths)[sequences]
    ends = step.starts[sequences] + np.minimum((tiles + 1) * tile_rows // group, step.lengths[sequences])
    order = np.argsort(-ends, kind="stable")
    return np.stack((sequences, rows, tiles), 1)[order].astype(np.int32)


# -------------------------------------------------------------------------------------- host memory


def _host_ids(step: StepInput, first_id: int, window: int) -> Ids:
    """Return the blocks in host memory that layers with this window see, in ascending order."""
    tables = step.tables[step.slots]
    columns = np.arange(tables.shape[1])
    firsts = np.maximum(step.starts - window + 1, 0) if window else np.zeros_like(step.starts)
    ends = step.starts + step.lengths
    is_seen = columns >= (firsts // step.block_tokens)[:, None]
    is_seen &= columns < (-(-ends // step.block_tokens))[:, None]
    ids: Ids = np.unique(tables[is_seen & (tables >= first_id)])
    return ids


def _staged_tables(tables: Ids, host_ids: Ids, first_id: int) -> Ids:
    """Return block tables that name blocks in host memory by their places among those staged."""
    places = np.searchsorted(host_ids, tables).astype(np.int32)
    return np.where(tables >= first_id, first_id + places, tables)
