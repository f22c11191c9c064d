"""Blocks to and from records of fewer bits: the bytes of records, the KV that comes back, pieces, sums."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pytest
import torch
from compiled_kernels import BACKENDS, kernels_of
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kvtransfer.blocks.checksum import checksum
from kvtransfer.blocks.device_pool import DevicePool
from kvtransfer.blocks.layout import BlockLayout
from kvtransfer.blocks.pool import KvPool
from kvtransfer.blocks.runs import ByteRegion
from kvtransfer.messages import Shard
from workers.model import native
from workers.model.kv_form import ScaledParts
from workers.rank import quantized_records
from workers.rank.quantized_records import QuantizedRecords

LARGEST = {"int8": 127.0, "fp8": 448.0}
ELEMENTS = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}
NUM_BLOCKS = 4
SHARD = Shard(2, 5, 1, 3)
by_backend = pytest.mark.parametrize("backend", BACKENDS)


@contextmanager
def computed_by(backend: str) -> Iterator[None]:
    """Convert with the kernels of an instruction set, or by torch."""
    kernels = None if backend == "torch" else kernels_of(backend)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(native, "load", lambda: kernels)
        yield


class Shape(NamedTuple):
    """A rank's blocks, and the form of their records."""

    form: ScaledParts
    dtype: torch.dtype = torch.bfloat16
    shard: Shard = SHARD
    block_tokens: int = 16
    num_kinds: int = 2
    group: tuple[int, ...] | None = None

    @property
    def layout(self) -> BlockLayout:
        sizes = sum(self.form.parts), self.block_tokens, self.dtype.itemsize
        return BlockLayout(self.shard, *sizes, num_kinds=self.num_kinds, group=self.group)

    def draw(self, seed: int = 0, odd: float = 1.0) -> Tensor:
        """Draw KV; layers differ in size a hundredfold, and one vector of each block is odd."""
        num_layers, num_heads = self.layout.num_layers(self.shard), self.shard.num_heads
        sizes = num_layers, self.num_kinds, num_heads, self.block_tokens, sum(self.form.parts)
        kv = torch.randn((NUM_BLOCKS, *sizes), generator=torch.Generator().manual_seed(seed))
        kv *= torch.logspace(-1, 1, num_layers)[:, None, None, None, None]
        kv[:, -1, -1, -1, 3] *= odd
        return kv.to(self.dtype)

    def records(self, kv: Tensor) -> list[bytes]:
        """Return the records of the blocks, computed vector by vector."""
        return [b"".join(self._head(head) for head in block.flatten(0, 2)) for block in kv.float()]

    def _head(self, head: Tensor) -> bytes:
        elements, scales = [], []
        for vector in (part.numpy() for token in head for part in torch.split(token, [*self.form.parts])):
            numbers, scale = self._vector(vector)
            elements.append(numbers)
            scales.append(scale)
        by_part = np.array(scales, "<f4").reshape(self.block_tokens, -1).T
        return torch.cat(elements).view(torch.uint8).numpy().tobytes() + by_part.tobytes()

    def _vector(self, vector: npt.NDArray[np.float32]) -> tuple[Tensor, float]:
        largest, most = np.float32(LARGEST[self.form.kv_dtype]), np.abs(vector).max()
        numbers = np.zeros_like(vector)
        scale = np.float32(math.nan)
        if np.isfinite(most):
            scale = most / largest if most >= 2.0**-100 else np.float32(0)
            numbers = vector * (largest / most) if scale else numbers
        if self.form.kv_dtype == "int8":
            numbers = np.rint(numbers)
        return torch.from_numpy(numbers).to(ELEMENTS[self.form.kv_dtype]), float(scale)

    def widened(self, record: bytes) -> Tensor:
        """Return the KV of a block that its record stands for, in `dtype`."""
        parts, layout = self.form.parts, self.layout
        num_elements = self.block_tokens * sum(parts)
        head_bytes = num_elements + 4 * self.block_tokens * len(parts)
        heads = []
        for start in range(0, len(record), head_bytes):
            raw = bytearray(record[start : start + head_bytes])
            elements = torch.frombuffer(raw[:num_elements], dtype=ELEMENTS[self.form.kv_dtype])
            scales = torch.frombuffer(raw[num_elements:], dtype=torch.float32)
            vectors = torch.split(elements.float().view(self.block_tokens, -1), [*parts], 1)
            by_part = torch.split(scales.view(-1, self.block_tokens).T, 1, 1)
            wide = [vector * scale for vector, scale in zip(vectors, by_part, strict=True)]
            heads.append(torch.cat(wide, 1).to(self.dtype))
        sizes = layout.num_layers(self.shard), self.num_kinds, self.shard.num_heads
        return torch.stack(heads).view(*sizes, self.block_tokens, sum(parts))


class Region:
    """Memory outside the pool with a place for a record of each block, at odd distances."""

    def __init__(self, num_bytes: int) -> None:
        self.num_bytes = num_bytes
        self.data = np.full(8 + NUM_BLOCKS * (num_bytes + 24), 7, dtype=np.uint8)
        self.offsets = [8 + block * (num_bytes + 24) for block in range(NUM_BLOCKS)]
        self.region = ByteRegion(self.data.data)

    def record(self, number: int) -> bytes:
        return self.data[self.offsets[number] :][: self.num_bytes].tobytes()

    def put(self, number: int, record: bytes) -> None:
        self.data[self.offsets[number] :][: self.num_bytes] = np.frombuffer(record, dtype=np.uint8)


@st.composite
def shapes(draw: st.DrawFn) -> Shape:
    """Of any elements, sizes and kinds of heads."""
    form = ScaledParts(
        draw(st.sampled_from(tuple(LARGEST))),
        draw(st.sampled_from([(16,), (64,), (128,), (24,), (64, 16), (32, 32, 32), (22, 6)])),
    )
    layer, head = draw(st.integers(0, 2)), draw(st.integers(0, 2))
    shard = Shard(layer, layer + draw(st.integers(1, 3)), head, head + draw(st.integers(1, 3)))
    return Shape(
        form,
        draw(st.sampled_from([torch.bfloat16, torch.float32, torch.float16])),
        shard,
        draw(st.sampled_from([16, 32])),
        draw(st.sampled_from([1, 2])),
    )


@by_backend
@settings(deadline=None, max_examples=15)
@given(
    shapes(),
    st.lists(st.integers(0, NUM_BLOCKS - 1), unique=True, min_size=1),
    st.sampled_from([1.0, 0.0, 1e-4, math.inf, math.nan]),
)
def test_records_have_the_reference_s_bytes(backend: str, shape: Shape, ids: list[int], odd: float) -> None:
    """And sums of them, whatever is converted at a time."""
    kv = shape.draw(odd=odd)
    expected = shape.records(kv)
    with computed_by(backend):
        pool = QuantizedRecords(shape.layout, kv, shape.form)
        place = Region(pool.layout.block_bytes)
        sums = pool.store(ids, place.region, place.offsets[: len(ids)])
    for number, block_id in enumerate(ids):
        assert nan_free(place.record(number), shape) == nan_free(expected[block_id], shape)
        assert sums[number] == checksum(place.record(number))
    pool.close()


def nan_free(record: bytes, shape: Shape) -> bytes:
    """Return the record with one kind of NaN: arithmetic may give any."""
    data = np.frombuffer(record, dtype=np.uint8).copy()
    head_bytes = shape.block_tokens * (sum(shape.form.parts) + 4 * len(shape.form.parts))
    for head in data.reshape(-1, head_bytes):
        scales = head[shape.block_tokens * sum(shape.form.parts) :].view(np.float32)
        scales[np.isnan(scales)] = math.nan
    return data.tobytes()


@by_backend
@settings(deadline=None, max_examples=15)
@given(shapes(), st.data())
def test_a_piece_of_a_record_is_widened(backend: str, shape: Shape, data: st.DataObject) -> None:
    """From a record of a larger shard; what is beside the piece stays as it was."""
    shard = shape.shard
    layers = sorted(data.draw(st.lists(st.integers(*layers_of(shard)), min_size=2, max_size=2, unique=True)))
    heads = sorted(data.draw(st.lists(st.integers(*heads_of(shard)), min_size=2, max_size=2, unique=True)))
    piece = Shard(layers[0], layers[1], heads[0], heads[1])
    kv, other = shape.draw(seed=1), shape.draw(seed=2, odd=math.nan)
    records = shape.records(kv)
    with computed_by(backend):
        pool = QuantizedRecords(shape.layout, other.clone(), shape.form)
        place = Region(pool.layout.block_bytes)
        for number, record in enumerate(records):
            place.put(number, record)
        ids = [2, 0, 3]
        sums = pool.load(ids, piece, place.region, place.offsets[:3], shard)
    assert sums == [checksum(record) for record in records[:3]]
    expected = other.clone()
    rows = slice(layers[0] - shard.layer_start, layers[1] - shard.layer_start)
    columns = slice(heads[0] - shard.head_start, heads[1] - shard.head_start)
    for number, block_id in enumerate(ids):
        expected[block_id, rows, :, columns] = shape.widened(records[number])[rows, :, columns]
    torch.testing.assert_close(pool._kv, expected, rtol=0, atol=0, equal_nan=True)
    pool.close()


def layers_of(shard: Shard) -> tuple[int, int]:
    return shard.layer_start, shard.layer_end


def heads_of(shard: Shard) -> tuple[int, int]:
    return shard.head_start, shard.head_end


@by_backend
@pytest.mark.parametrize("kv_dtype", LARGEST)
def test_rounding_again_changes_no_element(backend: str, kv_dtype: str) -> None:
    """KV that came from the store may go there again, and then a third time: errors do not add up."""
    shape = Shape(ScaledParts(kv_dtype, (64,)))
    with computed_by(backend):
        kv = shape.draw()
        pool = QuantizedRecords(shape.layout, kv, shape.form)
        place, seen, every = Region(pool.layout.block_bytes), [], list(range(NUM_BLOCKS))
        for _ in range(3):
            pool.store(every, place.region, place.offsets)
            seen.append([place.record(number) for number in every])
            pool.load(every, SHARD, place.region, place.offsets, SHARD)
    elements = [[elements_of(record, shape) for record in records] for records in seen]
    assert elements[0] == elements[1]
    assert seen[1] == seen[2]


def elements_of(record: bytes, shape: Shape) -> bytes:
    data = np.frombuffer(record, dtype=np.uint8)
    num_elements = shape.block_tokens * sum(shape.form.parts)
    return data.reshape(-1, num_elements + 4 * shape.block_tokens)[:, :num_elements].tobytes()


@by_backend
def test_groups_of_layers_share_a_record(backend: str) -> None:
    """A record has all layers; each group's pool fills the places of its own, and takes no sum."""
    groups: tuple[tuple[int, ...], ...] = ((2, 4), (3,))
    whole = Shape(ScaledParts("int8", (32,)))
    kv = whole.draw()
    expected = whole.records(kv)
    with computed_by(backend):
        pools = []
        for group in groups:
            shape = whole._replace(group=group)
            its = kv[:, [layer - SHARD.layer_start for layer in group]].clone()
            pools.append(QuantizedRecords(shape.layout, its, shape.form))
        place = Region(len(expected[0]))
        for pool in pools:
            assert pool.store([1, 3], place.region, place.offsets[:2]) == []
        assert [place.record(0), place.record(1)] == [expected[1], expected[3]]
        for pool in pools:
            assert pool.load([0], SHARD, place.region, place.offsets[1:2], SHARD) == []
    back = whole.widened(expected[3])
    for group, pool in zip(groups, pools, strict=True):
        rows = [layer - SHARD.layer_start for layer in group]
        assert torch.equal(pool._kv[0], back[rows])


@pytest.mark.parametrize("kv_dtype", LARGEST)
@pytest.mark.parametrize("staging_bytes", [1, 1 << 20])
def test_more_blocks_than_are_staged(
    monkeypatch: pytest.MonkeyPatch, kv_dtype: str, staging_bytes: int
) -> None:
    monkeypatch.setattr(quantized_records, "_STAGING_BYTES", staging_bytes)
    shape = Shape(ScaledParts(kv_dtype, (32,)))
    kv = shape.draw()
    expected = shape.records(kv)
    pool = QuantizedRecords(shape.layout, kv, shape.form)
    place, every = Region(pool.layout.block_bytes), list(range(NUM_BLOCKS))
    sums = pool.store(every, place.region, place.offsets)
    assert [place.record(number) for number in every] == expected
    assert sums == pool.load(every, SHARD, place.region, place.offsets, SHARD)


@pytest.mark.parametrize("kv_dtype", LARGEST)
def test_a_device_s_copies_are_the_same(monkeypatch: pytest.MonkeyPatch, kv_dtype: str) -> None:
    """With the pool of devices between blocks and records, on CPU tensors."""

    def staging_pool(layout: BlockLayout, device: torch.device) -> tuple[KvPool, Tensor]:
        data = torch.zeros((3, layout.block_bytes), dtype=torch.uint8, device=device)
        return DevicePool(layout, data), data

    monkeypatch.setattr(quantized_records, "_staging_pool", staging_pool)
    monkeypatch.setattr(native, "load", lambda: None)
    shape = Shape(ScaledParts(kv_dtype, (32,)))
    kv = shape.draw()
    records = shape.records(kv)
    pool = QuantizedRecords(shape.layout, kv, shape.form)
    place, every = Region(pool.layout.block_bytes), list(range(NUM_BLOCKS))
    sums = pool.store(every, place.region, place.offsets)
    assert [place.record(number) for number in every] == records
    assert sums == [checksum(record) for record in records]
    piece = Shard(3, 5, 2, 3)
    expected = kv.clone()
    for block_id, record in zip(reversed(every), records, strict=True):
        expected[block_id, 1:, :, 1:] = shape.widened(record)[1:, :, 1:]
    assert pool.load(every[::-1], piece, place.region, place.offsets, SHARD) == sums
    assert torch.equal(kv, expected)
    pool.close()


def test_what_lies_outside_is_refused() -> None:
    shape = Shape(ScaledParts("int8", (32,)))
    kv = shape.draw()
    pool = QuantizedRecords(shape.layout, kv, shape.form)
    place = Region(pool.layout.block_bytes)
    with pytest.raises(IndexError):
        pool.store([NUM_BLOCKS], place.region, place.offsets[:1])
    with pytest.raises(IndexError):
        pool.store([0], place.region, [len(place.data)])
    with pytest.raises(IndexError):
        pool.load([-1], SHARD, place.region, place.offsets[:1], SHARD)


@pytest.mark.parametrize(("head_dim", "share"), [(128, 0.516), (64, 0.531), (256, 0.508)])
def test_its_size_is_half(head_dim: int, share: float) -> None:
    shape = Shape(ScaledParts("int8", (head_dim,)))
    pool = QuantizedRecords(shape.layout, shape.draw(), shape.form)
    assert pool.layout.block_bytes / shape.layout.block_bytes == pytest.approx(share, abs=1e-3)
